"""How a trained model reads rows, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtool.training.precision import Precision


def no_warning(text: str) -> None:
    """Reports nothing."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Inference:
    """max_length: tokens of an example, at most. batch_tokens: of a forward. warn: reports what a user should know.
    progress: is given how many parts of how many are done."""

    max_length: int
    batch_tokens: int
    precision: Precision
    warn: Callable[[str], None] = no_warning
    progress: Callable[[int, int], None] = no_progress


@dataclass(frozen=True)
class Answers:
    """What a trained model answers to rows. records: plain data, one a row. scores: of `labelled` rows, by metric; none
    where the rows have no labels."""

    records: Iterator[dict[str, Any]]
    scores: Mapping[str, float] = field(default_factory=dict)
    labelled: int = 0
