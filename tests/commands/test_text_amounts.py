"""checkpoint_at=, max_words= and RUN@*: checkpoints at amounts of text, and their learning curve."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.runs.finding import kept_checkpoints, read_state
from tests.commands.conftest import pretrain

AT = ("max_steps=6", "evaluate_every=6", "checkpoint_every=6", "keep=1", "schedule=constant")


def states(run: Path) -> dict[str, tuple[int, bytes]]:
    return {
        ",".join(names): (read_state(folder)["tokens"], (folder / "model.safetensors").read_bytes())
        for folder, names in kept_checkpoints(run).items()
    }


def test_checkpoints_are_kept_at_amounts_and_the_same_after_a_resume(place: Path) -> None:
    probe = pretrain("probe", *AT, "keep=all", "checkpoint_every=1")
    tokens = [read_state(folder)["tokens"] for folder in sorted((probe / "checkpoints").glob("step_*"))]
    at = f"checkpoint_at=[{tokens[1]},{tokens[3] - 1}]"
    straight = pretrain("straight", *AT, at)
    assert [state[0] for state in states(straight).values()] == [tokens[1], tokens[3]]
    pretrain("resumed", *AT, f"checkpoint_at=[{tokens[1]}]", "max_steps=3", "checkpoint_every=3")
    resumed = pretrain("resumed", *AT, at)
    assert states(resumed) == states(straight)
    pointers = sorted((straight / "checkpoints").glob("at_*"))
    assert [path.read_text().strip() for path in pointers] == ["step_00000002", "step_00000004"]


def test_curve_has_the_scores_of_each_checkpoint_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = pretrain("probe", *AT)
    tokens = read_state(sorted((probe / "checkpoints").glob("step_*"))[-1])["tokens"]
    pretrain("run", *AT, f"checkpoint_at=[{tokens // 3},{tokens}]")
    assert cli.main(["evaluate", "runs/run@*", "report=curve"]) == 0
    points = json.loads((place / "curve/evaluation.json").read_text())["points"]
    rows = list(csv.DictReader((place / "curve/curve.csv").open()))
    assert len(points) == len(rows) == 2 and (place / "curve/plots/curve.png").stat().st_size > 0
    for point, row in zip(points, rows, strict=True):
        capsys.readouterr()
        assert cli.main(["evaluate", f"runs/run@{point['checkpoint']}"]) == 0
        assert f"{point['metrics']['loss']:.4f}" in capsys.readouterr().out
        assert float(row["loss"]) == pytest.approx(point["metrics"]["loss"])
    assert points[0]["metrics"]["loss"] != points[1]["metrics"]["loss"]


def test_a_run_without_kept_checkpoints_has_no_curve(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("run", *AT)
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/run@*"]) == 2
    assert "has no checkpoints at amounts of text" in capsys.readouterr().err
    assert cli.main(["evaluate", "runs/run@**"]) == 2
    assert "has no checkpoint '**'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint_at=[2K,1K]", "is not ascending"),
        ("checkpoint_at=[1K,2Kw]", "mixes tokens and words"),
        ("checkpoint_at=[1k]", "1k is not an amount of text"),
        ("checkpoint_at=[100M]", "is beyond the budget"),
    ],
)
def test_wrong_amounts_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    pretrain("run", *AT, override, status=2)
    assert message in capsys.readouterr().err


def test_max_words_counts_words_and_repeats_as_wc_does(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "train.txt").write_text("one  two\tthree\nfour five six , seven\n" * 40)
    (place / "held.txt").write_text("one two three four\n" * 10)
    words = 2 * len((place / "train.txt").read_text().split())
    text = ("data=text", "data.path=train.txt", "data.validation=held.txt", "max_steps=null", "objective.pairs=none")
    run = pretrain("run", *AT, *text, f"max_words={words}", f"checkpoint_at=[{words // 2}w]")
    result = json.loads((run / "result.json").read_text())
    assert (result["words"], result["epochs"], result["ended"]) == (words, 2.0, "max_words")
    assert "2.00 passes" in capsys.readouterr().out
    assert [read_state(folder)["words"] for folder in kept_checkpoints(run)] == [words // 2]
