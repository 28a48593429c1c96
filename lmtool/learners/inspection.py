"""Inspection of training examples, for `lmtool inspect`: the examples as plain data, and measured statistics.

A statistic is compared with its definition: the value that the configuration or the paper prescribes, such as 15%
masked tokens. The checks in this module apply to the examples of every learner. Checks of one objective are in a
subclass of `Inspector`, which the learner's method `inspector` returns.

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

FAMILYWISE_ERROR_RATE = 0.001
"""Family-wise error rate: the probability that at least one of the intervals of an inspection does not contain the
defined value, although the examples are correct."""


@dataclass
class Statistic:
    """A measured statistic, and the value that its definition requires.

    total, count: the sum and the number of the samples; count is 0 if `total` is a plain number instead of a sum.
    expected, variance: the expectation and the variance of the sum, by definition; expected is None without a
    definition. bound: the maximum deviation of one sample from its expectation. exact: whether the sum must equal its
    expectation exactly.
    """

    name: str
    total: float = 0.0
    count: float = 0.0
    expected: float | None = None
    variance: float = 0.0
    bound: float = 0.0
    exact: bool = False
    is_fraction: bool = False

    @property
    def measured(self) -> float:
        """The mean of the samples, or the plain number."""
        return self.total / (self.count or 1.0)

    @property
    def expected_value(self) -> float | None:
        """The value that the definition requires; None without a definition."""
        return None if self.expected is None else self.expected / (self.count or 1.0)

    def half_width(self, tested: int) -> float:
        """Returns half the width of the interval around the measured mean, from Bernstein's inequality. tested: the
        number of simultaneous intervals, over which the error rate is divided (Bonferroni)."""
        log_term = log(2 * max(tested, 1) / FAMILYWISE_ERROR_RATE)
        return (sqrt(2 * self.variance * log_term) + self.bound * log_term / 3) / (self.count or 1.0)

    def interval(self, tested: int) -> tuple[float, float]:
        """Returns the interval around the measured mean. tested: the number of simultaneous intervals."""
        half_width = self.half_width(tested)
        low, high = self.measured - half_width, self.measured + half_width
        return (max(low, 0.0), min(high, 1.0)) if self.is_fraction else (low, high)

    @property
    def must_be_zero(self) -> bool:
        """Whether the statistic counts events that must never occur."""
        return self.exact and self.expected == 0

    def holds(self, tested: int) -> bool:
        """Returns whether the statistic agrees with its definition. tested: the number of simultaneous intervals."""
        if self.expected is None or self.expected_value is None:
            return True
        if self.exact:
            return self.total == self.expected
        return abs(self.measured - self.expected_value) <= self.half_width(tested)


class RunningStatistics:
    """Statistics that are accumulated over batches, in the order in which they first occur. statistics: the statistics
    by name. remarks: for each statistic whose defined value is not a key of the configuration, how this value is
    computed."""

    def __init__(self) -> None:
        self.statistics: dict[str, Statistic] = {}
        self.remarks: dict[str, str] = {}

    def _statistic(self, name: str) -> Statistic:
        return self.statistics.setdefault(name, Statistic(name))

    def fraction(self, name: str, hits: float, count: float, probability: float | np.ndarray) -> None:
        """Adds independent samples of an event. hits: the number of samples in which the event occurred. probability:
        the defined probability of the event: one for all samples, or an array with one per sample."""
        probabilities = np.full(1, probability) if np.isscalar(probability) else np.asarray(probability)
        times = count / max(len(probabilities), 1)
        variance = float((probabilities * (1 - probabilities)).sum() * times)
        self.mean(name, hits, count, float(probabilities.sum() * times), variance, 1.0)
        self.statistics[name].is_fraction = True

    def mean(self, name: str, total: float, count: float, expected: float, variance: float, bound: float) -> None:
        """Adds samples whose mean has a definition. total, expected, variance: the sum of the samples, and its
        expectation and variance. bound: the maximum deviation of one sample from its expectation."""
        statistic = self._statistic(name)
        statistic.total += float(total)
        statistic.count += float(count)
        statistic.expected = (statistic.expected or 0.0) + expected
        statistic.variance += variance
        statistic.bound = max(statistic.bound, bound)

    def exact(self, name: str, total: float, expected: float, count: float = 0.0) -> None:
        """Adds a number that must equal its expectation. count: if the number is shown as a fraction, the number to
        divide it by."""
        statistic = self._statistic(name)
        statistic.exact, statistic.expected = True, (statistic.expected or 0.0) + float(expected)
        statistic.total += float(total)
        statistic.count += float(count)

    def never(self, name: str, times: float, count: float = 0.0) -> None:
        """Adds the number of times that a forbidden event occurred. count: see `exact`."""
        self.exact(name, times, 0.0, count)

    def report(self, name: str, total: float, count: float, is_fraction: bool = False) -> None:
        """Adds samples of a statistic without a defined value: their mean is reported, but not tested. total, count:
        the sum and the number of the samples. is_fraction: whether the mean is shown as a percentage."""
        statistic = self._statistic(name)
        statistic.is_fraction = is_fraction
        statistic.total += float(total)
        statistic.count += float(count)

    def measured(self, name: str) -> float | None:
        """Returns the mean of a statistic by name; None if it has no samples."""
        statistic = self.statistics.get(name)
        return statistic.measured if statistic is not None and statistic.count else None

    @property
    def tested(self) -> int:
        """The number of statistics that are tested by an interval."""
        return sum(statistic.expected is not None and not statistic.exact for statistic in self.statistics.values())

    def broken(self) -> list[Statistic]:
        """Returns the statistics that do not agree with their definitions."""
        return [statistic for statistic in self.statistics.values() if not statistic.holds(self.tested)]


# Number of examples in a batch of an inspection.
_EXAMPLES = 256
# Shown instead of labels that the model itself makes in a step, such as which tokens are replaced.
_UNKNOWN_LABELS = "made in the step"


@dataclass(frozen=True)
class SampledBatch:
    """Some examples of an epoch, and their batch. rows: (N,) the records of the examples in the plan of the epoch.
    numbers: (N,) the indices of these records in the plan."""

    rows: np.ndarray
    numbers: np.ndarray
    epoch: int
    batch: Batch

    @cached_property
    def boundaries(self) -> np.ndarray:
        """(N+1,) the index of each example's first document in the batch; the last entry is the number of documents. An
        example may have several documents."""
        examples = self.batch.examples.numpy()
        return np.append(np.flatnonzero(np.diff(examples, prepend=-1)), len(examples))


class Inspector:
    """Describes and measures the examples that a learner made from a split. learner: on the meta device (without
    weights), unless it generates part of its inputs. max_length: maximum tokens of an example."""

    def __init__(self, learner: Any, examples: Any, max_length: int):
        self.learner, self.examples, self.max_length = learner, examples, max_length
        self.tokenizer: Tokenizer = learner.tokenizer

    # Methods that subclasses override.

    def texts(self, sample: SampledBatch) -> list[list[str]]:
        """Returns the original texts of each example: the documents of a window, the segments of a pair, or the columns
        of a row. Returns an empty list if the original texts are not available."""
        return []

    def main_finding(self, stats: RunningStatistics) -> str:
        """Returns the most important measurement as a sentence; "" if there is none."""
        fraction = stats.measured("predicted fraction of text")
        return "" if fraction is None else f"{fraction:.1%} of the tokens are predicted"

    def label(self, value: Any, of_token: bool) -> Any:
        """Returns a label in readable form. of_token: whether the label belongs to a token; otherwise it belongs to the
        example."""
        return self.tokenizer.readable([value])[0] if of_token else value

    def repeats(self, epoch: int) -> bool:
        """Returns whether an epoch has the same random choices as an earlier epoch, so that it need not be measured."""
        return False

    def check_plan(self, stats: RunningStatistics) -> None:
        """Adds the statistics of the first epoch's plan, such as how many examples are truncated."""
        metadata = self.examples.metadata()
        if "truncated" in metadata:
            plan = self.examples.plan(0)
            first = self.examples.batch(plan.rows[:1], np.arange(1), 0)
            stats.report("truncated fraction", metadata["truncated"], metadata["examples"])
            if len(first.inputs.lengths) == 1:
                # The inputs of a truncated example have max_length tokens, and so have its outputs if there are any.
                sides = 1 if first.outputs is None else 2
                full = (plan.lengths >= sides * self.max_length).sum()
                stats.never("truncated rows that are shorter than max_length", max(0, metadata["truncated"] - full))

    def check(self, stats: RunningStatistics, sample: SampledBatch) -> None:
        """Adds the statistics of the learner's objective for some examples."""

    def entries(self, sample: SampledBatch) -> Iterator[dict[str, Any]]:
        """Yields each example as plain data, see `describe`."""
        batch, texts = sample.batch, self.texts(sample)
        for number in range(len(sample.numbers)):
            entry: dict[str, object] = {"example": int(sample.numbers[number]), "epoch": sample.epoch}
            if texts:
                entry["text"] = "\n".join(texts[number])
                # Offsets in the text at which another document, or the second text of a pair, begins.
                entry["boundaries"] = (np.cumsum([len(text) + 1 for text in texts[number]])[:-1]).tolist()
            documents = range(*sample.boundaries[number : number + 2])
            entry["input"] = self.side(batch.inputs, documents)
            if drawing := self.learner.backbone.diagram(batch.inputs.lengths[documents[0]]):
                entry["drawing"] = drawing
            if batch.outputs is not None:
                entry["output"] = self.side(batch.outputs, documents)
            entry["targets"] = {
                term: self._target(batch, target, documents)
                if target.at is not None
                else self._labels(target, number, len(sample.numbers))
                for term, target in batch.targets.items()
            }
            yield entry

    def first(self, n: int) -> np.ndarray:
        """Returns the numbers of the first n examples: fewer than n if there are fewer, and at most _EXAMPLES."""
        return np.arange(min(n, len(self.examples.plan(0)), _EXAMPLES))

    # Methods that `lmtool inspect` calls.

    def describe(self, n: int) -> Iterator[dict[str, object]]:
        """Yields the first n examples as plain data.

        The keys are `example` (the number of the example), `epoch`, `text` and the `boundaries` of documents or
        segments in it, the `input` and `output` of the model, the `targets` of each term, and for some families a
        `drawing`.
        """
        if n < 1:
            return
        numbers = self.first(n)
        rows = self.examples.plan(0).rows[numbers]
        yield from self.entries(SampledBatch(rows, numbers, 0, self.examples.batch(rows, numbers, 0)))

    def measure(self, tokens: int) -> RunningStatistics:
        """Measures examples until they have at least `tokens` tokens in total."""
        stats = RunningStatistics()
        self.check_plan(stats)
        self.check_batches(stats, tokens)
        return stats

    # Helper methods.

    def sampled_batches(self, tokens: int) -> Iterator[SampledBatch]:
        """Yields batches of examples in the order of the plan, until they have at least `tokens` tokens in total. If an
        epoch has too few tokens, the next epoch follows."""
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
        """Adds the statistics that apply to all examples, and the statistics of the objective, see `check`. tokens: how
        many tokens to measure."""
        pad = self._pad()
        for sample in self.sampled_batches(tokens):
            batch = sample.batch
            sides = [batch.inputs, *([batch.outputs] if batch.outputs is not None else [])]
            stats.report("tokens per example", batch.tokens, len(sample.numbers))
            stats.never("padding fraction", _padding(batch, pad), batch.tokens)
            longest = max(max(side.lengths) for side in sides)
            stats.never("sequences longer than max_length", longest > self.max_length)
            lengths = np.add.reduceat(np.sum([side.lengths for side in sides], axis=0), sample.boundaries[:-1])
            planned = self.examples.plan(sample.epoch).lengths[sample.numbers]
            stats.never("examples longer than planned", (lengths > planned).sum())
            self.check(stats, sample)

    def side(self, packed: Packed, documents: range) -> dict[str, object]:
        """Returns one side of an example as plain data: readable `pieces`, token `ids`, further columns, and the length
        of the `prefix` if there is one. packed: the inputs or the outputs of the batch. documents: the indices of the
        example's documents in the batch."""
        first, last = documents[0], documents[-1]
        tokens = slice(packed.starts[first], packed.starts[last] + packed.lengths[last])
        ids = packed.tokens[tokens].tolist()
        columns = {name: column[tokens].tolist() for name, column in packed.columns.items()}
        prefix = {"prefix": packed.prefixes[first]} if packed.prefixes else {}
        return {"pieces": self.tokenizer.readable(ids), "ids": ids, **columns, **prefix}

    def _labels(self, target: Target, number: int, count: int) -> object:
        if target.labels is None:
            return _UNKNOWN_LABELS
        values = target.labels.reshape(count, -1)[number].tolist()
        return self.label(values[0] if len(values) == 1 else values, False)

    def _target(self, batch: Batch, target: Target, documents: range) -> object:
        if target.labels is None or target.at is None:
            return _UNKNOWN_LABELS
        side = batch.inputs if target.side == "inputs" else batch.outputs
        assert side is not None
        start, targets = side.starts[documents[0]], []
        document_M = side.documents[target.at]
        in_example_M = (document_M >= documents[0]) & (document_M <= documents[-1])
        for row in in_example_M.nonzero()[:, 0].tolist():
            label = self.label(target.labels[row].item(), True)
            entry = {"position": int(target.at[row]) - start, "label": label}
            if target.span is not None:
                entry["borders"] = (target.span[row] - start).tolist()
            targets.append(entry)
        return targets

    def _pad(self) -> int | None:
        """None if the token has another role too, so that it may be real text."""
        pad = self.tokenizer.roles.get("pad")
        shared_with = [name for name, number in self.tokenizer.roles.items() if number == pad and name != "pad"]
        return None if shared_with else pad


def _padding(batch: Batch, pad: int | None) -> int:
    """The first output token does not count, because some families use the padding token as the start token."""
    positions = 0
    for side, first_position in ((batch.inputs, 0), (batch.outputs, 1)):
        if side is not None:
            ids = side.tokens.numpy()
            within = side.positions.numpy()[: sum(side.lengths)] >= first_position
            positions += len(ids) - len(within) + int((ids[: len(within)][within] == pad).sum())
    return positions
