"""Inspection: the examples of a learner as plain data, and their statistics compared with the definitions.

The checks here apply to all examples. Checks of an objective are in a subclass of `Inspector`, which the learner's
`inspector` returns.

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
"""Family-wise error rate: probability that any interval of a measurement misses its definition."""


@dataclass
class Statistic:
    """One measured statistic.

    total, count: the sum of the samples and their number; 0 samples for a plain number. expected, variance, bound:
    expectation and variance of the sum, and the maximum deviation of one sample; `expected` is None for a statistic
    without a definition. exact: the sum must equal its expectation. is_share: whether it is between 0 and 1.
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
        """The mean of the samples."""
        return self.total / (self.count or 1.0)

    @property
    def defined(self) -> float | None:
        """The value that its definition requires, or None."""
        return None if self.expected is None else self.expected / (self.count or 1.0)

    def half_width(self, tested: int) -> float:
        """Half width of the interval around the measured mean (Bernstein), for `tested` simultaneous intervals."""
        spread = log(2 * max(tested, 1) / FAMILY)
        return (sqrt(2 * self.variance * spread) + self.bound * spread / 3) / (self.count or 1.0)

    def interval(self, tested: int) -> tuple[float, float]:
        """The interval around the measured mean, for `tested` simultaneous intervals."""
        half = self.half_width(tested)
        low, high = self.measured - half, self.measured + half
        return (max(low, 0.0), min(high, 1.0)) if self.is_share else (low, high)

    @property
    def checks_itself(self) -> bool:
        """Whether it counts events that must never occur."""
        return self.exact and self.expected == 0

    def holds(self, tested: int) -> bool:
        """Whether the definition is within the interval."""
        if self.expected is None or self.defined is None:
            return True
        if self.exact:
            return self.total == self.expected
        return abs(self.measured - self.defined) <= self.half_width(tested)


class RunningStatistics:
    """Statistics accumulated over batches, in the order of their first entry."""

    def __init__(self) -> None:
        self.statistics: dict[str, Statistic] = {}
        self.remarks: dict[str, str] = {}
        """Explanations of definitions that are not a value of the configuration, by name."""

    def _of(self, name: str) -> Statistic:
        return self.statistics.setdefault(name, Statistic(name))

    def share(self, name: str, hits: float, of: float, share: float | np.ndarray) -> None:
        """`hits` among `of` samples, whose probability is `share`, or an array of probabilities."""
        chances = np.full(1, share) if np.isscalar(share) else np.asarray(share)
        times = of / max(len(chances), 1)
        self.mean(name, hits, of, float(chances.sum() * times), float((chances * (1 - chances)).sum() * times), 1.0)
        self.statistics[name].is_share = True

    def mean(self, name: str, total: float, count: float, expected: float, variance: float, bound: float) -> None:
        """A sum of samples with its expectation and variance. bound: maximum deviation of one sample from its mean."""
        statistic = self._of(name)
        statistic.total += float(total)
        statistic.count += float(count)
        statistic.expected = (statistic.expected or 0.0) + expected
        statistic.variance += variance
        statistic.bound = max(statistic.bound, bound)

    def exact(self, name: str, total: float, expected: float, of: float = 0.0) -> None:
        """A number that must equal its expectation. of: the number that it is a fraction of."""
        statistic = self._of(name)
        statistic.exact, statistic.expected = True, (statistic.expected or 0.0) + float(expected)
        statistic.total += float(total)
        statistic.count += float(of)

    def none(self, name: str, times: float, of: float = 0.0) -> None:
        """The number of events that must never occur."""
        self.exact(name, times, 0.0, of)

    def note(self, name: str, total: float, count: float, is_share: bool = False) -> None:
        """A mean without a definition, which is only reported."""
        statistic = self._of(name)
        statistic.is_share = is_share
        statistic.total += float(total)
        statistic.count += float(count)

    def measured(self, name: str) -> float | None:
        """The mean of a statistic by name; None without samples."""
        statistic = self.statistics.get(name)
        return statistic.measured if statistic is not None and statistic.count else None

    @property
    def tested(self) -> int:
        """The number of simultaneous intervals."""
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
    """Some examples of an epoch: their rows (N,) in its plan, their numbers (N,), and their batch."""

    rows: np.ndarray
    numbers: np.ndarray
    epoch: int
    batch: Batch

    @cached_property
    def boundaries(self) -> np.ndarray:
        """(N+1,) the first document of each example in the batch; an example may have several adjacent ones."""
        examples = self.batch.examples.numpy()
        return np.append(np.flatnonzero(np.diff(examples, prepend=-1)), len(examples))


class Inspector:
    """Describes and measures the examples of a learner.

    learner: on the meta device, unless it generates part of its inputs. examples: its examples of a split. max_length:
    maximum tokens of an example.
    """

    def __init__(self, learner: Any, examples: Any, max_length: int):
        self.learner, self.examples, self.max_length = learner, examples, max_length
        self.tokenizer: Tokenizer = learner.tokenizer

    # Overridden by subclasses.

    def texts(self, drawn: SampledBatch) -> list[list[str]]:
        """The original texts of each example: documents of a window, segments of a pair, columns of a row. Empty if the
        examples have none."""
        return []

    def fact(self, stats: RunningStatistics) -> str:
        """The most important measurement as a sentence; "" if nothing is notable."""
        share = stats.measured("predicted share of text")
        return "" if share is None else f"{share:.1%} of the tokens are predicted"

    def label(self, value: Any, describe_position: bool) -> Any:
        """A label as text. describe_position: whether it belongs to a position (a token) or to the example."""
        return self.tokenizer.readable([value])[0] if describe_position else value

    def repeats(self, epoch: int) -> bool:
        """Whether an epoch has the same random choices as an earlier one, so that measuring it adds nothing."""
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
                stats.none("truncated rows that are shorter than max_length", max(0, metadata["truncated"] - full))

    def check(self, stats: RunningStatistics, drawn: SampledBatch) -> None:
        """Adds the statistics of the objective, with their definitions."""

    def entries(self, drawn: SampledBatch) -> Iterator[dict[str, Any]]:
        """Each example as plain data, see `described`."""
        batch, texts = drawn.batch, self.texts(drawn)
        for number in range(len(drawn.numbers)):
            entry: dict[str, object] = {"example": int(drawn.numbers[number]), "epoch": drawn.epoch}
            if texts:
                entry["text"] = "\n".join(texts[number])
                # Offsets at which another document, or the second text of a pair, begins.
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
        """The numbers of the first n examples, or fewer."""
        return np.arange(min(n, len(self.examples.plan(0)), _EXAMPLES))

    # Called by `inspect`.

    def described(self, n: int) -> Iterator[dict[str, object]]:
        """The first n examples as plain data: `example` (its number), `epoch`, the `text` and the `boundaries` within
        it, the model's `input` and `output`, the `targets` by term, and a `drawing` for some families."""
        if n < 1:
            return
        numbers = self.first(n)
        rows = self.examples.plan(0).rows[numbers]
        yield from self.entries(SampledBatch(rows, numbers, 0, self.examples.batch(rows, numbers, 0)))

    def measured(self, tokens: int) -> RunningStatistics:
        """The statistics of examples with at least `tokens` tokens."""
        stats = RunningStatistics()
        self.check_plan(stats)
        self.check_batches(stats, tokens)
        return stats

    # Shared by both.

    def drawn(self, tokens: int) -> Iterator[SampledBatch]:
        """Examples in the order of the plan, from as many epochs as `tokens` tokens need."""
        processed = epoch = 0
        while processed < tokens and not self.repeats(epoch):
            plan = self.examples.plan(epoch)
            for start in range(0, len(plan), _EXAMPLES):
                numbers = np.arange(start, min(start + _EXAMPLES, len(plan)))
                batch = self.examples.batch(plan.rows[numbers], numbers, epoch)
                yield SampledBatch(plan.rows[numbers], numbers, epoch, batch)
                processed += batch.tokens
                if processed >= tokens:
                    return
            epoch += 1

    def check_batches(self, stats: RunningStatistics, tokens: int) -> None:
        """Adds the statistics of any batch, and those of `check`."""
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
        """One side of an example: its readable `pieces`, its `ids`, further columns, and the length of its `prefix`."""
        first, last = documents[0], documents[-1]
        part = slice(packed.starts[first], packed.starts[last] + packed.lengths[last])
        ids = packed.tokens[part].tolist()
        columns = {name: column[part].tolist() for name, column in packed.columns.items()}
        prefix = {"prefix": packed.prefixes[first]} if packed.prefixes else {}
        return {"pieces": self.tokenizer.readable(ids), "ids": ids, **columns, **prefix}

    def _labels(self, target: Target, number: int, count: int) -> object:
        """The label of one of `count` examples: a class, a value, or a list of them."""
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
        """The id of the padding token; None if it has another role too."""
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
