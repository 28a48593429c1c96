"""Objectives through the command: baselines of generated labels, two stages, mixture members, and tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import TINY, finetune, pretrain


def test_rtd_baseline_is_the_measured_base_rate(place: Path) -> None:
    folder = pretrain("run", "objective=rtd", "max_steps=3")
    result, metadata = (json.loads((folder / name).read_text()) for name in ("result.json", "facts.json"))
    metrics = result["metrics"]
    assert (result["metric"], result["value"]) == ("rtd_loss", metrics["rtd_loss"]), "not the weighted sum"
    assert result["baseline"] == metrics["rtd_baseline"] == metadata["baseline"]["value"]
    assert result["standard_error"] == metrics["rtd_standard_error"]
    assert result["gain_standard_error"] == metrics["rtd_gain_standard_error"]
    assert metadata["baseline"]["name"] == "base rate" and metadata["data"]


def test_second_stage_starts_after_generator_steps(place: Path) -> None:
    stages = [
        "objective=rtd",
        "objective.training=two_stage",
        "objective.generator_steps=4",
        "objective.generator_size=1",
    ]
    folder = pretrain("run", *stages, "max_steps=8")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["split"] == "train"}
    assert losses.keys() == set(range(1, 9))
    assert max(losses[step] for step in range(1, 5)) < 10, "only the generator trains"
    assert min(losses[step] for step in range(5, 9)) > 15, "only the model trains, with its weight of 50"


def test_mixture_member_that_does_not_fit_model_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "model=gpt_tiny", *TINY, "objective=mixture", "objective.members=[mlm,clm]"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "objective.members: objective=mlm trains an encoder; model=gpt is a decoder" in error
    assert "hint: set objective=auto" in error


MOOD = "{name: task, task: {kind: classification, name: mood, path: rows, text: [sentence], metrics: [accuracy, f1]}}"


def test_mixture_of_text_and_task_is_scored_and_reused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task is logged, scored, fingerprinted and planned separately. Finetuning keeps its head if the name is the
    same."""
    words = ["objective=mixture", f"objective.members=[mlm,{MOOD}]", "objective.weights=[0.7,0.3]"]
    folder = pretrain("first", *words, "max_steps=4", "evaluate_every=2")
    metadata, result = (json.loads((folder / name).read_text()) for name in ("facts.json", "result.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"loss_mlm", "loss_mood"} <= rows[0].keys() and metadata["baseline"]["name"] == "unigram and base rate"
    assert metadata["data"]["task mood"]["train_rows"] == 96 and len(metadata["data"]["task mood"]["fingerprint"]) == 64
    assert result["metrics"]["mood_count"] == 40 and {"mood_f1", "mood_accuracy"} <= result["metrics"].keys()
    assert result["metrics"]["mood_baseline"] == pytest.approx(math.log(2))
    assert result["parameters"] - pretrain_parameters("text", "objective=mlm") == 32 * 32 + 32 + 2 * 32 + 2
    assert "labels:\n      - '0'\n      - '1'\n" in (folder / "config.yaml").read_text()
    out = capsys.readouterr().out
    assert "heads.mood 66" in out and "mood examples 96" in out
    assert pretrain("first", *words, "max_steps=4", "evaluate_every=2") == folder
    assert "is finished" in capsys.readouterr().out

    finetune("second", "checkpoint=runs/first", "task.name=mood", 'task.labels=["0","1"]', "max_steps=2")
    assert "loaded: backbone" in (out := capsys.readouterr().out) and "heads.mood (66); dropped: heads.masked_lm" in out
    finetune("third", "checkpoint=runs/first", "max_steps=2")
    assert "heads.pooler (1,056); dropped" in (out := capsys.readouterr().out) and "new: heads.sst2 (66)" in out
    assert cli.main(["evaluate", "checkpoint=runs/first", "cache_dir=cache", "device=cpu"]) == 0
    assert "mood_f1" in capsys.readouterr().out
    assert cli.main(["plan", "pretrain", "model=bert_tiny", *TINY, *words]) == 0
    assert "96 training rows of the task mood" in capsys.readouterr().out


def pretrain_parameters(name: str, *more: str) -> int:
    return json.loads((pretrain(name, *more, "max_steps=1") / "result.json").read_text())["parameters"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("kind: classification, name: mood", "the task mood among the objectives has no data by default"),
        ("kind: classification, name: mood, path: nowhere", "task.path=nowhere does not exist"),
        ("kind: classification, path: rows", ".tsv: no column text to read; there are sentence, label"),
        (
            "kind: classification, path: rows, text: [label], label: sentence, labels: [a, b]",
            "is unknown; the labels of",
        ),
        ("kind: regression, path: rows, text: [label], label: sentence", "is not a number"),
        ("kind: clasification, path: rows", "members: task: kind=clasification is not known"),
        ("path: rows", "members: task: missing kind"),
    ],
)
def test_invalid_task_in_mixture_is_refused_early(
    place: Path, section: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain("run", "objective=mixture", f"objective.members=[mlm,{{name: task, task: {{{section}}}}}]", status=2)
    error, hint = capsys.readouterr().err.splitlines()
    assert message in error and hint.startswith("hint: ")
    assert not Path("runs").exists() and not Path("cache").exists()
