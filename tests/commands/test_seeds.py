"""`lmtool evaluate` of several runs: settings with means and deviations over seeds."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from lmtool.cli import main as cli
from lmtool.reporting.seeds import blocks_of_runs, refuse_other_rows, unscored_job, with_scores
from lmtool.runs.files import SCORED_ROWS
from lmtool.runs.finding import names_several, runs_named
from tests.commands.conftest import finetune, pretrain, work_in_copy, working_in

PAIRS = {
    "agreement": ("number", [("The dogs sleep.", "The dogs sleeps."), ("A cat runs near.", "A cat run near.")]),
    "distant": ("number", [("The dogs near the cat sleep.", "The dogs near the cat sleeps.")]),
    "order": ("syntax", [("The warm dog saw it.", "Warm the dog it saw."), ("A cold road.", "Cold a road.")]),
}
PAIR_TASK = ("task=minimal_pairs", "task.path=pairs", "device=cpu")
FIRST, SECOND = "runs/gpt_fast_1", "runs/gpt_fast_2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs/ and the runs of two settings: slow with one seed, fast with three."""
    place = tmp_path_factory.mktemp("trained")
    with working_in(place):
        Path("pairs").mkdir()
        for name, (phenomenon, rows) in PAIRS.items():
            lines = [{"sentence_good": good, "sentence_bad": bad, "linguistics_term": phenomenon} for good, bad in rows]
            Path(f"pairs/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, rate, seed in (("slow", "1e-4", 1), *(("fast", "3e-2", seed) for seed in (1, 2, 3))):
            words = ["max_steps=2", "evaluate_every=2", f"optimizer.lr={rate}", f"seed={seed}"]
            pretrain(f"gpt_{name}_{seed}", *words, model="gpt_tiny")
    return place


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return work_in_copy(trained, tmp_path / "own", monkeypatch)


def single(run: str, *words: str) -> dict[str, float]:
    """The accuracies of one run, evaluated alone."""
    shutil.rmtree("alone", ignore_errors=True)
    assert cli.main(["evaluate", run, *PAIR_TASK, "report=alone", *words]) == 0
    details = json.loads(Path("alone/evaluation.json").read_text())
    scores = {name: entry["value"] for name, entry in (details["paradigms"] | details["phenomena"]).items()}
    return {"accuracy": details["accuracy"]["value"], **scores}


def test_runs_are_grouped_by_setting_with_statistics_over_seeds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {path.name: single(str(path)) for path in sorted(Path("runs").glob("gpt_*"))}
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/gpt_*", *PAIR_TASK, "report=out"]) == 0
    shown = capsys.readouterr().out
    assert "2 settings, 4 runs" in shown and "optimizer.lr=0.03" in shown and "phenomenon" in shown
    settings = json.loads(Path("out/evaluation.json").read_text())["settings"]
    by_rate = {entry["setting"]["optimizer.lr"]: entry for entry in settings}
    assert sorted(by_rate) == ["0.0001", "0.03"] and by_rate["0.03"]["seeds"] == ["1", "2", "3"]
    for score in by_rate["0.03"]["scores"]:
        values = [alone[f"gpt_fast_{seed}"][score["name"]] for seed in (1, 2, 3)]
        assert score["values"] == pytest.approx(values) and score["n"] == 3
        assert score["mean"] == pytest.approx(statistics.mean(values))
        assert score["standard_deviation"] == pytest.approx(statistics.stdev(values))
    for score in by_rate["0.0001"]["scores"]:
        assert score["n"] == 1 and score["standard_deviation"] is None
        assert score["mean"] == pytest.approx(alone["gpt_slow_1"][score["name"]])
    rows = list(csv.DictReader(Path("out/seeds.csv").read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"metric", "phenomenon", "paradigm"} and len(rows) == 2 * (1 + 2 + 3)
    assert [row["standard_deviation"] for row in rows if row["optimizer.lr"] == "0.0001"] == [""] * 6
    page = Path("out/seeds.html").read_text()
    assert "optimizer.lr=0.03" in page and "gpt_fast_3" in page and Path("out/plots/scores.png").stat().st_size > 0


def test_interval_resamples_the_paradigms_of_the_mean_over_seeds(runs: Path) -> None:
    accuracies = [single(run) for run in (FIRST, SECOND)]
    assert cli.main(["evaluate", f"checkpoint=[{FIRST},{SECOND}]", *PAIR_TASK, "report=out"]) == 0
    (setting,) = json.loads(Path("out/evaluation.json").read_text())["settings"]
    first, *others = setting["scores"]
    means = [np.mean([scores[name] for scores in accuracies]) for name in PAIRS]
    assert len({*means}) > 1
    # Of three paradigms, the resamples with three times the worst one are 1/27 of all, more than 2.5%.
    assert first["low"] == pytest.approx(min(means)) and first["high"] == pytest.approx(max(means))
    intervals = {score["name"]: score["low"] for score in others}
    assert intervals["number"] == pytest.approx(min(means[:2])) and intervals["syntax"] is None
    assert intervals["agreement"] is None


def test_positional_runs_and_sweeps_are_lists_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "-m", "model=gpt_tiny", "data=text", "data.path=text.txt", "cache_dir=cache", "device=cpu"]
    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.feedforward_size=64"]
    budget = ["max_length=32", "batch_tokens=256", "max_steps=1", "precision=fp32", "model.vocab_size=400"]
    assert cli.main([*words, *small, *budget, "seed=1,2,3", "name=seeds"]) == 0
    jobs = sorted(str(path.parent) for path in Path("runs/seeds").glob("*/job.json"))
    assert len(jobs) == 3 and names_several("runs/seeds") and runs_named("runs/seeds") == (jobs, [])
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/seeds", *PAIR_TASK]) == 0
    of_sweep = capsys.readouterr().out
    assert cli.main(["evaluate", *jobs, *PAIR_TASK]) == 0
    assert capsys.readouterr().out == of_sweep and "1 setting, 3 runs" in of_sweep
    (Path(jobs[0]) / "result.json").unlink()
    assert cli.main(["evaluate", "runs/seeds", *PAIR_TASK]) == 0
    captured = capsys.readouterr()
    assert "1 setting, 2 runs" in captured.out and f"1 unfinished run left out: {jobs[0]}" in captured.err


def test_other_scores_have_means_over_seeds_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        pretrain(f"mlm_{seed}", f"seed={seed}", "max_steps=1")
        finetune(f"task_{seed}", "checkpoint=runs/mlm_1", f"seed={seed}", "max_steps=2", "evaluate_every=2")
    values = []
    for seed in (1, 2):
        assert cli.main(["evaluate", f"runs/task_{seed}", "device=cpu", "report=alone"]) == 0
        values.append(json.loads(Path("alone/evaluation.json").read_text())["splits"]["dev"]["metrics"]["accuracy"])
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/task_*", "device=cpu", "report=out"]) == 0
    (setting,) = json.loads(Path("out/evaluation.json").read_text())["settings"]
    accuracy = next(score for score in setting["scores"] if score["name"] == "accuracy")
    assert accuracy["values"] == pytest.approx([value["value"] for value in values])
    assert cli.main(["evaluate", "runs/mlm_*", "device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "text · 1 setting, 2 runs" in shown and "loss" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"checkpoint=[{FIRST},runs/copy]"], "have the same setting and the same seed"),
        ([f"checkpoint=[{FIRST},{SECOND}@*]"], "is a learning curve"),
        ([f"checkpoint=[{FIRST},{SECOND}]", f"against={FIRST}"], f"against={FIRST} does not apply"),
        ([f"checkpoint=[{FIRST},{SECOND}]", "output=x.jsonl"], "output=x.jsonl does not apply"),
        ([f"checkpoint=[{FIRST},{SECOND}]", "task.ngrams=2"], "is the baseline of one run"),
        (["checkpoint=runs/none_*"], "no finished run has this name"),
    ],
)
def test_what_cannot_be_one_table_is_refused(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FIRST, "runs/copy")
    assert cli.main(["evaluate", *words, *PAIR_TASK]) == 2
    assert message in capsys.readouterr().err


def test_runs_on_other_rows_are_refused() -> None:
    jobs = [unscored_job(seed, f"run_{seed}", {"seed": seed}) for seed in (1, 2)]
    scored = [with_scores(job, {"accuracy": 0.5, SCORED_ROWS: "1a"}, "blimp") for job in jobs]
    refuse_other_rows(scored)
    other = with_scores(jobs[1], {"accuracy": 0.5, SCORED_ROWS: "2b"}, "blimp")
    with pytest.raises(Exception, match="run_2 was scored on other rows than run_1"):
        refuse_other_rows([scored[0], other])


def test_runs_that_differ_in_a_name_or_a_device_are_one_setting() -> None:
    configs = [
        {"seed": seed, "name": f"n{seed}", "device": device, "optimizer": {"name": "adamw", "lr": rate}}
        for seed, device, rate in ((1, "cpu", 0.1), (2, "cuda", 0.1), (1, "cpu", 0.2))
    ]
    jobs = [unscored_job(number, f"run_{number}", config) for number, config in enumerate(configs)]
    scores = [with_scores(job, {"accuracy": 0.1 * number}, None) for number, job in enumerate(jobs)]
    (block,) = blocks_of_runs(scores)
    assert block.keys == ["optimizer.lr"] and sorted(group.n for group in block.groups) == [1, 2]
