"""Teachers other than a single running model: the average of several teachers, a teacher whose predictions are
truncated to the most probable words, a teacher whose outputs are stored on disk, and a file of hard labels.

Shape letters: N documents of a batch, G examples of a batch (an example has one or several documents), M targets.
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

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.data.loader import PackedLoader
from lmtool.distillation.recording import RecordedOutputs, RecordedStates, StudentData, Teacher, TeacherOutputs
from lmtool.distillation.store.folder import StoreLocation, open_or_make, require_free_space
from lmtool.distillation.store.keys import TermBatch, batch_states, batch_terms, group_by_example, require_rows
from lmtool.distillation.store.outputs import StoreFormat, TermReader, TermWriter, ranges
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.learners.mixed_sources import examples_of
from lmtool.models.heads.predicted import AveragePrediction, Classes, TargetProbabilities, truncate
from lmtool.nn.configs import Side
from lmtool.nn.stack import Tap, TapPoint
from lmtool.types import Batch


@dataclass(kw_only=True)
class TeacherEnsemble(Teacher):
    """Several teachers whose predictions for the same targets are averaged.

    The teachers may have been trained for different members of the student's mixture. The inherited attributes are
    those of the first teacher.

    Attributes:
        members: The teachers, at least one.
        weights: The weight of each teacher in the average, by its `origin`.
        average: Whether probabilities or logits are averaged.
    """

    members: Sequence[Teacher]
    weights: Mapping[str, float]
    average: Literal["probabilities", "logits"]

    @property
    def terms_taught(self) -> frozenset[str]:
        return frozenset().union(*(teacher.terms_taught for teacher in self.members))

    def predict_every_token(self) -> None:
        for teacher in self.members:
            teacher.predict_every_token()

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """Returns the averaged predictions. States are not recorded, since each teacher has different states."""
        weighted_by_term: dict[str, list[tuple[float, TargetProbabilities]]] = {}
        for teacher in self.members:
            for term, prediction in teacher.predict(batch).predicted.items():
                weighted_by_term.setdefault(term, []).append((self.weights[teacher.origin], prediction))
        predicted = {
            term: weighted[0][1] if len(weighted) == 1 else AveragePrediction.of(weighted, self.average)
            for term, weighted in weighted_by_term.items()
        }
        return RecordedOutputs(self.learner, batch, predicted)


@dataclass(kw_only=True)
class TopWordsTeacher(Teacher):
    """A teacher whose predictions over a vocabulary are truncated to the most probable words. top_k: number of words
    that are retained per target. temperatures: the softmax temperatures of the distillation terms, at which
    probabilities will be needed."""

    top_k: int
    temperatures: tuple[float, ...]

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        recorded = super().predict(batch, states)
        with self.precision.autocast():
            predicted = {
                term: truncate(prediction, self.top_k, self.temperatures)
                for term, prediction in recorded.predicted.items()
            }
        return replace(recorded, predicted=predicted)


# A teacher whose outputs are read from disk. The stored outputs of one pass over the data serve every run with the same
# teacher and data, for example runs with students of different sizes, or with different learning rates.


@dataclass(kw_only=True)
class StoredTeacher(Teacher):
    """A teacher whose outputs are computed once and stored, so that its network does not run in training.

    Attributes:
        location: The folder of the stored outputs.
        store_format: The format of the stored outputs.
        identity: Everything that the outputs depend on besides the examples that are read, as plain data.
        fixed_examples: Whether an example is the same in every epoch, as in finetuning. In pretraining, it may have
            other masks in every epoch.
        tokenizers: Descriptions of the teacher's and the student's tokenizers for the first screen, if they differ. In
            this case, the teacher tokenizes the rows of the student's table itself, and its predictions are stored per
            row.
        states: Whether to store the states of the last layers before the final norm, besides the predictions.
        terms: Reads the files of each loss term's predictions, and of each stack's states.
    """

    location: StoreLocation
    store_format: StoreFormat
    identity: JsonMapping
    fixed_examples: bool
    seed: int
    tokenizers: Mapping[str, str]
    states: bool = False
    terms: dict[str, TermReader] = field(default_factory=dict)

    def prepare(self, student: StudentData) -> JsonObject:
        if self.by_row:
            length = min(student.max_length, self.longest or student.max_length)
            examples = examples_of(self.learner, student.data, length)
            require_rows(student.examples.batch(student.examples.plan(0).rows[:1], np.arange(1), 0))
            student = replace(student, examples=examples)
        passes = Passes.from_student(student, self.fixed_examples, self.seed)
        identity = {
            **self.identity,
            "dtype": self.store_format.dtype,
            "top_k": self.store_format.top_k,
            "temperatures": list(self.store_format.temperatures),
            "read": passes.metadata,
        }
        store = open_or_make(self.location, identity, lambda folder: self._fill(folder, passes), student.progress)
        terms = store.metadata["terms"]
        self.terms = {name: TermReader(store.folder, metadata, self.store_format) for name, metadata in terms.items()}
        stored_examples = max(metadata["examples"] for metadata in terms.values())
        return {**store.screen_metadata(stored_examples=stored_examples), **self.tokenizers}

    @property
    def by_row(self) -> bool:
        """Whether stored examples are identified by their row in the table, instead of by a hash of their tokens."""
        return not self.reads_batches

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """Reads the predictions from disk. Raises UserError if an example of the batch was not stored."""
        device = batch.inputs.tokens.device
        predicted = {
            term: self._read(term, part, device) for term, part in batch_terms(batch).items() if term in self.terms
        }
        if self.states and states is not None:
            for name, part in batch_states(batch):
                point = self._last_layer(part.target.side)
                if states.wants(point):
                    stored = self._read(name, part, device)
                    assert isinstance(stored, Classes)
                    states(point, stored.logits_MC.float())
        return RecordedOutputs(self.learner, batch, predicted)

    def _read(self, term: str, part: TermBatch, device: torch.device) -> TargetProbabilities:
        outputs = self.terms[term].read(part, part.keys(self.by_row), device)
        if outputs is None:
            raise UserError(
                f"the stored outputs of the teacher lack predictions of {term} for examples that this run reads",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        return outputs

    def _last_layer(self, side: Side) -> TapPoint:
        return TapPoint(self.learner.backbone.config.depths[side], side)

    def _fill(self, folder: Path, passes: Passes) -> JsonObject:
        writers: dict[str, TermWriter] = {}
        unpredicted: set[str] = set()  # the student's terms for which the teacher makes no predictions
        documents_done, progress = 0, passes.student.progress
        for batch in passes.batches():
            documents_done += len(batch.inputs.lengths)
            parts = [(term, part) for term, part in batch_terms(batch).items() if term not in unpredicted]
            parts += batch_states(batch) if self.states else ()
            if not all(term in writers and writers[term].has(part.keys(self.by_row)) for term, part in parts):
                self._write_batch(batch, parts, writers, folder)
                unpredicted |= {term for term, _ in parts} - writers.keys()
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_free_space(folder, size, documents_done, passes.documents)
            if progress is not None:
                progress("running the teacher", documents_done, passes.documents)
        if not writers:
            raise UserError(
                f"distill.store= stores predictions, but distill.teacher={self.origin} has none that can be stored",
                "set distill.store=null",
            )
        return {"terms": {name: writer.close() for name, writer in writers.items()}}

    def _write_batch(
        self, batch: Batch, parts: Sequence[tuple[str, TermBatch]], writers: dict[str, TermWriter], folder: Path
    ) -> None:
        depths = self.learner.backbone.config.depths
        tap = RecordedStates(states=[TapPoint(depth, side) for side, depth in depths.items()]) if self.states else None
        predicted = dict(super().predict(batch.to(self.precision.device), tap).predicted)
        without_targets = sorted(predicted.keys() - batch_terms(batch).keys())
        if without_targets:
            raise UserError(
                f"the teacher's predictions of {without_targets[0]} cannot be stored, because the data lack "
                "the targets of this term",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        for term, part in parts:
            values = predicted.get(term)
            if tap is not None and term not in batch_terms(batch):
                values = Classes(_next_states(tap, self._last_layer(part.target.side), len(part.packed.tokens)))
            if values is not None:
                writer = writers.setdefault(term, TermWriter(folder, len(writers), self.store_format))
                with torch.no_grad(), self.precision.autocast():
                    writer.add(part, part.keys(self.by_row), values)


def _next_states(tap: RecordedStates, point: TapPoint, token_count: int) -> Tensor:
    states = tap.states[point].pop(0) if tap.states[point] else None
    if states is None or len(states) != token_count:
        raise UserError(
            "distill.terms.states: the teacher does not read each text exactly once, so its states cannot be stored",
            "set distill.store=null, so that the teacher runs alongside the student",
        )
    return states


def _same_every_epoch(examples: Examples) -> bool:
    if isinstance(examples, MixedExamples):
        return all(map(_same_every_epoch, examples.members.values()))
    return examples.plan(1) is examples.plan(0)


@dataclass(frozen=True)
class Passes:
    """The examples that a run will read, for which a teacher's outputs must be stored.

    Attributes:
        student: The student's training data.
        metadata: A description of the examples as plain data, which is part of the identity of the stored outputs.
        epochs: Number of complete epochs; 0 if the run ends within the first epoch.
        steps: If `epochs` is 0, the number of steps of the first epoch; otherwise 0.
        documents: Approximate number of documents, for the progress display.
    """

    student: StudentData
    metadata: JsonObject
    epochs: int
    steps: int
    documents: int

    @classmethod
    def from_student(cls, student: StudentData, fixed_examples: bool, seed: int) -> Passes:
        """Derives the examples from a run's data and budgets. Raises UserError if the number of examples is
        unlimited."""
        plan = student.examples.plan(0)
        if fixed_examples and _same_every_epoch(student.examples):
            return cls(student, {"epochs": "all"}, 1, 0, len(plan))
        steps, epochs = student.max_steps or math.inf, student.max_epochs or math.inf
        if math.isinf(steps) and math.isinf(epochs):
            raise UserError(
                "distill.store= cannot store outputs for all examples, because every epoch has different examples, and "
                "neither max_steps nor max_epochs limits their number",
                "set max_steps= or max_epochs=, in addition to another budget or instead of it",
            )
        first_epoch_steps = student.loader.steps_in_epoch(0)
        steps = min(steps, math.ceil(epochs * first_epoch_steps)) if epochs < 1 else steps
        if steps < first_epoch_steps:
            # The examples of the first steps depend on how many a step has, so the sizes are part of the identity.
            metadata = {"seed": seed, "steps": int(steps), **student.sizes}
            return cls(student, metadata, 0, int(steps), round(len(plan) * steps / first_epoch_steps))
        # Complete epochs, until the budget of steps or of epochs is covered.
        epoch_count, steps_covered = 0, 0.0
        while epoch_count < math.ceil(epochs) if math.isinf(steps) else steps_covered < steps and epoch_count < epochs:
            steps_covered += student.loader.steps_in_epoch(epoch_count)
            epoch_count += 1
        return cls(student, {"seed": seed, "epochs": epoch_count}, epoch_count, 0, len(plan) * epoch_count)

    def batches(self) -> Iterator[Batch]:
        """Yields batches of all examples, in the order of their lengths if complete epochs are read."""
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
    longest = int(examples.plan(0).lengths.max())  # a batch holds at least the longest example
    return PackedLoader(examples, 0, None, max(student.forward_tokens, longest), shuffle=False)


# A teacher of which only a file of predictions is available. It provides hard labels, and never runs.


@dataclass(frozen=True)
class FixedLabels(TargetProbabilities):
    """Predictions that consist of hard labels only. labels: (M,) the label of each target."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def probabilities(self, temperature: float = 1.0, first: int = 0, end: int | None = None) -> Tensor:
        raise TypeError("hard labels have no probabilities")

    def best(self) -> Tensor:
        return self.labels


@dataclass(frozen=True)
class _TermLabels:
    """The example with key keys_G[g] (sorted) has the labels from first_G[g] to first_G[g] + count_G[g]."""

    keys_G: np.ndarray
    first_G: np.ndarray
    count_G: np.ndarray
    labels: Tensor


@dataclass(kw_only=True)
class HardLabels(Teacher):
    """A file of predictions used as the teacher. learner: the student's, which makes the same examples from the
    relabeled rows. relabel: replaces the labels of the training data by the predictions, and returns it with metadata
    for the first screen. terms: the labels of each loss term."""

    relabel: Callable[[SplitData], tuple[SplitData, JsonObject]]
    terms: dict[str, _TermLabels] = field(default_factory=dict)

    @property
    def terms_taught(self) -> frozenset[str]:
        return frozenset([self.learner.config.name])

    def prepare(self, student: StudentData) -> JsonObject:
        data, metadata = self.relabel(student.data)
        loader = _sorted_loader(self.learner.examples(data, student.max_length), student)
        batches_by_term: dict[str, list[tuple[np.ndarray, np.ndarray, Tensor]]] = {}
        for batch in loader.epoch_batches():
            for term, part in batch_terms(batch).items():
                labels = part.target.labels
                if labels is not None and term in self.terms_taught:
                    keys_G = part.keys(by_row=False)
                    order_M, count_G = group_by_example(part.owners(len(labels)), len(keys_G))
                    batches_by_term.setdefault(term, []).append((keys_G, count_G, labels[torch.from_numpy(order_M)]))
        self.terms = {term: _concatenate(batches) for term, batches in batches_by_term.items()}
        return metadata

    def predict(self, batch: Batch, states: Tap | None = None) -> TeacherOutputs:
        """Looks up the labels of a batch. Raises UserError if the file has none for an example of the batch."""
        predicted: dict[str, TargetProbabilities] = {}
        for term, part in batch_terms(batch).items():
            stored, gold = self.terms.get(term), part.target.labels
            if stored is None or gold is None:
                continue
            keys_G = part.keys(by_row=False)
            index_G = np.searchsorted(stored.keys_G, keys_G).clip(max=len(stored.keys_G) - 1)
            order_M, count_G = group_by_example(part.owners(len(gold)), len(keys_G))
            if (stored.keys_G[index_G] != keys_G).any() or (stored.count_G[index_G] != count_G).any():
                raise UserError(
                    f"distill.predictions={self.origin} has no labels of {term} for examples that this run reads",
                    "use a teacher instead: distill.teacher=RUN",
                )
            labels = torch.empty_like(gold)
            labels[torch.from_numpy(order_M)] = stored.labels[
                torch.from_numpy(ranges(stored.first_G[index_G], count_G))
            ]
            predicted[term] = FixedLabels(labels.flatten().to(batch.inputs.tokens.device))
        return RecordedOutputs(self.learner, batch, predicted)


def _concatenate(batches: list[tuple[np.ndarray, np.ndarray, Tensor]]) -> _TermLabels:
    keys, counts = (np.concatenate(columns) for columns in list(zip(*batches, strict=True))[:2])
    unique, first_index = np.unique(keys, return_index=True)
    firsts = np.cumsum(counts) - counts
    return _TermLabels(unique, firsts[first_index], counts[first_index], torch.cat([labels for *_, labels in batches]))
