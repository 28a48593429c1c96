"""Summary of a sweep: groups, intervals, tables and figures, from folders of plain files."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb

from lmtool.commands import report
from lmtool.errors import UserError
from lmtool.learners.metrics import mean_and_error, t_quantile
from lmtool.reporting import drawing, html, plots
from lmtool.reporting.sweep_files import read_sweep
from lmtool.reporting.sweep_groups import blocks_of, csv_cell, csv_rows, difference
from lmtool.reporting.sweep_report import group_table, headline, sentences, unscored_table, write_sweep
from tests.reporting.conftest import HOSTILE
from tests.reporting.test_report import read_page

Values = dict[str, Sequence[Any]]


def job(sweep: Path, number: int, overrides: dict[str, Any], **record: Any) -> Path:
    """Write a job folder as a launcher does: done if it has a value, otherwise failed; all jobs score the same rows."""
    folder = sweep / str(number)
    folder.mkdir(parents=True)
    typed = [f"{key}={value}" for key, value in overrides.items()]
    done = {"exit_status": 0, "metric": "accuracy"} if "value" in record else {"exit_status": 1}
    done["validation_rows_sha256"] = "1a"
    (folder / "job.json").write_text(json.dumps({"job": number, "overrides": typed, **done, **record}))
    return folder


@pytest.fixture
def grid(tmp_path: Path) -> Callable[..., Path]:
    """A sweep over every combination of the values, each job scored by score(*values)."""

    def make(values: Values, score: Callable[..., float | None], name: str = "sweep", **record: Any) -> Path:
        for number, combination in enumerate(itertools.product(*values.values())):
            overrides = {"task": "rte", **dict(zip(values, combination, strict=True))}
            ends = {"exit_status": 4, "error": "the loss is nan"} if (value := score(*combination)) is None else {}
            job(tmp_path / name, number, overrides, **(ends or {"value": value, **record}))
        return tmp_path / name

    return make


def test_t_quantile_and_standard_error_match_scipy() -> None:
    # scipy.stats.t.ppf(.975, n); scipy.stats.sem([1, 2, 4])
    quantiles = {1: 12.7062047364, 2: 4.3026527297, 3: 3.1824463053, 10: 2.2281388520, 30: 2.0422724563}
    assert all(math.isclose(t_quantile(n), value, rel_tol=1e-10) for n, value in quantiles.items())
    assert mean_and_error([1, 2, 4]) == (pytest.approx(7 / 3), pytest.approx(0.8819171037))
    assert mean_and_error([3.0]) == (3.0, None)


def test_paired_difference_over_seeds_is_significant(grid: Callable[..., Path]) -> None:
    """A small gain on every seed is significant even if the seeds vary much more."""
    scores = {("a", 1): 0.5, ("a", 2): 0.7, ("a", 3): 0.9, ("b", 1): 0.51, ("b", 2): 0.712, ("b", 3): 0.911}
    sweep = read_sweep(grid({"tuning": "ab", "seed": (1, 2, 3)}, lambda *setting: scores[setting]))
    (block,) = blocks_of(sweep)
    assert [group.label for group in block.groups] == ["tuning=b", "tuning=a"]
    assert (block.best.n, block.best.error) == (3, pytest.approx(0.115769, rel=1e-4))
    gap = difference(block.groups[1], block.best)
    # scipy.stats.ttest_rel(a, b).confidence_interval()
    assert (gap.value, gap.low, gap.high) == tuple(map(pytest.approx, (-0.011, -0.01348413771, -0.00851586229)))
    assert gap.significant and gap.pairs == 3
    assert "All others differ significantly." in sentences(block)
    assert headline(block).startswith("Best of 2 settings on rte: tuning=b: accuracy 0.711 ± 0.116 (mean and")


@pytest.mark.parametrize(
    ("scores", "value", "apart", "message"),
    [  # of 277 rows; (a, b) of each seed
        (((0.6, 0.6 - 1 / 277), (0.7, 0.7 - 1 / 277)), -1 / 277, None, "which gives no interval. Add a pair: seed=3."),
        (
            ((0.6, 0.6 - 1 / 277), (0.7, 0.7 - 2 / 277)),
            -1.5 / 277,
            False,
            "Not significantly different from it: tuning=b.",
        ),
        (((0.6, 0.6), (0.7, 0.7)), 0.0, False, "Not significantly different from it: "),
    ],
)
def test_equal_paired_differences_give_no_interval(
    grid: Callable[..., Path], scores: Any, value: float, apart: bool | None, message: str
) -> None:
    """Scores of few rows are multiples of one row, so two seeds may differ equally by chance: no interval. A difference
    of 0 is in any interval."""
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda tuning, seed: scores[seed - 1]["ab".index(tuning)])
    (block,) = blocks_of(read_sweep(folder))
    gap = difference(block.groups[1], block.groups[0])
    assert (gap.value, gap.significant, gap.pairs) == (pytest.approx(value), apart, 2)
    assert (gap.low is None) == (value != -1.5 / 277)
    assert message in sentences(block)[0]
    header, rows = group_table(block)
    assert rows[1][header.index("significant")] == {None: "unknown", False: "no"}[apart]
    (referred,) = blocks_of(read_sweep(folder), against="tuning=b")
    asked = "significance unknown: every pair of seeds differs by the same amount"
    assert (asked in sentences(referred)[0]) == (apart is None)


@pytest.mark.parametrize(
    ("key", "metric", "caution"),
    [
        ("task.path", "accuracy", None),  # the rows are the same
        ("data.path", "loss", "data.path varies: loss over different targets is not comparable."),
        ("task.label_words", "accuracy", None),
    ],
)
def test_losses_over_different_targets_warn(
    grid: Callable[..., Path], key: str, metric: str, caution: str | None
) -> None:
    sweep = read_sweep(grid({key: "ab"}, {"a": 0.5, "b": 0.6}.__getitem__, metric=metric))
    cautions = [sentence for sentence in sentences(blocks_of(sweep)[0]) if "comparable" in sentence]
    assert [sentence[: len(caution or "")] for sentence in cautions] == ([caution] if caution else [])


def record_digests(folder: Path, digest_of: Callable[[dict[str, str]], str | None]) -> Path:
    """Record the digest of each job's validation rows."""
    for path in folder.glob("*/job.json"):
        record = json.loads(path.read_text())
        digest = digest_of(dict(text.split("=") for text in record["overrides"]))
        path.write_text(json.dumps({**record, "validation_rows_sha256": digest}))
    return folder


@pytest.mark.usefixtures("undrawn_figures")
def test_settings_on_different_rows_are_not_ranked(
    grid: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {("a", 1): 0.5, ("a", 2): 0.7, ("b", 1): 0.9, ("b", 2): 0.8}
    folder = grid({"task.path": "ab", "tuning": ("full", "lora"), "seed": (1, 2)}, lambda *key: scores[key[0], key[2]])
    record_digests(
        folder, lambda settings: settings["task.path"] + settings["seed"]
    )  # the seed chooses the held-out rows
    blocks = blocks_of(read_sweep(folder))
    assert [block.task for block in blocks] == ["rte, task.path=a", "rte, task.path=b"]
    assert all(block.keys == ["tuning"] and len(block.contrasts()) == 1 for block in blocks)
    assert [difference.pairs for block in blocks for _, difference in block.contrasts()] == [2, 2]
    assert all("Scored on other rows than the other settings of this task" in sentences(block)[-1] for block in blocks)
    assert report.main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Best of 2 settings on rte, task.path=") == 2 and "Best of 4" not in printed


def test_changed_data_file_separates_jobs(grid: Callable[..., Path]) -> None:
    folder = record_digests(grid({"tuning": "ab"}, {"a": 0.5, "b": 0.6}.__getitem__), lambda settings: None)
    for number, digest in (("0", "1a" * 32), ("1", "2b" * 32)):
        path = folder / number / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "validation_rows_sha256": digest}))
    assert [block.task for block in blocks_of(read_sweep(folder))] == ["rte, tuning=a", "rte, tuning=b"]


@pytest.mark.usefixtures("undrawn_figures")
@pytest.mark.parametrize("texts", [False, True])
def test_older_sweep_without_digests_compares_texts(grid: Callable[..., Path], texts: bool) -> None:
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda tuning, seed: 0.5 + seed / 10 + (tuning == "b") * seed / 20)
    record_digests(folder, lambda settings: None)
    for number in range(4):
        row = {"id": 0, "split": "dev", **({"sentence": "the cat"} if texts else {}), "gold": "x", "prediction": "x"}
        (folder / str(number) / "predictions.jsonl").write_text(json.dumps(row) + "\n")
    (block,) = blocks_of(read_sweep(folder))
    assert len(block.contrasts()) == texts
    reason = "The rows of these scores are not known, because result.json has no validation_rows_sha256"
    assert any(sentence.startswith(reason) for sentence in sentences(block)) == (not texts)
    assert ("if their rows are the same" in headline(block)) == (not texts)
    write_sweep(read_sweep(folder), [block])


def test_single_seed_has_no_error(grid: Callable[..., Path]) -> None:
    (block,) = blocks_of(read_sweep(grid({"tuning": "abc"}, {"a": 0.1, "b": 0.2, "c": 0.3}.__getitem__)))
    assert "n = 1: no error over seeds is known" in headline(block)
    assert sentences(block)[0].startswith("Whether the others differ significantly is unknown")


def test_group_table_shows_parameters_and_forgetting(grid: Callable[..., Path]) -> None:
    """Means over the jobs with values; a column with missing or equal values is dropped."""
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda tuning, seed: {"a": 0.4, "b": 0.3}[tuning])
    for number, (learn, after) in enumerate([(70, 2.5), (70, 3.5), (9, 2.0), (9, "?")]):
        forgetting = {"before": {"loss": 2.0}, "after": {"loss": after}}
        result = {"trainable_parameters": learn, "forgetting": forgetting}
        (folder / str(number) / "result.json").write_text(json.dumps(result))
    header, rows = group_table(blocks_of(read_sweep(folder))[0])
    named = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["tuning"], row["trainable parameters"], row["forgets"]) for row in named] == [
        ("a", 70, "+1.000"),
        ("b", 9, "0"),
    ]
    (folder / "0" / "result.json").unlink(), (folder / "1" / "result.json").unlink()
    assert "trainable parameters" not in group_table(blocks_of(read_sweep(folder))[0])[0]


def test_ledger_shows_compute_and_refuses_losses_of_other_objectives(grid: Callable[..., Path]) -> None:
    values = {"objective": ("mlm", "clm"), "max_flops": (1e12, 4e12)}
    folder = grid(values, lambda objective, max_flops: 3.0, metric="loss")
    for number in range(4):
        spent = (1e12, 4e12)[number % 2]
        result = {"objective": ("mlm", "clm")[number // 2], "flops": spent, "tokens": spent / 1e6, "words": 7}
        (folder / str(number) / "result.json").write_text(json.dumps(result))
    block = blocks_of(read_sweep(folder))[0]
    header, rows = group_table(block)
    named = [dict(zip(header, row, strict=True)) for row in rows]
    assert {(row["max_flops"], row["FLOPs"], row["tokens"]) for row in named} == {
        ("1000000000000.0", "1 TFLOP", "1 M"),
        ("4000000000000.0", "4 TFLOP", "4 M"),
    }
    assert any("different objectives (mlm, clm): their losses are not comparable" in text for text in sentences(block))
    (row, *_) = csv_rows(read_sweep(folder))
    assert (row["flops"], row["words"]) == (1e12, 7)


def test_differences_use_common_seeds(grid: Callable[..., Path]) -> None:
    scores = {("a", 1): 0.5, ("a", 2): 0.6, ("a", 3): 0.7, ("b", 1): None, ("b", 2): 0.5, ("b", 3): 0.65}
    sweep = read_sweep(grid({"tuning": "ab", "seed": (1, 2, 3)}, lambda *setting: scores[setting]))
    (block,) = blocks_of(sweep)
    assert difference(block.groups[1], block.best).pairs == 2 and block.groups[1].n == 2
    assert unscored_table(sweep)[1] == [["3", "tuning=b seed=1", "failed", "the loss is nan"]]
    assert "Not significantly different from it: tuning=b." in sentences(block)


@pytest.mark.usefixtures("undrawn_figures")
def test_tasks_and_metrics_have_separate_blocks(tmp_path: Path) -> None:
    for number, (task, metric, value) in enumerate(
        [("rte", "accuracy", 0.6), ("stsb", "mse", 0.9), ("stsb", "mse", 0.4)]
    ):
        job(tmp_path, number, {"task": task, "optimizer.lr": number}, metric=metric, value=value)
    job(tmp_path, 3, {"task": "stsb", "optimizer.lr": 3}, error="no such file", exit_status=2)
    blocks = blocks_of(read_sweep(tmp_path))
    assert [(block.task, block.metric, len(block.jobs)) for block in blocks] == [
        ("rte", "accuracy", 1),
        ("stsb", "mse", 3),
    ]
    assert blocks[1].best.mean == 0.4  # lower is better
    page = read_page(write_sweep(read_sweep(tmp_path), blocks)[0])
    assert "stsb: mse" in page.text and "no such file" in page.text


def test_distill_none_needs_no_distillation_keys(tmp_path: Path) -> None:
    taught = {"distill": "soft", "distill.teacher": "runs/x"}
    for number, overrides in enumerate([{**taught, "optimizer.lr": 1}, {"distill": "none", "optimizer.lr": 1}]):
        job(tmp_path, number, overrides, value=0.5)
    (block,) = blocks_of(read_sweep(tmp_path))
    assert (block.keys, block.missing) == (["distill"], [])
    job(tmp_path, 2, {**taught, "distill": "hard", "distill.gold": 0.5, "optimizer.lr": 1}, value=0.5)
    job(tmp_path, 3, {**taught, "distill.gold": 0.5, "optimizer.lr": 1}, value=0.5)
    (block,) = blocks_of(read_sweep(tmp_path))
    assert block.keys == ["distill", "distill.gold"] and not block.missing


def test_missing_grid_cells_and_unstarted_jobs_are_listed(grid: Callable[..., Path], tmp_path: Path) -> None:
    folder = grid({"batch_examples": (16, 32), "optimizer.lr": (1e-3, 1e-4)}, lambda *_: 0.5)
    (folder / "3" / "job.json").unlink()
    (block,) = blocks_of(read_sweep(folder))
    assert block.missing == [{"batch_examples": "32", "optimizer.lr": "0.0001"}]
    planned = [
        ["task=rte", f"batch_examples={size}", f"optimizer.lr={rate}"] for size in (16, 32) for rate in (1e-3, 1e-4)
    ]
    (folder / "sweep.json").write_text(json.dumps({"command": "finetune", "jobs": planned}))
    sweep = read_sweep(folder)
    assert [row[2] for row in unscored_table(sweep)[1]] == ["not started"] and not blocks_of(sweep)[0].missing
    # Sampled values form no grid, so no cell is missing.
    for number in range(9):
        job(tmp_path / "drawn", number, {"optimizer.lr": number, "batch_examples": number}, value=0.1)
    assert not blocks_of(read_sweep(tmp_path / "drawn"))[0].missing


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "its job.json is empty"),
        ('{"job": 1, "overr', "job.json is not valid JSON"),
        ("[1]", "job.json is not a JSON object"),
        ('{"job": 1, "overrides": ["a=2"], "exit_status": 1}', "it did not end"),
        ('{"job": 1, "overrides": ["a=2"], "exit_status": 0, "metric": "accuracy", "value": NaN}', "is not finite"),
        (
            '{"job": 1, "overrides": ["a=2"], "exit_status": 0, "metric": "accuracy", "value": "0.5"}',
            "is not finite",
        ),
        ('{"job": 1, "overrides": ["a=2"], "exit_status": 0}', "it has no score"),
        ('{"job": "x", "overrides": 7, "exit_status": true, "value": 1e999, "error": ["x"]}', "x"),
    ],
)
def test_damaged_job_is_listed_with_reason(tmp_path: Path, content: str, reason: str) -> None:
    job(tmp_path, 0, {"a": 1}, value=0.5)
    job(tmp_path, 1, {}).joinpath("job.json").write_text(content)
    sweep = read_sweep(tmp_path)
    (row,) = unscored_table(sweep)[1]
    assert reason in row[-1], row
    (block,) = blocks_of(sweep)
    assert block.best.mean == 0.5
    write_sweep(sweep, [block])


def test_running_job_is_detected_by_lock_owner(tmp_path: Path) -> None:
    from dataclasses import asdict

    from lmtool.runs.locks import Owner

    running = job(tmp_path, 0, {"a": 1})
    running.joinpath("LOCK").write_text(json.dumps(asdict(Owner.me())))
    running.joinpath("metrics.jsonl").write_text('{"step": 10}\n{"step": 20, "loss": 1.0}\n{"st')
    (tmp_path / "2_a-3").mkdir()
    (tmp_path / "2_a-3" / "submitted.json").write_text('{"overrides": ["a=3"]}')
    job(tmp_path, 1, {"a": 2}, owner={**asdict(Owner.me()), "pid": 2**22, "started": "1"})
    jobs = read_sweep(tmp_path).jobs
    assert [job.status for job in jobs] == ["running", "stopped", "not started"]
    assert [job.reason for job in jobs] == ["at step 20", "it did not end", ""]
    assert blocks_of(read_sweep(tmp_path)) == []


@pytest.mark.usefixtures("undrawn_figures")
def test_against_accepts_job_or_setting(grid: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    rates = (1e-3, 1e-4, 1e-5)
    folder = grid({"optimizer.lr": rates, "seed": (1, 2)}, lambda rate, seed: 0.5 + 100 * rate + seed / 100 * rate)
    for against in ("2", str(folder / "3"), "optimizer.lr=1e-4"):
        assert report.main([str(folder), f"against={against}"]) == 0
        assert "Best minus optimizer.lr=0.0001: +0.090" in capsys.readouterr().out
    for words, message in (
        (["against=99"], "neither a job nor a setting"),
        (["against=optimizer.lr=7"], "neither a job nor a setting"),
        (["against=1", "against=2"], "give run folders"),
        (["agianst=1"], "there is no key agianst"),
        ([str(folder)], "is a sweep"),
    ):
        with pytest.raises(UserError, match=message) as refusal:
            report.main([str(folder), *words])
    assert shlex.split(refusal.value.hint)[-2:] == [str(folder / "0"), str(folder / "1")]
    with pytest.raises(UserError, match="needs the folder of a sweep"):
        report.main([str(folder / "0"), "against=1"])


def test_folder_without_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a sweep"):
        read_sweep(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read_sweep(tmp_path / "nowhere")


def test_page_and_table_escape_hostile_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_SECRET", "plantedsecret")
    job(tmp_path, 0, {"a": "=cmd|' /C calc'!A0", "b": HOSTILE[:200]}, value=0.5)
    job(tmp_path, 1, {"a": "plantedsecret", "b": "2"}, exit_status=1, error=HOSTILE)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    page = read_page(tmp_path / "sweep.html")
    table = (tmp_path / "sweep.csv").read_text()
    assert "alert" in page.text and "\x1b" not in out + table
    assert "plantedsecret" not in out + page.text + table
    rows = list(csv.DictReader(table.splitlines()))
    assert rows[0]["a"] == "'=cmd|' /C calc'!A0" and rows[0]["value"] == "0.5" and len(rows) == 2
    cells = [csv_cell(value) for value in ("@x", "-1e-3", "-x", -2.0, None, "+\x1b")]
    assert cells == ["'@x", "-1e-3", "'-x", -2.0, None, "'+\\x1b"]


@pytest.mark.parametrize(
    ("against", "label"),
    [
        ("lr=0.0001", "tuning=lora optimizer.lr=1e-4"),  # the only setting with it
        ("tuning=full", "tuning=full"),  # the only setting with this key alone
        ("lr=1e-3 tuning=lora", "tuning=lora optimizer.lr=1e-3"),
        ("tuning=lora,optimizer.lr=1e-3", "tuning=lora optimizer.lr=1e-3"),
        ("projections=[q_proj,v_proj]", "tuning=full tuning.projections=[q_proj,v_proj]"),
    ],
)
def test_against_needs_only_the_keys_that_name_one_setting(tmp_path: Path, against: str, label: str) -> None:
    settings = (
        {"tuning": "full"}, {"tuning": "full", "tuning.projections": "[q_proj,v_proj]"},
        {"tuning": "lora", "optimizer.lr": "1e-3"}, {"tuning": "lora", "optimizer.lr": "1e-4"},
    )  # fmt: skip
    for number, overrides in enumerate(settings):
        job(tmp_path, number, {"task": "rte", **overrides}, value=0.5)
    sweep = read_sweep(tmp_path)
    (block,) = blocks_of(sweep, against)
    assert block.reference.label == label
    with pytest.raises(UserError) as refusal:
        blocks_of(sweep, "tuning=lora")
    assert refusal.value.hint == (
        "use one of 'against=tuning=lora optimizer.lr=1e-3', 'against=tuning=lora optimizer.lr=1e-4'"
    )


@pytest.mark.parametrize(
    ("values", "figure"),
    [
        ({"optimizer.lr": ("1e-5", "1e-4", "1e-3"), "seed": (1, 2)}, "Line: their mean"),
        ({"tuning": ("full", "lora"), "optimizer.lr": (1, 2)}, "Bold: the reference."),
        ({"batch_examples": (16, 32), "optimizer.lr": (3, 2, 5), "max_epochs": (2, 3, 4)}, "Bold: the reference."),
        ({"seed": (1, 2)}, ""),
        ({"a": (1, 2), "b": (1, 2), "c": (1, 2), "d": (1, 2)}, "Pale dots: single jobs."),
    ],
)
def test_figure_depends_on_varied_keys(grid: Callable[..., Path], values: Values, figure: str) -> None:
    sweep = read_sweep(grid(values, lambda *setting: len(repr(setting)) / 100 + float(str(setting[-1])) / 1000))
    text = write_sweep(sweep, blocks_of(sweep))[0].read_text()
    assert ("<svg" in text) == bool(figure) and figure in text


# Scores of 4 seeds each: b is worse than a on every seed, c on the average of the seeds alone.
_SEEDS = {"a": (0.70, 0.71, 0.72, 0.73), "b": (0.60, 0.61, 0.62, 0.635), "c": (0.60, 0.74, 0.62, 0.73)}


def test_only_significant_differences_are_colored(grid: Callable[..., Path]) -> None:
    folder = grid({"tuning": "abc", "seed": (1, 2, 3, 4)}, lambda tuning, seed: _SEEDS[tuning][seed - 1])
    for path in folder.glob("*/job.json"):
        scored = {"split": "validation", "accuracy": 0.5}
        rows = [{"step": step, **values} for step in (1, 2) for values in ({"loss": 1.0}, scored)]
        (path.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = blocks_of(read_sweep(folder))
    figures = plots.block_figures(block)
    assert list(figures) == ["settings", "scores", "curves", "training"]
    scores, differences = figures["scores"][0].axes
    assert [label.get_text() for label in scores.get_yticklabels()] == ["tuning=a", "tuning=c", "tuning=b"]
    means = [line.get_color() for line in scores.get_lines() if len(line.get_ydata()) == 1]
    assert means == [drawing.INK, drawing.QUIET, drawing.BASELINE]
    assert differences.get_title(loc="left") == "minus tuning=a"
    curves = [line.get_color() for line in figures["curves"][0].axes[0].get_lines()]
    assert curves == [drawing.INK, drawing.QUIET, drawing.COLORS[0]]
    # With b as the reference, a is better.
    (block,) = blocks_of(read_sweep(folder), "tuning=b")
    lines = plots.block_figures(block)["scores"][0].axes[0].get_lines()
    assert [line.get_color() for line in lines if len(line.get_ydata()) == 1] == [
        drawing.VALIDATION, drawing.QUIET, drawing.INK,
    ]  # fmt: skip


def test_map_colors_only_significant_differences(grid: Callable[..., Path]) -> None:
    """With one seed, no difference is known to be significant, so that no cell has a strong color."""
    for seeds, strong in (((1,), []), ((1, 2, 3), ["2", "2"])):
        values = {"tuning": ("full", "lora"), "optimizer.lr": ("1", "2"), "seed": seeds}

        def score(tuning: str, rate: str, seed: int) -> float:
            return 0.7 + 0.01 * seed - 0.1 * float(rate) * (1 + 0.001 * seed * seed)

        (block,) = blocks_of(read_sweep(grid(values, score, name=f"sweep{len(seeds)}")))
        (axes,) = plots.block_figures(block)["settings"][0].axes
        cells = [patch for patch in axes.patches if patch.get_alpha() is not None and patch.get_alpha() > 0.1]
        columns = [axes.get_xticklabels()[round(patch.get_x() + 0.48)].get_text() for patch in cells]
        assert columns == strong and all(patch.get_facecolor()[:3] == to_rgb(drawing.BASELINE) for patch in cells)


def test_curves_are_means_over_seeds_with_standard_errors(tmp_path: Path) -> None:
    """The band is the standard error at the steps that all seeds have."""
    for seed, losses in ((1, (2.0, 1.0, 0.5)), (2, (4.0, 2.0))):
        folder = job(tmp_path, seed, {"task": "rte", "seed": seed}, value=0.5)
        rows = [{"step": step, "split": "validation", "accuracy": loss} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = blocks_of(read_sweep(tmp_path))
    (axes,) = plots.block_figures(block)["curves"][0].axes
    (line,) = axes.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [3.0, 1.5])
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((1.0, 4.0))  # 1.5 - 0.5 and 3 + 1


def test_csv_of_a_sweep_has_plain_numbers(grid: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    scores = {("a", 1): 0.4, ("a", 2): 0.5, ("b", 1): 0.3, ("b", 2): 0.2}
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda *setting: scores[setting], seconds=200.0)
    for number in range(4):
        (folder / str(number) / "result.json").write_text(json.dumps({"flops": 978e9, "tokens": 120_000}))
    assert report.main([str(folder), "format=csv"]) == 0
    best, other = csv.DictReader(capsys.readouterr().out.splitlines())
    assert best.pop("tuning") == "a" and other.pop("tuning") == "b"
    numbers = {key: float(value) for key, value in other.items() if value}
    assert numbers["difference"] == pytest.approx(-0.2)
    assert numbers["difference_low"] < numbers["difference"] < numbers["difference_high"]
    assert (numbers["n"], numbers["seconds"], numbers["flops"], numbers["tokens"]) == (2, 200.0, 978e9, 120_000)
    assert float(best["accuracy"]) == pytest.approx(0.45) and best["difference"] == ""


@pytest.mark.parametrize("file_format", ["svg", "pdf"])
def test_figures_of_a_sweep_for_a_paper(
    grid: Callable[..., Path], capsys: pytest.CaptureFixture[str], file_format: str
) -> None:
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda tuning, seed: {"a": 0.4, "b": 0.3}[tuning])
    assert report.main([str(folder), f"format={file_format}"]) == 0
    paths = [folder / "plots" / f"{name}.{file_format}" for name in ("settings", "scores")]
    assert capsys.readouterr().out.splitlines() == [str(path) for path in paths]
    assert all(path.is_file() for path in paths)
    assert not (folder / "sweep.html").exists()
    assert report.main([str(folder)]) == 0 and (folder / "plots" / "scores.png").is_file()


@pytest.mark.slow
def test_page_of_1200_jobs_stays_small(grid: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = grid(
        {"a": range(40), "b": range(10), "seed": range(3)}, lambda a, b, seed: (a * 7 + b * 3 + seed) % 11 / 11
    )
    assert report.main([str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 80
    assert (folder / "sweep.html").stat().st_size < 700_000
    assert len((folder / "sweep.csv").read_text().splitlines()) == 1201
    assert html.escape("sweep.csv has 100 more rows.") in (folder / "sweep.html").read_text()


@pytest.mark.usefixtures("undrawn_figures")
def test_page_shows_baseline_and_links_reports_of_jobs(grid: Callable[..., Path]) -> None:
    folder = grid({"tuning": "ab", "seed": (1, 2)}, lambda tuning, seed: {"a": 0.4, "b": 0.3}[tuning])
    for number in range(4):
        (folder / str(number) / "result.json").write_text(json.dumps({"baseline": 0.25}))
    (folder / "2" / "report.html").write_text("")
    sweep = read_sweep(folder)
    assert "A constant prediction has accuracy 0.250." in sentences(blocks_of(sweep)[0])
    page, _ = write_sweep(sweep, blocks_of(sweep))
    text = page.read_text()
    assert '<a href="2/report.html">2</a>' in text and 'href="1/report.html"' not in text


@pytest.mark.usefixtures("undrawn_figures")
def test_cells_name_their_columns_for_narrow_pages(grid: Callable[..., Path]) -> None:
    """On a narrow page the head of the table is far from most cells, and a wide table would hide the interval."""
    folder = grid({"tuning": "ab", "seed": (1, 2, 3)}, lambda tuning, seed: {"a": 0.4, "b": 0.3}[tuning] + seed**2 / 50)
    sweep = read_sweep(folder)
    page, _ = write_sweep(sweep, blocks_of(sweep))
    text = page.read_text()
    header, rows = group_table(blocks_of(sweep)[0])
    settings = re.search("<table.*?</table>", text, re.DOTALL)
    assert settings is not None
    assert re.findall('data-name="([^"]+)"', settings[0]) == header * len(rows) and "95% interval" in header
