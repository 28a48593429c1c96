"""The loader: the batches of each step in a planned order, from any step on.

Shape letters: E examples of an epoch, B batches (steps of an epoch, or forward passes of a step), N examples of a step.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from lmtool.data.examples import LENGTHS_READ, Examples, Order, Plan, batch_boundaries, step_boundaries
from lmtool.errors import UserError
from lmtool.types import Batch, Step

Item = TypeVar("Item")

_POLL_SECONDS = 0.1
AHEAD = 2  # steps produced in advance


def prefetch(items: Iterable[Item], ahead: int = AHEAD) -> Iterator[Item]:
    """Iterates in the same order, with up to `ahead` items produced in advance by a thread. An exception of the
    producer is raised at its position in the order. The thread ends with the items, or soon after this iterator is
    closed or deleted."""
    ready: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def put(kind: str, item: Item | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put((kind, item), timeout=_POLL_SECONDS)
                return not closed.is_set()
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
        except BaseException as error:  # the reader raises it
            put("error", error)
        else:
            put("end", None)

    thread = threading.Thread(target=work, name="lmtool-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise item  # type: ignore[misc]
            yield item  # type: ignore[misc]
            del item
    finally:
        closed.set()
        with suppress(queue.Empty):  # wakes a producer that waits for space
            ready.get_nowait()
        thread.join()


@dataclass(frozen=True)
class LocalStep:
    """The part of a step that one process reads. indices: of the examples, in the order of the step. boundaries: (B+1,)
    of the forward passes. idle: how many more forward passes the busiest process runs in this step."""

    indices: np.ndarray
    boundaries: np.ndarray
    idle: int


def local_step(lengths: np.ndarray, rank: int, ranks: int, micro_batch_tokens: int | None) -> LocalStep:
    """Returns the part of a step for process `rank` of `ranks`. Each process computes all parts, without communication.
    lengths: (N,) tokens of each example. micro_batch_tokens: maximum tokens of a forward pass."""
    indices = [np.arange(len(lengths))] if ranks == 1 else assign(lengths, ranks)
    boundaries = [batch_boundaries(lengths[local], None, micro_batch_tokens) for local in indices]
    most = max(map(len, boundaries))
    return LocalStep(indices[rank], boundaries[rank], most - len(boundaries[rank]))


def assign(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Returns the indices of the examples of each process. Examples are dealt out, the longest first, in the order of
    the processes, then in reverse, and so on. The processes then have equally many examples, up to one, and nearly
    equally many tokens."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    turn, seat = np.divmod(np.arange(len(order)), ranks)
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.where(turn % 2, ranks - 1 - seat, seat)
    return [np.flatnonzero(owner == rank) for rank in range(ranks)]


# Lanes: contiguous streams of text for a model that carries state from one batch to the next.
#
# The joined text of a split is divided into as many lanes as a step has examples. Step t reads segment t of every lane,
# so the state after a segment is that of the text right before the next one (Mikolov et al. 2010; Dai et al. 2019,
# "Transformer-XL", section 3.2). Every epoch has the order of the text and starts with the initial state.
#
# Shape letters: L lanes, S segments of the longest lane, E segments of all lanes.


# A segment: its position in the text, its length, its lane, and how many tokens of its lane come before it.
SEGMENT = np.dtype([("start", "i8"), ("length", "i4"), ("lane", "i4"), ("before", "i8")])


@runtime_checkable
class LanedExamples(Examples, Protocol):
    """Examples with a plan of `segments` and batches that name their lanes (`Batch.lanes`). lanes: number of lanes."""

    lanes: int


@runtime_checkable
class SupportsLanes(Protocol):
    """Examples of joined text for a model that carries state. A loader reads them in lanes; others may read them in any
    order, without state."""

    def in_lanes(self, lanes: int) -> LanedExamples:
        """Returns the same text in at most this many lanes."""


def segments(positions: int, lanes: int, size: int) -> np.ndarray:
    """Divides a text of `positions` tokens into `lanes` contiguous lanes, whose sizes differ by at most one, and each
    lane into segments of `size`. Returns (E,) records of `SEGMENT`, sorted by step, then by lane. The last step may
    have fewer and shorter segments."""
    boundaries = np.arange(lanes + 1, dtype=np.int64) * positions // lanes
    starts_L, sizes_L = boundaries[:-1], np.diff(boundaries)
    before_S1 = np.arange(0, max(int(sizes_L.max(initial=0)), 1), size, dtype=np.int64)[:, None]
    lengths_SL = np.minimum(sizes_L - before_S1, size)
    rows_SL = np.empty(lengths_SL.shape, dtype=SEGMENT)
    rows_SL["start"], rows_SL["length"] = starts_L + before_S1, lengths_SL
    rows_SL["lane"], rows_SL["before"] = np.arange(lanes), before_S1
    return rows_SL[lengths_SL > 0]


@dataclass(frozen=True)
class _Epoch:
    """The steps of an epoch. sizes: the size of a step in examples and in tokens."""

    plan: Plan
    order: Order
    sizes: tuple[int | None, int | None]

    @cached_property
    def boundaries(self) -> np.ndarray:
        """(B+1,) boundaries of the steps in the order."""
        cache = self.plan.cache.of("boundaries", self.order, self.sizes)
        return cache.load(lambda: {"boundaries": step_boundaries(self.plan, self.order, *self.sizes)})["boundaries"]

    @property
    def steps(self) -> int:
        return len(self.boundaries) - 1

    def step(self, number: int) -> np.ndarray:
        """(N,) numbers of the examples of a step."""
        return self.order.examples(*self.boundaries[number : number + 2].tolist())

    def groups(self, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the first `steps` steps in groups: (N,) numbers of their examples, and the steps' boundaries."""
        step, boundaries = 0, self.boundaries[: steps + 1]
        while step < len(boundaries) - 1:
            fitting = int(np.searchsorted(boundaries, boundaries[step] + LENGTHS_READ, side="right")) - 1
            end_step = max(step + 1, fitting)
            start, end = boundaries[[step, end_step]].tolist()
            yield self.order.examples(start, end), boundaries[step : end_step + 1] - start
            step = end_step

    @cached_property
    def totals(self) -> list[int]:
        """Tokens of all examples, the longest, and the tokens if each step were padded to its longest example."""

        def compute() -> dict[str, np.ndarray]:
            tokens = longest = padded = 0
            for examples, boundaries in self.groups(self.steps):
                lengths = self.plan.lengths[examples].astype(np.int64)
                longest_of_steps = np.maximum.reduceat(lengths, boundaries[:-1])
                tokens += int(lengths.sum())
                longest = max(longest, int(longest_of_steps.max()))
                padded += int((longest_of_steps * np.diff(boundaries)).sum())
            return {"totals": np.array([tokens, longest, padded])}

        return self.plan.cache.of("totals", self.order, self.sizes).load(compute)["totals"].tolist()


class PackedLoader:
    """A `types.Loader` of packed batches.

    An epoch reads every example once, in a permutation computed from (seed, epoch). Steps are slices of it, so a cursor
    is two counters. Joined text for a model that carries state is read in order, a segment of each lane in a step.

    Args:
        examples: The examples; if they are not in lanes yet, they get as many lanes as a step has examples.
        seed: Seed of the order.
        batch_examples, batch_tokens: The size of a step; set one of them.
        micro_batch_tokens: Maximum tokens of a forward pass; a step may have several. This changes no result.
        shuffle: Whether to shuffle. False keeps the order of the plan.
        virtual_tokens: Tokens that a tuning method adds to each example in a forward pass.
        words: Words of the text that an epoch reads; None if unknown.
    """

    def __init__(
        self,
        examples: Examples,
        seed: int,
        batch_examples: int | None = None,
        batch_tokens: int | None = None,
        micro_batch_tokens: int | None = None,
        shuffle: bool = True,
        virtual_tokens: int = 0,
        words: int | None = None,
    ):
        if (batch_examples is None) == (batch_tokens is None):
            raise ValueError("give batch_examples or batch_tokens")
        if isinstance(examples, SupportsLanes):
            fitting = batch_examples or max(1, (batch_tokens or 0) // int(examples.plan(0).lengths.max()))
            examples = examples.in_lanes(fitting)
        self._lanes = examples.lanes if isinstance(examples, LanedExamples) else None
        self._words = words
        self._examples, self._seed, self._shuffle = examples, seed, shuffle and self._lanes is None
        self._batch_examples, self._batch_tokens = batch_examples, batch_tokens
        self._sizes = (batch_examples, batch_tokens) if self._lanes is None else (self._lanes, None)
        self._micro_batch_tokens, self._virtual_tokens = micro_batch_tokens, virtual_tokens
        self._epochs: dict[int, _Epoch] = {}
        self._start = (0, 0)

    @property
    def examples(self) -> Examples:
        """The examples, perhaps in lanes."""
        return self._examples

    def starting_at(self, epoch: int, skipped: int) -> Self:
        """Returns a loader of the same examples that starts in `epoch` after the first `skipped` examples of its order,
        which another loader has read."""
        if (epoch, skipped) == self._start:
            return self
        loader = copy.copy(self)
        loader._start, loader._epochs = (epoch, skipped), {}
        return loader

    def reads_like(self, other: PackedLoader) -> bool:
        """Whether another loader of the same text has the same examples in the same order."""
        plan, other_plan = self._epoch(0).plan, other._epoch(0).plan
        same_order = self._seed == other._seed and self._shuffle == other._shuffle
        same_rows = np.array_equal(plan.rows, other_plan.rows)
        return same_order and same_rows and np.array_equal(plan.lengths, other_plan.lengths)

    def steps(self, cursor: dict[str, int] | None = None, rank: int = 0, ranks: int = 1) -> Iterator[Step]:
        """Yields endless steps from the cursor on. A thread produces them in advance; it ends when the iterator is
        closed. With several processes, yields the part of each step for `rank` of `ranks`. Raises UserError if the
        cursor belongs to other data, or if several processes would read lanes."""
        if ranks > 1 and self._lanes is not None:
            raise UserError("a model that carries state over batches trains in one process", "set devices=1")
        cursor = cursor or {"epoch": 0, "batch": 0}
        total = self._epoch(cursor["epoch"]).steps
        if not 0 <= cursor["batch"] <= total:
            raise UserError(
                f"the checkpoint was saved at batch {cursor['batch']}, but an epoch has {total}: the data or the batch "
                "size changed",
                "restore the data, batch_examples= and batch_tokens=, or set another name= to start a new run",
            )
        return prefetch(self._steps(cursor["epoch"], cursor["batch"], rank, ranks))

    def steps_in_epoch(self, epoch: int) -> int:
        return self._epoch(epoch).steps

    def rows_read(self, steps: int) -> Iterator[np.ndarray]:
        """Yields, for each epoch, the rows that the first `steps` steps read, in arbitrary order within an epoch."""
        epoch = self._start[0]
        while steps > 0:
            current = self._epoch(epoch)
            for selected, _ in current.groups(steps):
                yield current.plan.rows[selected]
            steps, epoch = steps - current.steps, epoch + 1

    def after(self, steps: int) -> dict[str, int]:
        """Returns the cursor after the first `steps` steps."""
        epoch = self._start[0]
        while steps >= self._epoch(epoch).steps:
            steps, epoch = steps - self._epoch(epoch).steps, epoch + 1
        return {"epoch": epoch, "batch": steps}

    def examples_before(self, cursor: dict[str, int]) -> int:
        """Returns the number of examples before the cursor in the order of its epoch, including skipped ones."""
        epoch, skipped = self._start
        number = int(self._epoch(cursor["epoch"]).boundaries[cursor["batch"]])
        return number + (skipped if cursor["epoch"] == epoch else 0)

    def epoch_batches(self, epoch: int = 0) -> Iterator[Batch]:
        """Returns one pass over all examples for evaluation, longest first, or in lanes in the order of the text.
        `Batch.examples` has their numbers in the plan."""
        plan = self._epoch(epoch).plan
        tokens = self._batch_tokens
        if self._micro_batch_tokens is not None:
            tokens = min(self._micro_batch_tokens, tokens or self._micro_batch_tokens)
        if self._lanes is None:
            order = np.argsort(-np.asarray(plan.lengths, dtype=np.int64), kind="stable")
            boundaries = batch_boundaries(plan.lengths[order] + self._virtual_tokens, self._batch_examples, tokens)
        else:
            order = np.arange(len(plan))
            starts_in_step = batch_boundaries(plan.lengths[: self._lanes], None, tokens)[:-1]
            starts = (self._epoch(epoch).boundaries[:-1, None] + starts_in_step).flatten()
            boundaries = np.append(starts[starts < len(plan)], len(plan))
        batches = self._batches(plan, order, boundaries, epoch)
        return batches if len(boundaries) <= 2 else prefetch(batches)  # a single batch needs no thread

    def metadata(self) -> dict[str, Any]:
        """Returns the statistics of the first epoch, and those of the examples. `padding_avoided` is the fraction of
        padding if each step were padded to its longest example."""
        epoch = self._epoch(0)
        tokens, longest, padded = epoch.totals
        return {
            "examples": len(epoch.order),
            "steps_per_epoch": epoch.steps,
            "tokens_per_epoch": tokens,
            "mean_length": tokens / len(epoch.order),
            "longest": longest,
            "padding_fraction": 0.0,
            "padding_avoided": 1.0 - tokens / float(padded),
            **({} if self._words is None else {"words_per_epoch": self._words}),
            **self._examples.metadata(),
        }

    def _steps(self, epoch: int, batch: int, rank: int, ranks: int) -> Iterator[Step]:
        while True:
            current = self._epoch(epoch)
            while batch < current.steps:
                batches, idle = self._forwards(epoch, batch, rank, ranks)
                batch += 1
                cursor = {"epoch": epoch, "batch": batch}
                if batch == current.steps:
                    cursor = {"epoch": epoch + 1, "batch": 0}
                fraction = batch / current.steps
                if epoch == self._start[0] and fraction < 1:
                    skipped = self._start[1] / len(current.plan)
                    fraction = skipped + (1 - skipped) * fraction
                yield Step(batches, cursor, epoch + fraction, idle=idle)
            epoch, batch = epoch + 1, 0

    def _forwards(self, epoch: int, batch: int, rank: int, ranks: int) -> tuple[list[Batch], tuple[Batch, ...]]:
        """Returns the batches of a process in a step, and those, each the shortest example, that it runs idly while
        other processes have more forward passes."""
        current = self._epoch(epoch)
        selected = current.step(batch)
        lengths = current.plan.lengths[selected] + self._virtual_tokens
        part = local_step(lengths, rank, ranks, self._micro_batch_tokens)
        batches = list(self._batches(current.plan, selected[part.indices], part.boundaries, epoch))
        if not part.idle:
            return batches, ()
        shortest = selected[[int(lengths.argmin())]]
        return batches, tuple(self._batches(current.plan, shortest, np.array([0, 1]), epoch)) * part.idle

    def _batches(self, plan: Plan, order: np.ndarray, boundaries: np.ndarray, epoch: int) -> Iterator[Batch]:
        for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
            selected = order[start:end]
            yield self._examples.batch(plan.rows[selected], selected, epoch)

    def _epoch(self, epoch: int) -> _Epoch:
        cached = self._epochs.get(epoch)
        if cached is None:
            plan = self._examples.plan(epoch)
            if len(plan) == 0:
                raise UserError("the data contain no examples", "use more text or rows, or a smaller max_length=")
            skipped = self._start[1] if epoch == self._start[0] else 0
            order = Order(len(plan), self._seed if self._shuffle else None, epoch, skipped)
            # Of earlier epochs only the first is needed again (metadata, steps of an epoch).
            recent = {number: entry for number, entry in self._epochs.items() if number in (0, epoch - 1)}
            cached = _Epoch(plan, order, self._sizes)
            self._epochs = {**recent, epoch: cached}
        return cached
