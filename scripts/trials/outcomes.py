"""The outcomes of trials, and the kinds of faults that they plant."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Outcome(StrEnum):
    """How a trial ended. Those in capitals are failures."""

    RECOVERED = "recovered"  # the result is that of an undisturbed run
    FELL_BACK = "fell back"  # the command used another checkpoint and reported it
    REFUSED = "refused"  # a line `error:` that names the fault, and a line `hint:`
    DONE = "done"  # the input is legal, and the command read it correctly
    IMPOSSIBLE = "not possible here"  # this machine lacks what the trial needs
    SILENT = "SILENT"  # a wrong result or an ignored fault, without a message
    TRACEBACK = "TRACEBACK"  # a traceback, an abort, or a status that means a bug
    HANG = "HANG"
    SECRET = "SECRET"
    LEFTOVER = "LEFTOVER"  # a refused command left files
    DEAD_END = "DEAD END"  # a refusal of what should work, or a hint that does not work
    UNCLEAR = "UNCLEAR"  # a refusal without a hint, or one that does not name the fault
    ESCAPE = "ESCAPE"  # control characters of the input reached the screen
    EXECUTED = "EXECUTED"  # the input ran code, or wrote outside the trial's folder
    BROKEN = "BROKEN"  # the trial itself failed


@dataclass(frozen=True)
class Verdict:
    """detail: one line that names the fault and the observation."""

    outcome: Outcome
    detail: str


class Failed(Exception):
    """Ends a trial with a failure."""

    def __init__(self, outcome: Outcome, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Prefixes the details of failures raised inside with the fault."""
    try:
        yield
    except Failed as failure:
        raise Failed(failure.verdict.outcome, f"{fault}: {failure.verdict.detail}") from failure


Trial = Callable[[Path, Path, int], Verdict]
Row = dict[str, Any]
Summary = Callable[[list[Row]], tuple[str, bool]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. trials: their number; the seeds are 0, 1, ... draw: their number with --quick. trial: takes the
    stage (see stage.py), an empty folder and the seed, which alone decides what is planted; returns a verdict or raises
    Failed. summary: returns a line about all finished rows, and whether they reach their aim."""

    trials: int
    draw: int
    trial: Trial
    summary: Summary | None = None

    def run(self, stage: Path, place: Path, seed: int) -> Verdict:
        try:
            return self.trial(stage, place, seed)
        except Failed as failure:
            return failure.verdict


KINDS: dict[str, Kind] = {}


def kind(name: str, trials: int, draw: int = 2, summary: Summary | None = None) -> Callable[[Trial], Trial]:
    """Registers a trial in KINDS."""

    def enter(trial: Trial) -> Trial:
        KINDS[name] = Kind(trials, draw, trial, summary)
        return trial

    return enter


def chance_of(name: str, seed: int) -> random.Random:
    """The random choices of a trial."""
    return random.Random(f"{name} {seed}")
