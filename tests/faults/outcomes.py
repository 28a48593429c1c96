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
    """How a trial ended. Outcomes in capitals are failures."""

    RECOVERED = "recovered"  # the result equals that of an undisturbed run
    FELL_BACK = "fell back"  # the command used another checkpoint and reported it
    REFUSED = "refused"  # the command printed an error that names the fault, and a hint
    DONE = "done"  # the input is legal, and the command read it correctly
    IMPOSSIBLE = "not possible here"  # this machine lacks what the trial needs
    SILENT = "SILENT"  # a wrong result or an ignored fault, without a message
    TRACEBACK = "TRACEBACK"  # a traceback, an abort, or a status that means a bug
    HANG = "HANG"  # the command did not end within its time limit
    SECRET = "SECRET"  # a secret reached the output or a file
    LEFTOVER = "LEFTOVER"  # a refused command left files
    DEAD_END = "DEAD END"  # a legal command was refused, or a hint does not work
    UNCLEAR = "UNCLEAR"  # a refusal without a hint, or one that does not name the fault
    ESCAPE = "ESCAPE"  # control characters of the input reached the screen
    EXECUTED = "EXECUTED"  # the input ran code, or wrote outside the trial's folder
    BROKEN = "BROKEN"  # the trial itself failed


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial. detail: a line with the fault and the observed result."""

    outcome: Outcome
    detail: str


class TrialFailed(Exception):
    """Ends a trial with a failure."""

    def __init__(self, outcome: Outcome, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail)


@contextmanager
def fault_prefix(fault: str) -> Iterator[None]:
    """Puts the fault in front of the detail of each TrialFailed that is raised in the `with` block."""
    try:
        yield
    except TrialFailed as failure:
        raise TrialFailed(failure.verdict.outcome, f"{fault}: {failure.verdict.detail}") from failure


Trial = Callable[[Path, Path, int], Verdict]
Row = dict[str, Any]
Summary = Callable[[list[Row]], tuple[str, bool]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault, with the function that runs one trial of it.

    Attributes:
        trials: the number of trials; their seeds are 0, 1, ...
        quick_trials: the number of trials with --quick
        trial: takes the stage (see stage.py), an empty working folder, and the seed, which alone determines the fault;
            returns a verdict or raises TrialFailed
        summary: takes the rows of the finished trials; returns a line about them, and whether they reach their target
    """

    trials: int
    quick_trials: int
    trial: Trial
    summary: Summary | None = None

    def run(self, stage: Path, workdir: Path, seed: int) -> Verdict:
        try:
            return self.trial(stage, workdir, seed)
        except TrialFailed as failure:
            return failure.verdict


KINDS: dict[str, Kind] = {}


def kind(name: str, trials: int, quick_trials: int = 2, summary: Summary | None = None) -> Callable[[Trial], Trial]:
    """Returns a decorator that registers a trial function as a kind of fault (see `Kind`)."""

    def register(trial: Trial) -> Trial:
        KINDS[name] = Kind(trials, quick_trials, trial, summary)
        return trial

    return register


def trial_rng(name: str, seed: int) -> random.Random:
    """Returns the random generator of a trial."""
    return random.Random(f"{name} {seed}")
