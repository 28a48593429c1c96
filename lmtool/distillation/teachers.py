"""Teachers other than one running model: ensembles, teachers truncated to their most probable words, teachers whose
outputs are stored, and files of hard labels.

Shape letters: N documents, G examples, M targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.distillation.recording import RecordedOutputs, RecordedStates, StudentData, Teacher, TeacherOutputs
from lmtool.distillation.store.folder import StoreLocation, open_or_make, require_free_space
from lmtool.distillation.store.outputs import (
    Format,
    TermBatch,
    TermReader,
    TermWriter,
    batch_states,
    batch_terms,
    order_of,
    ranges,
    require_rows,
)
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.learners.mixed_sources import examples_of
from lmtool.models.heads.predicted import Averaged, Classes, TargetProbabilities, cut
from lmtool.nn.configs import Side
from lmtool.nn.stack import Tap, TapPoint
from lmtool.types import Batch


@dataclass(kw_only=True)
class TeacherEnsemble(Teacher):
    """Several teachers, whose predictions of the same targets are averaged; each may know different members of a
    mixture. Learner, precision and origin are the first member's.

    Attributes:
        members: The teachers, at least one.
        weights: The weight of each in the average, by origin.
        average: Whether probabilities or logits are averaged.
    """

    members: Sequence[Teacher]
    weights: Mapping[str, float]
    average: Literal["probabilities", "logits"]

    @property
    def teaches(self) -> frozenset[str]:
        return frozenset().union(*(teacher.teaches for teacher in self.members))

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """states: not recorded, since they would belong to several teachers."""
        parts: dict[str, list[tuple[float, TargetProbabilities]]] = {}
        for teacher in self.members:
            for term, prediction in teacher.predict(batch).predicted.items():
                parts.setdefault(term, []).append((self.weights[teacher.origin], prediction))
        predicted = {
            term: weighted[0][1] if len(weighted) == 1 else Averaged.of(weighted, self.average)
            for term, weighted in parts.items()
        }
        return RecordedOutputs(self.learner, batch, predicted)


@dataclass(kw_only=True)
class TopWordsTeacher(Teacher):
    """A teacher whose predictions over a vocabulary are truncated.

    Attributes:
        top_k: Number of most probable words that are retained.
        temperatures: Temperatures at which they are learned.
    """

    top_k: int
    temperatures: tuple[float, ...]

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        recorded = super().predict(batch, states)
        with self.precision.autocast():
            predicted = {
                term: cut(prediction, self.top_k, self.temperatures) for term, prediction in recorded.predicted.items()
            }
        return replace(recorded, predicted=predicted)


# A teacher whose predictions are read from disk. One pass of the teacher over the data serves every run with the same
# data: students of other sizes, other term weights, other learning rates.


@dataclass(kw_only=True)
class StoredTeacher(Teacher):
    """A teacher whose outputs are stored once, so that its network does not run in training.

    Attributes:
        location: Where the outputs are stored.
        layout: Format of the stored outputs.
        identity: What the outputs depend on besides the data that is read, as plain data.
        fixed: Whether every epoch has the same examples.
        seed: Of the run.
        tokenizers: The teacher's and the student's, for the first screen. If they differ, the teacher tokenizes the
            student's table itself, and predicts by row.
        states: Whether to store the last layers' states before the final norm.
    """

    location: StoreLocation
    layout: Format
    identity: JsonMapping
    fixed: bool
    seed: int
    tokenizers: Mapping[str, str]
    states: bool = False
    terms: dict[str, TermReader] = field(default_factory=dict)

    def begin(self, student: StudentData) -> JsonObject:
        if self.by_row:
            length = min(student.max_length, self.longest or student.max_length)
            examples = examples_of(self.learner, student.data, length)
            require_rows(student.examples.batch(student.examples.plan(0).rows[:1], np.arange(1), 0))
            student = replace(student, examples=examples)
        passes = Passes.of(student, self.fixed, self.seed)
        identity = {
            **self.identity,
            "dtype": self.layout.dtype,
            "top_k": self.layout.top_k,
            "temperatures": list(self.layout.temperatures),
            "read": passes.metadata,
        }
        store = open_or_make(self.location, identity, lambda folder: self._fill(folder, passes), student.progress)
        terms = store.metadata["terms"]
        self.terms = {name: TermReader(store.folder, metadata, self.layout) for name, metadata in terms.items()}
        examples_stored = max(metadata["examples"] for metadata in terms.values())
        return {**store.screen_metadata(stored_examples=examples_stored), **self.tokenizers}

    @property
    def by_row(self) -> bool:
        """Whether its examples are identified by row."""
        return not self.reads_batches

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """UserError if an example of the batch is missing."""
        device = batch.inputs.tokens.device
        predicted = {
            term: self._stored(term, part, device) for term, part in batch_terms(batch).items() if term in self.terms
        }
        if self.states and states is not None:
            for name, part in batch_states(batch):
                point = self._last(part.target.side)
                if states.wants(point):
                    stored = self._stored(name, part, device)
                    assert isinstance(stored, Classes)
                    states(point, stored.logits_MC.float())
        return RecordedOutputs(self.learner, batch, predicted)

    def _stored(self, term: str, part: TermBatch, device: torch.device) -> TargetProbabilities:
        stored = self.terms[term].of(part, part.keys(self.by_row), device)
        if stored is None:
            raise UserError(
                f"the store of the teacher's outputs lacks examples of {term} that this run reads",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        return stored

    def _last(self, side: Side) -> TapPoint:
        """The last layer of the stack that reads a side."""
        return TapPoint(self.learner.backbone.config.depths[side], side)

    def _fill(self, folder: Path, passes: Passes) -> JsonObject:
        """Writes the teacher's predictions for all examples."""
        writers: dict[str, TermWriter] = {}
        unpredicted: set[str] = set()  # terms that it does not predict
        done, progress = 0, passes.student.progress
        for batch in passes.batches():
            done += len(batch.inputs.lengths)
            parts = [(term, part) for term, part in batch_terms(batch).items() if term not in unpredicted]
            parts += batch_states(batch) if self.states else ()
            if not all(term in writers and writers[term].has(part.keys(self.by_row)) for term, part in parts):
                self._add(batch, parts, writers, folder)
                unpredicted |= {term for term, _ in parts} - writers.keys()
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_free_space(folder, size, done, passes.documents)
            if progress is not None:
                progress("running the teacher", done, passes.documents)
        if not writers:
            raise UserError(
                f"distill.teacher={self.origin} predicts nothing that can be stored", "set distill.store=null"
            )
        return {"terms": {name: writer.close() for name, writer in writers.items()}}

    def _add(
        self, batch: Batch, parts: Sequence[tuple[str, TermBatch]], writers: dict[str, TermWriter], folder: Path
    ) -> None:
        depths = self.learner.backbone.config.depths
        tap = RecordedStates(states=[TapPoint(depth, side) for side, depth in depths.items()]) if self.states else None
        predicted = dict(super().predict(batch.to(self.precision.device), tap).predicted)
        loose = sorted(predicted.keys() - batch_terms(batch).keys())
        if loose:
            raise UserError(
                f"the teacher's predictions of {loose[0]} have no targets in the data to index them by",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        for term, part in parts:
            values = predicted.get(term)
            if tap is not None and term not in batch_terms(batch):
                values = Classes(_next_states(tap, self._last(part.target.side), len(part.packed.tokens)))
            if values is not None:
                writer = writers.setdefault(term, TermWriter(folder, len(writers), self.layout))
                with torch.no_grad(), self.precision.autocast():
                    writer.add(part, part.keys(self.by_row), values)


def _next_states(tap: RecordedStates, point: TapPoint, tokens: int) -> Tensor:
    """The states of the next forward recorded by a tap. UserError if a learner does not read each text exactly once."""
    states = tap.states[point].pop(0) if tap.states[point] else None
    if states is None or len(states) != tokens:
        raise UserError(
            "distill.terms.states: this learner does not read each text exactly once, so its states cannot be stored",
            "set distill.store=null, so that the teacher runs alongside the student",
        )
    return states


def _same_every_epoch(examples: Examples) -> bool:
    """Whether the plan is constant."""
    if isinstance(examples, MixedExamples):
        return all(map(_same_every_epoch, examples.members.values()))
    return examples.plan(1) is examples.plan(0)


@dataclass(frozen=True)
class Passes:
    """The examples that a run reads.

    Attributes:
        metadata: The same as plain data.
        epochs: Complete epochs; 0: the first steps of one, up to `steps`.
        documents: Approximate number, for progress.
    """

    student: StudentData
    metadata: JsonObject
    epochs: int
    steps: int
    documents: int

    @classmethod
    def of(cls, student: StudentData, fixed: bool, seed: int) -> Passes:
        """UserError if no budget determines how much is read."""
        plan = student.examples.plan(0)
        if fixed and _same_every_epoch(student.examples):
            return cls(student, {"epochs": "all"}, 1, 0, len(plan))
        steps, epochs = student.max_steps or math.inf, student.max_epochs or math.inf
        if math.isinf(steps) and math.isinf(epochs):
            raise UserError(
                "distill.store= needs to know how much is read: every epoch has different examples",
                "set max_steps= or max_epochs=, in addition to another budget or instead of it",
            )
        in_epoch = student.loader.steps_in_epoch(0)
        steps = min(steps, math.ceil(epochs * in_epoch)) if epochs < 1 else steps
        if steps < in_epoch:
            metadata = {"seed": seed, "steps": int(steps), **student.sizes}
            return cls(student, metadata, 0, int(steps), round(len(plan) * steps / in_epoch))
        whole, read = 0, 0.0
        while whole < math.ceil(epochs) if math.isinf(steps) else read < steps and whole < epochs:
            read += student.loader.steps_in_epoch(whole)
            whole += 1
        return cls(student, {"seed": seed, "epochs": whole}, whole, 0, len(plan) * whole)

    def batches(self) -> Iterator[Batch]:
        """All examples; sorted by length if complete epochs are read."""
        examples = self.student.examples
        if not self.epochs:
            for step in islice(self.student.loader.steps(None), self.steps):
                yield from step.batches
            return
        if isinstance(examples, MixedExamples) and self.metadata["epochs"] == "all":
            examples = examples.complete()
        loader = _sorted_loader(examples, self.student)
        for epoch in range(self.epochs):
            yield from loader.epoch_batches(epoch)


def _sorted_loader(examples: Examples, student: StudentData) -> PackedLoader:
    """Reads examples in the order of their lengths, for forwards without gradients."""
    longest = int(examples.plan(0).lengths.max())
    return PackedLoader(examples, 0, None, max(student.tokens, longest), shuffle=False)


# A teacher known only by a file of predictions: it provides hard labels and never runs.


@dataclass(frozen=True)
class FixedLabels(TargetProbabilities):
    """labels: (M,), returned by `best`."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def probabilities(self, temperature: float = 1.0, first: int = 0, last: int | None = None) -> Tensor:
        raise TypeError("hard labels have no probabilities")

    def best(self) -> Tensor:
        return self.labels


@dataclass(frozen=True)
class _TermLabels:
    """By example, the labels of one term. keys_G: sorted. first_G, count_G: its slice of `labels`."""

    keys_G: np.ndarray
    first_G: np.ndarray
    count_G: np.ndarray
    labels: Tensor


@dataclass(kw_only=True)
class HardLabels(Teacher):
    """The learner is the student's, which turns rows into examples. relabel: replaces the labels of the training data
    by the predictions, and returns a line for the first screen."""

    relabel: Callable[[SplitData], tuple[SplitData, JsonObject]]
    terms: dict[str, _TermLabels] = field(default_factory=dict)

    @property
    def teaches(self) -> frozenset[str]:
        return frozenset([self.learner.config.name])

    def begin(self, student: StudentData) -> JsonObject:
        data, metadata = self.relabel(student.data)
        loader = _sorted_loader(self.learner.examples(data, student.max_length), student)
        columns: dict[str, list[tuple[np.ndarray, np.ndarray, Tensor]]] = {}
        for batch in loader.epoch_batches():
            for term, part in batch_terms(batch).items():
                labels = part.target.labels
                if labels is not None and term in self.teaches:
                    keys_G = part.keys(by_row=False)
                    order_M, count_G = order_of(part.owners(len(labels)), len(keys_G))
                    columns.setdefault(term, []).append((keys_G, count_G, labels[torch.from_numpy(order_M)]))
        self.terms = {term: _joined(batches) for term, batches in columns.items()}
        return metadata

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """UserError if it has no labels for an example of the batch."""
        predicted: dict[str, TargetProbabilities] = {}
        for term, part in batch_terms(batch).items():
            stored, target = self.terms.get(term), part.target.labels
            if stored is None or target is None:
                continue
            keys_G = part.keys(by_row=False)
            at_G = np.searchsorted(stored.keys_G, keys_G).clip(max=len(stored.keys_G) - 1)
            order_M, count_G = order_of(part.owners(len(target)), len(keys_G))
            if (stored.keys_G[at_G] != keys_G).any() or (stored.count_G[at_G] != count_G).any():
                raise UserError(
                    f"distill.predictions={self.origin} lacks examples of {term} in this run",
                    "use a teacher instead: distill.teacher=RUN",
                )
            labels = torch.empty_like(target)
            labels[torch.from_numpy(order_M)] = stored.labels[torch.from_numpy(ranges(stored.first_G[at_G], count_G))]
            predicted[term] = FixedLabels(labels.flatten().to(batch.inputs.tokens.device))
        return RecordedOutputs(self.learner, batch, predicted)


def _joined(batches: list[tuple[np.ndarray, np.ndarray, Tensor]]) -> _TermLabels:
    keys, counts = (np.concatenate(columns) for columns in list(zip(*batches, strict=True))[:2])
    unique, first_index = np.unique(keys, return_index=True)
    firsts = np.cumsum(counts) - counts
    return _TermLabels(unique, firsts[first_index], counts[first_index], torch.cat([labels for *_, labels in batches]))
