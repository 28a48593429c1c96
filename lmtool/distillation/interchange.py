"""Interchange interventions, and the agreement of a student with its teacher on held-out text, with and without them.

An interchange intervention runs a model on a base text, but after some layer it replaces the hidden states of some
tokens by those of a source text (Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural Networks"; Wu
et al. 2022, "Causal Distillation for Language Models"). Here every text of a batch is a base, and another text of the
same batch is its source. Student and teacher swap the states of the same tokens, after aligned layers. An ordinary
forward over the batch comes first: it provides the states of the source texts, and the layers below an intervention
are not computed again.

Shape letters: N texts of a batch, S swapped tokens, T tokens, H hidden width, M targets of a term (a summand of the
loss).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.distillation.recording import RecordedStates, Teacher, TeacherOutputs, member_batches, record
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.models.heads.predicted import Values
from lmtool.nn.stack import Side, Tap, TapPoint
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed, Target, send


class Site(NamedTuple):
    """The aligned layers of both models after which states are swapped, 0 for the embeddings. side: the side of the
    batch that the stack reads."""

    side: Side
    student: int
    teacher: int

    def point(self, teacher: bool) -> TapPoint:
        """Returns the location in the teacher, or with teacher=False in the student."""
        return TapPoint(self.teacher if teacher else self.student, self.side)


@dataclass(frozen=True)
class Swap:
    """The tokens of a batch whose states are replaced after one layer. to_S, from_S: indices, among the batch's packed
    tokens and on the host, of the replaced tokens and of those whose states replace them."""

    to_S: Tensor
    from_S: Tensor

    def union(self, other: Swap) -> Swap:
        """Combines two swaps that replace different tokens."""
        return Swap(torch.cat([self.to_S, other.to_S]), torch.cat([self.from_S, other.from_S]))


@dataclass(frozen=True)
class Interventions:
    """The interventions of one forward over a batch. swaps: the swapped tokens at each site, by the site's index in the
    list of sites. starts_N: the start of the swapped span in each text: 0 is the first possible position, 1 the last.
    swapped_texts: the number of texts with swapped states."""

    swaps: Mapping[int, Swap]
    starts_N: np.ndarray
    swapped_texts: int


def interventions(batch: Batch, sites: Sequence[Site], proportion: float, seed: int, step: int) -> Interventions:
    """Samples one intervention per text: another text as its source, a site, and a span of consecutive tokens, at the
    same positions of both texts. All choices are a function of seed, step and example numbers. batch: for a mixture,
    that of one member (`member_batches`). proportion: length of the span, as a fraction of the shorter text."""
    host = batch.host
    count = len(host.inputs.lengths)
    draws_N3 = random_streams.uniform(seed, "interchange", step, host.examples.numpy(), 3)
    source_draw_N, start_draw_N, site_draw_N = draws_N3.T
    numbers_N = np.arange(count)
    # A task may use only the encoder of an encoder-decoder.
    reachable = [index for index, site in enumerate(sites) if site.side == "inputs" or host.outputs is not None]
    sources_N = (numbers_N + 1 + (source_draw_N * (count - 1)).astype(np.int64)) % max(count, 1)
    choice_N = (site_draw_N * len(reachable)).astype(np.int64)
    swaps, swapped_texts = {}, 0
    for choice, site_index in enumerate(reachable):
        packed = host.inputs if sites[site_index].side == "inputs" else host.outputs
        assert packed is not None
        # The only text of a batch has no source but itself.
        bases = numbers_N[(choice_N == choice) & (sources_N != numbers_N)]
        swap, text_count = _swap(packed, bases, sources_N[bases], start_draw_N[bases], proportion)
        if text_count:
            swaps[site_index] = swap
            swapped_texts += text_count
    return Interventions(swaps, start_draw_N, swapped_texts)


def _swap(
    packed: Packed, bases: np.ndarray, sources: np.ndarray, start_fractions: np.ndarray, proportion: float
) -> tuple[Swap, int]:
    """start_fractions: 0 is the first possible position, 1 the last. proportion: of the shorter of the two texts."""
    lengths, text_starts = np.array(packed.lengths, dtype=np.int64), np.array(packed.starts, dtype=np.int64)
    shorter = np.minimum(lengths[bases], lengths[sources])
    spans = np.minimum(np.maximum(np.rint(proportion * shorter).astype(np.int64), 1), shorter)
    span_starts = (start_fractions * (shorter - spans + 1)).astype(np.int64)
    # The position of each swapped token within its span: 0, 1, ...
    within = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    to_S, from_S = (np.repeat(text_starts[texts] + span_starts, spans) + within for texts in (bases, sources))
    return Swap(torch.from_numpy(to_S), torch.from_numpy(from_S)), int((spans > 0).sum())


class Swapped(Tap):
    """A tap that replaces the states of base tokens by the states of source tokens.

    Attributes:
        recorded: The states of the ordinary forward of the same model over the same batch.
        swaps: For each batch of `member_batches`, the swapped tokens by tap point.
        dimensions: The range of swapped dimensions of a state, as fractions of its width.
        batch_index: For each stack, the index of its current batch of `member_batches`, in `swaps` and in the recorded
            states. Each run of the stack increases it.
    """

    def __init__(
        self,
        recorded: RecordedStates,
        swaps: Sequence[Mapping[TapPoint, Swap]],
        dimensions: tuple[float, float] = (0.0, 1.0),
    ):
        self.recorded, self.swaps, self.dimensions = recorded, swaps, dimensions
        self.batch_index: dict[Side, int] = {}

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        """Skips the layers below the first swap: the stack starts from the recorded states there."""
        self.batch_index[side] = index = self.batch_index.get(side, -1) + 1
        swapped = self.swaps[index]
        if side == "outputs" and any(point.side == "inputs" for point in swapped):
            return None  # the decoder reads changed states of the encoder
        start_layer = min((point.layer for point in swapped if point.side == side), default=None)
        if start_layer is None:  # nothing is swapped in this stack, so it starts from its last recorded layer
            start_layer = max((point.layer for point in self.recorded.states if point.side == side), default=None)
        return None if start_layer is None else (start_layer, self.recorded.states[TapPoint(start_layer, side)][index])

    def wants(self, point: TapPoint) -> bool:
        return point in self.swaps[self.batch_index[point.side]]

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        index = self.batch_index[point.side]
        swap = self.swaps[index][point]
        to_S, from_S = send(swap.to_S, x_TH.device), send(swap.from_S, x_TH.device)
        rows_SH = self.recorded.states[point][index].index_select(0, from_S)
        width = x_TH.shape[1]
        first = min(round(self.dimensions[0] * width), width - 1)
        last = max(round(self.dimensions[1] * width), first + 1)
        if (first, last) != (0, width):
            base_SH = x_TH.index_select(0, to_S)
            rows_SH = torch.cat([base_SH[:, :first], rows_SH[:, first:last], base_SH[:, last:]], 1)
        return x_TH.index_copy(0, to_S, rows_SH)


def record_interchange_states(depths: Mapping[Side, int], sites: Sequence[Site], teacher: bool) -> RecordedStates:
    """Returns a tap for an ordinary forward of the student or teacher that records the states at the sites and, in an
    encoder-decoder, the encoder's last states, which the decoder reads. depths: the layers of each stack of the
    model."""
    points = {site.point(teacher) for site in sites}
    if len(depths) > 1:
        points.add(TapPoint(depths["inputs"], "inputs"))
    return RecordedStates(points)


def swapping_tap(
    recorded: RecordedStates,
    plans: Sequence[Interventions],
    sites: Sequence[Site],
    teacher: bool,
    dimensions: tuple[float, float] = (0.0, 1.0),
) -> Swapped:
    """Returns the tap that carries out interventions in the student or teacher. recorded: the states of the model's
    ordinary forward over the same batch. plans: the interventions for each batch of `member_batches`. dimensions: the
    range of swapped dimensions of a state, as fractions of its width."""
    swaps: list[dict[TapPoint, Swap]] = []
    for plan in plans:
        swap_by_point: dict[TapPoint, Swap] = {}
        for site_index, swap in plan.swaps.items():
            point = sites[site_index].point(teacher)
            # Several layers of a student may be aligned with the same teacher layer.
            swap_by_point[point] = swap_by_point[point].union(swap) if point in swap_by_point else swap
        swaps.append(swap_by_point)
    return Swapped(recorded, swaps, dimensions)


# Agreement of student and teacher: the fraction of targets for which both predict the same class. Without interventions
# it is called fidelity, with interventions interchange accuracy (Geiger et al. 2022).

REGIONS = 4
"""Number of equal regions of the possible starts of a span; agreement is also reported by the region of the start."""
PROPORTION = 0.3
"""Length of the swapped span as a fraction of the shorter text, as in Wu et al. 2022."""


@dataclass
class _Count:
    same: int = 0
    n: int = 0

    def add(self, same_M: np.ndarray) -> None:
        self.same, self.n = self.same + int(same_M.sum()), self.n + same_M.size

    def fields(self) -> JsonObject:
        return {"value": self.same / self.n if self.n else None, "n": self.n}


@dataclass
class Agreement:
    """Counts of targets for which student and teacher predict the same class: plain, without interventions, or swapped,
    with them. changed: only targets for which the intervention changes the teacher's prediction. cells: by the site and
    the region in which the swapped span begins. texts: the number of texts."""

    plain: _Count = field(default_factory=_Count)
    swapped: _Count = field(default_factory=_Count)
    changed: _Count = field(default_factory=_Count)
    cells: dict[tuple[Site, int], _Count] = field(default_factory=lambda: defaultdict(_Count))
    texts: int = 0

    def fields(self) -> JsonObject:
        """Returns the fields of result.json: `fidelity` (without interventions) and `interchange_accuracy`."""
        cells = [
            {"side": site.side, "student_layer": site.student, "teacher_layer": site.teacher, "region": region + 1}
            | count.fields()
            for (site, region), count in sorted(self.cells.items())
        ]
        interchange = {
            **self.swapped.fields(),
            "changed": self.changed.fields(),
            "texts": self.texts,
            "proportion": PROPORTION,
            "regions": REGIONS,
            "cells": cells,
        }
        return {"fidelity": self.plain.fields(), "interchange_accuracy": interchange}

    def add(self, student: BaseLearner, teacher: Teacher, batch: Batch, sites: Sequence[Site]) -> None:
        """Counts one batch: a forward without interventions, and one with interventions at each site."""

        def predict(tap: Tap) -> dict[str, np.ndarray]:
            return _best_classes(record(student, batch, 0, tap, losses=False))

        student_states = record_interchange_states(student.backbone.config.depths, sites, teacher=False)
        teacher_states = record_interchange_states(teacher.learner.backbone.config.depths, sites, teacher=True)
        student_best, plain_best = predict(student_states), _best_classes(teacher.predict(batch, teacher_states))
        for term in _common_terms(student_best, plain_best):
            self.plain.add(student_best[term] == plain_best[term])
        self.texts += len(batch.inputs.lengths)
        for site in sites:
            plans = [interventions(part, [site], PROPORTION, student.seed, 0) for part in member_batches(batch)]
            if not any(plan.swapped_texts for plan in plans):
                continue
            student_best = predict(swapping_tap(student_states, plans, [site], teacher=False))
            teacher_tap = swapping_tap(teacher_states, plans, [site], teacher=True)
            teacher_best = _best_classes(teacher.predict(batch, teacher_tap))
            for term in _common_terms(student_best, teacher_best):
                same_M = student_best[term] == teacher_best[term]
                regions_M = _regions(batch.host, term, plans, len(same_M))
                self.swapped.add(same_M)
                self.changed.add(same_M[teacher_best[term] != plain_best[term]])
                for region in range(REGIONS):
                    self.cells[site, region].add(same_M[regions_M == region])


def agreement(
    student: BaseLearner,
    teacher: Teacher,
    sites: Sequence[Site],
    batches: Iterable[Batch],
    precision: Precision,
) -> JsonObject:
    """Measures the agreement of a student and its teacher on held-out batches, with a separate forward for each site.
    Returns the fields of result.json: `fidelity` and `interchange_accuracy`; null with a `..._reason` if not
    measurable. precision: the student's."""
    counts = Agreement()
    student.eval()
    with torch.no_grad(), precision.autocast():
        for batch in batches:
            counts.add(student, teacher, batch.to(precision.device), sites)
    if not counts.plain.n:
        return unmeasured("the two models do not predict classes for the same targets")
    if not counts.swapped.n:
        reason = "no batch contained two texts" if sites else "no layers of the two models are aligned"
        return {**counts.fields(), **without_interchange(reason)}
    return counts.fields()


def unmeasured(reason: str) -> JsonObject:
    """Returns the fields of result.json for an agreement that was not measured."""
    return {"fidelity": None, "fidelity_reason": reason, **without_interchange(reason)}


def without_interchange(reason: str) -> JsonObject:
    """Returns the fields of result.json for an interchange accuracy that was not measured."""
    return {"interchange_accuracy": None, "interchange_accuracy_reason": reason}


def _best_classes(outputs: TeacherOutputs) -> dict[str, np.ndarray]:
    """Regression terms are omitted."""
    predicted = {term: target for term, target in outputs.predicted.items() if not isinstance(target, Values)}
    return {term: target.best().cpu().numpy() for term, target in predicted.items()}


def _common_terms(student_best: Mapping[str, np.ndarray], teacher_best: Mapping[str, np.ndarray]) -> list[str]:
    return [
        term
        for term, best_M in student_best.items()
        if term in teacher_best and teacher_best[term].shape == best_M.shape
    ]


def _regions(batch: Batch, term: str, plans: Sequence[Interventions], count: int) -> np.ndarray:
    """-1 if it is not known which text a target belongs to."""
    parts = batch.members if isinstance(batch, MixedBatch) else (("", batch),)
    for (name, part), plan in zip(parts, plans, strict=True):
        for term_of_part, target in part.targets.items():
            if term in (term_of_part, term_of(name, term_of_part)):
                texts_M = _text_indices(target, part, count)
                regions_N = (plan.starts_N * REGIONS).astype(np.int64)
                return np.full(count, -1) if texts_M is None else regions_N[texts_M]
    return np.full(count, -1)


def _text_indices(target: Target, part: Batch, count: int) -> np.ndarray | None:
    """If there are k times as many targets as texts, each text has k consecutive targets; k times as many texts
    (multiple choice), each target has k consecutive texts, of which the first one counts."""
    packed = part.outputs if target.side == "outputs" and part.outputs is not None else part.inputs
    positions = target.at if target.span is None else target.span[:, 0]
    if positions is not None and len(positions) == count:
        return packed.documents[positions].numpy()
    texts = len(packed.lengths)
    if count and texts % count == 0:
        return np.arange(count) * (texts // count)
    return np.arange(count) // (count // texts) if count % texts == 0 else None
