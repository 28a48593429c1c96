"""The trunk of a branch: the checkpoint of a run that another run starts from, with branch=RUN@STEP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtool.config import saved
from lmtool.config.base import JsonObject
from lmtool.errors import Problem, UserError
from lmtool.runs.finding import (
    CONFIG,
    STATE,
    best_of,
    is_intact,
    of_step,
    own_folder,
    read_config,
    read_manifest,
    read_state,
    run_folder,
    saved_steps,
    step_of,
    verify,
)
from lmtool.runs.identity import BRANCH_KEYS, budgets, changed_values
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
            newest = ", ".join(str(step_of(folder)) for folder in reversed(steps[:_LISTED]))
            hint = f"set branch={run}@{_nearest(int(position), steps)}; train with keep=all or keep_every= to keep more"
            raise UserError(f"branch={value}: {run} has no checkpoint of step {int(position)}; it has {newest}", hint)
        return cls(run, point)

    @classmethod
    def with_config(cls, branch: str, started: JsonObject) -> tuple[Trunk, JsonObject]:
        """Returns the trunk and its configuration. started: the configuration with which the branch was started, or
        empty. It says which step `last` or `best` was then, since the trunk may have trained further, and replaces the
        trunk's configuration if the trunk is gone."""
        name, place = split_branch(branch)
        before = str(started.get("branch") or "")
        run, _, step = before.rpartition("@")
        if not place.isdigit() and run == str(run_folder(name)):
            branch, place = before, step
        try:
            trunk = cls.of(branch)
            return trunk, trunk.config()
        except UserError:
            if before != branch or not place.isdigit():
                raise
            return cls(Path(run), Path(run) / "checkpoints" / f"step_{int(step):08d}"), started

    @property
    def step(self) -> int:
        return step_of(self.point)

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

    def forbidden_change(self, key: str, change: str) -> Problem:
        hint = f"omit it; checkpoint={self.point} instead of branch= starts a new run from its weights"
        return Problem(key, f"{change}: branch={self} cannot change what its trunk learns", hint)

    def conflicts_with_words(self, typed: Mapping[str, str]) -> Iterator[Problem]:
        """Yields the errors of a branch that has no name, has the folder of its trunk, or also sets checkpoint=. typed:
        the values of the command line by key, except null."""
        folder, key = own_folder(typed), "run_dir" if typed.get("run_dir") else "name"
        if folder is None:
            yield Problem("name", f"branch={self}: a branch is a new run and needs a name", "set name=NEW")
        elif folder.resolve() == self.run.resolve():
            message = f"{key}={typed[key]} is the trunk, which a branch does not change"
            yield Problem(key, message, f"use another {key}=")
        if "checkpoint" in typed:
            message = f"checkpoint={typed['checkpoint']} and branch={self}: a run starts from only one of them"
            hint = "use branch= for weights, optimizer and data position, or checkpoint= for the weights only"
            yield Problem("checkpoint", message, hint)

    def conflicts(self, config: JsonObject, now: JsonObject) -> Iterator[Problem]:
        """Yields the errors of a branch that changes what its trunk learns, or whose budgets the trunk has used up:
        they count from the start of the trunk. config: the trunk's. now: the branch's."""
        state = read_state(self.point)
        for change in changed_values(config, now, BRANCH_KEYS):
            yield self.forbidden_change(change.split()[0], change)
        if budgets(config) != budgets(now) and (phase := phases_ended(state)):
            message = f"branch={self} cannot change the budget: phase {phase + 1} had started, and phases are its parts"
            yield Problem("phases", message, "omit the new budget, or branch from a step of the first phase")
        spent_budgets = {
            "max_steps": state["step"],
            "max_epochs": state.get("epoch") or 0,
            "max_tokens": state.get("tokens") or 0,
            "max_words": state.get("words") or 0,
            "max_minutes": (state.get("seconds") or 0) / 60,
        }
        for key, amount in spent_budgets.items():
            limit = now[key]
            if limit is not None and amount >= limit:
                is_whole = key not in ("max_epochs", "max_minutes")
                more = int(amount + max(amount // 10, 1)) if is_whole else f"{amount * 1.1:.3g}"
                message = f"{key}={limit:g} is used up at {self}: budgets include the trunk, which used {amount:g}"
                yield Problem(key, message, f"set {key}={more}, for example, or branch from an earlier step")


def phases_ended(state: JsonObject) -> int:
    """Returns the number of phases that were complete at a checkpoint. state: its state.json."""
    cursor = state.get("cursor")
    return int(cursor.get("phase", 0)) if isinstance(cursor, dict) else 0


def _nearest(step: int, folders: Sequence[Path]) -> int:
    return min(map(step_of, folders), key=lambda other: abs(other - step))


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
        hint = f"set branch={folder.parent.parent}@{step_of(folder)}"
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
