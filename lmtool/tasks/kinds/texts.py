"""Turns rows into packed batches. Texts are tokenized once, and truncated or read in overlapping windows.

Shape letters: E rows or texts, W windows, N rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.configs import Truncation
from lmtool.data.examples import Plan, Rows
from lmtool.data.formats import FormatTemplate, assemble, ragged_ranges, text_format, truncate_texts
from lmtool.data.trees import ANCESTORS, paths_of_tokens
from lmtool.errors import UserError
from lmtool.models.encoder_decoder import shift_right
from lmtool.tasks.kinds.labels import items_of, location
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target

# Texts per tokenizer call: enough to keep its threads busy, few enough to fit in memory; fewer with character offsets.
_TEXTS_PER_CALL, _ALIGNED_TEXTS_PER_CALL = 4096, 1024
# Fields of a plan that may exceed 32 bits: rows, and offsets into the concatenated tokens.
_INT64_FIELDS = ("row", "begin", "start", "end")
# Fields of a plan: the number of retained tokens of each text. `begin` is the index of the last text's first one.
_LENGTH_FIELDS = ("first", "second")


class AlignedTexts:
    """The distinct texts of a column, tokenized once: concatenated ids and character offsets."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        numbers: dict[str, int] = {}
        self.text_E = np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
        distinct = list(numbers)
        encoded = [
            pair
            for start in range(0, len(distinct), _ALIGNED_TEXTS_PER_CALL)
            for pair in tokenizer.encode_aligned_batch(distinct[start : start + _ALIGNED_TEXTS_PER_CALL])
        ]
        self.ids = np.concatenate([ids for ids, _ in encoded])
        self.spans = np.concatenate([spans for _, spans in encoded])
        lengths = np.array([len(ids) for ids, _ in encoded], dtype=np.int64)
        self.lengths_E = lengths[self.text_E]
        self.starts_E = (np.cumsum(lengths) - lengths)[self.text_E]

    def tokens_of(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Returns the first and the last token of a row that overlap the characters [start, end). If no token does,
        last < first."""
        spans_T2 = self.spans[self.starts_E[row] :][: self.lengths_E[row]]
        first = int(np.searchsorted(spans_T2[:, 1], start, side="right"))
        return first, int(np.searchsorted(spans_T2[:, 0], end, side="left")) - 1


@dataclass(frozen=True)
class Windows:
    """Windows of texts, (W,) int64 each; the windows of a text are adjacent and in order.

    text: index of the window's text. part: index of the window within it. start, end: the tokens [start, end) of the
    window. core_start, core_end: the tokens [core_start, core_end) whose predictions are taken from this window; the
    windows of a text cover each of its tokens exactly once.
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


def windows(lengths: np.ndarray, capacity: int | np.ndarray, overlap: int | np.ndarray = 0) -> Windows:
    """Returns overlapping windows of E texts. lengths: (E,) tokens of the texts. capacity: maximum tokens of a window,
    a number or (E,), above `overlap`, the tokens that adjacent windows share. Raises ValueError if windows would not
    advance.

    If two windows share a token, its prediction comes from the one where it is farther from the edge: the boundary is
    the middle of the overlap (the maximum context of Devlin et al. 2019, `run_squad.py`). The last window ends with its
    text and may be shorter; an empty text has one empty window.
    """
    lengths_E = np.asarray(lengths, dtype=np.int64)
    capacity_E = np.broadcast_to(np.asarray(capacity, dtype=np.int64), lengths_E.shape)
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


def encode_words(sentences: Sequence[Sequence[str]], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the ids and the words of each sentence, see `Tokenizer.encode_sentences`."""
    for start in range(0, len(sentences), _TEXTS_PER_CALL):
        yield from tokenizer.encode_sentences(sentences[start : start + _TEXTS_PER_CALL])


class EncodedTexts:
    """The tokens of E texts, concatenated, with the (E,) lengths and starts of the texts. columns: further values of
    the tokens, by name."""

    def __init__(self, ids: np.ndarray, lengths: np.ndarray, columns: Mapping[str, np.ndarray] | None = None):
        self.ids, self.lengths, self.columns = ids, np.asarray(lengths, dtype=np.int64), columns or {}
        self.starts = np.cumsum(self.lengths) - self.lengths

    @classmethod
    def of(cls, texts: list[str], tokenizer: Tokenizer) -> EncodedTexts:
        """Tokenizes texts."""
        pieces = [
            ids
            for start in range(0, len(texts), _TEXTS_PER_CALL)
            for ids in tokenizer.encode_batch(texts[start : start + _TEXTS_PER_CALL])
        ]
        return cls(np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32), np.array(list(map(len, pieces))))

    @classmethod
    def with_trees(cls, rows: Rows, tokenizer: Tokenizer) -> list[EncodedTexts]:
        """Tokenizes each text of rows with dependency trees. Subwords have the path of their word."""
        encoded = [list(encode_words(items_of(cells), tokenizer)) for cells in rows.columns.values()]
        trees = [rows.parents[name] for name in rows.columns]
        paths = paths_of_tokens(trees, [[word_T for _, word_T in pieces] for pieces in encoded])
        texts = []
        for pieces, paths_TD in zip(encoded, paths, strict=True):
            ids = [ids_T for ids_T, _ in pieces]
            texts.append(cls(np.concatenate(ids), np.array(list(map(len, ids))), {ANCESTORS: paths_TD}))
        return texts

    def indices(self, rows_N: np.ndarray, lengths_N: np.ndarray, offset_N: np.ndarray | int = 0) -> np.ndarray:
        """Returns the indices of the tokens of these rows: `lengths_N` tokens of each row, from its token `offset_N`
        on."""
        return ragged_ranges(self.starts[rows_N] + offset_N, lengths_N)

    def read(self, rows_N: np.ndarray, lengths_N: np.ndarray, offset_N: np.ndarray | int = 0) -> np.ndarray:
        """Returns the concatenated ids of the tokens at `indices`."""
        return self.ids[self.indices(rows_N, lengths_N, offset_N)]


@dataclass(frozen=True)
class InputFormat:
    """How texts become the inputs of a model.

    format_name: the special tokens around a text, see `data.formats`. max_length: maximum tokens of an example. start:
    the first token of the decoder's input, for encoder-decoders whose decoder reads the same text again (Lewis et al.
    2020, section 3.1); None for other models. stride: tokens shared by adjacent windows of a long text, at most half a
    window; None: long texts are truncated. truncation: how a pair is truncated, see `data.formats.truncate_texts`.
    """

    tokenizer: Tokenizer
    format_name: str
    max_length: int
    start: int | None = None
    stride: int | None = None
    truncation: Truncation = "longest_first"

    def template(self, texts: int, min_tokens: int) -> FormatTemplate:
        """Returns the special tokens around one or two texts. Raises UserError if fewer than `min_tokens` tokens
        of text fit."""
        template = FormatTemplate.of(text_format(self.format_name, self.tokenizer), texts)
        if self.max_length - template.special_count < min_tokens:
            raise UserError(
                f"max_length={self.max_length} is too small for {template.special_count} special tokens and text",
                f"set max_length={template.special_count + 8} or more",  # room for a short text
            )
        return template


class TaskExamples:
    """Base of the examples of one split of a task. Raises UserError if the split has no rows.

    term: the loss term of the targets. start: see `InputFormat`. _plan: the plan, which is the same in every epoch.
    """

    _plan: Plan

    def __init__(self, rows: Rows, term: str, split: str, start: int | None = None):
        if not len(rows):
            raise UserError(
                f"the {split} split has no rows", "add rows to its file, or set task.path to another folder"
            )
        self.rows, self.term, self.split, self.start = rows, term, split, start

    def build_plan(self, lengths: np.ndarray, **columns: np.ndarray) -> Plan:
        """Builds a plan. lengths: the number of packed tokens of each example. columns: the fields of the plan's
        records, among them `row` and `part`."""
        fields = [(name, "i8" if name in _INT64_FIELDS else "i4", values.shape[1:]) for name, values in columns.items()]
        records = np.empty(len(lengths), dtype=fields)
        for name, values in columns.items():
            records[name] = values
        return Plan(records, (1 if self.start is None else 2) * lengths)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch_of(
        self,
        inputs: Packed,
        target: Target | None,
        rows: np.ndarray,
        examples: np.ndarray,
        outputs: Packed | None = None,
    ) -> Batch:
        """Builds the batch of some records of the plan. outputs: the decoder's input; by default, if there is a start
        token, the inputs shifted right after it."""
        if outputs is None and self.start is not None:
            outputs = shift_right(inputs, self.start)
        return Batch(
            inputs,
            {} if target is None else {self.term: target},
            torch.from_numpy(np.asarray(examples, dtype=np.int64)),
            torch.from_numpy(rows["part"].astype(np.int32)),
            outputs,
            torch.from_numpy(rows["row"].astype(np.int64)),
        )

    def labels_at(self, row_N: np.ndarray) -> Tensor | None:
        """Returns the labels of these rows: class numbers as int64, values as fp32; None if the rows have no labels."""
        if self.rows.labels is None:
            return None
        labels = torch.from_numpy(np.asarray(self.rows.labels)[row_N])
        return labels if labels.dtype == torch.int64 else labels.float()

    def metadata(self) -> JsonObject:
        """Returns the split, and counts of examples and tokens."""
        return {"split": self.split, **self._plan.metadata()}


class GroupedExamples(TaskExamples):
    """Examples of rows that are several texts each, which are always in the same batch: choices, or both orders of a
    pair. pairs: the examples of all texts, those of a row adjacent. size: the number of texts of a row."""

    def __init__(self, rows: Rows, pairs: SequenceExamples, size: int):
        super().__init__(rows, pairs.term, pairs.split)
        self.pairs, self.size = pairs, size
        flat = pairs.plan(0)
        self._plan = Plan(flat.rows.reshape(-1, size), flat.lengths.reshape(-1, size).sum(axis=1))

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """Returns the batch of some rows. rows: (G, K) records of the plan, one for each text."""
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        flat = self.pairs.batch(rows.reshape(-1), np.arange(rows.size), epoch)
        row_G = rows["row"][:, 0] // self.size
        labels = self.labels_at(row_G)
        return replace(
            flat,
            targets={} if labels is None else {self.term: Target(labels)},
            examples=numbers.repeat_interleave(self.size),
            parts=torch.arange(self.size, dtype=torch.int32).repeat(len(rows)),
            rows=torch.from_numpy(row_G).repeat_interleave(self.size),
            groups=torch.arange(len(rows)).repeat_interleave(self.size),
        )

    def metadata(self) -> JsonObject:
        """Lengths are those of a row with all of its texts. `truncated` counts texts."""
        return {**self.pairs.metadata(), **self._plan.metadata()}


class SequenceExamples(TaskExamples):
    """Examples of one text or of a pair of texts. Long texts are truncated at the end; in a pair, the longer text is
    truncated until both fit. With windows (`InputFormat.stride`), the last text is read in windows, and the first text
    of a pair is truncated to half of the capacity."""

    def __init__(self, rows: Rows, input_format: InputFormat, term: str, split: str):
        super().__init__(rows, term, split, input_format.start)
        self.template = input_format.template(len(rows.columns), min_tokens=len(rows.columns))
        capacity, stride = input_format.max_length - self.template.special_count, input_format.stride
        if rows.parents:
            self._texts = EncodedTexts.with_trees(rows, input_format.tokenizer)
        else:
            self._texts = [EncodedTexts.of(texts, input_format.tokenizer) for texts in rows.columns.values()]
        lengths = [text.lengths for text in self._texts]
        row, part, begin = np.arange(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
        if stride is None:
            retained = [np.minimum(lengths[0], capacity)]
            if len(lengths) == 2:
                retained = [*truncate_texts(np.stack(lengths), capacity, input_format.truncation)]
            self.truncated = int(np.sum(np.sum(retained, axis=0) < np.sum(lengths, axis=0)))
        else:
            preceding = [np.minimum(side, capacity // 2) for side in lengths[:-1]]
            capacity_E = capacity - sum(preceding) + np.zeros_like(lengths[-1])
            text_windows = windows(lengths[-1], capacity_E, np.minimum(stride, capacity_E // 2))
            row, part, begin = text_windows.text, text_windows.part, text_windows.start
            retained = [*(side[row] for side in preceding), text_windows.lengths]
            self.truncated = sum(int(np.sum(side < length)) for side, length in zip(preceding, lengths, strict=False))
        packed = np.sum(retained, axis=0) + self.template.special_count
        if not packed.all():
            raise UserError(
                f"{location(rows.origin[row[np.argmin(packed)]])}: the text is empty, and this model adds no special "
                "tokens",
                "remove the row, or give it a text",
            )
        self._plan = self.build_plan(
            packed, row=row, part=part, begin=begin, **dict(zip(_LENGTH_FIELDS, retained, strict=False))
        )

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        texts: list[tuple[np.ndarray, np.ndarray]] = []
        columns: dict[str, list[np.ndarray]] = {}
        for text, name in zip(self._texts, _LENGTH_FIELDS, strict=False):
            indices = text.indices(rows["row"], rows[name], rows["begin"] if text is self._texts[-1] else 0)
            texts.append((text.ids[indices], rows[name]))
            for column, values in text.columns.items():
                columns.setdefault(column, []).append(values[indices])
        labels = self.labels_at(rows["row"])
        target = None if labels is None else Target(labels)
        return self.batch_of(assemble(self.template, texts, columns).packed(), target, rows, examples)

    def metadata(self) -> JsonObject:
        """Adds the number and the fraction of truncated rows."""
        counts = {"truncated": self.truncated, "truncated_fraction": self.truncated / len(self.rows)}
        return {**super().metadata(), **counts}
