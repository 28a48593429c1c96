"""Rows as packed batches: tokenized once, truncated or read in overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.data.examples import Plan, Rows
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format, truncate_texts
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import shifted
from lmtool.tasks.kinds.labels import location
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# Texts as tokens with character offsets.
# Shape letters: E rows, T tokens.


# Texts per tokenizer call: enough for its threads, few enough for memory.
_ALIGNED_TEXTS = 1024


class AlignedTexts:
    """The distinct texts of a column, tokenized once: concatenated ids and character offsets."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        numbers: dict[str, int] = {}
        self.text_E = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
        distinct = list(numbers)
        encoded = [
            pair
            for start in range(0, len(distinct), _ALIGNED_TEXTS)
            for pair in tokenizer.encode_aligned_batch(distinct[start : start + _ALIGNED_TEXTS])
        ]
        self.ids = np.concatenate([ids for ids, _ in encoded])
        self.spans = np.concatenate([spans for _, spans in encoded])
        lengths = np.array([len(ids) for ids, _ in encoded], dtype=np.int64)
        self.lengths_E = lengths[self.text_E]
        self.starts_E = (np.cumsum(lengths) - lengths)[self.text_E]

    def spans_of(self, row: int) -> np.ndarray:
        """(T, 2) character offsets of a row's tokens."""
        start = self.starts_E[row]
        return self.spans[start : start + self.lengths_E[row]]


# Long texts as overlapping windows: the tokens each window holds, and those for which its predictions count. A pure
# function of lengths.
# Shape letters: E texts, W windows.


@dataclass(frozen=True)
class Windows:
    """Windows of texts, (W,) int64 each; the windows of a text are adjacent and in order.

    text: index of the window's text. part: index of the window within it. start, end: the tokens [start, end) of the
    window. own_start, own_end: the tokens for which its predictions count; over the windows of a text these partition
    its tokens.
    """

    text: np.ndarray
    part: np.ndarray
    start: np.ndarray
    end: np.ndarray
    core_start: np.ndarray
    core_end: np.ndarray

    def __len__(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> np.ndarray:
        """(W,) tokens of each window."""
        return self.end - self.start


def windows(lengths: np.ndarray, room: int | np.ndarray, overlap: int | np.ndarray = 0) -> Windows:
    """Overlapping windows of E texts.

    Of two windows that share a token, its prediction comes from the one where it is farther from the edge: the boundary
    is the middle of the overlap (the maximum context of Devlin et al. 2019, `run_squad.py`). The last window ends with
    its text and may be shorter; an empty text has one empty window.

    Args:
        lengths: (E,) tokens of the texts.
        room: Maximum tokens of a window, a number or (E,), above `overlap`.
        overlap: Tokens shared by adjacent windows.

    Raises:
        ValueError: If windows would not advance.
    """
    lengths_E = np.asarray(lengths, dtype=np.int64)
    capacity_E = np.broadcast_to(np.asarray(room, dtype=np.int64), lengths_E.shape)
    step_E = capacity_E - np.asarray(overlap, dtype=np.int64)
    if len(lengths_E) and (step_E.min() < 1 or np.min(overlap) < 0):
        raise ValueError(f"windows of {capacity_E.min()} tokens cannot overlap by {np.max(overlap)}")
    counts_E = 1 + np.maximum(0, -(-(lengths_E - capacity_E) // step_E))
    text = np.repeat(np.arange(len(lengths_E)), counts_E)
    part = np.arange(len(text)) - np.repeat(np.cumsum(counts_E) - counts_E, counts_E)
    start = part * step_E[text]
    end = np.minimum(start + capacity_E[text], lengths_E[text])
    core_start, core_end = start.copy(), end.copy()
    later = np.flatnonzero(part > 0)
    boundaries = (start[later] + end[later - 1] + 1) // 2
    core_start[later], core_end[later - 1] = boundaries, boundaries
    return Windows(text, part, start, end, core_start, core_end)


# Rows as packed batches: tokenized once, truncated, laid out in the backbone's format.
# Shape letters: E rows, N of them in a batch.


# Texts per tokenizer call: enough for its threads, few enough for memory.
_TEXTS = 4096
# Fields of a plan: retained tokens of each text; `begin` is the first one of the last text.
_SIDES = ("first", "second")


class EncodedTexts:
    """E texts as concatenated ids, with (E,) offsets."""

    @classmethod
    def of_ids(cls, ids: np.ndarray, lengths: np.ndarray) -> EncodedTexts:
        """Texts that are already tokenized. ids: concatenated. lengths: (E,)."""
        texts = cls.__new__(cls)
        texts.ids, texts.lengths = ids, np.asarray(lengths, dtype=np.int64)
        texts.starts = np.cumsum(texts.lengths) - texts.lengths
        return texts

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        pieces = [
            ids
            for start in range(0, len(texts), _TEXTS)
            for ids in tokenizer.encode_batch(texts[start : start + _TEXTS])
        ]
        self.lengths = np.array([len(ids) for ids in pieces], dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.ids = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def read(self, rows_N: np.ndarray, lengths_N: np.ndarray, from_N: np.ndarray | int = 0) -> np.ndarray:
        return self.ids[ragged_ranges(self.starts[rows_N] + from_N, lengths_N)]


@dataclass(frozen=True)
class InputFormat:
    """How texts become the inputs of a model.

    format_name: the special tokens around a text, see `data.formats`. max_length: maximum tokens of an example. start:
    for encoder-decoders whose decoder reads the same text after this token (Lewis et al. 2020, section 3.1). stride:
    tokens shared by adjacent windows of a long text, at most half of one; None: long texts are truncated.
    """

    tokenizer: Tokenizer
    format_name: str
    max_length: int
    start: int | None = None
    stride: int | None = None

    def template(self, texts: int, fewest: int) -> FormatTemplate:
        """The special tokens around one text or two. UserError if fewer than `fewest` tokens of text fit."""
        template = FormatTemplate.of(text_format(self.format_name, self.tokenizer), texts)
        if self.max_length - template.special_count < fewest:
            raise UserError(
                f"max_length={self.max_length} leaves no capacity for text",
                f"max_length={template.special_count + 8} or more",
            )
        return template


class SequenceExamples:
    """One text or a pair of texts per row. Long texts are truncated at the end; of a pair, the longer one until both
    fit. With windows (`InputFormat.stride`), the last text is read in windows, and the first text of a pair is
    truncated to half of the length."""

    def __init__(self, rows: Rows, layout: InputFormat, term: str, split: str):
        if not len(rows):
            raise UserError(f"the {split} split has no rows", "use a table with rows: `lmtool show task.path`")
        self.rows, self.term, self.split, self.start = rows, term, split, layout.start
        self.template = layout.template(len(rows.columns), fewest=len(rows.columns))
        room, stride = layout.max_length - self.template.special_count, layout.stride
        self._texts = [EncodedTexts(texts, layout.tokenizer) for texts in rows.columns.values()]
        lengths = [text.lengths for text in self._texts]
        row, part, begin = np.arange(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
        if stride is None:
            retained = [np.minimum(lengths[0], room)]
            if len(lengths) == 2:
                retained = [*truncate_texts(np.stack(lengths), room)]
            self.truncated = int(np.sum(np.sum(retained, axis=0) < np.sum(lengths, axis=0)))
        else:
            preceding = [np.minimum(side, room // 2) for side in lengths[:-1]]
            capacity_E = room - sum(preceding) + np.zeros_like(lengths[-1])
            cut = windows(lengths[-1], capacity_E, np.minimum(stride, capacity_E // 2))
            row, part, begin = cut.text, cut.part, cut.start
            retained = [*(side[row] for side in preceding), cut.lengths]
            self.truncated = sum(int(np.sum(side < length)) for side, length in zip(preceding, lengths, strict=False))
        packed = np.sum(retained, axis=0)
        empty = np.flatnonzero(packed + self.template.special_count == 0)
        if len(empty):
            raise UserError(
                f"{location(rows.origin[row[empty[0]]])}: an empty text, to which this model adds no special token",
                "remove the row, or give it a text",
            )
        fields = {"row": row, "part": part, "begin": begin, **dict(zip(_SIDES, retained, strict=False))}
        records = np.empty(len(row), dtype=[(name, "i8" if name in ("row", "begin") else "i4") for name in fields])
        for name, values in fields.items():
            records[name] = values
        sides = 1 if layout.start is None else 2
        self._plan = Plan(records, sides * (packed + self.template.special_count))

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        texts = []
        for text, name in zip(self._texts, _SIDES, strict=False):
            begin = rows["begin"] if text is self._texts[-1] else 0
            texts.append((text.read(rows["row"], rows[name], begin), rows[name]))
        targets = {}
        if self.rows.labels is not None:
            labels = torch.from_numpy(np.asarray(self.rows.labels)[rows["row"]])
            targets[self.term] = Target(labels if labels.dtype == torch.int64 else labels.float())
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        inputs = assemble(self.template, texts).packed()
        outputs = None if self.start is None else shifted(inputs, self.start)
        parts = torch.from_numpy(rows["part"].astype(np.int32))
        return Batch(inputs, targets, numbers, parts, outputs, torch.from_numpy(rows["row"].astype(np.int64)))

    def metadata(self) -> dict[str, object]:
        """Counts of rows, tokens, and truncated rows."""
        return {
            "split": self.split,
            **self._plan.metadata(),
            "truncated": self.truncated,
            "truncated_fraction": self.truncated / len(self._plan),
        }
