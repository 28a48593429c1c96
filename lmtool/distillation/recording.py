"""Recording of a forward pass: the losses, the predictions of the heads, and the hidden states between the layers.

Recording does not change the learner, which is a model with its objective or task. `record` attaches observers to the
learner's heads and stacks, runs the learner, and detaches the observers. A `Teacher` is a frozen learner whose
predictions are recorded. Distillation modes and their terms compare the recordings of a student and a teacher for the
same batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
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


def member_batches(batch: Batch) -> list[Batch]:
    """Returns the batches that a learner reads in turn: one per member of a mixture, otherwise only the batch."""
    return [part for _, part in batch.members] if isinstance(batch, MixedBatch) else [batch]


class RecordedStates(Tap):
    """Records hidden states and the inputs of self-attention during a learner's forward.

    A stack may run several times in one forward, for example once per member of a mixture; each run appends an entry.
    states: for each tap point, the states (T, H) of each run. attention_inputs: for each tap point, the queries, keys
    and values of the self-attention in the layer before the point, for each run.
    """

    def __init__(self, states: Collection[TapPoint] = (), attention: Collection[TapPoint] = ()):
        """Records the states at the points `states`, and the attention inputs before the points `attention`."""
        self.states: dict[TapPoint, list[Tensor]] = {point: [] for point in states}
        self.attention_inputs: dict[TapPoint, list[AttentionInputs]] = {point: [] for point in attention}

    def wants(self, point: TapPoint) -> bool:
        return point in self.states

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        self.states[point].append(x_TH)
        return x_TH

    def token_counts(self, point: TapPoint) -> list[int]:
        """Returns the number of tokens in each recorded run of a stack at a tap point."""
        states = [len(x_TH) for x_TH in self.states.get(point, ())]
        return states + [len(inputs.q_TAD) for inputs in self.attention_inputs.get(point, ())]

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        return self.attention_inputs[point].append if kind == "self_attn" and point in self.attention_inputs else None


Prediction = TypeVar("Prediction", bound=TargetProbabilities, covariant=True)


@dataclass(frozen=True)
class RecordedOutputs(Generic[Prediction]):
    """The recorded outputs of a learner for a batch. predicted: for each loss term, the learner's predictions for its
    targets. output: the sums of the learner's own losses; None if they were not computed."""

    learner: BaseLearner
    batch: Batch
    predicted: Mapping[str, Prediction]
    output: StepOutput | None = None


StudentOutputs = RecordedOutputs[Predicted]
"""The outputs of a learner that has just run. Gradients flow through the outputs of a student."""
TeacherOutputs = RecordedOutputs[TargetProbabilities]
"""The teacher's predictions, which may also be averaged, truncated or read from disk."""


class _PredictionRecorder(HeadObserver):
    def __init__(self, learner: BaseLearner, batch: Batch, predictions_only: bool):
        self.learner, self.batch, self.predictions_only = learner, batch, predictions_only
        self.names: dict[nn.Module, str] = {head: name for name, head in learner.heads.items()}
        self.predicted: dict[str, Predicted] = {}

    def __call__(self, head: PredictingHead, logits: Tensor | TokenLogits) -> None:
        prediction = self.learner.interpret_logits(self.names[head], logits, self.batch)
        if prediction is not None:
            term, predicted = prediction
            self.predicted[term] = predicted


@contextmanager
def attach(learner: BaseLearner, heads: HeadObserver | None, states: Tap | None) -> Iterator[None]:
    """Within the context, connects a learner's heads to an observer, and the stacks of its backbone to a tap."""
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
    """Runs a learner's forward and records its outputs. Each member of a mixture reads its part of the batch, and the
    terms have the names that the mixture gives them. batch: on the learner's device. step: the training step, from
    which the dropout masks are derived. states: a tap that records or replaces the states between the layers. losses:
    whether to compute the learner's own losses, which for a head over a vocabulary cost as much time as the
    predictions."""
    if not isinstance(learner, Mixture):
        heads = _PredictionRecorder(learner, batch, predictions_only=not losses)
        with attach(learner, heads, states):
            output = learner(batch, step)
        return RecordedOutputs(learner, batch, heads.predicted, output if losses else None)
    assert isinstance(batch, MixedBatch), "a mixture reads the batches of its own examples"
    predicted: dict[str, Predicted] = {}
    sums: dict[str, Tensor] = {}
    for name, part in batch.members:
        if name not in learner.members:
            continue  # a teacher may have been trained for only some members of the student's mixture
        recorded = record(cast(BaseLearner, learner.members[name]), part, step, states, losses)
        predicted |= {term_of(name, term): prediction for term, prediction in recorded.predicted.items()}
        if recorded.output is not None:
            sums |= {term_of(name, term): total for term, total in recorded.output.sums.items()}
    return RecordedOutputs(learner, batch, predicted, StepOutput(sums, learner.loss_weights) if losses else None)


@dataclass(frozen=True)
class StudentData:
    """The data that a run reads in training. max_length: maximum number of tokens per text. sizes: the configuration
    keys that set how many examples or tokens a step has, with their values. forward_tokens: number of tokens per
    forward without gradients. progress: shows the progress of a preparation on the screen, or None."""

    data: SplitData
    max_length: int
    examples: Examples
    loader: Loader
    max_steps: int | None
    max_epochs: float | None
    sizes: Mapping[str, int | None]
    forward_tokens: int
    progress: OnStage | None = None


@dataclass
class Teacher:
    """A trained, frozen learner that a student learns from. It runs without gradients and without dropout.

    Attributes:
        precision: The number format in which the teacher runs.
        origin: The checkpoint as the user named it, for messages.
        longest: Maximum number of tokens per text if the teacher tokenizes texts itself; None means the student's
            maximum.
        reads_batches: Whether the teacher reads the student's batches, which requires the student's vocabulary and text
            format. Otherwise, the teacher tokenizes the texts of the student's data itself.
    """

    learner: BaseLearner
    precision: Precision
    origin: str
    longest: int | None = None
    reads_batches: bool = True

    @property
    def terms_taught(self) -> frozenset[str]:
        """The student's loss terms that the teacher makes predictions for."""
        return frozenset(self.learner.loss_weights)

    def predict_every_token(self) -> None:
        """Makes later predictions of masked words cover every token."""
        self.learner.predict_every_token()

    def prepare(self, student: StudentData) -> JsonObject:
        """Prepares the teacher before training. Returns a description of the preparation for the run's first screen."""
        return {}

    @torch.no_grad()
    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """Returns the teacher's predictions for a batch on the device of student and teacher. states: a tap that
        records or replaces the teacher's states between the layers."""
        device = batch.inputs.tokens.device.type
        if isinstance(batch, MixedBatch) and not isinstance(self.learner, Mixture):
            # The student adapts to another domain (task.domain), whose unlabeled texts are the second member of its
            # batches. The teacher predicts only for the labeled texts.
            batch = dict(batch.members)[self.learner.config.name]
        with torch.autocast(device, enabled=False), self.precision.autocast():
            return record(self.learner, batch, 0, states, losses=False)


@dataclass(frozen=True)
class LearnerPair:
    """The two models that a distillation term compares. teacher: the frozen teacher; None if the student learns from
    itself, or from a model that is trained with it. layers: the map from student to teacher layers; None if no term
    compares layers. every_token: the terms that are compared at every token, not only at the targets; each with the
    member of a mixture that has it, or None."""

    student: BaseLearner
    teacher: Teacher | None = None
    layers: LayerMap | None = None
    every_token: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def frozen_teacher(self) -> Teacher:
        """The teacher, for terms that work only with a frozen teacher."""
        assert self.teacher is not None
        return self.teacher

    @property
    def configs(self) -> ModelPair:
        """The configurations of both models."""
        return ModelPair(self.student.backbone.config, self.frozen_teacher.learner.backbone.config)
