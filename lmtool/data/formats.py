"""Text formats: the special tokens and segments around one text or a pair, as `data.configs.FORMATS` lists them.

Shape letters: N examples of a batch, T tokens of a batch, K texts of an example, L tokens of an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmtool.data.configs import FORMATS, Truncation
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Packed

SEGMENT = "segment"
"""The column that distinguishes the two texts of a pair."""


@dataclass(frozen=True)
class FormatTemplate:
    """The special tokens around the texts of an example, and the columns of all tokens.

    pieces: the ids of the special tokens before, between and after the texts. piece_columns: by column name, the value
    of each special token of each piece. text_columns: by column name, the value of each text.
    """

    pieces: tuple[np.ndarray, ...]
    piece_columns: dict[str, tuple[np.ndarray, ...]]
    text_columns: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, text_format: TextFormat, texts: int) -> FormatTemplate:
        """Returns the template of a format for one text or two."""
        ids, segments = text_format.ids, text_format.segments
        pieces: list[list[int]] = [[]]
        piece_segments: list[list[int]] = [[]]
        text_segments: list[int] = []
        for part in text_format.layouts[texts - 1].split():
            name, _, segment = part.partition(":")
            if name in ids:
                pieces[-1].append(ids[name])
                piece_segments[-1].append(int(segment or 0))
            else:
                text_segments.append(int(segment or 0))
                pieces.append([])
                piece_segments.append([])
        return cls(
            _arrays(pieces),
            {SEGMENT: _arrays(piece_segments)} if segments else {},
            {SEGMENT: tuple(text_segments)} if segments else {},
        )

    @property
    def special_count(self) -> int:
        """Number of special tokens of an example."""
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True)
class PackedArrays:
    """A packed batch as arrays. tokens: (T,) int64. lengths: (N,). columns: (T,) int64 or (T, ...) by name."""

    tokens: np.ndarray
    lengths: np.ndarray
    columns: dict[str, np.ndarray]

    def packed(self, tokens: np.ndarray | None = None) -> Packed:
        """Returns the batch as tensors. tokens: corrupted tokens to use instead."""
        columns = {name: torch.from_numpy(column) for name, column in self.columns.items()}
        ids = self.tokens if tokens is None else tokens
        return Packed(torch.from_numpy(ids), tuple(self.lengths.tolist()), columns)


def ragged_ranges(starts_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
    """Returns (T,) int64: the concatenated ranges start, start + 1, ... of N starts and lengths."""
    ends = np.cumsum(lengths_N)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts_N - (ends - lengths_N), lengths_N)


def assemble(
    template: FormatTemplate,
    texts: Sequence[tuple[np.ndarray, np.ndarray]],
    text_columns: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> PackedArrays:
    """Joins the texts of N examples with their special tokens. texts: for each text of the format, the concatenated ids
    of all examples, and their (N,) lengths. text_columns: by name, further columns: for each text, the values of its
    ids, (T, ...); special tokens get -1."""
    lengths = np.full(len(texts[0][1]), template.special_count, dtype=np.int64)
    for _, lengths_N in texts:
        lengths += np.asarray(lengths_N, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens = np.empty(int(lengths.sum()), dtype=np.int64)
    columns = {name: np.empty_like(tokens) for name in template.text_columns}
    further = {
        name: np.full((len(tokens), *values[0].shape[1:]), -1, dtype=values[0].dtype)
        for name, values in (text_columns or {}).items()
    }
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
            for name, column in further.items():
                column[positions] = (text_columns or {})[name][number]
            at = at + lengths_N
    return PackedArrays(tokens, lengths, columns | further)


@dataclass(frozen=True)
class TextFormat:
    """A format with the special tokens of a tokenizer. layouts: see `TextFormatSpec`. ids: special tokens by role.
    segments: whether tokens have the column "segment"."""

    layouts: tuple[str, str]
    ids: Mapping[str, int]
    segments: bool

    def join(self, *texts: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns one text or two with their special tokens: (L,) int64 ids, and (L,) int64 columns by name."""
        template = FormatTemplate.of(self, len(texts))
        packed = assemble(template, [(ids, np.array([len(ids)])) for ids in texts])
        return packed.tokens, packed.columns


def text_format(name: str, tokenizer: Tokenizer) -> TextFormat:
    """Returns the format of this name. Raises UserError if the tokenizer lacks one of its special tokens."""
    spec = FORMATS[name]
    return TextFormat(spec.layouts, {role: tokenizer.role(role) for role in (*spec.roles, *spec.added)}, spec.segments)


def _arrays(pieces: list[list[int]]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(piece, dtype=np.int64) for piece in pieces)


def truncate_texts(lengths_KN: np.ndarray, limit: int, rule: Truncation) -> np.ndarray:
    """Returns (K, N): the lengths of the K texts of N examples after tokens have been removed from the longest text of
    each example, one by one, until at most `limit` are left.

    rule: which of the shortened texts keep one token more, if their room cannot be divided evenly: for "bert" the first
    ones (`_truncate_seq_pair` of BERT's scripts), for "longest_first" the longest ones, of equally long texts the later
    ones (`truncation=True` of transformers' tokenizers).
    """
    texts = len(lengths_KN)
    sorted_KN = np.sort(lengths_KN, axis=0)
    before_KN = np.cumsum(sorted_KN, axis=0) - sorted_KN
    # If the k shortest texts are complete, the others share the rest equally; the best k leaves them most.
    cap_N = ((limit - before_KN) // (texts - np.arange(texts))[:, None]).max(axis=0)
    new_KN = np.minimum(lengths_KN, cap_N)
    truncated_KN = lengths_KN > cap_N
    left_N = limit - new_KN.sum(axis=0)
    if rule == "bert":
        return new_KN + (truncated_KN & (np.cumsum(truncated_KN, axis=0) <= left_N))
    by_length_KN = np.argsort(lengths_KN, axis=0, kind="stable")[::-1]
    return new_KN + (truncated_KN & (np.argsort(by_length_KN, axis=0) < left_N))


def layout_difference(tokenizer: Tokenizer, format_name: str) -> str | None:
    """Returns how the template in a tokenizer's own file, which transformers uses, differs from a format; None if it
    does not."""
    layout = text_format(format_name, tokenizer)
    for texts in (("a",), ("a", "b")):
        ids, columns = layout.join(*tokenizer.encode_batch(texts))
        file_ids, file_segments = tokenizer.encode_with_template(*texts)
        from_file, expected = " ".join(tokenizer.pieces(file_ids)), " ".join(tokenizer.pieces(ids))
        if file_ids != ids.tolist():
            return f"{from_file!r}, not {expected!r}"
        if SEGMENT in columns and file_segments != columns[SEGMENT].tolist():
            return f"{from_file!r} in the segments {file_segments}, not {columns[SEGMENT].tolist()}"
    return None


def with_format(tokenizer: Tokenizer, format_name: str) -> Tokenizer:
    """Returns the tokenizer with the format as the template in its file."""
    if layout_difference(tokenizer, format_name) is None:
        return tokenizer
    layout = text_format(format_name, tokenizer)
    templates = [FormatTemplate.of(layout, texts) for texts in (1, 2)]
    special = {f"t{token}": int(token) for template in templates for piece in template.pieces for token in piece}
    single, pair = (list(_to_template_notation(template)) for template in templates)
    return tokenizer.with_template(single, pair, special)


def _to_template_notation(template: FormatTemplate) -> Iterator[str]:
    texts = len(template.pieces) - 1
    for number, piece in enumerate(template.pieces):
        columns = template.piece_columns.get(SEGMENT)
        segments = np.zeros(len(piece), dtype=np.int64) if columns is None else columns[number]
        yield from (f"t{token}:{segment}" for token, segment in zip(piece, segments, strict=True))
        if number < texts:
            yield f"${'AB'[number]}:{template.text_columns.get(SEGMENT, (0, 0))[number]}"
