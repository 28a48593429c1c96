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
    numbers_of,
    plan_metadata,
    sampled_windows,
    some,
    text_capacity,
    windows,
)
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Packed, Target

# Masking of assembled examples, and the targets.
# Shape letters: T tokens of a batch, N examples in it, M masked positions.


class TokenMasks:
    """Masks over single tokens or words; the term `mlm` predicts every masked position.

    config: how many tokens are masked, and their replacements.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.config, self.vocabulary = config, vocabulary

    def masked(self, whole: PackedArrays, examples_N: np.ndarray, seed: int, epoch: int) -> Masked:
        """The assembled examples with masks; random numbers are keyed by (seed, epoch, example, position)."""
        numbers_N = np.asarray(examples_N)
        return mask_tokens(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def packed(self, whole: PackedArrays, masked: Masked) -> Packed:
        """The inputs."""
        return whole.packed(masked.tokens)

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        """By term, the targets of the examples."""
        return {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class SpanMasks(TokenMasks):
    """Masks over runs of words. With the boundary objective, the term `sbo` predicts the positions of spans whose
    neighbors are text, each with the flat indices of these neighbors."""

    def masked(self, whole: PackedArrays, examples_N: np.ndarray, seed: int, epoch: int) -> MaskedSpans:
        numbers_N = np.asarray(examples_N)
        return mask_spans(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        if self.config.boundary:
            assert isinstance(masked, MaskedSpans)
            boundaries = masked.spans[masked.span_of] + np.array([-1, 1])
            within = masked.at - boundaries[:, 0] - 1
            retained = masked.bordered[masked.span_of] & (within < self.config.boundary_targets)
            labels, at, span = (torch.from_numpy(values[retained]) for values in (masked.labels, masked.at, boundaries))
            targets["sbo"] = Target(labels, at=at, span=span)
        return targets


class Permutations(TokenMasks):
    """No token is hidden: the column "rank" determines the attention masks, and the term `plm` predicts some tokens."""

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
# Shape letters: N examples of a batch, T their tokens, M masked positions.


def masked_windows(
    stream: Stream, size: int, joined: bool, short: float, seed: int, epoch: int, special_count: int
) -> Plan:
    """The windows of `sampled_windows`, or of `windows` if `short` is 0."""
    rows = sampled_windows(stream, size, joined, short, seed, epoch) if short else windows(stream, size, joined)
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


class MaskedWindows:
    """Masked language modeling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows across documents, with a separator after each (RoBERTa's full sentences); separate: within each
    document. Random shorter windows are resampled each epoch.
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
        self.room, self.joined = text_capacity(max_length, self.template.special_count, 1), joined
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        short = self.config.short_window_probability
        drawn = self.config.sampling_epoch(epoch) if short else 0
        if drawn not in self._plans:
            plan = planned(
                masked_windows, self.stream, self.room, self.joined, short, self.seed, drawn,
                self.template.special_count,
            )  # fmt: skip
            # Plans of two epochs stay, because a prefetching loader reads across the boundary.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: some(plan, self.split)}
        return self._plans[drawn]

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """The windows before masking."""
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])

    def masked(self, whole: PackedArrays, examples: np.ndarray, epoch: int) -> Masked:
        """Their masks in an epoch."""
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
        """Size of an epoch, and the fraction of tokens that are predicted."""
        return {
            **plan_metadata(self.plan(0), self.store, self.split),
            "predicted_fraction": self.config.predicted_fraction,
        }


# Permuted windows in lanes, for a model that caches states of their first tokens. The windows of a lane start `reuse`
# tokens apart, and overlap: the cached states of a window belong to the text right before the next one (Yang et al.
# 2019, "XLNet", section 2.4; data_utils.py and `reuse_len` of its published code).
# Shape letters: N examples of a batch.


class PermutedWindows(MaskedWindows):
    """Windows across documents for a model that carries state; the loader reads them in lanes."""

    config: PlmConfig

    def in_lanes(self, lanes: int) -> PermutedSegments:
        """See `data.lanes.CutInLanes`. UserError if a window holds only reused tokens."""
        reuse = self.config.reuse
        if reuse >= self.room:
            raise UserError(
                f"objective.reuse={reuse} covers all of the {self.room} tokens of text of a window",
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
        """(N,) tokens of text in the windows."""
        return np.minimum(self._windows.room, len(self.stream) - rows["start"])

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """The windows before masking."""
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
        """Size of an epoch, the lanes, their windows, and the distance between window starts."""
        metadata = plan_metadata(self._plan, self._windows.store, self._windows.split)
        along = -(-len(self._plan) // self.lanes)
        share = self.config.predicted_fraction
        lane_metadata = {"lanes": self.lanes, "segments_per_lane": along, "segments_apart": self.config.reuse}
        return {**metadata, "predicted_fraction": share, **lane_metadata}
