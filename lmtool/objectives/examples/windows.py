"""Windows of running text: the planner of every objective that reads one text, and examples for language models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool import random_streams
from lmtool.data.examples import Plan, planned
from lmtool.data.formats import FormatTemplate, PackedArrays, assemble, ragged_ranges, text_format
from lmtool.data.loader import segments
from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import EncoderDecoder, shifted
from lmtool.objectives.corruption.noises import prefix_lengths
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Packed, Target

# Shared by all plans of text: the capacity, at least one example, and metadata.
# Shape letters: N examples of a batch.


def text_capacity(max_length: int, special_count: int, texts: int) -> int:
    """Tokens of text that fit. UserError if a text would have fewer than two."""
    capacity = max_length - special_count
    if capacity < 2 * texts:
        raise UserError(
            f"max_length={max_length} leaves {max(capacity, 0)} tokens of text after {special_count} special tokens",
            f"max_length={special_count + 2 * texts} or more",
        )
    return capacity


def some(plan: Plan, split: str) -> Plan:
    if not len(plan.lengths):
        raise UserError(f"the {split} text has no window of two tokens", "use more text with data.path=")
    return plan


def numbers_of(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples and parts of a batch; examples have a single part here."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def plan_metadata(plan: Plan, store: TokenStore, split: str) -> dict[str, Any]:
    """Metadata of an objective's examples, and of their store, for the screens."""
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "documents_without_tokens": int(store.metadata.get("documents_without_tokens", 0)),
        "store_tokens": int(store.document_offsets[-1]),
        "truncated_fraction": 0.0,  # long documents are split
        **plan.metadata(),
    }


# Windows of running text: the planner of every objective that reads one text per example. The text of a split is a
# *stream*: its documents concatenated, each followed by an optional separator. Windows are cut within documents
# (`separate`) or across them (`joined`).
# Shape letters: D documents, E windows, N windows of a batch, T their tokens.


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
        places = ragged_ranges(starts_N, lengths_N)
        document = np.searchsorted(self.boundaries, places, side="right") - 1
        first, within = self.offsets[document], places - self.boundaries[document]
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


# The two sides of an encoder-decoder's example.


class Sides:
    """The layout of both sides: each in the family's text format, and the outputs shifted after its start token."""

    def __init__(self, backbone: EncoderDecoder, tokenizer: Tokenizer):
        self.template = FormatTemplate.of(text_format(backbone.config.text_format, tokenizer), 1)
        self.start = tokenizer.role(backbone.config.start_role)

    def batch(self, inputs: Packed, outputs: PackedArrays, term: str, examples_N: np.ndarray) -> Batch:
        """A batch of encoder inputs and complete outputs, which are the targets."""
        labels = torch.from_numpy(outputs.tokens)
        target = Target(labels, at=torch.arange(len(labels)), side="outputs")
        return Batch(inputs, {term: target}, *numbers_of(examples_N), shifted(outputs.packed(), self.start))


# Windows of a document stream for next-token prediction.


# A window, and how many of its first positions are not predicted in it: those of previous windows, or the first of all.
_CAUSAL = np.dtype([*WINDOW.descr, ("known", "i4")])


def causal_windows(stream: Stream, size: int, joined: bool, overlap: int) -> Plan:
    """Windows as of `windows`, with the number of their first places that are not predicted in them."""
    cut = windows(stream, size, joined, overlap)
    rows = np.empty(len(cut), dtype=_CAUSAL)
    for name in WINDOW.names or ():
        rows[name] = cut[name]
    boundaries = stream.boundaries[:1] if joined else stream.boundaries
    rows["known"] = np.where(np.isin(cut["start"], boundaries), 1, overlap)
    return Plan(rows, rows["length"].astype(np.int64))


class CausalWindows:
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
        self.store, self.split = store, split
        self.stream = Stream.of(store, tokenizer.role("eos"))
        size = text_capacity(max_length, 0, 1)
        overlap = 1 if stride is None else size - stride
        if overlap < 1:
            raise UserError(
                f"stride={stride} is too long: windows of max_length={max_length} would not be contiguous",
                f"stride={size - 1} at most",
            )
        self._plan = some(planned(causal_windows, self.stream, size, documents == "joined", overlap), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, known = rows["length"].astype(np.int64), rows["known"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        at = ragged_ranges(starts + known - 1, lengths - known)
        packed = PackedArrays(tokens, lengths, {}).packed()
        return Batch(
            packed, {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}, *numbers_of(examples)
        )

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, and the fraction of tokens that predict."""
        metadata, rows = plan_metadata(self._plan, self.store, self.split), self._plan.rows
        predicted = int(rows["length"].sum(dtype=np.int64) - rows["known"].sum(dtype=np.int64))
        return {**metadata, "predicted_fraction": predicted / metadata["tokens"]}


class CausalSegments:
    """Next-token prediction in lanes, for a model with carried state: every token predicts the next one; the target of
    a segment's last token is in the next segment. So every token of the text but its first is predicted exactly once,
    as in joined windows."""

    def __init__(self, windows: CausalWindows, size: int, lanes: int):
        self._windows, self.stream = windows, windows.stream
        places = len(self.stream) - 1
        self.lanes = min(lanes, places)
        rows = segments(places, self.lanes, size)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), windows.split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, labels = (self.stream.read(rows["start"] + ahead, lengths) for ahead in (0, 1))
        return Batch(
            PackedArrays(tokens, lengths, {}).packed(),
            {"clm": Target(torch.from_numpy(labels), at=torch.arange(len(tokens)))},
            *numbers_of(examples),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, the lanes, and the segments of each."""
        metadata = plan_metadata(self._plan, self._windows.store, self._windows.split)
        along = -(-len(self._plan) // self.lanes)
        return {**metadata, "predicted_fraction": 1.0, "lanes": self.lanes, "segments_per_lane": along}


class CarriedWindows(CausalWindows):
    """Joined windows of a model with carried state: a loader reads them in lanes."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, split: str):
        super().__init__(tokenizer, store, max_length, "joined", split)
        self._size = max_length

    def in_lanes(self, lanes: int) -> CausalSegments:
        """See `data.lanes.CutInLanes`."""
        return CausalSegments(self, self._size, lanes)


# Text windows split anew in each epoch, for decoders and for encoder-decoders.
# Shape letters: N examples of a batch, T their tokens.


class _Splits:
    """Windows of text, split anew in each epoch."""

    def __init__(
        self, stream: Stream, store: TokenStore, size: int, joined: bool, special_count: int, split: str, seed: int
    ):
        self.stream, self.store, self.split, self.seed = stream, store, split, seed
        self._plan = some(planned(text_windows, stream, size, joined, 2, special_count), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def prefixes(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) where the windows are split."""
        return prefix_lengths(rows["length"], examples, self.seed, epoch)

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, and the fraction of its tokens that are predicted."""
        return {**plan_metadata(self._plan, self.store, self.split), "predicted_fraction": 0.5}


class MaskedPrefixes(_Splits):
    """For decoders: one text with `Packed.prefixes`; every token after the split is predicted by the previous one. Each
    document ends with the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, documents: str, split: str, seed: int):
        stream = Stream.of(store, tokenizer.role("eos"))
        super().__init__(stream, store, text_capacity(max_length, 0, 1), documents == "joined", 0, split, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, prefixes = self.stream.read(rows["start"], lengths), self.prefixes(rows, examples, epoch)
        at = ragged_ranges(np.cumsum(lengths) - lengths + prefixes - 1, lengths - prefixes)
        packed = replace(PackedArrays(tokens, lengths, {}).packed(), prefixes=tuple(prefixes.tolist()))
        target = Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))
        return Batch(packed, {"prefix_lm": target}, *numbers_of(examples))


class EncodedPrefixes(_Splits):
    """For encoder-decoders: the prefix on the input side, the rest on the output side, both in the family's format."""

    def __init__(self, sides: Sides, store: TokenStore, max_length: int, documents: str, split: str, seed: int):
        self.sides = sides
        special_count = sides.template.special_count
        stream = Stream.of(store, None)
        size = text_capacity(max_length, special_count, 1)
        super().__init__(stream, store, size, documents == "joined", 2 * special_count, split, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, prefixes = rows["length"].astype(np.int64), self.prefixes(rows, examples, epoch)
        before = self.stream.read(rows["start"], prefixes)
        behind = self.stream.read(rows["start"] + prefixes, lengths - prefixes)
        inputs = assemble(self.sides.template, [(before, prefixes)])
        outputs = assemble(self.sides.template, [(behind, lengths - prefixes)])
        return self.sides.batch(inputs.packed(), outputs, "prefix_lm", examples)
