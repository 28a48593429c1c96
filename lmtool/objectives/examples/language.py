"""Examples of causal, prefix and masked next-token language models: windows of running text, in which tokens are
predicted at the positions before them.

Shape letters: E windows of a text, N windows of a batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, SplitData, cached_plan
from lmtool.data.formats import PackedArrays, ragged_ranges
from lmtool.data.loader import segments
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import MntpConfig
from lmtool.objectives.corruption.masking import (
    MaskedSpans,
    MaskedTexts,
    PackedTexts,
    Vocabulary,
    mask_tiles,
    mask_tokens,
)
from lmtool.objectives.corruption.noises import prefix_lengths
from lmtool.objectives.examples.windows import (
    WINDOW,
    FixedPlan,
    Sides,
    Stream,
    lane_metadata,
    lanes_of,
    numbers_of,
    text_capacity,
    text_windows,
    windows,
)
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# The record of a window. known: how many tokens at the start of the window are not predicted: they are predicted in the
# previous window, or there is one, the first token of a document or of the stream.
_CAUSAL_WINDOW = np.dtype([*WINDOW.descr, ("known", "i4")])


def causal_windows(stream: Stream, size: int, joined: bool, overlap: int) -> Plan:
    """Builds a plan from the windows of `windows`, with the number of tokens that are not predicted, see
    `_CAUSAL_WINDOW`."""
    windows_E = windows(stream, size, joined, overlap)
    rows = np.empty(len(windows_E), dtype=_CAUSAL_WINDOW)
    for name in WINDOW.names or ():
        rows[name] = windows_E[name]
    boundaries = stream.boundaries[:1] if joined else stream.boundaries
    rows["known"] = np.where(np.isin(windows_E["start"], boundaries), 1, overlap)
    return Plan(rows, rows["length"].astype(np.int64))


class CausalWindows(FixedPlan):
    """Windows for next-token prediction, over a stream of documents that end with the end-of-text token.

    Every token is predicted exactly once, except the first token of each document (separate) or of the stream (joined).
    Consecutive windows share at least one token: the last token of a window is the first token of the next.

    Args:
        stride: The distance between the starts of consecutive windows; None means max_length - 1. With a smaller
            stride, windows share more tokens, and every token is predicted from at least max_length - stride tokens
            before it, except near the beginning (Baevski and Auli 2019).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        max_length: int,
        documents: str,
        split: str,
        stride: int | None = None,
    ):
        self.stream = Stream.from_store(store, tokenizer.role("eos"))
        size = text_capacity(max_length, 0, 1)
        overlap = 1 if stride is None else size - stride
        if overlap < 1:
            raise UserError(
                f"stride={stride} is too long: windows of max_length={max_length} would not overlap by one token",
                f"set stride={size - 1} or lower",
            )
        super().__init__(store, split, cached_plan(causal_windows, self.stream, size, documents == "joined", overlap))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, known = rows["length"].astype(np.int64), rows["known"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        indices = ragged_ranges(starts + known - 1, lengths - known)
        targets = {"clm": Target(torch.from_numpy(tokens[indices + 1]), at=torch.from_numpy(indices))}
        return Batch(PackedArrays(tokens, lengths, {}).packed(), targets, *numbers_of(examples))

    def documents_of(self, batch: Batch) -> np.ndarray:
        """Returns (M,): the number of the document of each target of a batch."""
        rows = self._plan.rows[batch.examples.cpu().numpy()]
        lengths, known = rows["length"].astype(np.int64), rows["known"].astype(np.int64)
        return self.stream.documents_at(ragged_ranges(rows["start"] + known, lengths - known))

    @property
    def predicted_fraction(self) -> float:
        rows = self._plan.rows
        predicted = int(rows["length"].sum(dtype=np.int64) - rows["known"].sum(dtype=np.int64))
        return predicted / int(self._plan.lengths.sum(dtype=np.int64))


class CausalSegments(FixedPlan):
    """Segments of at most `size` tokens for next-token prediction with a model that carries state from batch to batch.

    The stream of the same text's windows is divided into lanes, contiguous parts that are read in parallel, segment by
    segment. Every token predicts the next token; the label of a segment's last token is the first token of the next
    segment. Therefore, every token of the stream except the first is predicted exactly once, as in joined windows.
    """

    def __init__(self, windows: CausalWindows, size: int, lanes: int):
        self.stream = windows.stream
        targets = len(self.stream) - 1  # the first token is not predicted
        self.lanes = min(lanes, targets)
        rows = segments(targets, self.lanes, size)
        super().__init__(windows.store, windows.split, Plan(rows, rows["length"].astype(np.int64)))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, labels = (self.stream.read(rows["start"] + offset, lengths) for offset in (0, 1))
        return Batch(
            PackedArrays(tokens, lengths, {}).packed(),
            {"clm": Target(torch.from_numpy(labels), at=torch.arange(len(tokens)))},
            *numbers_of(examples),
            lanes=lanes_of(rows, self.lanes),
        )

    predicted_fraction = 1.0

    def metadata(self) -> JsonObject:
        return {**super().metadata(), **lane_metadata(self._plan, self.lanes)}


class CarriedWindows(CausalWindows):
    """Joined windows for a model that carries state from batch to batch. For such a model, the loader reads the text in
    lanes, see `CausalSegments`."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, split: str):
        super().__init__(tokenizer, store, max_length, "joined", split)
        self._size = max_length

    def in_lanes(self, lanes: int) -> CausalSegments:
        """Returns the text in lanes, see `SupportsLanes` in `data/loader.py`. lanes: the number of lanes."""
        return CausalSegments(self, self._size, lanes)


class _SplitWindows(FixedPlan):
    """Windows that are split into a prefix and a rest, in each epoch at other positions."""

    predicted_fraction = 0.5

    def __init__(self, data: SplitData, separator: int | None, max_length: int, special_count: int, seed: int):
        self.stream, self.seed = Stream.from_store(data.text, separator), seed
        size, joined = text_capacity(max_length, special_count, 1), data.documents == "joined"
        plan = cached_plan(text_windows, self.stream, size, joined, 2, 2 * special_count)
        super().__init__(data.text, data.split, plan)

    def prefixes(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        return prefix_lengths(rows["length"], examples, self.seed, epoch)


class MaskedPrefixes(_SplitWindows):
    """Split windows for decoders: a single text with `Packed.prefixes`, which makes attention within the prefix
    bidirectional. Every token after the prefix is predicted at the previous position. Each document ends with the
    end-of-text token."""

    def __init__(self, tokenizer: Tokenizer, data: SplitData, max_length: int, seed: int):
        super().__init__(data, tokenizer.role("eos"), max_length, 0, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, prefixes = self.stream.read(rows["start"], lengths), self.prefixes(rows, examples, epoch)
        indices = ragged_ranges(np.cumsum(lengths) - lengths + prefixes - 1, lengths - prefixes)
        packed = replace(PackedArrays(tokens, lengths, {}).packed(), prefixes=tuple(prefixes.tolist()))
        target = Target(torch.from_numpy(tokens[indices + 1]), at=torch.from_numpy(indices))
        return Batch(packed, {"prefix_lm": target}, *numbers_of(examples))


def rewritten_texts(stream: Stream, size: int, joined: bool) -> Plan:
    """Builds a plan from the windows of `windows` that have at least two tokens. The length of an example is that of
    the text twice, and the end-of-text token between the two."""
    windows = text_windows(stream, size, joined, 2, 0)
    return Plan(windows.rows, 2 * windows.lengths + 1)


class RewrittenTexts(FixedPlan):
    """Texts to read and to write again, for recurrent decoders: the text, the end-of-text token, and the text again.
    The second text and its end-of-text token are predicted."""

    predicted_fraction = 0.5

    def __init__(self, tokenizer: Tokenizer, data: SplitData, max_length: int):
        self.stream, self.end = Stream.from_store(data.text, None), tokenizer.role("eos")
        size = text_capacity(max_length, 1, 2) // 2
        plan = cached_plan(rewritten_texts, self.stream, size, data.documents == "joined")
        super().__init__(data.text, data.split, plan)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        texts = np.split(self.stream.read(rows["start"], rows["length"].astype(np.int64)), np.cumsum(rows["length"]))
        lengths = 2 * rows["length"].astype(np.int64) + 1
        tokens = np.concatenate([part for text in texts[:-1] for part in (text, [self.end], text)])
        indices = ragged_ranges(np.cumsum(lengths) - lengths + rows["length"], rows["length"] + 1)
        labels = np.concatenate([part for text in texts[:-1] for part in (text, [self.end])])
        target = Target(torch.from_numpy(labels), at=torch.from_numpy(indices))
        return Batch(
            PackedArrays(tokens, lengths, {}).packed(), {"sequence_autoencoder": target}, *numbers_of(examples)
        )


class EncodedPrefixes(_SplitWindows):
    """Split windows for encoder-decoders: the prefix is the input and the rest is the output, both in the text format
    of the family."""

    def __init__(self, sides: Sides, data: SplitData, max_length: int, seed: int):
        self.sides = sides
        super().__init__(data, None, max_length, sides.template.special_count, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, prefixes = rows["length"].astype(np.int64), self.prefixes(rows, examples, epoch)
        before = self.stream.read(rows["start"], prefixes)
        after = self.stream.read(rows["start"] + prefixes, lengths - prefixes)
        return self.sides.batch((before, prefixes), (after, lengths - prefixes), "prefix_lm", examples)


# The terms of masked next-token prediction: of masked texts, and of texts that are read causally.
MASKED, CAUSAL = "mntp", "clm"


class MaskedNextTokenWindows(CausalWindows):
    """Windows of `CausalWindows`, of which some are read causally and the others with masks, chosen anew in every
    epoch.

    A masked window has a prefix of its whole length, which makes attention bidirectional. Its first token is never
    masked, because no position comes before it. Every masked token is predicted at the previous position.
    """

    def __init__(self, config: MntpConfig, tokenizer: Tokenizer, data: SplitData, max_length: int, seed: int):
        super().__init__(tokenizer, data.text, max_length, data.documents, data.split)
        self.config, self.seed, self.vocabulary = config, seed, Vocabulary.from_tokenizer(tokenizer)

    def is_causal(self, examples: np.ndarray, epoch: int) -> np.ndarray:
        """Returns (N,) bool: which windows are read causally."""
        epoch = self.config.sampling_epoch(epoch)
        return random_streams.uniform(self.seed, "sample", epoch, examples, 1)[:, 0] < self.config.causal

    def mask(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> MaskedTexts:
        """Masks windows, all but their first tokens; indices count the tokens of a batch of these windows."""
        lengths = rows["length"].astype(np.int64)
        rest = self.stream.read(rows["start"] + 1, lengths - 1)
        texts = PackedTexts(rest, lengths - 1, examples, self.seed, epoch)
        mask = mask_tiles if self.config.longest_span > 1 else mask_tokens
        masked = mask(self.config, self.vocabulary, texts)
        tokens = self.stream.read(rows["start"], lengths)
        in_batch = ragged_ranges(np.cumsum(lengths) - lengths + 1, lengths - 1)
        tokens[in_batch] = masked.tokens
        masked = replace(masked, tokens=tokens, at=in_batch[masked.at])
        return replace(masked, spans=in_batch[masked.spans]) if isinstance(masked, MaskedSpans) else masked

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        examples = np.asarray(examples)
        lengths, is_causal = rows["length"].astype(np.int64), self.is_causal(examples, epoch)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        following = ragged_ranges(starts[is_causal], lengths[is_causal] - 1)
        # Masks are a function of each window, so masking all windows of the batch and using some changes none.
        masked = self.mask(rows, examples, epoch)
        in_masked = np.repeat(~is_causal, lengths)
        used = in_masked[masked.at]
        at, labels = masked.at[used] - 1, masked.labels[used]
        packed = PackedArrays(np.where(in_masked, masked.tokens, tokens), lengths, {}).packed()
        packed = replace(packed, prefixes=tuple(np.where(is_causal, 0, lengths).tolist()))
        targets = {MASKED: Target(torch.from_numpy(labels), at=torch.from_numpy(at))}
        if self.config.causal:
            targets[CAUSAL] = Target(torch.from_numpy(tokens[following + 1]), at=torch.from_numpy(following))
        return Batch(packed, targets, *numbers_of(examples))

    @property
    def predicted_fraction(self) -> float:
        return self.config.predicted_fraction
