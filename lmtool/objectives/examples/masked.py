"""Masked and permuted examples: windows of text, and the base of segment pairs.

Shape letters: T tokens of a batch, N examples in it, M masked positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
import torch

from lmtool.config.saved import JsonObject
from lmtool.data.examples import Plan, SplitData, planned
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, text_format
from lmtool.data.loader import segments
from lmtool.errors import UserError
from lmtool.objectives.configs import MaskingConfig, SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import Masked, MaskedSpans, PackedTexts, Vocabulary, mask_spans, mask_tokens
from lmtool.objectives.corruption.permutation import Permuted, permute
from lmtool.objectives.examples.windows import (
    WINDOW,
    Stream,
    lane_metadata,
    lanes_of,
    numbers_of,
    plan_metadata,
    require_examples,
    sampled_windows,
    text_capacity,
    windows,
)
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Packed, Target

# Masks of assembled examples, and the targets.


class TokenMasks:
    """Masks over single tokens or words; the term `mlm` predicts every masked position.

    config: how many tokens are masked, and their replacements.
    """

    def __init__(self, config: MaskingConfig | PlmConfig, vocabulary: Vocabulary):
        self.config, self.vocabulary = config, vocabulary

    def masked(self, texts: PackedTexts) -> Masked:
        """The assembled examples with masks."""
        return mask_tokens(cast(TokenMaskingConfig, self.config), self.vocabulary, texts)

    def packed(self, whole: PackedArrays, masked: Masked) -> Packed:
        """The inputs."""
        return whole.packed(masked.tokens)

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        """By term, the targets of the examples."""
        return {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class SpanMasks(TokenMasks):
    """Masks over runs of words. With the boundary objective, the term `sbo` predicts the positions of spans whose
    neighbors are text, each with the flat indices of these neighbors."""

    config: SpanConfig

    def masked(self, texts: PackedTexts) -> MaskedSpans:
        return mask_spans(self.config, self.vocabulary, texts)

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

    config: PlmConfig

    def masked(self, texts: PackedTexts) -> Permuted:
        return permute(self.config, self.vocabulary, texts)

    def packed(self, whole: PackedArrays, masked: Masked) -> Packed:
        assert isinstance(masked, Permuted)
        packed = whole.packed()
        return replace(packed, columns={**packed.columns, "rank": torch.from_numpy(masked.ranks)})

    def targets(self, whole: PackedArrays, masked: Masked) -> dict[str, Target]:
        return {"plm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class MaskedExamples(ABC):
    """The base of masked examples in the format of the backbone. texts: number of texts of an example."""

    texts: ClassVar[int]

    def __init__(
        self, config: MaskingConfig | PlmConfig, tokenizer: Tokenizer, format_name: str, data: SplitData,
        max_length: int, seed: int, masks: type[TokenMasks] = TokenMasks,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, data.text, data.split, seed
        self.masks = masks(config, Vocabulary.of(tokenizer))
        self.template = FormatTemplate.of(text_format(format_name, tokenizer), self.texts)
        self.capacity = text_capacity(max_length, self.template.special_count, self.texts)
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        sampled = self.planned_epoch(epoch)
        if sampled not in self._plans:
            plan = require_examples(self.new_plan(sampled), self.split)
            # Plans of two epochs stay, because a prefetching loader reads across the boundary.
            self._plans = dict([*self._plans.items()][-1:]) | {sampled: plan}
        return self._plans[sampled]

    def planned_epoch(self, epoch: int) -> int:
        """The epoch whose plan an epoch uses."""
        return self.config.sampling_epoch(epoch)

    @abstractmethod
    def new_plan(self, epoch: int) -> Plan:
        """The plan of an epoch."""

    @abstractmethod
    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """The examples before masking."""

    def masked(self, whole: PackedArrays, examples: np.ndarray, epoch: int) -> Masked:
        """The masks of examples in an epoch."""
        return self.masks.masked(PackedTexts(whole.tokens, whole.lengths, np.asarray(examples), self.seed, epoch))

    def extra_targets(self, rows: np.ndarray) -> dict[str, Target]:
        """By term, the targets besides those of masked positions."""
        return {}

    def lanes_of(self, rows: np.ndarray) -> Lanes | None:
        """The lanes of the examples, if they are segments of lanes."""
        return None

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        targets = {**self.masks.targets(whole, masked), **self.extra_targets(rows)}
        return Batch(self.masks.packed(whole, masked), targets, *numbers_of(examples), lanes=self.lanes_of(rows))

    def metadata(self) -> JsonObject:
        """Size of the first epoch, and the fraction of tokens that are predicted."""
        fraction = self.config.predicted_fraction
        return {**plan_metadata(self.plan(0), self.store, self.split), "predicted_fraction": fraction}


# Masked windows of text.


def masked_windows(
    stream: Stream, size: int, joined: bool, short: float, seed: int, epoch: int, special_count: int
) -> Plan:
    """The windows of `sampled_windows`, or of `windows` if `short` is 0."""
    rows = sampled_windows(stream, size, joined, short, seed, epoch) if short else windows(stream, size, joined)
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


class MaskedWindows(MaskedExamples):
    """Masked language modeling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows across documents, with a separator after each (RoBERTa's full sentences); separate: within each
    document. Random shorter windows are resampled each epoch.
    """

    texts = 1

    def __init__(
        self, config: MaskingConfig | PlmConfig, tokenizer: Tokenizer, format_name: str, data: SplitData,
        max_length: int, seed: int, masks: type[TokenMasks] = TokenMasks,
    ):  # fmt: skip
        super().__init__(config, tokenizer, format_name, data, max_length, seed, masks)
        self.joined = data.documents == "joined"
        self.stream = Stream.from_store(self.store, tokenizer.role("sep") if self.joined else None)

    def planned_epoch(self, epoch: int) -> int:
        return self.config.sampling_epoch(epoch) if self.config.short_window_probability else 0

    def new_plan(self, epoch: int) -> Plan:
        short, special_count = self.config.short_window_probability, self.template.special_count
        return planned(masked_windows, self.stream, self.capacity, self.joined, short, self.seed, epoch, special_count)

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])


# Permuted windows in lanes, for a model that caches states of their first tokens. The windows of a lane start `reuse`
# tokens after each other, and overlap: the cached states of a window belong to the text right before the next one (Yang
# et al. 2019, "XLNet", section 2.4; data_utils.py and `reuse_len` of its published code).


class PermutedWindows(MaskedWindows):
    """Windows across documents for a model that carries state; the loader reads them in lanes."""

    config: PlmConfig

    def in_lanes(self, lanes: int) -> PermutedSegments:
        """See `data.lanes.CutInLanes`. UserError if a window holds only reused tokens."""
        reuse = self.config.reuse
        if reuse >= self.capacity:
            raise UserError(
                f"objective.reuse={reuse} covers all of the {self.capacity} tokens of text of a window",
                f"set objective.reuse={max(1, self.capacity // 2)}, or a longer max_length=",
            )
        return PermutedSegments(self, lanes)


class PermutedSegments(MaskedExamples):
    """The same windows in lanes."""

    config: PlmConfig

    def __init__(self, windows: PermutedWindows, lanes: int):
        self._windows, self.stream, self.seed = windows, windows.stream, windows.seed
        self.config, self.masks, self.store, self.split = windows.config, windows.masks, windows.store, windows.split
        self.lanes = min(lanes, len(self.stream))
        self._plans = {}

    def _text_lengths(self, rows: np.ndarray) -> np.ndarray:
        """(N,) tokens of text in the windows."""
        return np.minimum(self._windows.capacity, len(self.stream) - rows["start"])

    def planned_epoch(self, epoch: int) -> int:
        return 0

    def new_plan(self, epoch: int) -> Plan:
        rows = segments(len(self.stream), self.lanes, self.config.reuse)
        return Plan(rows, self._text_lengths(rows) + self._windows.template.special_count)

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        windows = np.zeros(len(rows), dtype=WINDOW)
        windows["start"], windows["length"] = rows["start"], self._text_lengths(rows)
        return self._windows.assemble(windows)

    def lanes_of(self, rows: np.ndarray) -> Lanes:
        return lanes_of(rows, self.lanes)

    def metadata(self) -> JsonObject:
        """Adds the lanes, their windows, and the distance between window starts."""
        return {**super().metadata(), **lane_metadata(self.plan(0), self.lanes), "segments_apart": self.config.reuse}
