"""Inspection: the examples of a learner as plain data, and their statistics compared with the definitions.

What holds of any examples is here. What an objective promises besides is a subclass of `Inspector`, which the learner's
`inspector` gives.

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt
from typing import Any

import numpy as np

from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

FAMILY = 0.001
"""Chance that any of the intervals of one measurement does not hold."""


@dataclass
class Statistic:
    """One line of the table.

    total: the sum of the draws, of which there are `count` (0: a number that is reported as it is). expected, variance,
    bound: of the sum; None for what has no definition and is only reported. exact: the sum must be what is expected.
    is_share: whether it lies between 0 and 1.
    """

    name: str
    total: float = 0.0
    count: float = 0.0
    expected: float | None = None
    variance: float = 0.0
    bound: float = 0.0
    exact: bool = False
    is_share: bool = False

    @property
    def measured(self) -> float:
        """The mean of the draws."""
        return self.total / (self.count or 1.0)

    @property
    def defined(self) -> float | None:
        """What it should be."""
        return None if self.expected is None else self.expected / (self.count or 1.0)

    def half_width(self, tested: int) -> float:
        """Of the interval around the measured mean, one of `tested` that hold together."""
        spread = log(2 * max(tested, 1) / FAMILY)
        return (sqrt(2 * self.variance * spread) + self.bound * spread / 3) / (self.count or 1.0)

    def interval(self, tested: int) -> tuple[float, float]:
        """Around the measured mean, one of `tested` that hold together."""
        half = self.half_width(tested)
        low, high = self.measured - half, self.measured + half
        return (max(low, 0.0), min(high, 1.0)) if self.is_share else (low, high)

    @property
    def checks_itself(self) -> bool:
        """Whether it counts what must never be."""
        return self.exact and self.expected == 0

    def holds(self, tested: int) -> bool:
        """Whether the definition lies in the interval."""
        if self.expected is None or self.defined is None:
            return True
        if self.exact:
            return self.total == self.expected
        return abs(self.measured - self.defined) <= self.half_width(tested)


class RunningStatistics:
    """Statistics that grow batch by batch, in the order of their first mention."""

    def __init__(self) -> None:
        self.statistics: dict[str, Statistic] = {}
        self.remarks: dict[str, str] = {}
        """What a definition is, by the statistic's name, where it is no number of the configuration."""

    def _of(self, name: str) -> Statistic:
        return self.statistics.setdefault(name, Statistic(name))

    def share(self, name: str, hits: float, of: float, share: float | np.ndarray) -> None:
        """`hits` of `of` draws, each with a chance of `share`, or with chances of their own (an array)."""
        chances = np.full(1, share) if np.isscalar(share) else np.asarray(share)
        times = of / max(len(chances), 1)
        self.mean(name, hits, of, float(chances.sum() * times), float((chances * (1 - chances)).sum() * times), 1.0)
        self.statistics[name].is_share = True

    def mean(self, name: str, total: float, count: float, expected: float, variance: float, bound: float) -> None:
        """A sum of draws with its expectation and variance; bound: how far one draw can be from its mean."""
        statistic = self._of(name)
        statistic.total += float(total)
        statistic.count += float(count)
        statistic.expected = (statistic.expected or 0.0) + expected
        statistic.variance += variance
        statistic.bound = max(statistic.bound, bound)

    def exact(self, name: str, total: float, expected: float, of: float = 0.0) -> None:
        """A number that must be what is expected; of: what it is a share of."""
        statistic = self._of(name)
        statistic.exact, statistic.expected = True, (statistic.expected or 0.0) + float(expected)
        statistic.total += float(total)
        statistic.count += float(of)

    def none(self, name: str, times: float, of: float = 0.0) -> None:
        """Something that must never occur."""
        self.exact(name, times, 0.0, of)

    def note(self, name: str, total: float, count: float, is_share: bool = False) -> None:
        """A mean that is reported and has no definition."""
        statistic = self._of(name)
        statistic.is_share = is_share
        statistic.total += float(total)
        statistic.count += float(count)

    def measured(self, name: str) -> float | None:
        """The mean of a statistic by its name; None where nothing of it was drawn."""
        statistic = self.statistics.get(name)
        return statistic.measured if statistic is not None and statistic.count else None

    @property
    def tested(self) -> int:
        """The number of intervals that hold jointly."""
        return sum(statistic.expected is not None and not statistic.exact for statistic in self.statistics.values())

    def broken(self) -> list[Statistic]:
        """The statistics that violate their definitions."""
        return [statistic for statistic in self.statistics.values() if not statistic.holds(self.tested)]


# Examples measured at a time.
_EXAMPLES = 256
# Placeholder for labels that are not known before a step.
_UNKNOWN_LABELS = "made in the step"


@dataclass(frozen=True)
class SampledBatch:
    """Some examples of an epoch: rows of its plan (N,), their numbers in it (N,), and the batch made of them."""

    rows: np.ndarray
    numbers: np.ndarray
    epoch: int
    batch: Batch

    @cached_property
    def boundaries(self) -> np.ndarray:
        """(N+1,) the first document of each example in the batch: an example may have several, side by side."""
        examples = self.batch.examples.numpy()
        return np.append(np.flatnonzero(np.diff(examples, prepend=-1)), len(examples))


class Inspector:
    """Looks into the examples of a learner.

    learner: without weights (on the meta device), unless it makes a part of what it reads itself. examples: what it
    made of a split. max_length: that of the examples.
    """

    def __init__(self, learner: Any, examples: Any, max_length: int):
        self.learner, self.examples, self.max_length = learner, examples, max_length
        self.tokenizer: Tokenizer = learner.tokenizer

    # What a subclass says.

    def texts(self, drawn: SampledBatch) -> list[list[str]]:
        """The texts of each example before anything was done to them: documents of a window, segments of a pair,
        columns of a row. Empty where the examples hold none."""
        return []

    def fact(self, stats: RunningStatistics) -> str:
        """The most important measurement as a sentence; "" if nothing is notable."""
        share = stats.measured("predicted share of text")
        return "" if share is None else f"{share:.1%} of the tokens are predicted"

    def label(self, value: Any, describe_position: bool) -> Any:
        """A label as text. describe_position: whether it belongs to a position (a token) or to the example."""
        return self.tokenizer.readable([value])[0] if describe_position else value

    def repeats(self, epoch: int) -> bool:
        """Whether an epoch's draws are those of an earlier one, which say nothing new."""
        return False

    def check_plan(self, stats: RunningStatistics) -> None:
        """Adds statistics of truncated or omitted examples in the first epoch."""
        metadata = self.examples.metadata()
        if "truncated" in metadata:
            plan = self.examples.plan(0)
            first = self.examples.batch(plan.rows[:1], np.arange(1), 0)
            stats.note("truncated fraction", metadata["truncated"], metadata["examples"])
            if len(first.inputs.lengths) == 1:
                sides = 1 if first.outputs is None else 2
                full = (plan.lengths >= sides * self.max_length).sum()
                stats.none("rows cut that are shorter than max_length", max(0, metadata["truncated"] - full))

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        """Adds statistics that the objective promises, with their definitions."""

    def entries(self, drawn: SampledBatch) -> Iterator[dict[str, Any]]:
        """Each example as plain data, see `described`; `diagram`, where the family or a subclass adds it:
        further lines, each with a title."""
        batch, texts = drawn.batch, self.texts(drawn)
        for number in range(len(drawn.numbers)):
            entry: dict[str, object] = {"example": int(drawn.numbers[number]), "epoch": drawn.epoch}
            if texts:
                entry["text"] = "\n".join(texts[number])
                # Where in the text another document, or the second text of a pair, begins.
                entry["boundaries"] = (np.cumsum([len(text) + 1 for text in texts[number]])[:-1]).tolist()
            documents = range(*drawn.boundaries[number : number + 2])
            entry["input"] = self.side(batch.inputs, documents)
            if drawing := self.learner.backbone.diagram(batch.inputs.lengths[documents[0]]):
                entry["drawing"] = drawing
            if batch.outputs is not None:
                entry["output"] = self.side(batch.outputs, documents)
            entry["targets"] = {
                term: self._target(batch, target, documents)
                if target.at is not None
                else self._labels(target, number, len(drawn.numbers))
                for term, target in batch.targets.items()
            }
            yield entry

    def first(self, n: int) -> np.ndarray:
        """Numbers of the n examples, or fewer, that are shown."""
        return np.arange(min(n, len(self.examples.plan(0)), _EXAMPLES))

    # What `inspect` calls.

    def described(self, n: int) -> Iterator[dict[str, object]]:
        """The first n examples: `example` (its number), `epoch`, the `text` with the `boundaries` within it, what the
        model reads (`input`, `output`), the `targets` by term, and what some of them draw (`diagram`)."""
        if n < 1:
            return
        numbers = self.first(n)
        rows = self.examples.plan(0).rows[numbers]
        yield from self.entries(SampledBatch(rows, numbers, 0, self.examples.batch(rows, numbers, 0)))

    def measured(self, tokens: int) -> RunningStatistics:
        """The statistics of the examples over `tokens` tokens or a few more."""
        stats = RunningStatistics()
        self.check_plan(stats)
        self.check_batches(stats, tokens)
        return stats

    # What both are made of.

    def drawn(self, tokens: int) -> Iterator[SampledBatch]:
        """Examples in the plan's order, of as many epochs as `tokens` tokens take."""
        seen = epoch = 0
        while seen < tokens and not self.repeats(epoch):
            plan = self.examples.plan(epoch)
            for start in range(0, len(plan), _EXAMPLES):
                numbers = np.arange(start, min(start + _EXAMPLES, len(plan)))
                batch = self.examples.batch(plan.rows[numbers], numbers, epoch)
                yield SampledBatch(plan.rows[numbers], numbers, epoch, batch)
                seen += batch.tokens
                if seen >= tokens:
                    return
            epoch += 1

    def check_batches(self, stats: RunningStatistics, tokens: int) -> None:
        """Enter what holds of any batch, and what `check` adds."""
        pad = self._pad()
        for drawn in self.drawn(tokens):
            batch = drawn.batch
            sides = [batch.inputs, *([batch.outputs] if batch.outputs is not None else [])]
            stats.note("tokens an example", batch.tokens, len(drawn.numbers))
            stats.none("padding fraction", _padding(batch, pad), batch.tokens)
            longest = max(max(side.lengths) for side in sides)
            stats.none("sequences longer than max_length", longest > self.max_length)
            lengths = np.add.reduceat(np.sum([side.lengths for side in sides], axis=0), drawn.boundaries[:-1])
            planned = self.examples.plan(drawn.epoch).lengths[drawn.numbers]
            stats.none("examples longer than planned", (lengths > planned).sum())
            self.check(stats, drawn)

    def side(self, packed: Packed, documents: range) -> dict[str, object]:
        """One side of an example: its `pieces` as a person reads them, `ids` and further columns, and the length of its
        `prefix`."""
        first, last = documents[0], documents[-1]
        part = slice(packed.starts[first], packed.starts[last] + packed.lengths[last])
        ids = packed.tokens[part].tolist()
        columns = {name: column[part].tolist() for name, column in packed.columns.items()}
        prefix = {"prefix": packed.prefixes[first]} if packed.prefixes else {}
        return {"pieces": self.tokenizer.readable(ids), "ids": ids, **columns, **prefix}

    def _labels(self, target: Target, number: int, count: int) -> object:
        """The label of an example, one of `count`: a class, a value, or as many of them as the head gives."""
        if target.labels is None:
            return _UNKNOWN_LABELS
        values = target.labels.reshape(count, -1)[number].tolist()
        return self.label(values[0] if len(values) == 1 else values, False)

    def _target(self, batch: Batch, target: Target, documents: range) -> object:
        """The position, label and, for spans, boundaries of each target."""
        if target.labels is None or target.at is None:
            return _UNKNOWN_LABELS
        side = batch.inputs if target.side == "inputs" else batch.outputs
        assert side is not None
        start, targets = side.starts[documents[0]], []
        document_M = side.documents[target.at]
        of_example = (document_M >= documents[0]) & (document_M <= documents[-1])
        for row in of_example.nonzero()[:, 0].tolist():
            label = self.label(target.labels[row].item(), True)
            entry = {"position": int(target.at[row]) - start, "label": label}
            if target.span is not None:
                entry["borders"] = (target.span[row] - start).tolist()
            targets.append(entry)
        return targets

    def _pad(self) -> int | None:
        """The id that stands for padding and nothing else."""
        pad = self.tokenizer.roles.get("pad")
        shared_with = [name for name, number in self.tokenizer.roles.items() if number == pad and name != "pad"]
        return None if shared_with else pad


def _padding(batch: Batch, pad: int | None) -> int:
    """Number of positions without a token: after the sequences, or padding; outputs may start with the padding id."""
    positions = 0
    for side, first in ((batch.inputs, 0), (batch.outputs, 1)):
        if side is not None:
            ids = side.tokens.numpy()
            within = side.positions.numpy()[: sum(side.lengths)] >= first
            positions += len(ids) - len(within) + int((ids[: len(within)][within] == pad).sum())
    return positions
