from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lmtool.commands import report
from lmtool.errors import UserError
from lmtool.reporting import heat_maps
from lmtool.reporting.comparison import (
    changed_keys,
    compare,
    print_comparison,
    report_comparison,
    write_comparison,
)
from lmtool.reporting.console import Output
from lmtool.reporting.examples import predicted_example, sample_groups, summarize
from lmtool.reporting.html import render
from lmtool.reporting.report import write_report
from lmtool.reporting.run_files import models_of, read_predictions, read_run
from lmtool.reporting.scores import Score, score_of
from lmtool.reporting.text import percent
from lmtool.runs.locks import Owner
from tests.breadth import slow_but
from tests.reporting.conftest import write_rows, write_task_run

VOID = {"meta", "br", "link", "img", "hr", "input"}
LOADING = {"iframe", "object", "embed", "link", "img", "base", "form", "video", "audio"}


class Page(HTMLParser):
    """Check that tags nest, nothing is loaded and nothing but the page's script is run; collect ids, text, cells of
    table rows, titles of drawings, and the folded text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text, self.folded = "", ""
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in LOADING, tag
        for name, value in attrs:
            assert not name.startswith("on") and name != "src", (tag, name)
            assert name not in ("href", "xlink:href") or re.match(r"#|[\w%-]+(/[\w%-]+)*\.html$", value), value
            if name == "id":
                self.ids.append(value)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "title":
            self.titles.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] == ["title"]:
            self.titles[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data
            self.folded += data if "details" in self.open else ""
            if {"td", "th"} & set(self.open):
                self.rows[-1][-1] += data


def read_page(path: Path) -> Page:
    raw = path.read_bytes()
    assert len(raw) < 1_500_000
    text = raw.decode("utf-8")
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", text)
    # A browser would interpret control characters in the data.
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    page = Page(text)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert re.findall("sha256-([^']+)", page.policy) == hashes and len(hashes) <= 1, "the page runs only its own script"
    assert page.policy.startswith("default-src 'none'; ")
    assert len(page.ids) == len(set(page.ids))
    return page


def render_samples(samples: list) -> str:
    return render("examples.html", groups=sample_groups(samples))


def test_pretraining_report_shows_result_and_samples(language_run):
    page = read_page(write_report(language_run))
    assert "5.120" in page.text and "6.810" in page.text and "Better than the unigram baseline" in page.text
    assert "84.5 standard errors" in page.text
    assert "return the" in page.text and "overlap" in page.text and "##lap" not in page.text
    assert "upon a time" in page.text and page.text.count("Once") == 1
    assert f"lmtool pretrain --config {shlex.quote(f'{language_run}/config.yaml')}" in page.text
    assert "lmtool pretrain 'name=a b'" in page.text
    assert {path.name for path in (language_run / "plots").iterdir()} == {"loss.png", "curves.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (language_run / "plots").iterdir())
    source = (language_run / "report.html").read_text()
    assert source.count('class="roomy"') == source.count('class="narrow"') == 2, (
        "every figure has a narrow version with readable text"
    )


@pytest.fixture(scope="module")
def task_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_task_run(tmp_path_factory.mktemp("runs") / "sst2-bert-0007"))


@pytest.fixture(scope="module")
def task_page(task_report: Path) -> Page:
    return read_page(task_report)


def test_task_report_shows_surprising_predictions(task_report: Path, task_page: Page) -> None:
    page = task_page
    assert "0.750 ± 0.068" in page.text  # binomial, 40 examples
    assert "Better than the majority baseline" in page.text
    surprising = page.text[page.text.index("Surprising") :]
    assert "text 36" in surprising  # the most confident error
    assert "gold: negative" in surprising
    assert (task_report.parent / "plots" / "confusion.png").is_file()


def test_predictions_are_a_table_with_wrong_ones_first(task_page: Page) -> None:
    page = task_page
    head = page.rows.index(["text", "gold", "predicted", "confidence", "result"])
    rows = page.rows[head + 1 : head + 41]
    assert [row[-1] for row in rows] == ["wrong"] * 10 + ["right"] * 30
    assert [row[1:4] for row in rows[:2]] == [["negative", "positive", "86.0%"], ["negative", "positive", "82.0%"]]
    assert rows[0][0].strip() == "text 36" and "All 40 predictions" in page.text


@pytest.mark.usefixtures("undrawn_figures")
def test_table_of_many_predictions_is_a_sample(task_run) -> None:
    folder = task_run()
    rows = [{"id": n, "sentence": f"text {n}", "gold": n % 3 > 0, "prediction": True, "score": 0.5} for n in range(900)]
    rows = [{**row, "gold": str(row["gold"]), "prediction": str(row["prediction"])} for row in rows]
    write_rows(folder / "predictions.jsonl", rows)
    page = read_page(write_report(folder))
    results = [row[-1] for row in page.rows if row[0].startswith("text ")]
    assert results == ["wrong"] * 200 + ["right"] * 200
    assert "200 wrong and 200 right ones, selected at random from 900 predictions" in page.text


def test_two_examples_are_open_and_the_others_folded(task_page: Page) -> None:
    page = task_page
    examples = page.text[page.text.index("Examples") : page.text.index("More examples")]
    names, folded_names = (re.findall(r"text \d+", text) for text in (examples, page.folded))
    assert len(names) == 2 and "Right" in examples and "Wrong" in examples
    assert len(folded_names) >= 8 and not set(names) & set(folded_names) and "Surprising" in page.folded


def test_points_of_curves_have_their_numbers(task_page: Page) -> None:
    titles = task_page.titles
    assert "step 100\ntraining 5.756\nrunning mean 5.777\nvalidation 5.856" in titles
    assert any(title.startswith("step 100\nvalidation accuracy 0.712\nbaseline 0.500") for title in titles)


@pytest.mark.usefixtures("undrawn_figures")
def test_report_of_unfinished_run_says_whether_it_trains(task_run) -> None:
    folder = task_run(max_steps=400, command="finetune")
    (folder / "result.json").unlink()
    page = read_page(write_report(folder, trains=True))
    assert "Training, at step 300 of a run that ends at max_steps=400." in page.text
    assert not (folder / "plots").exists(), "a run that trains should not spend time on PNG files"
    page = read_page(write_report(folder, trains=False, reason="stopped by <SIGTERM>"))
    assert "Stopped after step 300 of a run that ends at max_steps=400: stopped by <SIGTERM>." in page.text
    assert f"lmtool resume {shlex.quote(str(folder))} continues the run" in page.text and "is missing" not in page.text
    assert "accuracy so far, at step 300" in page.text and "0.749" in page.text and (folder / "plots").is_dir()
    assert "Stopped after step 300" in read_page(write_report(folder)).text
    (folder / "LOCK").write_text(json.dumps(asdict(Owner.me())))
    assert "Training, at step 300" in read_page(write_report(folder)).text


def test_regression_report_shows_closest_and_furthest(task_run):
    folder = task_run("stsb")
    rows = [{"id": n, "a": "x", "b": "y", "gold": n / 10, "prediction": n / 12 + 0.1, "score": 0} for n in range(30)]
    (folder / "predictions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = read_page(write_report(folder))
    assert "Closest" in page.text and "Furthest off" in page.text
    assert (folder / "plots" / "scatter.png").is_file()


@pytest.mark.usefixtures("undrawn_figures")
def test_tagging_report_shows_tags_and_class_scores(task_run):
    """Wrong tags appear beside the gold tag, and rows of another form are skipped."""
    folder = task_run("ner")
    row = {"id": 1, "tokens": ["Anna", "saw", "<Bonn>"], "gold": ["B-PER", "O", "B-LOC"], "score": 0.25}
    rows = [{**row, "prediction": ["B-PER", "O", "O"]}, {**row, "id": 2, "prediction": row["gold"]}]
    rows += [{**row, "id": 3, "prediction": ["O"]}, {**row, "id": 4, "gold": None, "prediction": ["O"]}]
    (folder / "predictions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = json.loads((folder / "result.json").read_text())
    classes = {"PER": {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 8}, "LOC": {"support": 70}}
    (folder / "result.json").write_text(json.dumps({**result, "classes": classes}))
    page = read_page(write_report(folder))
    assert "Anna B-PER saw <Bonn> O B-LOC" in " ".join(page.text.split())
    classes = page.text[page.text.index("Classes") :]
    assert classes.index("LOC") < classes.index("PER") and "0.333" in classes
    (folder / "result.json").write_text(json.dumps({**result, "classes": {"PER": 3}}))
    read_page(write_report(folder))


@pytest.mark.parametrize(
    ("gold", "predicted", "message"),
    [
        ([], "", "no answer (75%)"),
        ([], "fox", "fox (75%), gold: no answer"),
        (["fox", "a fox"], "", "no answer (75%), gold: fox or a fox"),
        (["fox", "a fox"], "Fox", "Fox (75%)"),
        ("ein Fuchs", "", "nothing (75%), gold: ein Fuchs"),
    ],
)
def test_empty_prediction_is_named(gold: Any, predicted: str, message: str) -> None:
    row = {"id": 1, "question": "who?", "gold": gold, "prediction": predicted, "score": 0.75}
    assert predicted_example(row).caption == message


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0%"), (1.48e-9, "< 0.001%"), (-1.48e-9, "> -0.001%"), (1.2e-5, "0.0012%"), (0.00012, "0.012%"), (1, "100%")],
)
def test_percentages_have_no_exponent(fraction: float, text: str) -> None:
    assert percent(fraction) == text


def test_report_of_many_labels_stays_small(task_run):
    folder = task_run()
    with (folder / "predictions.jsonl").open("w") as file:
        for number in range(20_000):
            row = {"id": number, "text": "word " * 60, "gold": f"label{number % 150}", "score": 0.5}
            file.write(json.dumps({**row, "prediction": f"label{number % 7}"}) + "\n")
    read_page(write_report(folder))


@pytest.mark.parametrize("content", ["", "\n", '{"step": 1', "not json\n[]\n{}\n", '{"step": 1, "loss": NaN}\n'])
def test_metrics_without_points_have_no_curves(language_run, content):
    (language_run / "metrics.jsonl").write_text(content)
    assert "Curves" not in read_page(write_report(language_run)).text


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "facts.json", "environment.json", "samples.json"])
@pytest.mark.parametrize("content", slow_but({None, "{broken"}, [None, "", "{broken", "[1, 2]", '"text"', "\x00\xff"]))
def test_missing_or_broken_file_drops_only_its_section(language_run, name, content):
    path = language_run / name
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="latin-1")
    page = read_page(write_report(language_run))
    if content == "{broken" and name.endswith("json"):
        assert f"{name} is not valid JSON" in page.text


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("name", ["metrics.jsonl", "predictions.jsonl", "samples.json"])
def test_oversized_file_drops_only_its_section(task_run, name):
    run = task_run()
    with (run / name).open("wb") as file:
        file.truncate(8 << 30)
    assert re.search(f"{name}.* (more|longer) than [0-9]+ bytes", read_page(write_report(run)).text)


@pytest.mark.usefixtures("undrawn_figures")
def test_values_of_wrong_types_are_skipped(language_run):
    result = {
        "status": 1,
        "metric": "loss",
        "value": "5",
        "metrics": [1],
        "steps": "many",
        "command": ["x"],
        "seed": {},
    }
    (language_run / "result.json").write_text(json.dumps(result))
    metadata = {"data": 3, "model": [1], "baseline": {"value": "x"}, "next": 4}
    (language_run / "facts.json").write_text(json.dumps(metadata))
    (language_run / "samples.json").write_text(json.dumps([1, {"pieces": 3}, {"pieces": ["a"], "masked": [{}]}]))
    read_page(write_report(language_run))


def test_result_with_the_error_of_the_gain_alone_is_read(language_run: Path) -> None:
    def score(metrics: dict[str, float]) -> Score:
        result = json.loads((language_run / "result.json").read_text())
        result |= {"standard_error": 0.02, "metrics": {"loss": 5.12, "standard_error": 0.02, **metrics}}
        result["distillation"] = {"models": [{"name": "student", "score": 5.12, "standard_error": 0.02}]}
        (language_run / "result.json").write_text(json.dumps(result))
        run = read_run(language_run)
        assert models_of(run) == [{"name": "student", "score": 5.12}]
        found = score_of(run.result, run.baseline)
        assert found is not None and found.standard_error == run.result["metrics"].get("standard_error")
        return found

    mlm = {"mlm_loss": 5.12, "mlm_count": 9, "mlm_standard_error": 0.07, "mlm_gain_standard_error": 0.02}
    nsp = {"nsp_loss": 0.7, "nsp_count": 9, "nsp_standard_error": 0.01, "nsp_gain_standard_error": 0.01}
    one_term, two_terms = score(mlm), score({**mlm, **nsp, "mlm_loss": 4.42})
    assert (one_term.standard_error, one_term.gain_standard_error) == (0.07, 0.02)
    assert (two_terms.standard_error, two_terms.gain_standard_error) == (None, 0.02), "unknown rather than wrong"
    assert "84.5 standard errors" in two_terms.sentence


def test_folder_without_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run"):
        write_report(tmp_path)


def test_damaged_prediction_line_is_counted(task_run):
    folder = task_run()
    with (folder / "predictions.jsonl").open("a") as file:
        file.write('{"torn')
    run = read_run(folder)
    assert len(list(read_predictions(run))) == 40
    assert run.problems == ["predictions.jsonl: left out 1 line without a JSON object."]


def write_predictions(
    run: Path, predictions: list, gold: list, metrics: dict, text: str | None = "text", **more
) -> Path:
    """Write predictions and their scores into a run."""
    rows = [
        {"id": number, "split": "dev", **({"text": f"{text} {number}"} if text else {}), "gold": g, "prediction": p}
        for number, (g, p) in enumerate(zip(gold, predictions, strict=True))
    ]
    write_rows(run / "predictions.jsonl", rows)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"metrics": metrics, "validation_examples": len(gold)} | more))
    return run


def comparison_text(*runs: Path) -> str:
    stream = io.StringIO()
    print_comparison(Output(stream), compare(runs))
    return stream.getvalue()


@pytest.mark.usefixtures("undrawn_figures")
def test_comparison_shows_runs_and_paired_difference(task_run):
    gold = ["yes", "no"] * 100
    first = write_predictions(task_run("one", 1.0, optimizer={"lr": 0.001}), gold, gold, {"accuracy": 1.0, "loss": 0.1})
    guesses = ["yes"] * 200
    second = write_predictions(
        task_run("two", 0.5, optimizer={"lr": 0.01}), guesses, gold, {"accuracy": 0.5, "loss": 0.7}, seconds=90
    )
    stream = io.StringIO()
    report_comparison(Output(stream), [first, second], first.parent / "comparison.html")
    text = stream.getvalue()
    assert "optimizer.lr  0.001  0.01" in text and "accuracy  1.000  0.500 ± 0.035" in text and "1 min 30 s" in text
    assert "two minus one, the same rows resampled for both" in text
    line = next(line for line in text.splitlines() if line.startswith("accuracy") and "-0.5000" in line)
    assert re.search(r"0\.5000  1\.0000  -0\.5000     -0\.5\d+ to -0\.4\d+  yes", line), line
    page = read_page(first.parent / "comparison.html")
    assert "On the same rows" in page.text and "-0.5000" in page.text


@pytest.mark.parametrize(
    ("predictions", "gold", "metrics", "message"),
    [
        (
            ["a", "b"],
            ["a", "b"],
            {"accuracy": 0.25},
            "do not follow from single labels",
        ),  # not the accuracy of the rows
        (["a", "b"], ["a", "c"], {"accuracy": 0.5}, "they were scored on different rows"),
        ([["a"], ["b"]], [["a"], ["b"]], {"accuracy": 1.0}, "neither single labels"),
        ([], [], {}, "two has no labeled predictions"),
        (["a", "b"], ["a", "b"], {"f1": 1.0, "accuracy": "high"}, "do not follow from single labels"),
    ],
)
def test_unpaired_runs_have_reason(task_run, predictions, gold, metrics, message):
    pairs = [["a"], ["b"]] if gold and isinstance(gold[0], list) else ["a", "b"]
    first = write_predictions(task_run("one"), pairs, pairs, {"accuracy": 1.0})
    second = write_predictions(task_run("two"), predictions, gold, metrics)
    assert message in comparison_text(first, second)
    with pytest.raises(UserError, match="named twice"):
        comparison_text(first, first)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [  # text of the rows and digest in result.json; None if absent
        (("one", None), ("another", None), "they were scored on different rows"),
        (("one", "1a"), ("one", "2b"), "they were scored on different rows"),
        (("one", "1a"), ("another", "1a"), "the same rows resampled for both"),  # the digest covers the rows as read
        ((None, "1a"), (None, "1a"), "the same rows resampled for both"),
        ((None, None), (None, "1a"), "the texts that one was scored on are not known"),
        (("one", None), (None, None), "the texts that two was scored on are not known"),
    ],
)
def test_only_runs_on_same_texts_are_paired(task_run, first, second, message):
    gold = ["yes", "no"] * 20
    runs = []
    for name, (text, digest) in (("one", first), ("two", second)):
        recorded = {} if digest is None else {"validation_rows_sha256": digest}
        runs.append(write_predictions(task_run(name), gold, gold, {"accuracy": 1.0}, text, **recorded))
    text = comparison_text(*runs)
    assert message in text and ("95% interval" in text) == ("resampled" in message)


def test_row_ids_do_not_affect_pairing(task_run):
    gold = ["yes", "no"] * 20
    first, second = (write_predictions(task_run(name), gold, gold, {"accuracy": 1.0}) for name in ("one", "two"))
    rows = [json.loads(line) for line in (second / "predictions.jsonl").read_text().splitlines()]
    write_rows(second / "predictions.jsonl", [{**row, "id": f"row-{row['id']}"} for row in rows])
    assert "the same rows resampled for both" in comparison_text(first, second)


def test_regression_values_are_paired(task_run):
    gold = [0.5 * number for number in range(20)]
    noise = [value + (-1) ** place for place, value in enumerate(gold)]
    first = write_predictions(task_run("one"), gold, gold, {"mse": 0.0, "accuracy": 1.0}, metric="mse", value=0.0)
    second = write_predictions(task_run("two"), noise, gold, {"mse": 1.0, "accuracy": 0.0}, metric="mse", value=1.0)
    text = comparison_text(first, second)
    assert "+1.0000" in text and "accuracy" not in text.split("resampled")[1]


def test_comparison_page_shows_scores_and_differing_keys(task_run, tmp_path):
    runs = [task_run("one", 0.7, optimizer={"lr": 0.001}), task_run("two", 0.9, optimizer={"lr": 0.002})]
    page = read_page(write_comparison(compare(runs), tmp_path / "out" / "comparison.html"))
    assert page.text.index("two") < page.text.index("one")  # the better run first
    differs = page.text[page.text.index("What differs") : page.text.index("Curves")]
    assert "optimizer.lr" in differs and "seed" not in differs
    with pytest.raises(UserError, match="two runs"):
        compare(runs[:1])
    names = re.findall('data-name="([^"]+)"', (tmp_path / "out" / "comparison.html").read_text())
    assert {"run", "accuracy", "key"} <= set(names), "a cell names its column for narrow pages"


def test_absent_key_differs_from_null():
    assert changed_keys([{"a": 1, "b": None}, {"a": 1}]) == ["b"]
    assert changed_keys([{"name": "x"}, {"name": "y"}]) == []


def test_reporting_imports_no_heavy_library():
    modules = "report, comparison, costs, console, screens, html"
    heavy = "[name for name in ('torch', 'matplotlib', 'rich', 'jinja2') if name in sys.modules]"
    code = f"import sys; from lmtool.reporting import {modules}; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_samples_show_words_without_space_marks() -> None:
    place = {"position": 2, "truth": "▁sat", "guesses": [["▁ran", 0.5], ["sat", 0.25]]}
    page = render_samples([{"pieces": ["▁The", "▁cat", "▁sat", "ting", ".", "<sep>"], "masked": [place]}])
    assert 'The cat <mark class="wrong">ran <s>sat</s></mark>ting. <span class="quiet">&lt;sep&gt;</span>' in page
    assert "ran 50.0% · sat 25.0%" in page and "▁" not in page
    page = render_samples(
        [{"text": "cat", "neighbours": [["dog", 0.5], ["▁cow", 0.25]]}, {"text": "x", "neighbours": 3}]
    )
    assert "<td>cat</td><td>dog 0.500 · cow 0.250</td>" in page and "Written by" not in page and "x</td>" not in page


def test_loss_terms_are_shown_with_baselines(language_run) -> None:
    path = language_run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [row | {"loss_mlm": 4.5, "loss_nsp": 0.6} for row in rows])
    scores = {f"mlm_{name}": value for name, value in {"loss": 5.25, "baseline": 6.125, "accuracy": 0.25}.items()}
    result = json.loads((language_run / "result.json").read_text())
    result["metrics"] |= scores | {"nsp_loss": 0.625, "nsp_baseline": 0.75}
    (language_run / "result.json").write_text(json.dumps(result))
    page = read_page(write_report(language_run))
    assert "the weighted sum of its terms" in page.text and "nats" not in page.text
    assert "<td>mlm</td>" in (source := (language_run / "report.html").read_text()) and "6.125" in source


@pytest.mark.parametrize(
    ("gold", "predicted", "right", "labels"),
    [
        (["a", "b"], ["a", "a"], 1, True),
        ([["The book", "a text"], []], ["book", ""], 2, False),  # any accepted answer is right; answers are not labels
        (["one text", "another"], ["one text", "a third"], 1, False),
        (["a,b", ""], ["a,b", "b"], 1, False),  # sets of labels
    ],
)
def test_only_labels_have_confusion_table(gold: list, predicted: list, right: int, labels: bool) -> None:
    rows = [
        {"id": n, "gold": own, "prediction": guess} for n, (own, guess) in enumerate(zip(gold, predicted, strict=True))
    ]
    summary = summarize([*rows, *rows] if labels or "" in gold else rows)
    assert len(summary.right) in (right, 2 * right)
    assert (len(summary.pairs) > 0 and summary.has_labels(())) is labels


DETECTED = {
    "pieces": ["the", "cat", "sit", "##s", "<b>", "now"],
    "masked": [
        # Replaced and detected, replaced and missed, and filled with the original token.
        {"position": 1, "truth": "cat", "shown": "[MASK]", "guesses": [["cat", 0.5]], "sampled": "dog"},
        {"position": 3, "truth": "##s", "shown": "[MASK]", "guesses": [["##s", 0.5]], "sampled": "##ed"},
        {"position": 4, "truth": "<b>", "shown": "[MASK]", "guesses": [["x", 0.5]], "sampled": "<b>"},
    ],
    "replaced": [0.1, 0.9, 0.2, 0.4, 0.3, 0.7],  # the last is a false positive
}


def test_replaced_token_detection_is_shown_and_counted() -> None:
    page = render_samples([DETECTED])
    assert '<mark class="right">dog <s>cat</s></mark>' in page and '<mark class="wrong">ed <s>##s</s></mark>' in page
    assert '<mark class="wrong">now ?</mark>' in page and "&lt;b&gt;" in page and "<b>" not in page
    assert "2 of 6 tokens replaced: 1 detected, 1 missed; 1 false positives" in page


def test_sample_with_a_probability_for_one_token_only_is_skipped() -> None:
    page = render_samples([DETECTED, {**DETECTED, "replaced": [0.1]}])
    assert page.count("Detection of replaced tokens") == 1 and page.count("false positives</small>") == 1


def test_comparison_shows_compute_text_and_passes(tmp_path: Path) -> None:
    runs = [write_language_run(tmp_path / name, 2.0, None) for name in ("one", "two")]
    for run, words in zip(runs, (7_000, 14_000), strict=True):
        result = json.loads((run / "result.json").read_text())
        result |= {"flops": words * 1e9, "tokens": 2 * words, "words": words, "epochs": words / 7_000}
        (run / "result.json").write_text(json.dumps(result))
    lines = [line.split("  ") for line in comparison_text(*runs).splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert cells["FLOPs"] == ["7 TFLOP", "14 TFLOP"] and cells["passes over the data"] == ["1.000", "2.000"]
    assert cells["words"] == ["7,000", "14,000"]


def write_language_run(folder: Path, loss: float, bits: float | None, vocabulary: int = 100, **more: str) -> Path:
    """Writes the result of a language model. more: its `objective`, and the `text` that it was scored on."""
    folder.mkdir()
    metrics = {"loss": loss, **({} if bits is None else {"bits_per_byte": bits})}
    result = {"status": "done", "metric": "loss", "value": loss, "metrics": metrics}
    (folder / "result.json").write_text(json.dumps(result | {"objective": more.get("objective", "clm")}))
    metadata = {"data": {"fingerprint": more.get("text", "a")}, "model": {"vocabulary": vocabulary}}
    (folder / "facts.json").write_text(json.dumps(metadata))
    return folder


def test_language_models_of_other_vocabularies_are_compared_by_bits_per_byte(tmp_path: Path) -> None:
    small = write_language_run(tmp_path / "small", loss=2.0, bits=1.5, vocabulary=100)
    large = write_language_run(tmp_path / "large", loss=3.0, bits=1.2, vocabulary=1000)
    text = comparison_text(small, large)
    assert "different vocabularies (entries: small 100, large 1000)" in text and "bits per byte can" in text
    assert "bits per byte  1.500  1.200" in text and not re.search("^(loss|baseline) ", text, re.MULTILINE)
    report_comparison(Output(io.StringIO()), [small, large], tmp_path / "page.html")
    page = read_page(tmp_path / "page.html").text
    assert page.index("large") < page.index("small")  # best first
    # With the same vocabulary, the losses can be compared.
    equal = write_language_run(tmp_path / "equal", loss=2.5, bits=1.4, vocabulary=100)
    text = comparison_text(small, equal)
    assert "cannot be compared" not in text and text.index("loss ") < text.index("bits per byte  1.500  1.400")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vocabulary": 1000}, "losses per token cannot be compared"),
        ({"objective": "mlm"}, "different objectives (clm, mlm)"),
        ({"text": "b"}, "scored on different texts"),
    ],
)
def test_incomparable_losses_are_not_ranked(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    worse = write_language_run(tmp_path / "worse", 3.0, None)
    better = write_language_run(tmp_path / "better", 2.0, None, **more)
    assert message in comparison_text(worse, better)
    report_comparison(Output(io.StringIO()), [worse, better], tmp_path / "page.html")
    page = read_page(tmp_path / "page.html").text
    assert message in page and page.index("worse") < page.index("better")


def test_comparison_shows_test_scores_and_omits_neutral_keys(task_run) -> None:
    runs = [task_run("one", 1.0, keep=2, optimizer={"lr": 0.1}), task_run("two", 0.5, keep=3, optimizer={"lr": 0.2})]
    for run, accuracy in zip(runs, (0.75, 0.5), strict=True):
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"tests": {"test": {"accuracy": accuracy}}}))
    text = comparison_text(*runs)
    assert re.search(r"test +0\.750 +0\.500", text) and "optimizer.lr" in text and "keep" not in text


@pytest.mark.parametrize("name", ["latex", "csv"])
def test_tables_for_other_programs(task_run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folders = [str(task_run(run, value)) for run, value in (("one_a", 0.75), ("two", 0.5))]
    assert report.main([*folders, f"format={name}"]) == 0
    table = capsys.readouterr().out
    if name == "csv":
        rows = list(csv.DictReader(io.StringIO(table)))
        assert [(row["run"], float(row["accuracy"])) for row in rows] == [("one_a", 0.75), ("two", 0.5)]
    else:
        assert table.startswith("\\begin{tabular}{l") and table.count(" \\\\\n") == 3
        assert "\\toprule\nrun & accuracy & " in table and "one\\_a & 0.750 & " in table
    for words in (folders[:1], [folders[0], "format=xlsx"]):
        with pytest.raises(UserError, match="format"):
            report.main([*words, *(["format=csv"] if len(words) == 1 else [])])


def test_csv_has_plain_numbers_and_a_paper_readable_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"small": (2.0, 1.5, 100), "large": (3.0, 1.2, 1000)}
    runs = [write_language_run(tmp_path / name, *values) for name, values in sizes.items()]
    for run in runs:
        result = json.loads((run / "result.json").read_text())
        result |= {"seconds": 91.755, "flops": 978446531954.5, "peak_memory_bytes": 973266944, "standard_error": 0.02}
        (run / "result.json").write_text(json.dumps(result))
    assert report.main([*map(str, runs), "format=csv"]) == 0
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert row.pop("run") == "small" and row.pop("status") == "done"
    values = {key: float(value) for key, value in row.items() if value}
    assert values == {
        "bits_per_byte": 1.5, "loss": 2.0, "loss_standard_error": 0.02, "seconds": 91.755, "flops": 978446531954.5,
        "peak_memory_bytes": 973266944,
    }  # fmt: skip
    assert report.main([*map(str, runs), "format=latex"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, *rows = ([cell.strip(" \\") for cell in line.split("&")] for line in lines if "&" in line)
    cells = dict(zip(header, rows[0], strict=True))
    assert cells["run"] == "large" and cells["bits per byte"] == "1.200", "best first"
    assert (cells["time"], cells["FLOPs"], cells["peak memory"]) == ("1 min 32 s", "978 GFLOP", "973 MB")
    assert not {"loss", "$\\pm$ loss", "baseline", "status"} & cells.keys()


@pytest.mark.usefixtures("undrawn_figures")
def test_report_of_all_of_a_folder_compares_its_runs(task_run, capsys: pytest.CaptureFixture[str]) -> None:
    one = task_run("one", 0.75)
    folder = task_run("two", 0.5).parent
    (folder / "sweep" / "0").mkdir(parents=True)
    (folder / "sweep" / "0" / "job.json").write_text("{}")
    (folder / "course").mkdir()
    (folder / "index.html").write_text("<html></html>")
    (folder / "latest").symlink_to("two")
    names = [str(folder / name) for name in ("course", "index.html", "latest", "one", "sweep", "two")]
    assert report.main(names) == 0
    shown = capsys.readouterr()
    assert re.search(r"accuracy +0\.750 +0\.500", shown.out)
    assert shown.err.replace(f"{folder}/", "") == (
        "left out: course (no run), index.html (a file), latest (two), sweep (a sweep)\n"
    )
    with pytest.raises(UserError, match="sweep is a sweep"):
        report.main([str(one), str(folder / "sweep")])
    with pytest.raises(UserError, match="absent"):
        report.main([*names, str(folder / "absent")])


@pytest.mark.usefixtures("undrawn_figures")
def test_figures_of_runs_for_a_paper(task_run, language_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a run are in its folder, those of a comparison beside the page."""
    first, second = (task_run(run, value) for run, value in (("one", 0.75), ("two", 0.5)))
    for folders, plots_folder, name in (
        ([language_run], language_run / "plots", "loss"),
        ([first, second], first.parent / "comparison_plots", "scores"),
    ):
        assert report.main([*map(str, folders), "format=pdf"]) == 0
        written = [Path(line) for line in capsys.readouterr().out.splitlines()]
        assert plots_folder / f"{name}.pdf" in written and set(written) == set(plots_folder.glob("*"))
        assert all(path.read_bytes().startswith(b"%PDF") for path in written)
    assert report.main([str(first), str(second)]) == 0
    assert (first.parent / "comparison_plots" / "scores.png").is_file()
    assert "Bars: 95% intervals" in (first.parent / "comparison.html").read_text()


@pytest.mark.usefixtures("undrawn_figures")
def test_confusion_shows_classes_with_errors(task_run) -> None:
    """Thirty classes: 0 to 27 are right, and half of 28 is taken for 29."""
    gold = [str(number) for number in range(30) for _ in range(4)]
    predictions = ["29" if label == "28" and index % 2 else label for index, label in enumerate(gold)]
    run = write_predictions(task_run("many"), predictions, gold, {"accuracy": 0.98}, classes={})
    summary = summarize(read_predictions(read_run(run)))
    header, rows = summary.confused_pairs()
    assert header[:3] == ["gold", "predicted", "rows"] and rows == [["28", "29", 2, "50.0%"]]
    labels, counts = heat_maps.most_confused(summary.pairs)
    assert len(labels) == 20 and {"28", "29"} <= set(labels) and counts[labels.index("28")][-1] == 0
    hidden, hidden_counts = heat_maps.most_confused({("a", "b"): 1, **{(f"c{n}", "a"): 5 for n in range(30)}})
    assert hidden_counts[hidden.index("a")][-1] == 1  # b is left out
    page = read_page(write_report(run)).text
    assert "The 20 of 30 labels with the most errors" in page
