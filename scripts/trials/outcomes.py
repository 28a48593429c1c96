"""What a trial is, and how it can end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """How a trial ended. Those in capitals are failures."""

    RECOVERED = "recovered"  # the fault is gone from the result: it is that of an undisturbed run
    FELL_BACK = "fell back"  # another checkpoint was used, and the command said so
    REFUSED = "refused"  # a line `error:` that names the fault, and a line `hint:`
    DONE = "done"  # no fault after all: legal input, read as it should be
    IMPOSSIBLE = "not possible here"  # this machine lacks what the trial needs
    SILENT = "SILENT"  # a wrong result, or an unread fault, without a word
    TRACEBACK = "TRACEBACK"  # a traceback, an abort, or a status that means a bug
    HANG = "HANG"
    SECRET = "SECRET"
    LEFTOVER = "LEFTOVER"  # a refused command left files behind
    DEAD_END = "DEAD END"  # no way on: a refusal where a fall back was possible, or a hint that does not work
    UNCLEAR = "UNCLEAR"  # a refusal without a hint, or one that does not name the fault
    ESCAPE = "ESCAPE"  # control characters of the input reached the screen
    EXECUTED = "EXECUTED"  # something in the input ran, or wrote outside its place
    BROKEN = "BROKEN"  # the trial itself failed

    @property
    def failed(self) -> bool:
        return self.value.isupper()


@dataclass(frozen=True)
class Verdict:
    """detail: what was planted, and what was seen; one line."""

    outcome: Outcome
    detail: str


class Failed(Exception):
    """Ends a trial with a failure."""

    def __init__(self, outcome: Outcome, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Names the fault in what is raised inside."""
    try:
        yield
    except Failed as failure:
        raise Failed(failure.verdict.outcome, f"{fault}: {failure.verdict.detail}") from failure


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    trials: how many there are in all, seeds 0, 1, ... draw: how many a small draw has. trial: takes the stage (see
    stage.py), an empty folder that is the trial's own, and its seed; what it plants is a function of the seed. Raises
    Failed, or returns a verdict. summary: a line about all finished rows, and whether it is a good one.
    """

    name: str
    about: str
    trials: int
    draw: int
    trial: Callable[[Path, Path, int], Verdict]
    summary: Callable[[list[dict[str, object]]], tuple[str, bool]] | None = None

    def run(self, stage: Path, place: Path, seed: int) -> Verdict:
        try:
            return self.trial(stage, place, seed)
        except Failed as failure:
            return failure.verdict


def chance_of(kind: str, seed: int) -> random.Random:
    """The random choices of a trial."""
    return random.Random(f"{kind} {seed}")
