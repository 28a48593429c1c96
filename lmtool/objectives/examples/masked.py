"""Masked and permuted windows of text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool.data.examples import Plan, SplitData, planned
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, text_format
from lmtool.data.loader import segments
from lmtool.errors import UserError
from lmtool.objectives.configs import MaskingConfig
from lmtool.objectives.corruption.masking import Masked, MaskedSpans, Vocabulary, mask_spans, mask_tokens
from lmtool.objectives.corruption.permutation import Permuted, permute
from lmtool.objectives.examples.windows import (
    WINDOW,
    Stream,
    drawn_windows,
    numbers_of,
    plan_metadata,
    room_for,
    some,
    windows,
)
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Packed, Target

# How an objective masks assembled examples, and what is predicted there.
#
# Shape letters: T tokens of a batch, N examples in it, M masked places.


class TokenMasks:
    """Masks over single tokens or words; the term `mlm` predicts every masked place.

    config: says how many, and what stands in their place.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.config, self.vocabulary = config, vocabulary

    def masked(self, whole: PackedArrays, examples_N: np.ndarray, seed: int, epoch: int) -> Masked:
        """The assembled examples with masks, which are keyed by (seed, epoch, example, position)."""
        numbers_N = np.asarray(examples_N)
        return mask_tokens(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def packed(self, whole: PackedArrays, masked: Masked) -> Packed:
        """What the model reads."""
        return whole.packed(masked.tokens)

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        """By term, what is predicted of the examples."""
        return {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class SpanMasks(TokenMasks):
    """Masks over runs of words. The term `sbo`, of a configuration with the boundary objective, predicts the places of
    the spans whose neighbours are text, each with the flat indices of these neighbours."""

    def masked(self, whole: PackedArrays, examples_N: np.ndarray, seed: int, epoch: int) -> MaskedSpans:
        numbers_N = np.asarray(examples_N)
        return mask_spans(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        if self.config.boundary:
            assert isinstance(masked, MaskedSpans)
            boundaries = masked.spans[masked.span_of] + np.array([-1, 1])
            within = masked.at - boundaries[:, 0] - 1
            kept = masked.bordered[masked.span_of] & (within < self.config.boundary_targets)
            labels, at, span = (torch.from_numpy(values[kept]) for values in (masked.labels, masked.at, boundaries))
            targets["sbo"] = Target(labels, at=at, span=span)
        return targets


class Permutations(TokenMasks):
    """Nothing is hidden: the column "rank" says which tokens see which, and the term `plm` predicts some of them."""

    def masked(self, whole: PackedArrays, examples_N: np.ndarray, seed: int, epoch: int) -> Permuted:
        numbers_N = np.asarray(examples_N)
        return permute(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def packed(self, whole: PackedArrays, masked: Masked) -> Packed:
        assert isinstance(masked, Permuted)
        packed = whole.packed()
        return replace(packed, columns={**packed.columns, "rank": torch.from_numpy(masked.ranks)})

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        return {"plm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


# Masked windows of text, in the format of the backbone.
#
# Shape letters: N examples of a batch, T their tokens, M masked places.


def masked_windows(
    stream: Stream, size: int, joined: bool, short: float, seed: int, epoch: int, special_count: int
) -> Plan:
    """Windows as of `drawn_windows`; as of `windows` where none is short."""
    rows = drawn_windows(stream, size, joined, short, seed, epoch) if short else windows(stream, size, joined)
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


class MaskedWindows:
    """Masked language modelling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows of one running stream, with the separator after each document (RoBERTa's full sentences);
    separate: of each document by itself. Where some are shorter by chance, those are drawn anew each epoch.
    """

    def __init__(
        self, config: MaskingConfig | PlmConfig, tokenizer: Tokenizer, format_name: str, data: SplitData,
        max_length: int, seed: int, masks: type[TokenMasks] = TokenMasks,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, data.text, data.split, seed
        self.masks = masks(config, Vocabulary.of(tokenizer))
        self.template = FormatTemplate.of(text_format(format_name, tokenizer), 1)
        joined = data.documents == "joined"
        self.stream = Stream.of(self.store, tokenizer.role("sep") if joined else None)
        self.room, self.joined = room_for(max_length, self.template.special_count, 1), joined
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        short = self.config.short_window_probability
        drawn = self.config.drawn_epoch(epoch) if short else 0
        if drawn not in self._plans:
            plan = planned(
                masked_windows, self.stream, self.room, self.joined, short, self.seed, drawn,
                self.template.special_count,
            )  # fmt: skip
            # The epoch before and the one ahead: a prefetching loader looks over the border.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: some(plan, self.split)}
        return self._plans[drawn]

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """The windows as they are before masking."""
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])

    def masked(self, whole: PackedArrays, examples: np.ndarray, epoch: int) -> Masked:
        """Their masks, in an epoch."""
        return self.masks.masked(whole, examples, self.seed, epoch)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        return Batch(
            self.masks.packed(whole, masked),
            self.masks.targets(whole, masked),
            *numbers_of(examples),
        )

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that is predicted."""
        return {
            **plan_metadata(self.plan(0), self.store, self.split),
            "predicted_fraction": self.config.predicted_fraction,
        }


# Permuted windows in lanes, for a model that keeps states of their first tokens.
#
# The windows of a lane begin `reuse` tokens apart and read on from there, over text that the next ones begin with:
# what is kept of a window is of the text right before the next one (Yang et al. 2019, "XLNet", section 2.4;
# data_utils.py and `reuse_len` of its published code).
#
# Shape letters: N examples of a batch.


class PermutedWindows(MaskedWindows):
    """Windows of a model that carries state, joined: a loader reads them in lanes."""

    config: PlmConfig

    def in_lanes(self, lanes: int) -> PermutedSegments:
        """See `data.lanes.CutInLanes`. UserError where a window holds nothing but what is reused."""
        reuse = self.config.reuse
        if reuse >= self.room:
            raise UserError(
                f"objective.reuse={reuse} leaves nothing of the {self.room} tokens of text of a window",
                f"objective.reuse={max(1, self.room // 2)}, or a longer max_length=",
            )
        return PermutedSegments(self, lanes)


class PermutedSegments:
    """The same windows in lanes."""

    def __init__(self, windows: PermutedWindows, lanes: int):
        self._windows, self.stream = windows, windows.stream
        self.config, self.masks, self.masked = windows.config, windows.masks, windows.masked
        self.lanes = min(lanes, len(self.stream))
        rows = segments(len(self.stream), self.lanes, self.config.reuse)
        self._plan = some(Plan(rows, self._reads(rows) + windows.template.special_count), windows.split)

    def _reads(self, rows: np.ndarray) -> np.ndarray:
        """(N,) tokens of text that windows read."""
        return np.minimum(self._windows.room, len(self.stream) - rows["start"])

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """The windows as they are read."""
        windows = np.zeros(len(rows), dtype=WINDOW)
        windows["start"], windows["length"] = rows["start"], self._reads(rows)
        return self._windows.assemble(windows)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        return Batch(
            self.masks.packed(whole, masked),
            self.masks.targets(whole, masked),
            *numbers_of(examples),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, the lanes, how many windows follow each other in one, and how far apart they begin."""
        metadata = plan_metadata(self._plan, self._windows.store, self._windows.split)
        along = -(-len(self._plan) // self.lanes)
        share = self.config.predicted_fraction
        own = {"lanes": self.lanes, "segments_per_lane": along, "segments_apart": self.config.reuse}
        return {**metadata, "predicted_fraction": share, **own}
