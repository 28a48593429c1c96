"""Windows of running text: the planner of every objective that reads one text, and examples for language models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.saved import JsonObject
from lmtool.data.examples import Plan, SplitData, planned
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, ragged_ranges, text_format
from lmtool.data.loader import segments
from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import EncoderDecoder, shifted
from lmtool.objectives.corruption.noises import prefix_lengths
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Target

# Shape letters: D documents, E windows, N windows of a batch, T their tokens.


def text_capacity(max_length: int, special_count: int, texts: int) -> int:
    """Tokens of text that fit. UserError if a text would have fewer than two."""
    capacity = max_length - special_count
    if capacity < 2 * texts:
        raise UserError(
            f"max_length={max_length} leaves {max(capacity, 0)} tokens of text after {special_count} special tokens",
            f"max_length={special_count + 2 * texts} or more",
        )
    return capacity


def require_examples(plan: Plan, split: str) -> Plan:
    """The plan. UserError if it is empty."""
    if not len(plan.lengths):
        raise UserError(f"the {split} text has no window of two tokens", "use more text with data.path=")
    return plan


def numbers_of(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples and parts of a batch; examples have a single part here."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def plan_metadata(plan: Plan, store: TokenStore, split: str) -> JsonObject:
    """Metadata of an objective's examples, and of their store, for the screens."""
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "documents_without_tokens": int(store.metadata.get("documents_without_tokens", 0)),
        "store_tokens": int(store.document_offsets[-1]),
        "truncated_fraction": 0.0,  # long documents are split
        **plan.metadata(),
    }


class FixedPlan:
    """Examples whose plan is the same in every epoch. UserError if the plan is empty."""

    def __init__(self, store: TokenStore, split: str, plan: Plan):
        self.store, self.split = store, split
        self._plan = require_examples(plan, split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    @property
    def predicted_fraction(self) -> float | None:
        """The fraction of an epoch's tokens that are predicted, for the screens."""
        return None

    def metadata(self) -> JsonObject:
        """Size of an epoch, and the fraction of its tokens that are predicted."""
        fraction = self.predicted_fraction
        metadata = plan_metadata(self._plan, self.store, self.split)
        return metadata if fraction is None else {**metadata, "predicted_fraction": fraction}


def lanes_of(rows: np.ndarray, count: int) -> Lanes:
    """The lanes, out of `count`, to which the segments of a batch belong."""
    return Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), count)


def lane_metadata(plan: Plan, lanes: int) -> JsonObject:
    """The lanes, and the segments of each, for the screens."""
    return {"lanes": lanes, "segments_per_lane": -(-len(plan) // lanes)}


# Windows of running text: the planner of every objective that reads one text per example. The text of a split is a
# *stream*: its documents concatenated, each followed by an optional separator. Windows are cut within documents
# (`separate`) or across them (`joined`).


# One window: its first position in the stream, and its length.
WINDOW = np.dtype([("start", "i8"), ("length", "i4")])
# short: whether its length was sampled; it is reached unless the text ends before.
SAMPLED_WINDOW = np.dtype([*WINDOW.descr, ("short", "i1")])
# Random numbers of a window: whether it is short, and its length.
_DRAWS = 2


class Stream:
    """The documents of a token store as one stream of ids, without copying.

    separator: the id after each document, or None. Empty documents are dropped. cache: that of the store.
    """

    def __init__(
        self, tokens: np.ndarray, document_offsets: np.ndarray, separator: int | None, cache: ArrayCache = UNSHARED
    ):
        offsets = np.asarray(document_offsets, dtype=np.int64)
        full = offsets[1:] > offsets[:-1]
        if not full.all():
            offsets = offsets[np.append(True, full)]
        self.tokens, self.offsets, self.separator = tokens, offsets, separator
        self.cache = cache.of("stream", separator)
        # Without separators, stream positions are store positions, and only the memory map is used.
        self.boundaries = offsets if separator is None else self.cache.load(self._with_separators)["boundaries"]

    @classmethod
    def of(cls, store: TokenStore, separator: int | None) -> Stream:
        """The documents of a store."""
        return cls(store.tokens, store.document_offsets, separator, store.cache)

    def _with_separators(self) -> dict[str, np.ndarray]:
        return {"boundaries": self.offsets + np.arange(len(self.offsets))}

    def __len__(self) -> int:
        return int(self.boundaries[-1])

    def read(self, starts_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """(T,) int64: the concatenated ids of N runs."""
        positions = ragged_ranges(starts_N, lengths_N)
        document = np.searchsorted(self.boundaries, positions, side="right") - 1
        first, within = self.offsets[document], positions - self.boundaries[document]
        ended = within == self.offsets[document + 1] - first
        ids = np.asarray(self.tokens[first + np.where(ended, 0, within)], dtype=np.int64)
        return ids if self.separator is None else np.where(ended, self.separator, ids)


def windows(stream: Stream, size: int, joined: bool, overlap: int = 0) -> np.ndarray:
    """(E,) records of `WINDOW`: consecutive windows of at most `size` positions, each sharing `overlap` with the next.

    joined: across documents, so that only the last window is shorter; else within each document. A final window that
    would hold only the overlap is dropped; so is a single token, if windows overlap.
    """
    boundaries = np.array([0, len(stream)]) if joined else stream.boundaries
    stride = size - overlap
    lengths = np.diff(boundaries)
    counts = np.where(lengths > min(overlap, 1), np.maximum(-(-(lengths - overlap) // stride), 1), 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * stride
    rows = np.empty(len(owner), dtype=WINDOW)
    rows["start"] = boundaries[owner] + offset
    rows["length"] = np.minimum(size, lengths[owner] - offset)
    return rows


def text_windows(stream: Stream, size: int, joined: bool, shortest: int, special_count: int) -> Plan:
    """The windows of `windows` with at least `shortest` positions. special_count: special tokens of an example."""
    rows = windows(stream, size, joined)
    rows = rows[rows["length"] >= shortest]
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


def sampled_windows(stream: Stream, size: int, joined: bool, short: float, seed: int, epoch: int) -> np.ndarray:
    """(E,) records of `SAMPLED_WINDOW`: consecutive windows as in `windows`, but each aims, with probability `short`,
    at a length sampled uniformly from 2 to `size`, as in BERT's script for pairs (short_seq_prob of
    create_pretraining_data.py). A pure function of its arguments."""
    boundaries = np.array([0, len(stream)]) if joined else stream.boundaries
    lengths = np.diff(boundaries)
    mean = (1 - short) * size + short * (size + 2) / 2
    counts = np.ceil(1.1 * lengths / mean).astype(np.int64) + 4
    documents, cut = np.arange(len(lengths)), [np.empty(0, dtype=SAMPLED_WINDOW)]
    while len(documents):
        # More windows than each document needs; twice as many for documents that need still more.
        owner = np.repeat(documents, counts)
        last = np.cumsum(counts)
        number = np.arange(len(owner)) - np.repeat(last - counts, counts)
        drawn, length = (
            random_streams.uniform_at(seed, "sample", epoch, owner, number * _DRAWS + which) for which in (0, 1)
        )
        rows = np.empty(len(owner), dtype=SAMPLED_WINDOW)
        rows["short"] = drawn < short
        aim = np.where(rows["short"] == 1, 2 + (length * (size - 1)).astype(np.int64), size)
        ends = np.cumsum(aim)
        start = ends - aim - np.repeat(ends[last - counts] - aim[last - counts], counts)
        rows["start"], rows["length"] = boundaries[owner] + start, np.minimum(aim, lengths[owner] - start)
        whole = (start + aim)[last - 1] >= lengths[documents]
        cut.append(rows[np.repeat(whole, counts) & (start < lengths[owner])])
        documents, counts = documents[~whole], 2 * counts[~whole]
    windows_of_all = np.concatenate(cut)
    return windows_of_all[np.argsort(windows_of_all["start"], kind="stable")]


RaggedTexts = tuple[np.ndarray, np.ndarray]
"""The concatenated ids of N texts, and their (N,) lengths."""


class Sides:
    """The layout of an encoder-decoder's two sides: each in the family's text format, and the outputs shifted after its
    start token."""

    def __init__(self, backbone: EncoderDecoder, tokenizer: Tokenizer):
        self.template = FormatTemplate.of(text_format(backbone.config.text_format, tokenizer), 1)
        self.start = tokenizer.role(backbone.config.start_role)

    def batch(self, source: RaggedTexts, target: RaggedTexts, term: str, examples_N: np.ndarray) -> Batch:
        """A batch whose encoder reads the source, and whose decoder predicts the target."""
        inputs, outputs = (assemble(self.template, [texts]) for texts in (source, target))
        labels = torch.from_numpy(outputs.tokens)
        targets = {term: Target(labels, at=torch.arange(len(labels)), side="outputs")}
        return Batch(inputs.packed(), targets, *numbers_of(examples_N), shifted(outputs.packed(), self.start))


# Windows of a document stream for next-token prediction.


# A window, and how many of its first positions are not predicted in it: those of previous windows, or the first of all.
_CAUSAL = np.dtype([*WINDOW.descr, ("known", "i4")])


def causal_windows(stream: Stream, size: int, joined: bool, overlap: int) -> Plan:
    """The windows of `windows`, with the number of their first positions that are not predicted in them."""
    plain = windows(stream, size, joined, overlap)
    rows = np.empty(len(plain), dtype=_CAUSAL)
    for name in WINDOW.names or ():
        rows[name] = plain[name]
    boundaries = stream.boundaries[:1] if joined else stream.boundaries
    rows["known"] = np.where(np.isin(plain["start"], boundaries), 1, overlap)
    return Plan(rows, rows["length"].astype(np.int64))


class CausalWindows(FixedPlan):
    """Next-token prediction over the stream of documents, each closed by the end-of-text token.

    Every token but the first of a document (separate) or of the whole stream (joined) is predicted exactly once.
    Consecutive windows share one token, the last of one being the first of the next. stride: distance between window
    starts, so that windows share max_length - stride positions and every token is predicted from at least that many
    before it, except near the beginning (Baevski and Auli 2019); None: max_length - 1.
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
        self.stream = Stream.of(store, tokenizer.role("eos"))
        size = text_capacity(max_length, 0, 1)
        overlap = 1 if stride is None else size - stride
        if overlap < 1:
            raise UserError(
                f"stride={stride} is too long: windows of max_length={max_length} would not be contiguous",
                f"stride={size - 1} at most",
            )
        super().__init__(store, split, planned(causal_windows, self.stream, size, documents == "joined", overlap))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, known = rows["length"].astype(np.int64), rows["known"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        at = ragged_ranges(starts + known - 1, lengths - known)
        targets = {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}
        return Batch(PackedArrays(tokens, lengths, {}).packed(), targets, *numbers_of(examples))

    @property
    def predicted_fraction(self) -> float:
        rows = self._plan.rows
        predicted = int(rows["length"].sum(dtype=np.int64) - rows["known"].sum(dtype=np.int64))
        return predicted / int(self._plan.lengths.sum(dtype=np.int64))


class CausalSegments(FixedPlan):
    """Next-token prediction in lanes, for a model with carried state: every token predicts the next one; the target of
    a segment's last token is in the next segment. So every token of the text but its first is predicted exactly once,
    as in joined windows."""

    def __init__(self, windows: CausalWindows, size: int, lanes: int):
        self.stream = windows.stream
        predicted = len(self.stream) - 1
        self.lanes = min(lanes, predicted)
        rows = segments(predicted, self.lanes, size)
        super().__init__(windows.store, windows.split, Plan(rows, rows["length"].astype(np.int64)))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, labels = (self.stream.read(rows["start"] + ahead, lengths) for ahead in (0, 1))
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
    """Joined windows of a model with carried state: a loader reads them in lanes."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, split: str):
        super().__init__(tokenizer, store, max_length, "joined", split)
        self._size = max_length

    def in_lanes(self, lanes: int) -> CausalSegments:
        """See `data.lanes.CutInLanes`."""
        return CausalSegments(self, self._size, lanes)


class _Splits(FixedPlan):
    """Windows of text, split anew in each epoch. special_count: special tokens of each side of the split."""

    predicted_fraction = 0.5

    def __init__(self, data: SplitData, separator: int | None, max_length: int, special_count: int, seed: int):
        self.stream, self.seed = Stream.of(data.text, separator), seed
        size, joined = text_capacity(max_length, special_count, 1), data.documents == "joined"
        plan = planned(text_windows, self.stream, size, joined, 2, 2 * special_count)
        super().__init__(data.text, data.split, plan)

    def prefixes(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) where the windows are split."""
        return prefix_lengths(rows["length"], examples, self.seed, epoch)


class MaskedPrefixes(_Splits):
    """For decoders: one text with `Packed.prefixes`; every token after the split is predicted by the previous one. Each
    document ends with the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer, data: SplitData, max_length: int, seed: int):
        super().__init__(data, tokenizer.role("eos"), max_length, 0, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, prefixes = self.stream.read(rows["start"], lengths), self.prefixes(rows, examples, epoch)
        at = ragged_ranges(np.cumsum(lengths) - lengths + prefixes - 1, lengths - prefixes)
        packed = replace(PackedArrays(tokens, lengths, {}).packed(), prefixes=tuple(prefixes.tolist()))
        target = Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))
        return Batch(packed, {"prefix_lm": target}, *numbers_of(examples))


class EncodedPrefixes(_Splits):
    """For encoder-decoders: the prefix on the input side, the rest on the output side, both in the family's format."""

    def __init__(self, sides: Sides, data: SplitData, max_length: int, seed: int):
        self.sides = sides
        super().__init__(data, None, max_length, sides.template.special_count, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, prefixes = rows["length"].astype(np.int64), self.prefixes(rows, examples, epoch)
        before = self.stream.read(rows["start"], prefixes)
        behind = self.stream.read(rows["start"] + prefixes, lengths - prefixes)
        return self.sides.batch((before, prefixes), (behind, lengths - prefixes), "prefix_lm", examples)
