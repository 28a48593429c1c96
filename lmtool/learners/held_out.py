"""The held-out splits of a run: their examples, the constant baseline, and the evaluation of a learner on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmtool import random_streams
from lmtool.data.examples import Examples, Plan, Rows, SplitData, batch_boundaries
from lmtool.data.loader import PackedLoader, SupportsLanes
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import Evaluation, SplitEvaluations, evaluate
from lmtool.learners.metrics import LOSS
from lmtool.learners.mixed_sources import examples_of, scorer_of
from lmtool.runs.files import to_json
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import Precision
from lmtool.types import Batch

EVALUATION_TOKENS = 8192
"""Maximum tokens of a forward in evaluation, if the configuration sets no limit in tokens."""
# For models that carry state from batch to batch: the maximum number of lanes (contiguous streams of text that are read
# in parallel), and the minimum number of segments in a lane. The number of lanes changes the scores slightly, because
# every lane starts with the initial state, so this number does not depend on the batch size.
MAX_LANES, MIN_SEGMENTS_PER_LANE = 10, 16
# Maximum examples and tokens of the sample for slow computations. 512 examples give a standard error of about 0.02; the
# second limit applies to long examples.
SAMPLE_EXAMPLES, SAMPLE_TOKENS = 512, 32_768
MIN_EVALUATION_ROWS = 256
"""Minimum rows of an evaluation during training, for a standard error of an accuracy of at most 0.03."""
EVALUATED_SHARE = 0.5
"""Tokens that the evaluations during a run read together, as a fraction of those that it trains on. A token takes about
a third of the time, since there is no backward pass."""
CHEAP_EVALUATION_TOKENS = 10_000
"""An evaluation of fewer tokens takes hardly any time."""


def evaluation_tokens(config: Any) -> int:
    """Returns the maximum number of tokens of a forward in evaluation. config: the configuration of a run."""
    return config.micro_batch_tokens or config.batch_tokens or EVALUATION_TOKENS


@dataclass(frozen=True)
class EvaluationSize:
    """The size of an evaluation during training: `rows`, or more if they have fewer than `tokens` tokens."""

    rows: int
    tokens: float = 0.0


class SampledExamples:
    """Some of the examples of a split. numbers: (S,) their numbers in the plan."""

    def __init__(self, examples: Examples, numbers: np.ndarray):
        self.examples, self.numbers = examples, numbers

    def plan(self, epoch: int) -> Plan:
        plan = self.examples.plan(epoch)
        return Plan(plan.rows[self.numbers], plan.lengths[self.numbers])

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        return self.examples.batch(rows, self.numbers[examples], epoch)

    def metadata(self) -> dict[str, Any]:
        return self.examples.metadata()


def sampled_rows(rows: Rows, count: int) -> Rows:
    """Returns the `count` rows whose texts have the smallest hashes, in their order in the file, and all other rows
    with the same texts. The sample does not depend on the order of the rows or on their labels."""
    if len(rows) <= count:
        return rows
    texts = (to_json(texts, indent=None) for texts in zip(*rows.columns.values(), strict=True))
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    last = sorted(hashes)[count - 1]
    return rows.take(np.array([number for number, value in enumerate(hashes) if value <= last]))


class EvaluationSplit:
    """A held-out split: its data, and a loader that reads all of its examples in order.

    max_length: maximum tokens of an example. batch_tokens: maximum tokens of a batch; raised to the length of one
    example if it is smaller. size: maximum size; None for all examples. scored: the number of rows (of a text: of
    examples) that are read, and that there are.
    """

    def __init__(
        self,
        learner: BaseLearner,
        data: SplitData,
        max_length: int,
        batch_tokens: int,
        seed: int,
        size: EvaluationSize | None = None,
    ):
        self.data = data
        self.examples: Examples = examples_of(learner, data, max_length)
        self.seed, self.virtual_tokens = seed, learner.virtual_tokens
        self.batch_tokens = max(batch_tokens, max_length + self.virtual_tokens)
        lengths = self.examples.plan(0).lengths
        tokens, count = int(lengths.sum(dtype=np.int64)), sum(map(len, data.rows.values())) or len(lengths)
        self.scored = count, count
        examples = self.examples
        if isinstance(examples, SupportsLanes):
            examples = examples.in_lanes(min(MAX_LANES, max(1, tokens // (MIN_SEGMENTS_PER_LANE * max_length))))
        elif size is not None and (rows := max(size.rows, int(size.tokens * count / max(tokens, 1)))) < count:
            if data.rows:
                parts = {name: sampled_rows(part, -(-rows * len(part) // count)) for name, part in data.rows.items()}
                self.data = replace(data, rows=parts)
                self.examples = examples = examples_of(learner, self.data, max_length)
                self.scored = sum(map(len, parts.values())), count
            else:
                numbers = random_streams.Permutation(count, seed, "sample", 0)(np.arange(rows))
                examples, self.scored = SampledExamples(examples, np.sort(numbers)), (rows, count)
        self.loader = PackedLoader(
            examples, seed, batch_tokens=self.batch_tokens, shuffle=False, virtual_tokens=self.virtual_tokens
        )

    def sample(self) -> Iterator[Batch]:
        """Yields the batches of a random sample of the examples, for slow computations."""
        plan = self.examples.plan(0)
        order = random_streams.Permutation(len(plan), self.seed, "sample", 0)(
            np.arange(min(len(plan), SAMPLE_EXAMPLES))
        )
        lengths = plan.lengths[order].astype(np.int64)
        # A standard error needs two examples, even if they exceed the limit.
        order = order[: max(int((lengths.cumsum() <= SAMPLE_TOKENS).sum()), 2)]
        boundaries = batch_boundaries(plan.lengths[order] + self.virtual_tokens, tokens=self.batch_tokens)
        for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
            yield self.examples.batch(plan.rows[order[start:end]], order[start:end], 0)


def _counted(batches: Iterator[Batch], progress: Callable[[int, int], None], total: int) -> Iterator[Batch]:
    done = 0
    for batch in batches:
        progress(done, total)
        yield batch
        done = min(done + batch.tokens, total)
    progress(total, total)


class HeldOutSplits:
    """All held-out splits of a run; the first one gives the main score.

    data: the data of each split by name; "train" is ignored. max_length: maximum tokens of an example. batch_tokens:
    maximum tokens of a forward. predictors: the constant predictors of each term, which are scored on the same targets.
    example_learner: the learner that makes the examples; None means `learner`. size: the size of an evaluation that
    selects the best checkpoint; None for all examples.
    """

    def __init__(
        self,
        learner: BaseLearner,
        data: Mapping[str, SplitData],
        max_length: int,
        batch_tokens: int,
        seed: int,
        predictors: Mapping[str, Predictor] | None = None,
        example_learner: BaseLearner | None = None,
        size: EvaluationSize | None = None,
    ):
        self.learner, self.predictors = learner, predictors or {}

        def splits(size: EvaluationSize | None) -> dict[str, EvaluationSplit]:
            return {
                split: EvaluationSplit(example_learner or learner, split_data, max_length, batch_tokens, seed, size)
                for split, split_data in data.items()
                if split != "train"
            }

        self.splits = splits(None)
        self.samples = self.splits if size is None else splits(size)
        self._final: SplitEvaluations | None = None

    @property
    def first(self) -> EvaluationSplit:
        """The split that gives the main score."""
        return next(iter(self.splits.values()))

    @property
    def has_documents(self) -> bool:
        """Whether the first split has a loss for each document of its text."""
        return scorer_of(self.learner, self.first.data, self.first.examples, self.predictors).has_documents

    @property
    def tokens(self) -> tuple[int, int]:
        """The number of tokens that an evaluation during training and one of all examples reads."""
        sampled, complete = (
            sum(int(split.loader.metadata()["tokens_per_epoch"]) for split in splits.values())
            for splits in (self.samples, self.splits)
        )
        return sampled, complete

    @property
    def sampled(self) -> bool:
        """Whether an evaluation during training reads only a part of the examples."""
        return any(split.scored[0] < split.scored[1] for split in self.samples.values())

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of the loader of each split, by the split's name."""
        metadata = {name: split.loader.metadata() for name, split in self.splits.items()}
        for name, split in self.samples.items():
            read, count = split.scored
            if read < count:
                metadata[name]["during training"] = f"{read:,} of {count:,} rows; evaluate_rows=all reads all"
        return metadata

    def final_score(self, precision: Precision, group: ProcessGroup = ALONE) -> SplitEvaluations:
        """Scores the trained learner on all examples; later calls return the same scores."""
        self._final = self._final or self.score(precision, group=group)
        return self._final

    def score(
        self,
        precision: Precision,
        calibrates: bool = False,
        group: ProcessGroup = ALONE,
        by_document: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SplitEvaluations:
        """Scores the learner on all splits.

        calibrates: whether the scores select the best checkpoint. If so, only the samples are scored, and the first
        split also tunes the decision thresholds. by_document: whether to sum the losses of each document, see `Scorer`.
        progress: takes the number of tokens of a split that are scored, and the number of all its tokens.
        """
        evaluations: dict[str, Evaluation] = {}
        for name, split in (self.samples if calibrates else self.splits).items():
            scorer = scorer_of(self.learner, split.data, split.examples, self.predictors)
            scorer.calibrates, scorer.selects = calibrates and not evaluations, calibrates
            scorer.by_document = by_document
            batches = split.loader.epoch_batches()
            if progress is not None:
                total = int(split.loader.metadata()["tokens_per_epoch"])
                batches = _counted(batches, progress, total)
            evaluations[name] = evaluate(self.learner, scorer, batches, precision, group)
        return SplitEvaluations(evaluations)

    def baseline(self, train: SplitData) -> dict[str, object]:
        """Returns the score of the constant predictors on the first split, see `BaseLearner.baseline`."""
        return self.learner.baseline(train, self.first.data, self.first.loader.epoch_batches(), self.predictors)

    def baseline_loss(self, baseline: Mapping[str, Any]) -> float:
        """Returns the largest loss of the constant predictors over the splits.

        baseline: the result of the method `baseline`. If the learner's metric is its loss, the value of `baseline` is
        returned; otherwise this method reads all splits.
        """
        if self.learner.metric is LOSS:
            return float(baseline["value"])
        return max(
            self.learner.baseline_loss(split.loader.epoch_batches(), self.predictors) for split in self.splits.values()
        )
