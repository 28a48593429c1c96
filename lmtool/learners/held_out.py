"""The held-out splits of a run: their examples, their baseline, and the scores of a learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lmtool import random_streams
from lmtool.data.examples import Examples, SplitData, batch_boundaries
from lmtool.data.loader import CutInLanes, PackedLoader
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import SplitEvaluations, evaluate
from lmtool.learners.metrics import LOSS
from lmtool.learners.mixed_examples import examples_of, scorer_of
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import Precision
from lmtool.types import Batch

EVALUATION_TOKENS = 8192
# Maximum number of parallel streams of joined text, and minimum segments of each. The number of streams changes the
# scores slightly, so it does not depend on the batch size.
EVALUATION_LANES, SEGMENTS_OF_LANE = 10, 16
# Enough for a standard error of .02 over examples, but limited for long examples.
SAMPLE_EXAMPLES, SAMPLE_TOKENS = 512, 32_768


def evaluation_tokens(config: Any) -> int:
    """Maximum tokens of a forward pass in evaluation."""
    return config.micro_batch_tokens or config.batch_tokens or EVALUATION_TOKENS


class EvaluationSplit:
    """A held-out split: its data, and all of its examples in order."""

    def __init__(self, learner: BaseLearner, data: SplitData, max_length: int, batch_tokens: int, seed: int):
        self.data = data
        self.examples: Examples = examples_of(learner, data, max_length)
        virtual = learner.virtual_tokens
        self.seed, self.virtual = seed, virtual
        self.budget = max(batch_tokens, max_length + virtual)
        tokens = int(self.examples.plan(0).lengths.sum(dtype=np.int64))
        lanes = min(EVALUATION_LANES, max(1, tokens // (SEGMENTS_OF_LANE * max_length)))
        examples = self.examples.in_lanes(lanes) if isinstance(self.examples, CutInLanes) else self.examples
        self.loader = PackedLoader(examples, seed, None, self.budget, shuffle=False, virtual_tokens=virtual)

    def sample(self) -> Iterator[Batch]:
        """Batches of a random sample of examples, for slow computations."""
        plan = self.examples.plan(0)
        order = random_streams.Permutation(len(plan), self.seed, "sample", 0)(
            np.arange(min(len(plan), SAMPLE_EXAMPLES))
        )
        lengths = plan.lengths[order].astype(np.int64)
        order = order[: max(int((lengths.cumsum() <= SAMPLE_TOKENS).sum()), 2)]
        boundaries = batch_boundaries(plan.lengths[order] + self.virtual, None, self.budget)
        for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
            yield self.examples.batch(plan.rows[order[start:end]], order[start:end], 0)


class HeldOutSplits:
    """Every split of `data` except train; the first gives the main score.

    predictors: constant predictors by term, scored on the same targets. batch_tokens: maximum tokens of a forward pass.
    example_learner: makes the examples, if it is another learner.
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
    ):
        self.learner, self.predictors = learner, predictors or {}
        self.splits = {
            split: EvaluationSplit(example_learner or learner, part, max_length, batch_tokens, seed)
            for split, part in data.items()
            if split != "train"
        }

    @property
    def first(self) -> EvaluationSplit:
        return next(iter(self.splits.values()))

    @property
    def tokens(self) -> int:
        """Tokens per evaluation."""
        return sum(int(part.loader.metadata()["tokens_per_epoch"]) for part in self.splits.values())

    def metadata(self) -> dict[str, Any]:
        """The metadata of the loader of each split."""
        return {split: part.loader.metadata() for split, part in self.splits.items()}

    def score(self, precision: Precision, calibrates: bool = False, group: ProcessGroup = ALONE) -> SplitEvaluations:
        """Score all splits, shared by the processes of a group. calibrates: whether the scores select a checkpoint, and
        the first split tunes the decision thresholds."""
        evaluations = {}
        for split, part in self.splits.items():
            scorer = scorer_of(self.learner, part.data, part.examples, self.predictors)
            scorer.calibrates, scorer.selects = calibrates and part is self.first, calibrates
            batches = part.loader.epoch_batches()
            evaluations[split] = evaluate(self.learner, scorer, batches, precision, group)
        return SplitEvaluations(evaluations)

    def baseline(self, train: SplitData) -> dict[str, object]:
        """The score of the constant predictors on the first split."""
        return self.learner.baseline(train, self.first.data, self.first.loader.epoch_batches(), self.predictors)

    def baseline_loss(self, baseline: Mapping[str, Any]) -> float:
        """The largest loss of the constant predictors over splits. For a language model it is the baseline itself;
        otherwise all held-out text is read."""
        if self.learner.metric is LOSS:
            return float(baseline["value"])
        return max(
            self.learner.baseline_loss(part.loader.epoch_batches(), self.predictors) for part in self.splits.values()
        )
