"""A teacher with stored predictions, which are read from disk instead of running its network.

One pass of the teacher over the data serves every run with the same data: students of other sizes, other term weights,
other learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtool.data.examples import Examples
from lmtool.data.loader import PackedLoader
from lmtool.distillation.seen import RecordedOutputs, RecordedStates, StudentData, Teacher
from lmtool.distillation.store.folder import Opened, Shelf, open_or_make, require_free_space
from lmtool.distillation.store.outputs import (
    Format,
    TermBatch,
    TermReader,
    TermWriter,
    batch_states,
    batch_terms,
    require_rows,
)
from lmtool.errors import UserError
from lmtool.learners.mixed_examples import MixedExamples, examples_of
from lmtool.models.heads.predicted import Classes, TargetProbabilities, cut
from lmtool.nn.configs import Side
from lmtool.nn.stack import Tap, TapPoint
from lmtool.types import Batch


@dataclass(kw_only=True)
class StoredTeacher(Teacher):
    """of: the identity of its outputs, as plain data, except for the data that is read. states: whether to store the
    last layers' states before the final norm. fixed: whether every epoch has the same examples. seed: of the run.
    tokenizers: the teacher's and the student's, for the first screen: if these differ, it tokenizes the student's table
    itself, and predicts by row."""

    shelf: Shelf
    layout: Format
    of: Mapping[str, Any]
    fixed: bool
    seed: int
    tokenizers: Mapping[str, str]
    states: bool = False
    terms: dict[str, TermReader] = field(default_factory=dict)

    def begin(self, reading: StudentData) -> dict[str, Any]:
        if self.by_row:
            length = min(reading.max_length, self.longest or reading.max_length)
            examples = examples_of(self.learner, reading.data, length)
            require_rows(reading.examples.batch(reading.examples.plan(0).rows[:1], np.arange(1), 0))
            reading = replace(reading, examples=examples)
        passes = Passes.of(reading, self.fixed, self.seed)
        retained = {
            "dtype": self.layout.dtype,
            "top_k": self.layout.top_k,
            "temperatures": list(self.layout.temperatures),
        }
        opened = open_or_make(
            self.shelf, {**self.of, **retained, "read": passes.metadata}, lambda folder: self._fill(folder, passes),
            reading.progress,
        )  # fmt: skip
        self._read(opened)
        stored = max(metadata["examples"] for metadata in opened.metadata["terms"].values())
        return {**opened.screen_metadata(stored_examples=stored), **self.tokenizers}

    @property
    def by_row(self) -> bool:
        """Whether its examples are identified by row."""
        return not self.reads_batches

    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        """UserError if an example of the batch is missing."""
        device = batch.inputs.tokens.device
        held = {term: part for term, part in batch_terms(batch).items() if term in self.terms}
        predicted = {term: self._kept(term, part, device) for term, part in held.items()}
        for name, part in batch_states(batch) if self.states and states is not None else ():
            point = self._last(part.target.side)
            if states is not None and states.wants(point):
                retained = self._kept(name, part, device)
                assert isinstance(retained, Classes)
                states(point, retained.logits_MC.float())
        return RecordedOutputs(self.learner, batch, predicted)

    def _kept(self, term: str, held: TermBatch, device: torch.device) -> TargetProbabilities:
        retained = self.terms[term].of(held, held.keys(self.by_row), device)
        if retained is None:
            raise UserError(
                f"the store of the teacher's outputs lacks examples of {term} that this run reads",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        return retained

    def _last(self, side: Side) -> TapPoint:
        """The last layer of the stack that reads a side."""
        return TapPoint(self.learner.backbone.config.depths[side], side)

    def _read(self, opened: Opened) -> None:
        terms = opened.metadata["terms"]
        self.terms = {name: TermReader(opened.folder, metadata, self.layout) for name, metadata in terms.items()}

    def _fill(self, folder: Path, passes: Passes) -> dict[str, Any]:
        """Writes the teacher's predictions for all examples."""
        writers: dict[str, TermWriter] = {}
        unpredicted: set[str] = set()  # terms that it does not predict
        done = 0
        for batch in passes.batches():
            done += len(batch.inputs.lengths)
            held = [(term, part) for term, part in batch_terms(batch).items() if term not in unpredicted]
            held += batch_states(batch) if self.states else ()
            if not all(term in writers and writers[term].has(part.keys(self.by_row)) for term, part in held):
                self._add(batch, held, writers, folder)
                unpredicted |= {term for term, _ in held} - writers.keys()
                size = sum(file.stat().st_size for file in folder.iterdir())
                require_free_space(folder, size, done, passes.documents)
            if passes.reading.progress is not None:
                passes.reading.progress("asking the teacher", done, passes.documents)
        if not writers:
            raise UserError(
                f"distill.teacher={self.origin} predicts nothing that can be stored", "set distill.store=null"
            )
        return {"terms": {name: writer.close() for name, writer in writers.items()}}

    def _add(
        self, batch: Batch, held: Sequence[tuple[str, TermBatch]], writers: dict[str, TermWriter], folder: Path
    ) -> None:
        depths = self.learner.backbone.config.depths
        tap = RecordedStates(states=[TapPoint(depth, side) for side, depth in depths.items()]) if self.states else None
        predicted = dict(super().see(batch.to(self.precision.device), tap).predicted)
        loose = sorted(predicted.keys() - batch_terms(batch).keys())
        if loose:
            raise UserError(
                f"the teacher's predictions of {loose[0]} have no targets in the data to index them by",
                "set distill.store=null, so that the teacher runs alongside the student",
            )
        for term, part in held:
            values = predicted.get(term)
            if tap is not None and term not in batch_terms(batch):
                values = Classes(_next_states(tap, self._last(part.target.side), len(part.packed.tokens)))
            if values is not None:
                writer = writers.setdefault(term, TermWriter(folder, len(writers), self.layout))
                with torch.no_grad(), self.precision.autocast():
                    writer.add(part, part.keys(self.by_row), values)


def _next_states(tap: RecordedStates, point: TapPoint, tokens: int) -> torch.Tensor:
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
    """The examples that a run reads. metadata: the same as plain data. epochs: complete epochs; 0: the first steps of
    one, up to `steps`. documents: approximate number, for progress."""

    reading: StudentData
    metadata: dict[str, Any]
    epochs: int
    steps: int
    documents: int

    @classmethod
    def of(cls, reading: StudentData, fixed: bool, seed: int) -> Passes:
        """UserError if no budget determines how much is read."""
        plan = reading.examples.plan(0)
        if fixed and _same_every_epoch(reading.examples):
            return cls(reading, {"epochs": "all"}, 1, 0, len(plan))
        steps, epochs = reading.max_steps or math.inf, reading.max_epochs or math.inf
        if math.isinf(steps) and math.isinf(epochs):
            raise UserError(
                "distill.store= needs to know how much is read: every epoch has different examples",
                "set max_steps= or max_epochs=, in addition to another budget or instead of it",
            )
        in_epoch = reading.loader.steps_in_epoch(0)
        steps = min(steps, math.ceil(epochs * in_epoch)) if epochs < 1 else steps
        if steps < in_epoch:
            metadata = {"seed": seed, "steps": int(steps), **reading.sizes}
            return cls(reading, metadata, 0, int(steps), round(len(plan) * steps / in_epoch))
        whole, read = 0, 0.0
        while whole < math.ceil(epochs) if math.isinf(steps) else read < steps and whole < epochs:
            read += reading.loader.steps_in_epoch(whole)
            whole += 1
        return cls(reading, {"seed": seed, "epochs": whole}, whole, 0, len(plan) * whole)

    def batches(self) -> Iterator[Batch]:
        """All examples; sorted by length if complete epochs are read."""
        examples, tokens = self.reading.examples, self.reading.tokens
        if not self.epochs:
            for step in islice(self.reading.loader.steps(None), self.steps):
                yield from step.batches
            return
        if isinstance(examples, MixedExamples) and self.metadata["epochs"] == "all":
            examples = examples.complete()
        longest = int(examples.plan(0).lengths.max())
        loader = PackedLoader(examples, 0, None, max(tokens, longest), shuffle=False)
        for epoch in range(self.epochs):
            yield from loader.epoch_batches(epoch)


# A teacher with predictions over a vocabulary truncated to its most probable words.


@dataclass(kw_only=True)
class CutTeacher(Teacher):
    """top_k: words retained of a vocabulary. temperatures: at which they are learned."""

    top_k: int
    temperatures: tuple[float, ...]

    def see(self, batch: Batch, states: Tap | None = None) -> RecordedOutputs:
        seen = super().see(batch, states)
        with self.precision.autocast():
            predicted = {term: cut(each, self.top_k, self.temperatures) for term, each in seen.predicted.items()}
        return replace(seen, predicted=predicted)
