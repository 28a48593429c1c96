"""Masked and permuted examples: windows of text, and the base class that segment pairs share.

Shape letters: T tokens of a batch, N examples in it, M masked positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
import torch

from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, SplitData, cached_plan
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, text_format
from lmtool.data.loader import segments
from lmtool.errors import UserError
from lmtool.objectives.configs import MaskingConfig, PlmConfig, SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import (
    BorderedSpans,
    MaskedTexts,
    PackedTexts,
    Vocabulary,
    mask_spans,
    mask_tokens,
)
from lmtool.objectives.corruption.permutation import PermutedTexts, permute
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
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Packed, Target

# Classes that mask examples, and make the inputs and targets of masked examples.


class TokenMasks:
    """Masks single tokens or words. The term `mlm` predicts the original token at every masked position. config: how
    many tokens are masked, and what replaces them. vocabulary: the vocabulary."""

    def __init__(self, config: MaskingConfig | PlmConfig, vocabulary: Vocabulary):
        self.config, self.vocabulary = config, vocabulary

    def mask(self, texts: PackedTexts) -> MaskedTexts:
        """Masks the texts of a batch, which already have special tokens."""
        return mask_tokens(cast(TokenMaskingConfig, self.config), self.vocabulary, texts)

    def packed(self, original: PackedArrays, masked: MaskedTexts) -> Packed:
        """Returns the inputs of the batch. original: the texts before masking. masked: the masked texts."""
        return original.packed(masked.tokens)

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        """Returns the targets of each term. original: the texts before masking. masked: the masked texts."""
        return {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class SpanMasks(TokenMasks):
    """Masks spans of words. With the span boundary objective, the term `sbo` also predicts the tokens of each span from
    the two tokens next to the span, unless one of these two is a special token."""

    config: SpanConfig

    def mask(self, texts: PackedTexts) -> BorderedSpans:
        return mask_spans(self.config, self.vocabulary, texts)

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        targets = super().targets(original, masked)
        if self.config.boundary:
            assert isinstance(masked, BorderedSpans)
            boundaries = masked.spans[masked.span_of] + np.array([-1, 1])
            position_in_span = masked.at - boundaries[:, 0] - 1
            selected = masked.bordered[masked.span_of] & (position_in_span < self.config.boundary_targets)
            labels, indices, span = (
                torch.from_numpy(values[selected]) for values in (masked.labels, masked.at, boundaries)
            )
            targets["sbo"] = Target(labels, at=indices, span=span)
        return targets


class Permutations(TokenMasks):
    """Permutes tokens instead of masking them. The tokens of the input do not change. The column `rank` has the
    position of each token in a random order, which determines the attention masks. The term `plm` predicts some of the
    tokens."""

    config: PlmConfig

    def mask(self, texts: PackedTexts) -> PermutedTexts:
        return permute(self.config, self.vocabulary, texts)

    def packed(self, original: PackedArrays, masked: MaskedTexts) -> Packed:
        assert isinstance(masked, PermutedTexts)
        packed = original.packed()
        return replace(packed, columns={**packed.columns, "rank": torch.from_numpy(masked.ranks)})

    def targets(self, original: PackedArrays, masked: MaskedTexts) -> dict[str, Target]:
        return {"plm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class MaskedExamples(ABC):
    """The base class of masked examples. text_count: the number of texts in an example, 1 for windows and 2 for pairs.
    format_name: the name of the backbone's text format in `lmtool.data.formats`. max_length: maximum tokens of an
    example. masks: the class that masks the examples; as an attribute, its instance."""

    text_count: ClassVar[int]

    def __init__(
        self,
        config: MaskingConfig | PlmConfig,
        tokenizer: Tokenizer,
        format_name: str,
        data: SplitData,
        max_length: int,
        seed: int,
        masks: type[TokenMasks] = TokenMasks,
    ):
        self.config, self.store, self.split, self.seed = config, data.text, data.split, seed
        self.masks = masks(config, Vocabulary.from_tokenizer(tokenizer))
        self.template = FormatTemplate.of(text_format(format_name, tokenizer), self.text_count)
        self.capacity = text_capacity(max_length, self.template.special_count, self.text_count)
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        sampled = self.planned_epoch(epoch)
        if sampled not in self._plans:
            plan = require_examples(self.new_plan(sampled), self.split)
            # The previous plan stays in memory, because a prefetching loader reads both plans at the boundary of two
            # epochs.
            self._plans = dict([*self._plans.items()][-1:]) | {sampled: plan}
        return self._plans[sampled]

    def planned_epoch(self, epoch: int) -> int:
        """Returns the epoch whose plan an epoch uses."""
        return self.config.sampling_epoch(epoch)

    @abstractmethod
    def new_plan(self, epoch: int) -> Plan:
        """Builds the plan of an epoch."""

    @abstractmethod
    def assemble(self, rows: np.ndarray) -> PackedArrays:
        """Returns examples before masking, with special tokens. rows: rows of a plan."""

    def mask(self, original: PackedArrays, examples: np.ndarray, epoch: int) -> MaskedTexts:
        """Masks examples. examples, epoch: the numbers of the examples and the epoch, which key the random numbers."""
        return self.masks.mask(PackedTexts(original.tokens, original.lengths, np.asarray(examples), self.seed, epoch))

    def extra_targets(self, rows: np.ndarray) -> dict[str, Target]:
        """Returns the targets of additional terms, which do not predict masked tokens."""
        return {}

    def lanes_of(self, rows: np.ndarray) -> Lanes | None:
        """Returns the lanes of examples that are read in lanes; None for other examples."""
        return None

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        original = self.assemble(rows)
        masked = self.mask(original, examples, epoch)
        targets = {**self.masks.targets(original, masked), **self.extra_targets(rows)}
        return Batch(self.masks.packed(original, masked), targets, *numbers_of(examples), lanes=self.lanes_of(rows))

    def metadata(self) -> JsonObject:
        """Returns the size of the first epoch, and the fraction of tokens that are predicted."""
        fraction = self.config.predicted_fraction
        return {**plan_metadata(self.plan(0), self.store, self.split), "predicted_fraction": fraction}


# Masked windows of text.


def masked_windows(
    stream: Stream, size: int, joined: bool, short_probability: float, seed: int, epoch: int, special_count: int
) -> Plan:
    """Builds a plan from the windows of `sampled_windows`; if no windows are short, from those of `windows`.
    special_count: the number of special tokens in an example."""
    if short_probability:
        rows = sampled_windows(stream, size, joined, short_probability, seed, epoch)
    else:
        rows = windows(stream, size, joined)
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


class MaskedWindows(MaskedExamples):
    """Masked windows of text in the backbone's text format, such as `[CLS] text [SEP]`.

    With data.documents=joined, windows continue across documents, and a separator follows each document (RoBERTa's full
    sentences). With data.documents=separate, a window has tokens of one document. If some windows are short, the
    windows of each epoch are sampled anew.
    """

    text_count = 1

    def __init__(
        self,
        config: MaskingConfig | PlmConfig,
        tokenizer: Tokenizer,
        format_name: str,
        data: SplitData,
        max_length: int,
        seed: int,
        masks: type[TokenMasks] = TokenMasks,
    ):
        super().__init__(config, tokenizer, format_name, data, max_length, seed, masks)
        self.joined = data.documents == "joined"
        self.stream = Stream.from_store(self.store, tokenizer.role("sep") if self.joined else None)

    def planned_epoch(self, epoch: int) -> int:
        return self.config.sampling_epoch(epoch) if self.config.short_window_probability else 0

    def new_plan(self, epoch: int) -> Plan:
        short_probability, special_count = self.config.short_window_probability, self.template.special_count
        return cached_plan(
            masked_windows, self.stream, self.capacity, self.joined, short_probability, self.seed, epoch, special_count
        )

    def assemble(self, rows: np.ndarray) -> PackedArrays:
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])


# Permuted windows for a model that caches hidden states (XLNet). The stream is divided into lanes, contiguous parts
# that are read in parallel, window by window. Each window starts `reuse` tokens after the previous window of its lane,
# so windows overlap. The first `reuse` tokens of a window come right before the next window; their states are cached
# for the next window (Yang et al. 2019, "XLNet", section 2.4; data_utils.py and `reuse_len` of its published code).


class PermutedWindows(MaskedWindows):
    """Permuted windows across documents for a model that caches states. For such a model, the loader reads the windows
    in lanes, see `PermutedSegments`."""

    config: PlmConfig

    def in_lanes(self, lanes: int) -> PermutedSegments:
        """Returns the windows in lanes, see `SupportsLanes` in `data/loader.py`. Raises UserError if all tokens of a
        window are reused."""
        reuse = self.config.reuse
        if reuse >= self.capacity:
            raise UserError(
                f"objective.reuse={reuse} covers all of the {self.capacity} tokens of text in a window",
                f"set objective.reuse={max(1, self.capacity // 2)}, or a larger max_length=",
            )
        return PermutedSegments(self, lanes)


class PermutedSegments(MaskedExamples):
    """The windows of `PermutedWindows` in lanes. windows: the same text and settings, without lanes. lanes: the number
    of lanes."""

    config: PlmConfig

    def __init__(self, windows: PermutedWindows, lanes: int):
        self._windows, self.stream, self.seed = windows, windows.stream, windows.seed
        self.config, self.masks, self.store, self.split = windows.config, windows.masks, windows.store, windows.split
        self.lanes = min(lanes, len(self.stream))
        self._plans = {}

    def _text_lengths(self, rows: np.ndarray) -> np.ndarray:
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
        """Adds the number of lanes, the windows per lane, and the distance between consecutive windows."""
        return {**super().metadata(), **lane_metadata(self.plan(0), self.lanes), "segments_apart": self.config.reuse}
