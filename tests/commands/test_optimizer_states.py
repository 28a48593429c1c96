"""keep_optimizer= and `lmtool runs prune`: which checkpoints of a finished run keep the optimizer's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.runs.finding import is_intact
from tests.commands.conftest import pretrain

EVERY_STEP = ("max_steps=4", "evaluate_every=1", "keep=3")


def with_optimizer(run: Path) -> list[int]:
    """Returns the steps of the checkpoints that have an optimizer state."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    assert all(map(is_intact, folders))
    return [int(folder.name[5:]) for folder in folders if (folder / "optimizer.safetensors").exists()]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("keep_optimizer=last",), [4]),
        (("keep_optimizer=all",), [2, 3, 4]),
        (("keep_optimizer=none",), []),
        (("keep_optimizer=last", "keep_every=2"), [2, 4]),
        (("keep_optimizer=last", "keep=all"), [1, 2, 3, 4]),
    ],
)
def test_finished_run_keeps_configured_optimizer_states(
    place: Path, overrides: tuple[str, ...], steps: list[int]
) -> None:
    assert with_optimizer(pretrain("run", *EVERY_STEP, *overrides)) == steps


def test_larger_budget_resumes_from_last_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*EVERY_STEP, "schedule=constant", "keep_optimizer=last")
    run = pretrain("run", *words)
    pretrain("run", *words, "max_steps=6")
    straight = pretrain("straight", *words, "max_steps=6")
    name = "checkpoints/step_00000006/model.safetensors"
    assert (run / name).read_bytes() == (straight / name).read_bytes()


def test_removed_state_is_named_on_resume_and_branch(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*EVERY_STEP, "schedule=constant", "keep_optimizer=none")
    pretrain("run", *words)
    pretrain("run", *words, "max_steps=6", status=2)
    assert cli.main(["pretrain", "branch=runs/run@3", "name=branch", "max_steps=6"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("has no optimizer state") == errors.count("hint: set checkpoint=") == 2


def test_prune_lists_states_and_removes_them_on_request(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pretrain("run", *EVERY_STEP, "keep_optimizer=all")
    capsys.readouterr()
    assert cli.main(["runs", "prune"]) == 0
    listed = capsys.readouterr().out
    assert "step_00000002" in listed and "step_00000003" in listed and "step_00000004" not in listed
    assert with_optimizer(run) == [2, 3, 4] and "lmtool runs prune runs delete=true" in listed
    assert cli.main(["runs", "prune", "runs", "delete=true"]) == 0
    assert with_optimizer(run) == [4]
    assert cli.main(["runs", "prune", "runs/run", "keep_optimizer=none", "delete=true"]) == 0
    assert with_optimizer(run) == []
    capsys.readouterr()
    assert cli.main(["runs", "prune"]) == 0
    assert "no optimizer state" in capsys.readouterr().out
    assert cli.main(["evaluate", "runs/run", "device=cpu", "cache_dir=cache"]) == 0


@pytest.mark.parametrize("words", [["nowhere"], ["runs", "delete=maybe"], ["keep_optimizer=all"], ["runs", "runs"]])
def test_prune_refuses_other_words(place: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    Path("runs").mkdir(exist_ok=True)
    assert cli.main(["runs", "prune", *words]) == 2
    assert "hint: " in capsys.readouterr().err
