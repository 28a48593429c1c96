"""The data of a split, and the plan of an epoch: its examples and their lengths, before any of them is built.

Shape letters: E examples of an epoch, N examples of a batch, B batches.
"""

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


@dataclass(frozen=True)
class Rows:
    """Decoded rows of a table.

    ids: identifiers from the file, or indices from 0. columns: values of the rows (texts, lists of words, ...) by name,
    in the order in which a task reads them. labels: the row's labels as its task kind represents them ((N,) int64
    classes, (N,) float64 values, or a list); None if the split is unlabeled. origin: (file, line) of each row. parents:
    by column and for each row, the index of each word's head in a dependency tree, -1 for the root; empty without
    trees.
    """

    ids: list[str | int]
    columns: dict[str, list[Any]]
    labels: np.ndarray | Sequence[Any] | None
    origin: list[tuple[str, int]]
    parents: Mapping[str, list[list[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of_texts(cls, **columns: list[str]) -> Rows:
        """Returns unlabeled rows of texts that are not from a file."""
        count = len(next(iter(columns.values())))
        return cls(list(range(count)), dict(columns), None, [("text", line + 1) for line in range(count)])

    def take(self, indices: np.ndarray) -> Rows:
        """Returns the rows at these indices, in this order."""
        numbers = np.asarray(indices).tolist()
        return Rows(
            [self.ids[number] for number in numbers],
            {name: [values[number] for number in numbers] for name, values in self.columns.items()},
            self.labels_at(indices),
            [self.origin[number] for number in numbers],
            {name: [trees[number] for number in numbers] for name, trees in self.parents.items()},
        )

    def labels_at(self, indices: np.ndarray) -> np.ndarray | Sequence[object] | None:
        """Returns the labels at these indices, in this order."""
        if self.labels is None or isinstance(self.labels, np.ndarray):
            return None if self.labels is None else self.labels[indices]
        return [self.labels[number] for number in np.asarray(indices).tolist()]


def unlabeled_name(task: str) -> str:
    """Returns the name under which a task's rows are stored without their labels."""
    return f"{task} unlabelled"


@dataclass(frozen=True)
class SplitData:
    """The data of a split: text, rows of tables, or both.

    split: train, validation, or a name in a data set. store: the text. documents: joined if an example may span several
    documents. rows: rows by the name of their task, see `unlabeled_name`. stride: tokens between the starts of windows
    in held-out text, for a learner with `supports_stride`; None: windows as in training. members: the data of each text
    of a mixture by its title. fractions: the fraction of the examples that each member provides; None: in proportion to
    the members' sizes.
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
        """The store. Raises ValueError if the split has no text."""
        if self.store is None:
            raise ValueError(f"the split {self.split} has no text")
        return self.store


@dataclass(frozen=True)
class Plan:
    """The plan of an epoch. rows: (E,) records from which the planner builds the examples. lengths: (E,) tokens of each
    example including special tokens, exact or the maximum. cache: the cache of arrays computed from the plan."""

    rows: np.ndarray
    lengths: np.ndarray
    cache: ArrayCache = field(default=UNSHARED, compare=False)

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.lengths):
            raise ValueError(f"{len(self.rows)} rows and {len(self.lengths)} lengths")

    def __len__(self) -> int:
        return len(self.rows)

    def metadata(self) -> dict[str, object]:
        """Returns the numbers of examples and tokens, and the mean and maximum length."""
        return {
            "examples": len(self),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "mean_length": float(self.lengths.mean()),
            "longest": int(self.lengths.max()),
        }


def cached_plan(compute: Callable[..., Plan], text: Cached, *arguments: Any) -> Plan:
    """Returns `compute(text, *arguments)`, a pure function. If several processes of a machine read the text, one of
    them computes the plan, and all map it from a file."""
    cache = text.cache.of(compute, *arguments)

    def arrays() -> dict[str, np.ndarray]:
        plan = compute(text, *arguments)
        return {"rows": plan.rows, "lengths": plan.lengths}

    return Plan(**cache.load(arrays), cache=cache)


@runtime_checkable
class Examples(Protocol):
    """The examples of an objective or a task for a loader. All methods are pure functions of their arguments."""

    def plan(self, epoch: int) -> Plan:
        """Returns the plan of an epoch."""

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """Returns the batch of (N,) rows of the plan. examples: (N,) numbers of these rows in the plan."""

    def metadata(self) -> dict[str, Any]:
        """Returns the statistics for the screens: truncated fraction, skipped documents, ..."""


def batch_boundaries(lengths: np.ndarray, examples: int | None = None, tokens: int | None = None) -> np.ndarray:
    """Returns (B+1,): boundaries of consecutive batches over (E,) lengths, in order.

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
    boundaries, start = [0], 0
    while start < count:
        fitting = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + tokens, side="right"))
        start = max(fitting, start + 1) if examples is None else min(max(fitting, start + 1), start + examples, count)
        boundaries.append(start)
    return np.array(boundaries, dtype=np.int64)


_BLOCK = 1 << 14  # examples permuted at a time, which takes some milliseconds
LENGTHS_READ = 1 << 18  # lengths read at a time


@dataclass(frozen=True)
class Order:
    """The order in which the examples of an epoch are read, computed in blocks on demand.

    count: examples of the plan. seed: seed of the permutation; None: the order of the plan. skipped: examples omitted
    at the start.
    """

    count: int
    seed: int | None
    epoch: int
    skipped: int

    def __len__(self) -> int:
        return self.count - self.skipped

    def examples(self, start: int, end: int) -> np.ndarray:
        """Returns (N,): numbers of the examples at the positions from `start` to `end`."""
        first, stop = start + self.skipped, end + self.skipped
        if self.seed is None:
            return np.arange(first, stop)
        numbers = range(first // _BLOCK, -(-stop // _BLOCK))
        blocks = [_permuted_block(self.count, self.seed, self.epoch, number) for number in numbers]
        return np.concatenate(
            [
                block[max(first - number * _BLOCK, 0) : stop - number * _BLOCK]
                for number, block in zip(numbers, blocks, strict=True)
            ]
        )


@lru_cache(maxsize=4)  # consecutive steps read from the same block
def _permuted_block(count: int, seed: int, epoch: int, number: int) -> np.ndarray:
    permutation = random_streams.Permutation(count, seed, "order", epoch)
    return permutation(np.arange(number * _BLOCK, min((number + 1) * _BLOCK, count)))


def step_boundaries(plan: Plan, order: Order, examples: int | None, tokens: int | None) -> np.ndarray:
    """Returns (B+1,): the `batch_boundaries` of all examples in an order. Reads the lengths in parts."""
    if tokens is None:
        return batch_boundaries(np.empty(len(order)), examples)
    parts, start, size = [np.zeros(1, dtype=np.int64)], 0, LENGTHS_READ
    while start < len(order):
        end = min(start + size, len(order))
        boundaries = start + batch_boundaries(plan.lengths[order.examples(start, end)], examples, tokens)[1:]
        # The last batch of a part may continue in the next part.
        step_ends = boundaries if end == len(order) else boundaries[:-1]
        start, size = (int(step_ends[-1]), LENGTHS_READ) if len(step_ends) else (start, 2 * size)
        parts.append(step_ends)
    return np.concatenate(parts)
