"""Text formats: the special tokens and columns around texts, by the name in a model's configuration (`text_format`).

bert: [CLS] a [SEP], or [CLS] a [SEP] b [SEP], with the column "segment": 1 from the first token of b on
(Devlin et al. 2019). roberta: <s> a </s>, or <s> a </s></s> b </s>, no columns (Liu et al. 2019). gpt: a <eos>, or
a <eos> b <eos>, no columns; the last token is the one a head reads. gpt1: [START] a [EXTRACT], or [START] a [DELIM] b
[EXTRACT], tokens that finetuning adds (Radford et al. 2018, section 3.3). t5: as gpt, with </s> (Raffel et al. 2020).
bart: as roberta (Lewis et al. 2020). xlnet: a [SEP] [CLS], or a [SEP] b [SEP] [CLS], with the column "segment": 0, 1
for b and its [SEP], 2 for [CLS] (Yang et al. 2019). plain: a, or a b: what transformers' tokenizers of GPT
and GPT-2 give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed


@dataclass(frozen=True)
class FormatTemplate:
    """A format as constants: the special tokens before, between and after its texts, and the columns of each.

    pieces: for one text (before, after), for two (before, between, after), each the ids of special tokens.
    piece_columns, text_columns: by column name, a value for every special token of each piece, and one for each text.
    """

    pieces: tuple[np.ndarray, ...]
    piece_columns: dict[str, tuple[np.ndarray, ...]]
    text_columns: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, text_format: Any, texts: int) -> FormatTemplate:
        """Read a format (`lmtool.data.formats`) of one or two texts by giving it texts of one marked token each."""
        marks = [np.array([-1 - number], dtype=np.int64) for number in range(texts)]
        ids, columns = text_format.single(*marks) if texts == 1 else text_format.pair(*marks)
        ids = np.asarray(ids, dtype=np.int64)
        at = [int(np.flatnonzero(ids == mark)[0]) for mark in marks]
        boundaries = [-1, *at, len(ids)]
        spans = [slice(boundaries[number] + 1, boundaries[number + 1]) for number in range(texts + 1)]
        columns = {name: np.asarray(column, dtype=np.int64) for name, column in columns.items()}
        return cls(
            tuple(ids[span] for span in spans),
            {name: tuple(column[span] for span in spans) for name, column in columns.items()},
            {name: tuple(int(column[place]) for place in at) for name, column in columns.items()},
        )

    @property
    def special_count(self) -> int:
        """Special tokens an example has."""
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True)
class PackedArrays:
    """tokens: (T,) int64. lengths: (N,). columns: (T,) int64 by name."""

    tokens: np.ndarray
    lengths: np.ndarray
    columns: dict[str, np.ndarray]

    def packed(self, tokens: np.ndarray | None = None) -> Packed:
        """The batch as tensors; `tokens` in the place of its own where they were corrupted."""
        columns = {name: torch.from_numpy(column) for name, column in self.columns.items()}
        ids = self.tokens if tokens is None else tokens
        return Packed(torch.from_numpy(ids), tuple(self.lengths.tolist()), columns)


def ragged_ranges(starts_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
    """(T,) int64: start, start + 1, ... of N runs, laid end to end."""
    ends = np.cumsum(lengths_N)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts_N - (ends - lengths_N), lengths_N)


def assemble(template: FormatTemplate, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> PackedArrays:
    """Put N examples together.

    texts: for each text of the format, its ids laid end to end over the examples, and their (N,) lengths.
    """
    lengths = np.full(len(texts[0][1]), template.special_count, dtype=np.int64)
    for _, lengths_N in texts:
        lengths += np.asarray(lengths_N, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens = np.empty(int(lengths.sum()), dtype=np.int64)
    columns = {name: np.empty_like(tokens) for name in template.text_columns}
    at = starts
    for number, piece in enumerate(template.pieces):
        for offset, token in enumerate(piece):
            tokens[at + offset] = token
            for name, column in columns.items():
                column[at + offset] = template.piece_columns[name][number][offset]
        at = at + len(piece)
        if number < len(texts):
            ids, lengths_N = texts[number]
            lengths_N = np.asarray(lengths_N, dtype=np.int64)
            positions = ragged_ranges(at, lengths_N)
            tokens[positions] = ids
            for name, column in columns.items():
                column[positions] = template.text_columns[name][number]
            at = at + lengths_N
    return PackedArrays(tokens, lengths, columns)


Formatted = tuple[np.ndarray, dict[str, np.ndarray]]


class TextFormat(Protocol):
    """single_overhead, pair_special_count: special tokens around one text and around two."""

    single_special_count: int
    pair_special_count: int

    def single(self, ids: np.ndarray) -> Formatted:
        """(L,) int64 ids with the special tokens, and (L,) int64 columns by name."""

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted: ...


class BertFormat:
    single_special_count, pair_special_count = 2, 3

    def __init__(self, tokenizer: Tokenizer):
        self._cls, self._sep = tokenizer.role("cls"), tokenizer.role("sep")

    def single(self, ids: np.ndarray) -> Formatted:
        joined = _join([self._cls], ids, [self._sep])
        return joined, {"segment": np.zeros(len(joined), dtype=np.int64)}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        joined = _join([self._cls], first, [self._sep], second, [self._sep])
        segment = np.zeros(len(joined), dtype=np.int64)
        segment[len(first) + 2 :] = 1
        return joined, {"segment": segment}


class RobertaFormat:
    single_special_count, pair_special_count = 2, 4

    def __init__(self, tokenizer: Tokenizer):
        self._cls, self._sep = tokenizer.role("cls"), tokenizer.role("sep")

    def single(self, ids: np.ndarray) -> Formatted:
        return _join([self._cls], ids, [self._sep]), {}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        return _join([self._cls], first, [self._sep, self._sep], second, [self._sep]), {}


class GptFormat:
    single_special_count, pair_special_count = 1, 2

    def __init__(self, tokenizer: Tokenizer):
        self._eos = tokenizer.role("eos")

    def single(self, ids: np.ndarray) -> Formatted:
        return _join(ids, [self._eos]), {}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        return _join(first, [self._eos], second, [self._eos]), {}


class Gpt1Format:
    single_special_count, pair_special_count = 2, 3

    def __init__(self, tokenizer: Tokenizer):
        self._start, self._delimiter, self._extract = (tokenizer.role(name) for name in ("bos", "sep", "cls"))

    def single(self, ids: np.ndarray) -> Formatted:
        return _join([self._start], ids, [self._extract]), {}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        return _join([self._start], first, [self._delimiter], second, [self._extract]), {}


class XlnetFormat:
    single_special_count, pair_special_count = 2, 3

    def __init__(self, tokenizer: Tokenizer):
        self._cls, self._sep = tokenizer.role("cls"), tokenizer.role("sep")

    def single(self, ids: np.ndarray) -> Formatted:
        joined = _join(ids, [self._sep, self._cls])
        return joined, {"segment": _join(np.zeros(len(joined) - 1, dtype=np.int64), [2])}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        joined = _join(first, [self._sep], second, [self._sep, self._cls])
        segment = np.zeros(len(joined), dtype=np.int64)
        segment[len(first) + 1 :], segment[-1] = 1, 2
        return joined, {"segment": segment}


class PlainFormat:
    single_special_count, pair_special_count = 0, 0

    def __init__(self, tokenizer: Tokenizer):
        """No special token stands around a text."""

    def single(self, ids: np.ndarray) -> Formatted:
        return _join(ids), {}

    def pair(self, first: np.ndarray, second: np.ndarray) -> Formatted:
        return _join(first, second), {}


_FORMATS: dict[str, Callable[[Tokenizer], TextFormat]] = {
    "bert": BertFormat,
    "roberta": RobertaFormat,
    "gpt": GptFormat,
    "gpt1": Gpt1Format,
    "plain": PlainFormat,
    "t5": GptFormat,
    "bart": RobertaFormat,
    "xlnet": XlnetFormat,
}


def text_format(name: str, tokenizer: Tokenizer) -> TextFormat:
    """The format a model names. UserError where the tokenizer lacks one of its special tokens."""
    return _FORMATS[name](tokenizer)


def _join(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def truncate_pair(
    first: int | np.ndarray, second: int | np.ndarray, limit: int
) -> tuple[int, int] | tuple[np.ndarray, np.ndarray]:
    """Lengths of two texts after taking tokens off the longer one, the second where both are equal, until they fit.

    Numbers or (N,) arrays of them; limit: tokens of both together, at most. (`_truncate_seq_pair` of BERT's scripts.)
    """
    pair = np.stack(np.broadcast_arrays(np.atleast_1d(first), np.atleast_1d(second)))
    new_a, new_b = truncate_texts(pair, limit)
    scalars = np.ndim(first) == np.ndim(second) == 0
    return (int(new_a[0]), int(new_b[0])) if scalars else (new_a, new_b)


def truncate_texts(lengths_KN: np.ndarray, limit: int) -> np.ndarray:
    """(K, N) lengths of the K texts of N examples after taking tokens off the longest one, the later of equal ones,
    until those of an example fit. limit: tokens of an example, at most."""
    texts = len(lengths_KN)
    shorter_KN = np.sort(lengths_KN, axis=0)
    before_KN = np.cumsum(shorter_KN, axis=0) - shorter_KN
    # With the k shortest texts complete, the others have so many tokens each; the best k leaves them most.
    cap_N = ((limit - before_KN) // (texts - np.arange(texts))[:, None]).max(axis=0)
    new_KN = np.minimum(lengths_KN, cap_N)
    cut_KN = lengths_KN > cap_N
    left_N = limit - new_KN.sum(axis=0)
    return new_KN + (cut_KN & (np.cumsum(cut_KN, axis=0) <= left_N))


# A text format beside what a tokenizer's own file puts around texts, which is what transformers reads.


SEGMENT = "segment"
# One text, and a pair.
_TEXTS = (("a",), ("a", "b"))


def layout_difference(tokenizer: Tokenizer, format_name: str) -> str | None:
    """How the tokenizer's file lays out a text or a pair, and how the format does, as pieces, where the two differ."""
    for texts in _TEXTS:
        template = FormatTemplate.of(text_format(format_name, tokenizer), len(texts))
        runs = [np.asarray(ids, dtype=np.int64) for ids in tokenizer.encode_batch(texts)]
        expected = assemble(template, [(ids, np.array([len(ids)])) for ids in runs])
        ids, segments = tokenizer.encode_with_template(*texts)
        own, ours = " ".join(tokenizer.pieces(ids)), " ".join(tokenizer.pieces(expected.tokens.tolist()))
        if ids != expected.tokens.tolist():
            return f"{own!r}, and not {ours!r}"
        if SEGMENT in expected.columns and segments != expected.columns[SEGMENT].tolist():
            return f"{own!r} in the segments {segments}, and not {expected.columns[SEGMENT].tolist()}"
    return None


def with_format(tokenizer: Tokenizer, format_name: str) -> Tokenizer:
    """The tokenizer, its file laying out texts and pairs as the format does."""
    if layout_difference(tokenizer, format_name) is None:
        return tokenizer
    templates = [FormatTemplate.of(text_format(format_name, tokenizer), len(texts)) for texts in _TEXTS]
    special = {f"t{number}": int(number) for template in templates for piece in template.pieces for number in piece}
    single, pair = (list(_written(template)) for template in templates)
    return tokenizer.with_layout(single, pair, special)


def _written(template: FormatTemplate) -> Iterator[str]:
    """A template as the tokenizers library writes one."""
    texts = len(template.pieces) - 1
    for number, piece in enumerate(template.pieces):
        columns = template.piece_columns.get(SEGMENT)
        segments = np.zeros(len(piece), dtype=np.int64) if columns is None else columns[number]
        yield from (f"t{token}:{segment}" for token, segment in zip(piece, segments, strict=True))
        if number < texts:
            yield f"${'AB'[number]}:{template.text_columns.get(SEGMENT, (0, 0))[number]}"
