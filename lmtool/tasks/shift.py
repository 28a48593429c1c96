"""How far texts and labels are from each other: of the splits of a task, of a task and another domain, of two tasks.

Divergences are Jensen and Shannon's (Lin 1991), in bits: 0 where two distributions are the same, 1 where they share
nothing. Those of samples are above 0 also without a shift; how far, a draw of the source beside the rest of it shows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from lmtool.config.tables import build
from lmtool.data.split import Rows
from lmtool.streams import Permutation
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.loading import TaskData

_WORD = re.compile(r"\w+")
# Bins of values, over the range of both sides.
_BINS = 10
# Of the stream "sample": which rows of the source are held against the rest.
_CHANCE = 16
MOST = 20_000
"""Rows of a side that are read, a seeded draw of them."""


@dataclass(frozen=True)
class Shift:
    """From the texts of `source` to those of `target`. rows: of the target. words: divergence of their unigrams, in
    lower case; chance: of a draw of the source, as large as the target or half of the source, beside the rest.
    unknown: share of the target's words that the source never has; unknown_types: the same of different words. labels:
    divergence of the labels, None where there are none to compare."""

    source: str
    target: str
    rows: int
    words: float
    chance: float
    unknown: float
    unknown_types: float
    labels: float | None


def shifts(members: Mapping[str, TaskData]) -> Iterator[Shift]:
    """Within each task from its training rows to its other rows, and between the training rows of each two tasks."""
    for name, data in members.items():
        kind: TaskKind = build(data.config)
        title = "" if len(members) == 1 else f"{name} "
        others = {**data.validation, **data.test}
        if data.unlabelled is not None:
            others["unlabelled texts"] = data.unlabelled
        for split, rows in others.items():
            if len(rows):
                yield shift(f"{title}train", data.train, f"{title}{split}", rows, kind)
    for (first, source), (second, target) in combinations(members.items(), 2):
        yield shift(f"{first} train", source.train, f"{second} train", target.train)


def shift(source: str, first: Rows, target: str, second: Rows, kind: TaskKind | None = None) -> Shift:
    """The shift from the first rows to the second. kind: of the labels of both; None where they are of two tasks."""
    count = len(second)
    first, second = (_drawn(rows, min(len(rows), MOST)) for rows in (first, second))
    known, other = unigrams(first), unigrams(second)
    unknown = {word: count for word, count in other.items() if word not in known}
    order = Permutation(len(first), 0, "sample", _CHANCE)(np.arange(len(first)))
    size = min(len(second), len(first) // 2)
    drawn = unigrams(first.take(order[:size]))
    return Shift(
        source,
        target,
        count,
        divergence(known, other),
        divergence(drawn, known - drawn),
        sum(unknown.values()) / max(other.total(), 1),
        len(unknown) / max(len(other), 1),
        None if kind is None else _label_shift(kind, first, second),
    )


def _drawn(rows: Rows, count: int) -> Rows:
    """A seeded draw of rows."""
    return rows.take(Permutation(len(rows), 0, "sample", _CHANCE)(np.arange(count))) if count < len(rows) else rows


def unigrams(rows: Rows) -> Counter[str]:
    """How often each word comes in all columns of rows, in lower case."""
    return Counter(word for text in _texts(rows) for word in _WORD.findall(text.lower()))


def _texts(rows: Rows) -> Iterator[str]:
    for column in rows.columns.values():
        yield from (" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in column)


def divergence(first: Mapping[Any, float], second: Mapping[Any, float]) -> float:
    """The Jensen-Shannon divergence of two distributions given by counts, in bits; nan where one has none."""
    names = sorted({*first, *second}, key=str)
    sides = [np.array([side.get(name, 0) for name in names], dtype=np.float64) for side in (first, second)]
    if not all(side.sum() for side in sides):
        return float("nan")
    shares = [side / side.sum() for side in sides]
    middle = (shares[0] + shares[1]) / 2
    return sum(float(np.sum(side[side > 0] * np.log2(side[side > 0] / middle[side > 0]))) for side in shares) / 2


def _label_shift(kind: TaskKind, first: Rows, second: Rows) -> float | None:
    """Of classes by their numbers, of values by bins; None of labels that are neither."""
    if first.labels is None or second.labels is None:
        return None
    sides = [np.asarray(list(_single(kind, rows))) for rows in (first, second)]
    if any(side.ndim != 1 or side.dtype.kind not in "iufU" or not len(side) for side in sides):
        return None
    if sides[0].dtype.kind == "f":
        edges = np.histogram_bin_edges(np.concatenate(sides), _BINS)
        sides = [np.digitize(side, edges[1:-1]) for side in sides]
    return divergence(*(Counter(side.tolist()) for side in sides))


def _single(kind: TaskKind, rows: Rows) -> Iterable[Any]:
    assert rows.labels is not None
    return kind.single(rows.labels)
