"""Interchange interventions: a forward over base texts with some states from a forward over source texts.

Geiger et al. 2022, "Inducing Causal Structure for Interpretable Neural Networks"; Wu et al. 2022, "Causal Distillation
for Language Models". Every text of a batch is the base of an intervention whose source is another text of the batch;
both models swap the states of the same tokens after aligned layers. The ordinary forward over the batch provides the
sources' states and the layers below an intervention, which are not recomputed.

Shape letters: N texts of a batch, S swapped tokens, T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool import random_streams
from lmtool.distillation.seen import RecordedStates
from lmtool.learners.mixed_examples import MixedBatch
from lmtool.nn.stack import Side, Tap, TapPoint
from lmtool.types import Batch, Packed, send


class Site(NamedTuple):
    """An intervention's location: after which layer of the student, and of the teacher."""

    side: Side
    student: int
    teacher: int

    def place(self, teacher: bool) -> TapPoint:
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


def parts_of(batch: Batch) -> list[Batch]:
    """The batches that a learner reads in turn: the members of a mixture, or the batch itself."""
    return [part for _, part in batch.members] if isinstance(batch, MixedBatch) else [batch]


def interventions(batch: Batch, sites: Sequence[Site], proportion: float, seed: int, step: int) -> Interventions:
    """For each text of a batch (of `parts_of`), samples a source among the others, a site, and a span of consecutive
    tokens at the same positions of both; a function of (seed, step, example) and the texts of the batch. proportion:
    length of the span as a fraction of the shorter text."""
    host = batch.host
    count = len(host.inputs.lengths)
    draws_N3 = random_streams.uniform(seed, "interchange", step, host.examples.numpy(), 3)
    numbers_N = np.arange(count)
    # A task may use only one stack of a model with two.
    reachable = [number for number, site in enumerate(sites) if site.side == "inputs" or host.outputs is not None]
    sources_N = (numbers_N + 1 + (draws_N3[:, 0] * (count - 1)).astype(np.int64)) % max(count, 1)
    site_N = (draws_N3[:, 2] * len(reachable)).astype(np.int64)
    swaps, changed = {}, 0
    for place, number in enumerate(reachable):
        packed = host.inputs if sites[number].side == "inputs" else host.outputs
        assert packed is not None
        bases = numbers_N[(site_N == place) & (sources_N != numbers_N)]
        swap, texts = _swap(packed, bases, sources_N[bases], draws_N3[bases, 1], proportion)
        if texts:
            swaps[number] = swap
            changed += texts
    return Interventions(swaps, draws_N3[:, 1], changed)


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
    """Replaces states in a forward by those of the sources. retained: states of the ordinary forward over the same
    batch. swaps: by location, for each batch of `parts_of`. dimensions: the swapped part of each state, as fractions of
    its width."""

    def __init__(
        self,
        retained: RecordedStates,
        swaps: Sequence[Mapping[TapPoint, Swap]],
        dimensions: tuple[float, float] = (0.0, 1.0),
    ):
        self.kept, self.swaps, self.dimensions = retained, swaps, dimensions
        self.part: dict[Side, int] = {}

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        """Layers below the first swap return their recorded states."""
        self.part[side] = part = self.part.get(side, -1) + 1
        swapped = self.swaps[part]
        if side == "outputs" and any(place.side == "inputs" for place in swapped):
            return None  # the decoder reads changed states of the encoder
        first = min((place.layer for place in swapped if place.side == side), default=None)
        if first is None:
            first = max((place.layer for place in self.kept.states if place.side == side), default=None)
        return None if first is None else (first, self.kept.states[TapPoint(first, side)][part])

    def wants(self, place: TapPoint) -> bool:
        return place in self.swaps[self.part[place.side]]

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        part = self.part[place.side]
        swap = self.swaps[part][place]
        to_S, from_S = send(swap.to_S, x_TH.device), send(swap.from_S, x_TH.device)
        rows_SH = self.kept.states[place][part].index_select(0, from_S)
        first, last = _span(self.dimensions, x_TH.shape[1])
        if (first, last) != (0, x_TH.shape[1]):
            own_SH = x_TH.index_select(0, to_S)
            rows_SH = torch.cat([own_SH[:, :first], rows_SH[:, first:last], own_SH[:, last:]], 1)
        return x_TH.index_copy(0, to_S, rows_SH)


def _span(shares: tuple[float, float], width: int) -> tuple[int, int]:
    """The first and the exclusive last dimension of a part of the width given as two fractions, at least one
    dimension."""
    first = min(round(shares[0] * width), width - 1)
    return first, max(round(shares[1] * width), first + 1)


def record_interchange_states(depths: Mapping[Side, int], sites: Sequence[Site], teacher: bool) -> RecordedStates:
    """Records the states needed for interventions at these sites; of an encoder-decoder also those that its decoder
    reads. depths: of the model, by side."""
    places = {site.place(teacher) for site in sites}
    if len(depths) > 1:
        places.add(TapPoint(depths["inputs"], "inputs"))
    return RecordedStates(places)


def swapped(
    retained: RecordedStates,
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
            place = sites[number].place(teacher)
            # Several layers of a student may be aligned with the same teacher layer.
            at[place] = at[place].alongside(swap) if place in at else swap
        swaps.append(at)
    return Swapped(retained, swaps, dimensions)
