"""Agreement of a student with its teacher on held-out text: plain, and under interchange interventions.

Interchange accuracy (Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural Networks"): the fraction
of counterfactual forwards in which both predict the same, with the states of some tokens swapped for those of another
text after aligned layers.

Shape letters: M targets of a term, N texts of a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmtool.distillation.interchange import (
    Interventions,
    Site,
    interventions,
    parts_of,
    record_interchange_states,
    swapped,
)
from lmtool.distillation.seen import RecordedOutputs, Teacher, see
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedBatch, term_of
from lmtool.models.heads.predicted import Values
from lmtool.nn.stack import Tap
from lmtool.training.precision import Precision
from lmtool.types import Batch, Target

REGIONS = 4
"""Parts of a text by which agreement is reported: the part in which the swapped span begins."""
PROPORTION = 0.3
"""Length of the span as a fraction of the shorter text, as in the paper."""


@dataclass
class _Tally:
    """Counts of targets (`n`) and of agreements (`same`); `changed` and `changed_same` count only targets for which the
    swap changes the teacher's prediction."""

    same: int = 0
    n: int = 0
    changed_same: int = 0
    changed: int = 0

    def add(self, same_M: np.ndarray, changed_M: np.ndarray | None = None) -> None:
        self.same, self.n = self.same + int(same_M.sum()), self.n + same_M.size
        if changed_M is not None:
            self.changed_same += int(same_M[changed_M].sum())
            self.changed += int(changed_M.sum())

    def words(self) -> dict[str, Any]:
        return {"value": self.same / self.n if self.n else None, "n": self.n}

    def words_of_changed(self) -> dict[str, Any]:
        return {"value": self.changed_same / self.changed if self.changed else None, "n": self.changed}


@dataclass
class Agreement:
    """Agreement counts without interventions, with them, and with them by (site, region). texts: number of texts."""

    plain: _Tally = field(default_factory=_Tally)
    swapped: _Tally = field(default_factory=_Tally)
    cells: dict[tuple[Site, int], _Tally] = field(default_factory=lambda: defaultdict(_Tally))
    texts: int = 0

    def words(self) -> dict[str, Any]:
        """The fields of result.json: `fidelity`, agreement without interventions, and `interchange_accuracy`."""
        cells = [
            {"side": site.side, "student_layer": site.student, "teacher_layer": site.teacher, "region": region + 1}
            | tally.words()
            for (site, region), tally in sorted(self.cells.items())
        ]
        interchange = {
            **self.swapped.words(),
            "changed": self.swapped.words_of_changed(),
            "texts": self.texts,
            "proportion": PROPORTION,
            "regions": REGIONS,
            "cells": cells,
        }
        return {"fidelity": self.plain.words(), "interchange_accuracy": interchange}


def agreement(
    student: BaseLearner,
    teacher: Teacher,
    sites: Sequence[Site],
    batches: Iterable[Batch],
    precision: Precision,
) -> dict[str, Any]:
    """Measures `fidelity` and `interchange_accuracy` on held-out batches; null with a `..._reason` if not measurable.
    sites: interventions, each in a separate forward. precision: the student's."""
    counted = Agreement()
    student.eval()
    with torch.no_grad(), precision.autocast():
        for batch in batches:
            _count(counted, student, teacher, batch.to(precision.device), sites)
    if not counted.plain.n:
        return unknown("the two models do not predict classes of the same targets")
    if not counted.swapped.n:
        reason = "no batch contained two texts" if sites else "no layers of the two are aligned"
        return {**counted.words(), **without_interchange(reason)}
    return counted.words()


def unknown(reason: str) -> dict[str, Any]:
    """The fields of result.json without a measurement."""
    return {"fidelity": None, "fidelity_reason": reason, **without_interchange(reason)}


def without_interchange(reason: str) -> dict[str, Any]:
    """The fields of result.json for an interchange accuracy that was not measured."""
    return {"interchange_accuracy": None, "interchange_accuracy_reason": reason}


def _count(counted: Agreement, student: BaseLearner, teacher: Teacher, batch: Batch, sites: Sequence[Site]) -> None:
    """Counts one batch: plain forwards, and one with each site swapped."""

    def of_student(tap: Tap) -> dict[str, np.ndarray]:
        return _best(see(student, batch, 0, tap, losses=False))

    student_states = record_interchange_states(student.backbone.config.depths, sites, teacher=False)
    teacher_states = record_interchange_states(teacher.learner.backbone.config.depths, sites, teacher=True)
    of_model, before = of_student(student_states), _best(teacher.see(batch, teacher_states))
    for term in _shared(of_model, before):
        counted.plain.add(of_model[term] == before[term])
    counted.texts += len(batch.inputs.lengths)
    for site in sites:
        plans = [interventions(part, [site], PROPORTION, student.seed, 0) for part in parts_of(batch)]
        if not any(plan.changed for plan in plans):
            continue
        of_model = of_student(swapped(student_states, plans, [site], teacher=False))
        of_teacher = _best(teacher.see(batch, swapped(teacher_states, plans, [site], teacher=True)))
        for term in _shared(of_model, of_teacher):
            same_M, changed_M = of_model[term] == of_teacher[term], of_teacher[term] != before[term]
            regions_M = _regions(batch.host, term, plans, len(same_M))
            counted.swapped.add(same_M, changed_M)
            for region in range(REGIONS):
                in_region_M = regions_M == region
                counted.cells[site, region].add(same_M[in_region_M], changed_M[in_region_M])


def _best(seen: RecordedOutputs) -> dict[str, np.ndarray]:
    """By term, the best classes, (M,); terms over values are left out."""
    predicted = {term: prediction for term, prediction in seen.predicted.items() if not isinstance(prediction, Values)}
    return {term: prediction.best().cpu().numpy() for term, prediction in predicted.items()}


def _shared(of_model: Mapping[str, np.ndarray], of_teacher: Mapping[str, np.ndarray]) -> list[str]:
    return [term for term, best_M in of_model.items() if term in of_teacher and of_teacher[term].shape == best_M.shape]


def _regions(batch: Batch, term: str, plans: Sequence[Interventions], count: int) -> np.ndarray:
    """(M,) the region of the text in which the span begins, for each target of a term; -1 without a text."""
    parts = batch.members if isinstance(batch, MixedBatch) else (("", batch),)
    for (name, part), plan in zip(parts, plans, strict=True):
        for own_term, target in part.targets.items():
            if own_term == term or term_of(name, own_term) == term:
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
