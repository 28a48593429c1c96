"""Interchange interventions: a forward over base texts with some states from a forward over source texts, and the
agreement of a student with its teacher on held-out text, with and without interventions.

Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural Networks"; Wu et al. 2022, "Causal Distillation
for Language Models". Every text of a batch is the base of an intervention whose source is another text of the batch;
both models swap the states of the same tokens after aligned layers. The ordinary forward over the batch provides the
sources' states and the layers below an intervention, which are not recomputed.

Shape letters: N texts of a batch, S swapped tokens, T tokens, H hidden width, M targets of a term.
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
from lmtool.config.saved import JsonObject
from lmtool.distillation.recording import RecordedStates, Teacher, TeacherOutputs, parts_of, record
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.models.heads.predicted import Values
from lmtool.nn.stack import Side, Tap, TapPoint
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed, Target, send


class Site(NamedTuple):
    """An intervention's location: after which layer of the student, and of the teacher."""

    side: Side
    student: int
    teacher: int

    def point(self, teacher: bool) -> TapPoint:
        """The location in one of the models."""
        return TapPoint(self.teacher if teacher else self.student, self.side)


@dataclass(frozen=True)
class Swap:
    """to_S, from_S: flat indices, on the host, of the tokens whose states are replaced, and of their sources."""

    to_S: Tensor
    from_S: Tensor

    def alongside(self, other: Swap) -> Swap:
        """The union of two swaps of distinct tokens."""
        return Swap(torch.cat([self.to_S, other.to_S]), torch.cat([self.from_S, other.from_S]))


@dataclass(frozen=True)
class Interventions:
    """The interventions of one forward. swaps: by site index. starts_N: the span's start in each text, as a fraction of
    its possible positions. changed: number of texts with swapped states."""

    swaps: Mapping[int, Swap]
    starts_N: np.ndarray
    changed: int


def interventions(batch: Batch, sites: Sequence[Site], proportion: float, seed: int, step: int) -> Interventions:
    """For each text of a batch (of `parts_of`), samples a source among the others, a site, and a span of consecutive
    tokens at the same positions of both; a function of (seed, step, example) and the texts of the batch. proportion:
    length of the span as a fraction of the shorter text."""
    host = batch.host
    count = len(host.inputs.lengths)
    uniform_N3 = random_streams.uniform(seed, "interchange", step, host.examples.numpy(), 3)
    numbers_N = np.arange(count)
    # A task may use only one stack of a model with two.
    reachable = [number for number, site in enumerate(sites) if site.side == "inputs" or host.outputs is not None]
    sources_N = (numbers_N + 1 + (uniform_N3[:, 0] * (count - 1)).astype(np.int64)) % max(count, 1)
    site_N = (uniform_N3[:, 2] * len(reachable)).astype(np.int64)
    swaps, changed = {}, 0
    for index, number in enumerate(reachable):
        packed = host.inputs if sites[number].side == "inputs" else host.outputs
        assert packed is not None
        bases = numbers_N[(site_N == index) & (sources_N != numbers_N)]
        swap, texts = _swap(packed, bases, sources_N[bases], uniform_N3[bases, 1], proportion)
        if texts:
            swaps[number] = swap
            changed += texts
    return Interventions(swaps, uniform_N3[:, 1], changed)


def _swap(
    packed: Packed, bases: np.ndarray, sources: np.ndarray, starts: np.ndarray, proportion: float
) -> tuple[Swap, int]:
    """The tokens of a span in each base and source, and the number of texts with any. starts: of the spans, as
    fractions."""
    lengths, firsts = np.array(packed.lengths, dtype=np.int64), np.array(packed.starts, dtype=np.int64)
    shorter = np.minimum(lengths[bases], lengths[sources])
    spans = np.minimum(np.maximum(np.rint(proportion * shorter).astype(np.int64), 1), shorter)
    first = (starts * (shorter - spans + 1)).astype(np.int64)
    # 0, 1, ... in each span.
    within = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    to_S, from_S = (np.repeat(firsts[texts] + first, spans) + within for texts in (bases, sources))
    return Swap(torch.from_numpy(to_S), torch.from_numpy(from_S)), int((spans > 0).sum())


class Swapped(Tap):
    """Replaces states in a forward by those of the sources. recorded: states of the ordinary forward over the same
    batch. swaps: by location, for each batch of `parts_of`. dimensions: the swapped part of each state, as fractions of
    its width."""

    def __init__(
        self,
        recorded: RecordedStates,
        swaps: Sequence[Mapping[TapPoint, Swap]],
        dimensions: tuple[float, float] = (0.0, 1.0),
    ):
        self.recorded, self.swaps, self.dimensions = recorded, swaps, dimensions
        self.part: dict[Side, int] = {}

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        """Layers below the first swap return their recorded states."""
        self.part[side] = part = self.part.get(side, -1) + 1
        swapped = self.swaps[part]
        if side == "outputs" and any(point.side == "inputs" for point in swapped):
            return None  # the decoder reads changed states of the encoder
        first = min((point.layer for point in swapped if point.side == side), default=None)
        if first is None:
            first = max((point.layer for point in self.recorded.states if point.side == side), default=None)
        return None if first is None else (first, self.recorded.states[TapPoint(first, side)][part])

    def wants(self, point: TapPoint) -> bool:
        return point in self.swaps[self.part[point.side]]

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        part = self.part[point.side]
        swap = self.swaps[part][point]
        to_S, from_S = send(swap.to_S, x_TH.device), send(swap.from_S, x_TH.device)
        rows_SH = self.recorded.states[point][part].index_select(0, from_S)
        first, last = _span(self.dimensions, x_TH.shape[1])
        if (first, last) != (0, x_TH.shape[1]):
            base_SH = x_TH.index_select(0, to_S)
            rows_SH = torch.cat([base_SH[:, :first], rows_SH[:, first:last], base_SH[:, last:]], 1)
        return x_TH.index_copy(0, to_S, rows_SH)


def _span(fractions: tuple[float, float], width: int) -> tuple[int, int]:
    """The first and the exclusive last dimension of a part of the width, at least one dimension."""
    first = min(round(fractions[0] * width), width - 1)
    return first, max(round(fractions[1] * width), first + 1)


def record_interchange_states(depths: Mapping[Side, int], sites: Sequence[Site], teacher: bool) -> RecordedStates:
    """Records the states needed for interventions at these sites, and in an encoder-decoder those that the decoder
    reads. depths: of the model, by side."""
    points = {site.point(teacher) for site in sites}
    if len(depths) > 1:
        points.add(TapPoint(depths["inputs"], "inputs"))
    return RecordedStates(points)


def swapped(
    recorded: RecordedStates,
    plans: Sequence[Interventions],
    sites: Sequence[Site],
    teacher: bool,
    dimensions: tuple[float, float] = (0.0, 1.0),
) -> Swapped:
    """The tap of one of the models. plans: for each batch of `parts_of`."""
    swaps: list[dict[TapPoint, Swap]] = []
    for plan in plans:
        at: dict[TapPoint, Swap] = {}
        for number, swap in plan.swaps.items():
            point = sites[number].point(teacher)
            # Several layers of a student may be aligned with the same teacher layer.
            at[point] = at[point].alongside(swap) if point in at else swap
        swaps.append(at)
    return Swapped(recorded, swaps, dimensions)


# Agreement. Interchange accuracy (Geiger et al. 2022): the fraction of counterfactual forwards in which student and
# teacher predict the same, with the states of some tokens swapped for those of another text after aligned layers.

REGIONS = 4
"""Parts of a text by which agreement is reported: the part in which the swapped span begins."""
PROPORTION = 0.3
"""Length of the span as a fraction of the shorter text, as in the paper."""


@dataclass
class _Count:
    """The number of targets (`n`) for which both models predict the `same`."""

    same: int = 0
    n: int = 0

    def add(self, same_M: np.ndarray) -> None:
        self.same, self.n = self.same + int(same_M.sum()), self.n + same_M.size

    def fields(self) -> JsonObject:
        return {"value": self.same / self.n if self.n else None, "n": self.n}


@dataclass
class Agreement:
    """Agreement without interventions, with them, with those that change the teacher's prediction, and by (site,
    region). texts: number of texts."""

    plain: _Count = field(default_factory=_Count)
    swapped: _Count = field(default_factory=_Count)
    changed: _Count = field(default_factory=_Count)
    cells: dict[tuple[Site, int], _Count] = field(default_factory=lambda: defaultdict(_Count))
    texts: int = 0

    def fields(self) -> JsonObject:
        """The fields of result.json: `fidelity`, agreement without interventions, and `interchange_accuracy`."""
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
        """Counts one batch: plain forwards, and one with each site swapped."""

        def predict(tap: Tap) -> dict[str, np.ndarray]:
            return _best(record(student, batch, 0, tap, losses=False))

        student_states = record_interchange_states(student.backbone.config.depths, sites, teacher=False)
        teacher_states = record_interchange_states(teacher.learner.backbone.config.depths, sites, teacher=True)
        of_student, plain = predict(student_states), _best(teacher.predict(batch, teacher_states))
        for term in _shared(of_student, plain):
            self.plain.add(of_student[term] == plain[term])
        self.texts += len(batch.inputs.lengths)
        for site in sites:
            plans = [interventions(part, [site], PROPORTION, student.seed, 0) for part in parts_of(batch)]
            if not any(plan.changed for plan in plans):
                continue
            of_student = predict(swapped(student_states, plans, [site], teacher=False))
            of_teacher = _best(teacher.predict(batch, swapped(teacher_states, plans, [site], teacher=True)))
            for term in _shared(of_student, of_teacher):
                same_M = of_student[term] == of_teacher[term]
                regions_M = _regions(batch.host, term, plans, len(same_M))
                self.swapped.add(same_M)
                self.changed.add(same_M[of_teacher[term] != plain[term]])
                for region in range(REGIONS):
                    self.cells[site, region].add(same_M[regions_M == region])


def agreement(
    student: BaseLearner,
    teacher: Teacher,
    sites: Sequence[Site],
    batches: Iterable[Batch],
    precision: Precision,
) -> JsonObject:
    """Measures `fidelity` and `interchange_accuracy` on held-out batches; null with a `..._reason` if not measurable.
    sites: interventions, each in a separate forward. precision: the student's."""
    counts = Agreement()
    student.eval()
    with torch.no_grad(), precision.autocast():
        for batch in batches:
            counts.add(student, teacher, batch.to(precision.device), sites)
    if not counts.plain.n:
        return unknown("the two models do not predict classes of the same targets")
    if not counts.swapped.n:
        reason = "no batch contained two texts" if sites else "no layers of the two are aligned"
        return {**counts.fields(), **without_interchange(reason)}
    return counts.fields()


def unknown(reason: str) -> JsonObject:
    """The fields of result.json without a measurement."""
    return {"fidelity": None, "fidelity_reason": reason, **without_interchange(reason)}


def without_interchange(reason: str) -> JsonObject:
    """The fields of result.json for an interchange accuracy that was not measured."""
    return {"interchange_accuracy": None, "interchange_accuracy_reason": reason}


def _best(outputs: TeacherOutputs) -> dict[str, np.ndarray]:
    """By term, the best classes, (M,); terms over values are left out."""
    predicted = {term: target for term, target in outputs.predicted.items() if not isinstance(target, Values)}
    return {term: target.best().cpu().numpy() for term, target in predicted.items()}


def _shared(of_student: Mapping[str, np.ndarray], of_teacher: Mapping[str, np.ndarray]) -> list[str]:
    return [
        term for term, best_M in of_student.items() if term in of_teacher and of_teacher[term].shape == best_M.shape
    ]


def _regions(batch: Batch, term: str, plans: Sequence[Interventions], count: int) -> np.ndarray:
    """(M,) the region of the text in which the span begins, for each target of a term; -1 without a text."""
    parts = batch.members if isinstance(batch, MixedBatch) else (("", batch),)
    for (name, part), plan in zip(parts, plans, strict=True):
        for term_of_part, target in part.targets.items():
            if term in (term_of_part, term_of(name, term_of_part)):
                texts_M = _texts(target, part, count)
                regions_N = (plan.starts_N * REGIONS).astype(np.int64)
                return np.full(count, -1) if texts_M is None else regions_N[texts_M]
    return np.full(count, -1)


def _texts(target: Target, part: Batch, count: int) -> np.ndarray | None:
    """(M,) the text of each target. Targets without positions are consecutive per text, or shared by several texts."""
    packed = part.outputs if target.side == "outputs" and part.outputs is not None else part.inputs
    at = target.at if target.span is None else target.span[:, 0]
    if at is not None and len(at) == count:
        return packed.documents[at].numpy()
    texts = len(packed.lengths)
    if count and texts % count == 0:
        return np.arange(count) * (texts // count)
    return np.arange(count) // (count // texts) if count % texts == 0 else None
