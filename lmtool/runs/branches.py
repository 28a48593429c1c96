"""The trunk of a branch: the checkpoint of a run that another run starts from, with branch=RUN@STEP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtool.config import saved
from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.runs.finding import (
    CONFIG,
    STATE,
    best_of,
    is_intact,
    of_step,
    read_config,
    read_manifest,
    run_folder,
    saved_steps,
    verify,
)
from lmtool.system.files import RUNS, Damaged, user_path

_FORM = "branch=runs/NAME@STEP, or runs/NAME@last, runs/NAME@best"
_LISTED = 12  # steps in an error, at most


@dataclass(frozen=True)
class Trunk:
    """The run that a branch starts from. run: its folder, as typed. point: the folder of the checkpoint."""

    run: Path
    point: Path

    @classmethod
    def of(cls, value: str) -> Trunk:
        """Returns the trunk of RUN@STEP, RUN@last, RUN@best or RUN, which means RUN@last. Raises UserError if there is
        no such checkpoint."""
        name, position = split_branch(value)
        run = run_folder(name)
        steps = saved_steps(run / "checkpoints")
        if not steps:
            by_name = RUNS / name
            hint = f"set branch={by_name}@{position}" if saved_steps(by_name / "checkpoints") else f"use {_FORM}"
            raise UserError(f"branch={value}: {'no checkpoint in' if run.is_dir() else 'no run at'} {run}", hint)
        if position == "last":
            return cls(run, steps[0])
        point = best_of(run / "checkpoints") if position == "best" else of_step(run / "checkpoints", int(position))
        if point is None:
            newest = ", ".join(str(_step_of(folder)) for folder in reversed(steps[:_LISTED]))
            hint = f"set branch={run}@{_nearest(int(position), steps)}; train with keep=all or keep_every= to keep more"
            raise UserError(f"branch={value}: {run} has no checkpoint of step {int(position)}; it has {newest}", hint)
        return cls(run, point)

    @property
    def step(self) -> int:
        return _step_of(self.point)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"

    def config(self) -> JsonObject:
        """Returns the configuration of the checkpoint, including `version` and `command`. Raises UserError if the
        checkpoint is damaged."""
        try:
            verify(self.point, hashes=False)
            read_manifest(self.point).verify([CONFIG, STATE])
        except Damaged as damage:
            raise self.refusal(damage) from damage
        return saved.require_version(read_config(self.point), self.point / CONFIG)

    def refusal(self, damage: Damaged) -> UserError:
        """Returns the error for a damaged checkpoint; its hint names the nearest intact checkpoint of the run."""
        others = [folder for folder in saved_steps(self.run / "checkpoints") if folder != self.point]
        intact = [folder for folder in others if is_intact(folder)]
        hint = f"set branch={self.run}@{_nearest(self.step, intact)}, which is intact" if intact else damage.hint
        return UserError(damage.message, hint)


def phases_ended(state: JsonObject) -> int:
    """Returns the number of phases that were complete at a checkpoint. state: its state.json."""
    cursor = state.get("cursor")
    return int(cursor.get("phase", 0)) if isinstance(cursor, dict) else 0


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _nearest(step: int, folders: Sequence[Path]) -> int:
    return min(map(_step_of, folders), key=lambda other: abs(other - step))


def split_branch(value: str) -> tuple[str, str]:
    """Splits RUN@CHECKPOINT into the run and the checkpoint: a step, `last` (the default) or `best`. Raises UserError
    for another place, and for the folder of a checkpoint."""
    name, _, place = value.rpartition("@")
    if name and (place in ("last", "best") or re.fullmatch("[0-9]{1,18}", place)):
        return name, place
    folder = user_path(value)
    if name and not folder.is_dir():
        raise UserError(f"branch={value}: {place!r} is not a step", f"use {_FORM}")
    if re.fullmatch(r"step_\d{8,}", folder.name) and folder.parent.name == "checkpoints":
        hint = f"set branch={folder.parent.parent}@{_step_of(folder)}"
        raise UserError(f"branch={value}: a branch starts from a run at a step", hint)
    return value, "last"


def branch_of(words: Sequence[str]) -> str | None:
    """Returns the value of branch= on the command line, or None. Raises UserError if there are two."""
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("branch=")]
    if len(set(values)) > 1:
        both = " and ".join(f"branch={value}" for value in values)
        raise UserError(f"{both}: a key may be set only once", "keep one of them")
    return values[-1].strip("'\"") if values and values[-1] not in ("null", "") else None


def refuse_in_sweep(words: Sequence[str]) -> None:
    """Raises UserError for branch= with -m: a branch has the configuration of its trunk."""
    if branch_of(words) is not None:
        raise UserError("branch= cannot be used with -m", "start each branch separately, with its own name=")
