"""What a learner reads: the data of one split, and the plan of an epoch of its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from lmtool import random_streams
from lmtool.data.shared import UNSHARED, ArrayCache, Cached
from lmtool.data.store import TokenStore
from lmtool.types import Batch

# The data of one split: text, labeled rows, or both.


@dataclass(frozen=True)
class Rows:
    """Decoded rows of a table, labeled or not.

    ids: a row's own number in its file where it has one, else its place from 0. columns: by name and in the order in
    which a task reads them, one value a row: texts, lists of words, whatever its kind reads. labels: what is
    predicted, one a row in the form of its kind ((N,) int64 classes, (N,) float64 values, a list of anything else);
    None where the split is unlabeled. origin: (file, line) of each row.
    """

    ids: list[str | int]
    columns: dict[str, list[Any]]
    labels: np.ndarray | Sequence[Any] | None
    origin: list[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_texts(cls, **columns: list[str]) -> Rows:
        """Unlabeled rows of texts by column that came from no file."""
        count = len(next(iter(columns.values())))
        return cls(list(range(count)), dict(columns), None, [("text", line + 1) for line in range(count)])

    def take(self, indices: np.ndarray) -> Rows:
        """The rows at these places, in this order."""
        places = np.asarray(indices).tolist()
        return Rows(
            [self.ids[place] for place in places],
            {name: [values[place] for place in places] for name, values in self.columns.items()},
            self.labels_at(indices),
            [self.origin[place] for place in places],
        )

    def labels_at(self, indices: np.ndarray) -> np.ndarray | Sequence[object] | None:
        """The labels of the rows at these places, in this order."""
        labels = self.labels
        if labels is None or isinstance(labels, np.ndarray):
            return None if labels is None else labels[indices]
        return [labels[place] for place in np.asarray(indices).tolist()]


def unlabelled(task: str) -> str:
    """The name of a task's rows whose labels are not read."""
    return f"{task} unlabelled"


@dataclass(frozen=True)
class SplitData:
    """What a learner learns from, or is scored on.

    split: train, validation, or the name a data set gives it. store: the text, and `documents` whether an example may
    span several of its documents. rows: labeled rows by the name of their task, and `unlabelled` ones. stride: tokens
    between the starts of the windows of held-out text, of a learner that `slides`; None: windows as in training.
    members: of several texts, the data of each by its title; `fractions` of their examples, None: as many as there are.
    """

    split: str
    store: TokenStore | None = None
    documents: Literal["separate", "joined"] = "joined"
    rows: Mapping[str, Rows] = field(default_factory=dict)
    stride: int | None = None
    members: Mapping[str, SplitData] = field(default_factory=dict)
    fractions: tuple[float, ...] | None = None

    @property
    def text(self) -> TokenStore:
        """The store of a split that has text."""
        if self.store is None:
            raise ValueError(f"the split {self.split} has no text")
        return self.store


# The plan of an epoch: which examples it has and how long each is, before any of them is built.
#
# Shape letters: E examples of an epoch, N examples of a batch.


@dataclass(frozen=True)
class Plan:
    """rows: (E,) records, all that is needed to make each example; their fields are the planner's own business.
    lengths: (E,) packed tokens of each example with its special tokens, exact or the largest it can have. cache: of
    what is computed from the plan."""

    rows: np.ndarray
    lengths: np.ndarray
    cache: ArrayCache = field(default=UNSHARED, compare=False)

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.lengths):
            raise ValueError(f"{len(self.rows)} rows and {len(self.lengths)} lengths")

    def __len__(self) -> int:
        return len(self.rows)

    def metadata(self) -> dict[str, object]:
        """How many examples, their tokens, and their mean and longest length."""
        return {
            "examples": len(self),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "mean_length": float(self.lengths.mean()),
            "longest": int(self.lengths.max()),
        }


def planned(compute: Callable[..., Plan], text: Cached, *arguments: Any) -> Plan:
    """`compute(text, *arguments)`: a pure function. Where several processes of a machine read the text, one of them
    computes the plan, and all map it from one file."""
    cache = text.cache.of(compute, *arguments)

    def arrays() -> dict[str, np.ndarray]:
        plan = compute(text, *arguments)
        return {"rows": plan.rows, "lengths": plan.lengths}

    return Plan(**cache.load(arrays), cache=cache)


@runtime_checkable
class Examples(Protocol):
    """What a loader reads: an objective's or a task's examples. Everything is a pure function of its arguments."""

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch; cached by the caller that makes it where it is dear."""

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """The batch of (N,) rows of the plan, whose numbers in it are `examples` (N,)."""

    def metadata(self) -> dict[str, Any]:
        """What the screens say: truncated fraction, skipped documents, ..."""


def batch_boundaries(lengths: np.ndarray, examples: int | None = None, tokens: int | None = None) -> np.ndarray:
    """(B+1,) boundaries of consecutive batches over (E,) lengths, in order.

    examples: examples per batch; the last batch may have fewer. tokens: maximum tokens per batch; a longer example is a
    batch by itself. Both: whichever is reached first. Neither: a single batch.
    """
    count = len(lengths)
    if count == 0:
        return np.zeros(1, dtype=np.int64)
    if tokens is None:
        stride = count if examples is None else examples
        return np.append(np.arange(0, count, stride, dtype=np.int64), count)
    ends = np.cumsum(lengths, dtype=np.int64)
    boundaries, at = [0], 0
    while at < count:
        fitting = int(np.searchsorted(ends, (ends[at - 1] if at else 0) + tokens, side="right"))
        at = max(fitting, at + 1) if examples is None else min(max(fitting, at + 1), at + examples, count)
        boundaries.append(at)
    return np.array(boundaries, dtype=np.int64)


_BLOCK = 1 << 14  # examples permuted at a time, which takes some milliseconds
LENGTHS_READ = 1 << 18  # lengths read at a time


@dataclass(frozen=True)
class Order:
    """The order in which the examples of an epoch are read, computed in blocks on demand.

    count: examples of the plan. seed: seed of the permutation; None: the order of the plan. skipped: examples that are
    omitted at the beginning.
    """

    count: int
    seed: int | None
    epoch: int
    skipped: int

    def __len__(self) -> int:
        return self.count - self.skipped

    def examples(self, start: int, end: int) -> np.ndarray:
        """(N,) the numbers of the examples from `start` to `end`."""
        first, last = start + self.skipped, end + self.skipped
        if self.seed is None:
            return np.arange(first, last)
        numbers = range(first // _BLOCK, -(-last // _BLOCK))
        blocks = [_permuted_block(self.count, self.seed, self.epoch, number) for number in numbers]
        return np.concatenate(
            [
                block[max(first - number * _BLOCK, 0) : last - number * _BLOCK]
                for number, block in zip(numbers, blocks, strict=True)
            ]
        )


@lru_cache(maxsize=4)  # consecutive steps read from the same block
def _permuted_block(count: int, seed: int, epoch: int, number: int) -> np.ndarray:
    """The examples of one block of a permuted epoch."""
    permutation = random_streams.Permutation(count, seed, "order", epoch)
    return permutation(np.arange(number * _BLOCK, min((number + 1) * _BLOCK, count)))


def step_boundaries(plan: Plan, order: Order, examples: int | None, tokens: int | None) -> np.ndarray:
    """(B+1,) the boundaries of `batch_boundaries` over all examples in this order, reading part of the lengths at a
    time."""
    if tokens is None:
        return batch_boundaries(np.empty(len(order)), examples)
    parts, at, size = [np.zeros(1, dtype=np.int64)], 0, LENGTHS_READ
    while at < len(order):
        end = min(at + size, len(order))
        boundaries = at + batch_boundaries(plan.lengths[order.examples(at, end)], examples, tokens)[1:]
        # The last batch of a part may continue in the next part.
        complete = boundaries if end == len(order) else boundaries[:-1]
        at, size = (int(complete[-1]), LENGTHS_READ) if len(complete) else (at, 2 * size)
        parts.append(complete)
    return np.concatenate(parts)
