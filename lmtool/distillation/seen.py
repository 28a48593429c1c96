"""Records a learner's forward from outside: its losses, the predictions of its heads, and the states between its
layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtool.data.examples import Examples, SplitData
from lmtool.data.sources import OnStage
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.learners.mixture import Mixture
from lmtool.models.heads.base import HeadObserver, PredictingHead, TokenLogits
from lmtool.models.heads.predicted import Predicted
from lmtool.nn.context import AttentionKind, AttentionObserver
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.nn.tiled import AttentionInputs
from lmtool.training.precision import Precision
from lmtool.types import Batch, Loader, StepOutput


class RecordedStates(Tap):
    """Records the states at some locations, and the attention inputs of the preceding layers: by location, those of
    each forward of a stack, in order."""

    def __init__(self, states: Collection[TapPoint] = (), attention: Collection[TapPoint] = ()):
        self.states: dict[TapPoint, list[Tensor]] = {point: [] for point in states}
        self.attention_inputs: dict[TapPoint, list[AttentionInputs]] = {point: [] for point in attention}

    def wants(self, point: TapPoint) -> bool:
        return point in self.states

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        self.states[point].append(x_TH)
        return x_TH

    def tokens(self, point: TapPoint) -> list[int]:
        """Tokens of each forward at a location."""
        states = [len(x_TH) for x_TH in self.states.get(point, ())]
        return states + [len(attended.q_TAD) for attended in self.attention_inputs.get(point, ())]

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        return self.attention_inputs[point].append if kind == "self_attn" and point in self.attention_inputs else None


@dataclass(frozen=True)
class RecordedOutputs:
    """A recorded forward. predicted: by term, the predictions of its targets. output: its own losses; None if not
    computed."""

    learner: BaseLearner
    batch: Batch
    predicted: Mapping[str, Any]
    output: StepOutput | None = None


class _Predictions(HeadObserver):
    """Records the head outputs of a learner for a batch."""

    def __init__(self, learner: BaseLearner, batch: Batch, only: bool):
        self.learner, self.batch, self.only = learner, batch, only
        self.names: dict[nn.Module, str] = {head: name for name, head in learner.heads.items()}
        self.predicted: dict[str, Predicted] = {}

    def __call__(self, head: PredictingHead, logits: Tensor | TokenLogits) -> None:
        prediction = self.learner.predicted(self.names[head], logits, self.batch)
        if prediction is not None:
            term, predicted = prediction
            self.predicted[term] = predicted


@contextmanager
def tapped(learner: BaseLearner, heads: HeadObserver | None, states: Tap | None) -> Iterator[None]:
    """A learner with taps on its heads and on the stacks of its backbone."""
    predicting = [head for head in learner.heads.values() if isinstance(head, PredictingHead)]
    stacks = [module for module in learner.backbone.modules() if isinstance(module, Stack)]
    try:
        for head in predicting:
            head.tap = heads
        for stack in stacks:
            stack.tap = states
        yield
    finally:
        for head in predicting:
            head.tap = None
        for stack in stacks:
            stack.tap = None


def see(
    learner: BaseLearner, batch: Batch, step: int, states: Tap | None = None, losses: bool = True
) -> RecordedOutputs:
    """Runs a training forward. states: records, or replaces, the states between the layers. losses: whether to compute
    the learner's own, which take as long as the predictions for heads over a vocabulary."""
    if isinstance(learner, Mixture):
        return _see_members(learner, batch, step, states, losses)
    heads = _Predictions(learner, batch, only=not losses)
    with tapped(learner, heads, states):
        output = learner(batch, step)
    return RecordedOutputs(learner, batch, heads.predicted, output if losses else None)


def _see_members(learner: Mixture, batch: Batch, step: int, states: Tap | None, losses: bool) -> RecordedOutputs:
    """Runs the members of a mixture that are in a batch, with the mixture's term names. A teacher may know only some of
    them."""
    assert isinstance(batch, MixedBatch), "a mixture reads the batches of its own examples"
    predicted: dict[str, Any] = {}
    sums: dict[str, Tensor] = {}
    for name, part in batch.members:
        if name not in learner.members:
            continue
        seen = see(cast(BaseLearner, learner.members[name]), part, step, states, losses)
        predicted |= {term_of(name, term): each for term, each in seen.predicted.items()}
        if seen.output is not None:
            sums |= {term_of(name, term): total for term, total in seen.output.sums.items()}
    return RecordedOutputs(learner, batch, predicted, StepOutput(sums, learner.weights) if losses else None)


@dataclass(frozen=True)
class StudentData:
    """The data that a run reads in training. examples: the student's, made from `data`. max_steps, max_epochs: budgets,
    or None. sizes: the keys that set the step size. tokens: of a forward without gradients. progress: shows progress.
    """

    data: SplitData
    max_length: int
    examples: Examples
    loader: Loader
    max_steps: int | None
    max_epochs: float | None
    sizes: Mapping[str, int | None]
    tokens: int
    progress: OnStage | None = None


@dataclass
class Teacher:
    """A trained, frozen learner: no gradient, no dropout, its own number format. origin: the user's checkpoint.
    longest: maximum tokens of a text that it reads independently; None: as the student. reads_batches: whether it reads
    the student's batches, which requires its vocabulary."""

    learner: BaseLearner
    precision: Precision
    origin: str
    longest: int | None = None
    reads_batches: bool = True

    @property
    def teaches(self) -> frozenset[str]:
        """The student's terms that it predicts."""
        return frozenset(self.learner.weights)

    def begin(self, reading: StudentData) -> dict[str, Any]:
        """Called before training. Returns a description of the preparation for the first screen."""
        return {}

    @torch.no_grad()
    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        """Its predictions for a batch of the student."""
        device = batch.inputs.tokens.device.type
        if isinstance(batch, MixedBatch) and not isinstance(self.learner, Mixture):
            # Labeled texts paired with texts of another domain, for which a teacher has no predictions.
            batch = dict(batch.members)[self.learner.config.name]
        with torch.autocast(device, enabled=False), self.precision.autocast():
            return see(self.learner, batch, 0, states, losses=False)
