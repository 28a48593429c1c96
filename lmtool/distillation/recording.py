"""Records a learner's forward from outside: its losses, the predictions of its heads, and the states between its
layers. A frozen teacher is a learner whose forward is recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from lmtool.config.saved import JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.data.sources import OnStage
from lmtool.distillation.configs.base import LayerMap, ModelPair
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.learners.mixture import Mixture
from lmtool.models.heads.base import HeadObserver, PredictingHead, TokenLogits
from lmtool.models.heads.predicted import Predicted, TargetProbabilities
from lmtool.nn.context import AttentionKind, AttentionObserver
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.nn.tiled import AttentionInputs
from lmtool.training.precision import Precision
from lmtool.types import Batch, Loader, StepOutput


def parts_of(batch: Batch) -> list[Batch]:
    """The batches that a learner reads in turn: the members of a mixture, or the batch itself."""
    return [part for _, part in batch.members] if isinstance(batch, MixedBatch) else [batch]


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
        return states + [len(inputs.q_TAD) for inputs in self.attention_inputs.get(point, ())]

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        return self.attention_inputs[point].append if kind == "self_attn" and point in self.attention_inputs else None


Prediction = TypeVar("Prediction", bound=TargetProbabilities, covariant=True)


@dataclass(frozen=True)
class RecordedOutputs(Generic[Prediction]):
    """The recorded outputs of a learner for a batch.

    Attributes:
        predicted: By term, the predictions of its targets.
        output: The learner's own losses; None if not computed.
    """

    learner: BaseLearner
    batch: Batch
    predicted: Mapping[str, Prediction]
    output: StepOutput | None = None


StudentOutputs = RecordedOutputs[Predicted]
TeacherOutputs = RecordedOutputs[TargetProbabilities]


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


def record(
    learner: BaseLearner, batch: Batch, step: int, states: Tap | None = None, losses: bool = True
) -> StudentOutputs:
    """Runs a training forward and records its outputs.

    Args:
        learner: The learner; with a mixture, each of its members that is in the batch, and the terms have the
            mixture's names.
        batch: The batch, on the learner's device.
        step: The step, which keys the dropout.
        states: Records, or replaces, the states between the layers.
        losses: Whether to compute the learner's own losses, which take as long as the predictions for heads over a
            vocabulary.
    """
    if not isinstance(learner, Mixture):
        heads = _Predictions(learner, batch, only=not losses)
        with tapped(learner, heads, states):
            output = learner(batch, step)
        return RecordedOutputs(learner, batch, heads.predicted, output if losses else None)
    assert isinstance(batch, MixedBatch), "a mixture reads the batches of its own examples"
    predicted: dict[str, Predicted] = {}
    sums: dict[str, Tensor] = {}
    for name, part in batch.members:
        if name not in learner.members:
            continue  # a teacher may know only some members
        recorded = record(cast(BaseLearner, learner.members[name]), part, step, states, losses)
        predicted |= {term_of(name, term): prediction for term, prediction in recorded.predicted.items()}
        if recorded.output is not None:
            sums |= {term_of(name, term): total for term, total in recorded.output.sums.items()}
    return RecordedOutputs(learner, batch, predicted, StepOutput(sums, learner.weights) if losses else None)


@dataclass(frozen=True)
class StudentData:
    """The data that a run reads in training.

    Attributes:
        examples: The student's, made from `data`.
        max_steps: Budget, or None; so is `max_epochs`.
        sizes: The keys that set the step size.
        tokens: Of a forward without gradients.
        progress: Shows progress.
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
    """A trained, frozen learner: no gradient, no dropout, its own number format.

    Attributes:
        origin: The user's checkpoint.
        longest: Maximum tokens of a text that it reads independently; None: as the student.
        reads_batches: Whether it reads the student's batches, which requires its vocabulary.
    """

    learner: BaseLearner
    precision: Precision
    origin: str
    longest: int | None = None
    reads_batches: bool = True

    @property
    def teaches(self) -> frozenset[str]:
        """The student's terms that it predicts."""
        return frozenset(self.learner.weights)

    def begin(self, student: StudentData) -> JsonObject:
        """Called before training. Returns a description of the preparation for the first screen."""
        return {}

    @torch.no_grad()
    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """Its predictions for a batch of the student. states: records, or replaces, the states between the layers."""
        device = batch.inputs.tokens.device.type
        if isinstance(batch, MixedBatch) and not isinstance(self.learner, Mixture):
            # Labeled texts paired with texts of another domain, for which a teacher has no predictions.
            batch = dict(batch.members)[self.learner.config.name]
        with torch.autocast(device, enabled=False), self.precision.autocast():
            return record(self.learner, batch, 0, states, losses=False)


@dataclass(frozen=True)
class LearnerPair:
    """A student and its teacher, with the map from student to teacher layers for terms that compare layers. teacher:
    None if the student learns from other learners of the run, or from itself."""

    student: BaseLearner
    teacher: Teacher | None = None
    layers: LayerMap | None = None

    @property
    def frozen_teacher(self) -> Teacher:
        """The teacher, for terms that need one."""
        assert self.teacher is not None
        return self.teacher

    @property
    def configs(self) -> ModelPair:
        """The configurations of both models."""
        return ModelPair(self.student.backbone.config, self.frozen_teacher.learner.backbone.config)
