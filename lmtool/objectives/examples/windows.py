"""Windows of running text: how text is split into windows, and what all examples from text share."""

from __future__ import annotations

import numpy as np
import torch

from lmtool import random_streams
from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format
from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import EncoderDecoder, shift_right
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Target

# Shape letters: E windows of a text, N windows of a batch, T tokens of a batch.


def text_capacity(max_length: int, special_count: int, text_count: int) -> int:
    """Returns how many tokens of text fit into an example of text_count texts and special_count special tokens. Raises
    UserError if fewer than two fit per text."""
    capacity = max_length - special_count
    if capacity < 2 * text_count:
        raise UserError(
            f"max_length={max_length} is too short: with {special_count} special tokens, only {max(capacity, 0)} "
            "tokens of text fit",
            f"set max_length={special_count + 2 * text_count} or more",
        )
    return capacity


def require_examples(plan: Plan, split: str) -> Plan:
    """Returns the plan. Raises UserError if the plan is empty. split: the name of the split, for the message."""
    if not len(plan.lengths):
        raise UserError(f"the {split} text has no window of two tokens", "set data.path= to more text")
    return plan


def numbers_of(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the fields `examples` and `parts` of a batch, in which every example has a single part."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def plan_metadata(plan: Plan, store: TokenStore, split: str) -> JsonObject:
    """Returns the metadata of the examples of a split and of its token store, for the screens."""
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "documents_without_tokens": int(store.metadata.get("documents_without_tokens", 0)),
        "store_tokens": int(store.document_offsets[-1]),
        "truncated_fraction": 0.0,  # long documents are split into windows instead
        **plan.metadata(),
    }


class FixedPlan:
    """The base class of examples whose plan is the same in every epoch. Raises UserError if the plan is empty."""

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
        """Returns the size of an epoch, and the fraction of its tokens that are predicted."""
        fraction = self.predicted_fraction
        metadata = plan_metadata(self._plan, self.store, self.split)
        return metadata if fraction is None else {**metadata, "predicted_fraction": fraction}


def lanes_of(rows: np.ndarray, count: int) -> Lanes:
    """Returns the lanes to which the segments of a batch belong. rows: the segments. count: the number of lanes."""
    return Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), count)


def lane_metadata(plan: Plan, lanes: int) -> JsonObject:
    """Returns the number of lanes, and the maximum number of segments per lane, for the screens."""
    return {"lanes": lanes, "segments_per_lane": -(-len(plan) // lanes)}


# The text of a split is a *stream*: its documents concatenated, each followed by an optional separator. Windows are
# parts of single documents (data.documents=separate), or of the stream regardless of documents (data.documents=joined).


# The record of a window: its first position in the stream, and its length.
WINDOW = np.dtype([("start", "i8"), ("length", "i4")])
# The record of a window whose length may be sampled. short: whether the length was sampled. If the text ends before,
# the window is shorter than the sampled length.
SAMPLED_WINDOW = np.dtype([*WINDOW.descr, ("short", "i1")])
# Number of random numbers per window: whether it is short, and its length.
_DRAWS = 2


class Stream:
    """The documents of a token store as one stream of token ids, which are not copied. document_offsets: the boundaries
    of documents in the store; empty documents are dropped. separator: the id of the token after each document; None for
    no separator."""

    def __init__(
        self, tokens: np.ndarray, document_offsets: np.ndarray, separator: int | None, cache: ArrayCache = UNSHARED
    ):
        offsets = np.asarray(document_offsets, dtype=np.int64)
        has_tokens = offsets[1:] > offsets[:-1]
        if not has_tokens.all():
            offsets = offsets[np.append(True, has_tokens)]
        self.tokens, self.offsets, self.separator = tokens, offsets, separator
        self.cache = cache.of("stream", separator)
        # Without separators, stream positions are store positions, and only the memory map is used.
        self.boundaries = offsets if separator is None else self.cache.load(self._with_separators)["boundaries"]

    @classmethod
    def from_store(cls, store: TokenStore, separator: int | None) -> Stream:
        """Returns the stream of the documents in a store."""
        return cls(store.tokens, store.document_offsets, separator, store.cache)

    def _with_separators(self) -> dict[str, np.ndarray]:
        return {"boundaries": self.offsets + np.arange(len(self.offsets))}

    def __len__(self) -> int:
        return int(self.boundaries[-1])

    def documents_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the number of the document at each position of the stream."""
        return np.searchsorted(self.boundaries, positions, side="right") - 1

    def read(self, starts_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """Returns the concatenated ids (T,) of N parts of the stream, int64. starts_N: the first position of each part.
        lengths_N: the number of tokens of each part."""
        positions = ragged_ranges(starts_N, lengths_N)
        document = self.documents_at(positions)
        first, position_in_document = self.offsets[document], positions - self.boundaries[document]
        is_separator = position_in_document == self.offsets[document + 1] - first
        ids = np.asarray(self.tokens[first + np.where(is_separator, 0, position_in_document)], dtype=np.int64)
        return ids if self.separator is None else np.where(is_separator, self.separator, ids)


def windows(stream: Stream, size: int, joined: bool, overlap: int = 0) -> np.ndarray:
    """Splits a stream into consecutive windows of at most `size` tokens: (E,) records of `WINDOW`. A window at the end
    of a text is dropped if the previous window has all of its tokens. If windows overlap, a text of a single token has
    no window. joined: whether windows continue across documents, so that only the last window is shorter; otherwise,
    each window has tokens of one document. overlap: the number of tokens that a window shares with the next window."""
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
    """Builds a plan from the windows of `windows` that have at least `shortest` tokens. special_count: the number of
    special tokens in an example."""
    rows = windows(stream, size, joined)
    rows = rows[rows["length"] >= shortest]
    return Plan(rows, rows["length"].astype(np.int64) + special_count)


def sampled_windows(
    stream: Stream, size: int, joined: bool, short_probability: float, seed: int, epoch: int
) -> np.ndarray:
    """Splits a stream into consecutive windows (see `windows`), some of which are short: (E,) records of
    `SAMPLED_WINDOW`. With probability `short_probability`, the length of a window is sampled uniformly from 2 to
    `size`, as in BERT's script for pairs (short_seq_prob of create_pretraining_data.py); otherwise it is `size`. seed,
    epoch: they key the random numbers."""
    boundaries = np.array([0, len(stream)]) if joined else stream.boundaries
    lengths = np.diff(boundaries)
    # Sample more windows than a document probably needs: 10% and 4 windows above the expected number. If the windows of
    # a document do not reach its end, its windows are sampled again, twice as many.
    mean_length = (1 - short_probability) * size + short_probability * (size + 2) / 2
    counts = np.ceil(1.1 * lengths / mean_length).astype(np.int64) + 4
    documents, finished = np.arange(len(lengths)), [np.empty(0, dtype=SAMPLED_WINDOW)]
    while len(documents):
        owner = np.repeat(documents, counts)
        owner_ends = np.cumsum(counts)
        first = owner_ends - counts
        number = np.arange(len(owner)) - np.repeat(first, counts)
        short_uniform, length_uniform = (
            random_streams.uniform_at(seed, "sample", epoch, owner, number * _DRAWS + draw) for draw in (0, 1)
        )
        rows = np.empty(len(owner), dtype=SAMPLED_WINDOW)
        rows["short"] = short_uniform < short_probability
        target = np.where(rows["short"] == 1, 2 + (length_uniform * (size - 1)).astype(np.int64), size)
        ends = np.cumsum(target)
        start = ends - target - np.repeat(ends[first] - target[first], counts)
        rows["start"], rows["length"] = boundaries[owner] + start, np.minimum(target, lengths[owner] - start)
        reaches_end = (start + target)[owner_ends - 1] >= lengths[documents]
        finished.append(rows[np.repeat(reaches_end, counts) & (start < lengths[owner])])
        documents, counts = documents[~reaches_end], 2 * counts[~reaches_end]
    all_windows = np.concatenate(finished)
    return all_windows[np.argsort(all_windows["start"], kind="stable")]


RaggedTexts = tuple[np.ndarray, np.ndarray]
"""The concatenated ids of N texts, and the lengths (N,) of the texts."""


class Sides:
    """Makes the batches of an encoder-decoder. Its two sides, inputs and outputs, have the family's text format. The
    decoder's inputs are the start token and the outputs, shifted by one position. backbone: the encoder-decoder.
    tokenizer: the tokenizer. Raises UserError if the tokenizer lacks a special token of the format."""

    def __init__(self, backbone: EncoderDecoder, tokenizer: Tokenizer):
        self.template = FormatTemplate.of(text_format(backbone.config.text_format, tokenizer), 1)
        self.start = tokenizer.role(backbone.config.start_role)

    def batch(self, source: RaggedTexts, target: RaggedTexts, term: str, examples_N: np.ndarray) -> Batch:
        """Returns a batch in which the encoder reads the source, and the decoder predicts the target. term: the name of
        the term that predicts the target. examples_N: the numbers of the examples."""
        inputs, outputs = (assemble(self.template, [texts]) for texts in (source, target))
        labels = torch.from_numpy(outputs.tokens)
        targets = {term: Target(labels, at=torch.arange(len(labels)), side="outputs")}
        return Batch(inputs.packed(), targets, *numbers_of(examples_N), shift_right(outputs.packed(), self.start))
