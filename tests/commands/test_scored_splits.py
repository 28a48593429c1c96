"""A labeled test split is scored once, at the end of a run; `evaluate` scores all rows of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtool.cli import main as cli
from lmtool.data.examples import Rows
from lmtool.learners.held_out import HeldOutSplits, sampled_rows
from lmtool.session import session
from tests.commands.conftest import TINY, finetune, pretrain, working_in


@pytest.mark.usefixtures("reports")
def test_labeled_test_split_is_scored_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("rows/dev.tsv").read_text().splitlines()
    Path("rows/test.tsv").write_text("\n".join(lines[:13]) + "\n")
    run = finetune("run", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=2")
    result = json.loads((run / "result.json").read_text())
    assert result["tests"]["test"]["examples"] == 12 and 0 <= result["tests"]["test"]["accuracy"] <= 1
    shown = capsys.readouterr().out
    assert "selected on these 40 rows" in shown and "on 12 rows, scored once" in shown
    report = (run / "report.html").read_text()
    assert "selected on these 40 rows" in report and "on 12 rows, scored once" in report
    # Evaluations during training do not use the test split.
    assert not any("test" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert cli.main(["evaluate", "checkpoint=runs/run", "task=rows/test.tsv", "cache_dir=cache", "device=cpu"]) == 0
    assert "n = 12" in capsys.readouterr().out


def test_unlabeled_test_rows_are_not_scored(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows/test.tsv").write_text("index\tsentence\n0\ta text\n")
    run = finetune("run", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=1")
    assert "tests" not in json.loads((run / "result.json").read_text())
    assert "scored once" not in capsys.readouterr().out


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "validation"]


def test_evaluations_during_training_read_a_sample_of_the_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch = ("model=bert_tiny", "checkpoint=none", *TINY, "max_steps=2", "evaluate_every=1")
    run = finetune("sampled", *scratch, "evaluate_rows=10")
    result = json.loads((run / "result.json").read_text())
    assert (result["selection_examples"], result["validation_examples"]) == (10, 40)
    shown = capsys.readouterr().out
    assert "during training 10 of 40 rows" in shown and "on 40 rows; selected on 10 of them" in shown
    # The final scores are those of a run that selects the same checkpoint on all rows.
    complete = finetune("complete", *scratch, "evaluate_rows=all")
    other = json.loads((complete / "result.json").read_text())
    assert other["best_step"] == result["best_step"] and other["metrics"] == result["metrics"]
    assert evaluations(complete)[-1]["loss"] == result["metrics"]["loss"] != evaluations(run)[-1]["loss"]


def test_short_run_is_evaluated_less_often(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = ("model=bert_tiny", "checkpoint=none", *TINY, "max_steps=10", "batch_examples=8")
    assert len(evaluations(finetune("cheap", *scratch))) == 10
    monkeypatch.setattr(session, "CHEAP_EVALUATION_TOKENS", 0)
    run = finetune("short", *scratch)
    result = json.loads((run / "result.json").read_text())
    # All 40 rows are read each time, as many tokens as in 5 of the 10 steps, but at least twice.
    assert [row["step"] for row in evaluations(run)] == [5, 10] and result["steps"] == 10
    assert len(evaluations(finetune("asked", *scratch, "evaluate_every=2"))) == 5
    assert len(evaluations(finetune("rows", *scratch, "evaluate_rows=all"))) == 10


def test_evaluations_during_pretraining_read_a_sample_of_the_examples(place: Path) -> None:
    run = pretrain("sampled", "evaluate_rows=3", "evaluate_every=2")
    counts = {row["mlm_count"] for row in evaluations(run)}
    complete = json.loads((run / "result.json").read_text())["metrics"]["mlm_count"]
    assert len(counts) == 1 and 0 < max(counts) < complete


def test_evaluations_of_a_run_in_minutes_do_not_grow_with_the_text(place: Path) -> None:
    Path("train.txt").write_text("\n".join(f"the dog number {number} sleeps" for number in range(20_000)))
    Path("held_out.txt").write_text("\n".join(f"the cat number {number} sleeps" for number in range(2_000)))
    text = ("data.path=train.txt", "data.validation=held_out.txt", "data.document=line")
    run = pretrain("short", *text, "max_steps=null", "max_minutes=0.001", model="gpt_tiny")
    counts = {row["clm_count"] for row in evaluations(run)}
    complete = json.loads((run / "result.json").read_text())["metrics"]["clm_count"]
    assert len(counts) == 1 and max(counts) < complete / 2


def test_sample_depends_on_texts_only() -> None:
    rows = Rows.of_texts(text=[f"text {number}" for number in range(1000)])
    small = sampled_rows(rows, 256)
    assert len(small) == 256 and small.ids == sorted(small.ids)
    assert set(small.ids) < set(sampled_rows(rows, 400).ids)
    reordered = rows.take(np.arange(1000)[::-1])
    assert set(sampled_rows(reordered, 256).ids) == set(small.ids)
    assert len(sampled_rows(Rows.of_texts(text=["same", "other"] * 100), 1)) == 100  # equal texts stay together


def test_language_models_are_compared_on_the_same_documents(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {}
    for name, size in (("small", 300), ("large", 350)):
        run = pretrain(name, f"tokenizer.vocab_size={size}", "data.document=line", model="gpt_tiny")
        bits[name] = json.loads((run / "result.json").read_text())["metrics"]["bits_per_byte"]
    capsys.readouterr()
    evaluate = ["evaluate", "checkpoint=runs/small", "cache_dir=cache", "device=cpu"]
    assert cli.main([*evaluate, "against=runs/large"]) == 0
    shown = capsys.readouterr().out
    assert "runs/small minus runs/large, the same documents resampled for both" in shown
    numbers = next(line for line in shown.splitlines() if line.startswith("bits_per_byte") and " to " in line).split()
    first, second, difference, low, _, high = (float(text) if text != "to" else 0.0 for text in numbers[1:7])
    assert (first, second) == (pytest.approx(bits["small"], abs=1e-3), pytest.approx(bits["large"], abs=1e-3))
    assert difference == pytest.approx(first - second, abs=2e-4) and low < difference < high
    pretrain("masked")
    monkeypatch.setattr(HeldOutSplits, "score", lambda *_: pytest.fail("refused before anything is scored"))
    for pair in (["runs/small", "runs/masked"], ["runs/masked", "runs/small"]):
        capsys.readouterr()
        assert cli.main(["evaluate", *pair, "data.document=line", *evaluate[2:]]) == 2
        error = capsys.readouterr().err
        assert f"{pair[0]} and {pair[1]} cannot be compared on a text: the loss of runs/masked (objective=mlm)" in error
        assert "set task=blimp" in error and "against" not in error


def test_scores_of_a_text_are_printed_once_with_progress(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pretrain("run", model="gpt_tiny")
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    Path("other.txt").write_text(Path("text.txt").read_text())
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/run", "data=other.txt", "cache_dir=cache", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "tokenizing all text of data.path=other.txt" in shown and "validation" not in shown
    assert "scoring runs/run …" in shown
    names = re.findall(r"^(\w+) +\d.*$", shown, re.MULTILINE)
    assert names == ["loss", "perplexity", "word_perplexity", "bits_per_byte", "clm_accuracy", "clm_count"], shown
    assert cli.main(["evaluate", "runs/run", "cache_dir=cache", "device=cpu", "precision=fp32"]) == 0
    score = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("loss "))
    loss, sign, error = score.split()[1:]
    assert (float(loss), sign) == (pytest.approx(metrics["loss"], abs=1e-3), "±")
    assert float(error) == pytest.approx(metrics["standard_error"], abs=2e-4), "the same error as after training"


def bits_by_row(shown: str) -> dict[tuple[int, str], tuple[float, ...]]:
    """The bits per byte of each row of the table by length, and the difference with its interval."""
    row = re.compile(
        r"^(\d+) +(as in training|linear|ntk|yarn) +([\d.]+)(?: +([+-][\d.]+) +([+-][\d.]+) to ([+-][\d.]+))?"
    )
    matches = filter(None, map(row.match, shown.splitlines()))
    return {(int(m[1]), m[2]): tuple(float(text) for text in m.groups()[2:] if text is not None) for m in matches}


def test_lengths_compare_windows_with_those_of_training(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "data.document=line",
        "model.positions.name=rotary",
        "max_length=16",
        "max_steps=6",
        "model.initializer_std=0.3",
    )
    pretrain("rotary", *words, model="gpt_tiny")
    evaluate = ["evaluate", "checkpoint=runs/rotary", "cache_dir=cache", "device=cpu"]
    capsys.readouterr()
    assert cli.main([*evaluate, "lengths=[8,32]"]) == 0
    rows = bits_by_row(capsys.readouterr().out)
    extended = [(32, kind) for kind in ("as in training", "linear", "ntk", "yarn")]
    assert list(rows) == [(16, "as in training"), (8, "as in training"), *extended]
    for length in (8, 16, 32):
        assert cli.main([*evaluate, f"max_length={length}"]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bits_per_byte"))
        assert float(line.split()[1]) == rows[length, "as in training"][0]
    for value, *difference in rows.values():
        if difference:
            assert difference[0] == pytest.approx(value - rows[16, "as in training"][0], abs=2e-4)
            assert difference[1] < difference[0] < difference[2]
    assert len({rows[key][0] for key in extended}) == 4


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a causal language model."""
    folder = tmp_path_factory.mktemp("causal")
    with working_in(folder):
        pretrain("causal", "data.document=line", "max_steps=1", model="gpt_tiny")
    return folder


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("lengths=[8,9999]", "lengths=9999 exceeds the"),
        ("lengths=[8] max_length=16", "exclude each other"),
        ("lengths=[4]", "lengths[0]: given 4"),
    ],
)
def test_lengths_that_cannot_be_scored_are_refused(
    causal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, message: str
) -> None:
    monkeypatch.chdir(causal)
    assert cli.main(["evaluate", "checkpoint=runs/causal", "device=cpu", *typed.split()]) == 2
    error = capsys.readouterr().err
    assert message in error, error


def test_lengths_need_a_causal_model_and_documents(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("masked", "max_steps=1")
    assert cli.main(["evaluate", "checkpoint=runs/masked", "device=cpu", "lengths=[8,16]"]) == 2
    assert "compares causal language models without carried state" in capsys.readouterr().err
