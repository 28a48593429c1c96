"""A forward of a learner, watched from outside: its losses, what its heads predict, the states between its layers."""

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
    """Keeps the states at some places, and what self-attentions in the layers before others compute with: by place,
    those of each forward of a stack, in their order."""

    def __init__(self, states: Collection[TapPoint] = (), attention: Collection[TapPoint] = ()):
        self.states: dict[TapPoint, list[Tensor]] = {place: [] for place in states}
        self.attention_inputs: dict[TapPoint, list[AttentionInputs]] = {place: [] for place in attention}

    def wants(self, place: TapPoint) -> bool:
        return place in self.states

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        self.states[place].append(x_TH)
        return x_TH

    def tokens(self, place: TapPoint) -> list[int]:
        """How many tokens each forward had at a place."""
        states = [len(x_TH) for x_TH in self.states.get(place, ())]
        return states + [len(attended.q_TAD) for attended in self.attention_inputs.get(place, ())]

    def attention(self, place: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        return self.attention_inputs[place].append if kind == "self_attn" and place in self.attention_inputs else None


@dataclass(frozen=True)
class RecordedOutputs:
    """What a forward showed. predicted: by term, what the learner predicts of its targets. output: its own losses;
    None where they were not computed."""

    learner: BaseLearner
    batch: Batch
    predicted: Mapping[str, Any]
    output: StepOutput | None = None


class _Predictions(HeadObserver):
    """Keeps what the heads of a learner predict of a batch."""

    def __init__(self, learner: BaseLearner, batch: Batch, only: bool):
        self.learner, self.batch, self.only = learner, batch, only
        self.names: dict[nn.Module, str] = {head: name for name, head in learner.heads.items()}
        self.predicted: dict[str, Predicted] = {}

    def __call__(self, head: PredictingHead, logits: Tensor | TokenLogits) -> None:
        said = self.learner.predicted(self.names[head], logits, self.batch)
        if said is not None:
            term, predicted = said
            self.predicted[term] = predicted


@contextmanager
def tapped(learner: BaseLearner, heads: HeadObserver | None, states: Tap | None) -> Iterator[None]:
    """A learner whose heads, and the stacks of whose backbone, have taps."""
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
    """A training forward. states: sees, or replaces, the states between the layers. losses: whether its own are
    computed; those of heads over a vocabulary take as long as the predictions."""
    if isinstance(learner, Mixture):
        return _see_members(learner, batch, step, states, losses)
    heads = _Predictions(learner, batch, only=not losses)
    with tapped(learner, heads, states):
        output = learner(batch, step)
    return RecordedOutputs(learner, batch, heads.predicted, output if losses else None)


def _see_members(learner: Mixture, batch: Batch, step: int, states: Tap | None, losses: bool) -> RecordedOutputs:
    """Those of the members of a mixture that are in a batch, one after the other, by the names of the mixture's terms.
    A teacher may know some of them alone."""
    assert isinstance(batch, MixedBatch), "a mixture reads the batches of its own examples"
    predicted: dict[str, Any] = {}
    sums: dict[str, Tensor] = {}
    for name, own in batch.members:
        if name not in learner.members:
            continue
        seen = see(cast(BaseLearner, learner.members[name]), own, step, states, losses)
        predicted |= {term_of(name, term): each for term, each in seen.predicted.items()}
        if seen.output is not None:
            sums |= {term_of(name, term): total for term, total in seen.output.sums.items()}
    return RecordedOutputs(learner, batch, predicted, StepOutput(sums, learner.weights) if losses else None)


@dataclass(frozen=True)
class StudentData:
    """What a run reads in training. examples: those of the student, made of `data`. max_steps, max_epochs: its budgets;
    None where they are open. sizes: the keys that size a step. tokens: of a forward without gradients. progress: shows
    how far something is."""

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
    """A trained learner that is read and never learns: no gradient, no dropout, in its own number format. origin: the
    checkpoint that a user named. longest: tokens of the longest text that it reads by itself; None: as the student.
    reads_batches: whether it reads the batches of its student: has its vocabulary."""

    learner: BaseLearner
    precision: Precision
    origin: str
    longest: int | None = None
    reads_batches: bool = True

    @property
    def teaches(self) -> frozenset[str]:
        """Those of the student's whose targets it predicts."""
        return frozenset(self.learner.weights)

    def begin(self, reading: StudentData) -> dict[str, Any]:
        """Called before training. Returns what the first screen says of what was done for it."""
        return {}

    @torch.no_grad()
    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        """What it predicts of a batch of the student's."""
        device = batch.inputs.tokens.device.type
        if isinstance(batch, MixedBatch) and not isinstance(self.learner, Mixture):
            # Labelled texts, each beside one of another domain, of which a teacher has nothing to say.
            batch = dict(batch.members)[self.learner.config.name]
        with torch.autocast(device, enabled=False), self.precision.autocast():
            return see(self.learner, batch, 0, states, losses=False)
