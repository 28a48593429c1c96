"""Many examples in a format at once: special tokens between runs of text, laid end to end without a Python loop.

Shape letters: N examples, T tokens of the packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmtool.types import Packed


@dataclass(frozen=True)
class Template:
    """A format as constants: the special tokens before, between and after its texts, and the columns of each.

    pieces: for one text (before, after), for two (before, between, after), each the ids of special tokens.
    piece_columns, text_columns: by column name, a value for every special token of each piece, and one for each text.
    """

    pieces: tuple[np.ndarray, ...]
    piece_columns: dict[str, tuple[np.ndarray, ...]]
    text_columns: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, text_format: Any, texts: int) -> Template:
        """Read a format (`lmtool.data.formats`) of one or two texts by giving it texts of one marked token each."""
        marks = [np.array([-1 - number], dtype=np.int64) for number in range(texts)]
        ids, columns = text_format.single(*marks) if texts == 1 else text_format.pair(*marks)
        ids = np.asarray(ids, dtype=np.int64)
        at = [int(np.flatnonzero(ids == mark)[0]) for mark in marks]
        borders = [-1, *at, len(ids)]
        spans = [slice(borders[number] + 1, borders[number + 1]) for number in range(texts + 1)]
        columns = {name: np.asarray(column, dtype=np.int64) for name, column in columns.items()}
        return cls(
            tuple(ids[span] for span in spans),
            {name: tuple(column[span] for span in spans) for name, column in columns.items()},
            {name: tuple(int(column[place]) for place in at) for name, column in columns.items()},
        )

    @property
    def overhead(self) -> int:
        """Special tokens an example has."""
        return sum(len(piece) for piece in self.pieces)


@dataclass(frozen=True)
class Assembled:
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


def assemble(template: Template, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Assembled:
    """Put N examples together.

    texts: for each text of the format, its ids laid end to end over the examples, and their (N,) lengths.
    """
    lengths = np.full(len(texts[0][1]), template.overhead, dtype=np.int64)
    for _, own in texts:
        lengths += np.asarray(own, dtype=np.int64)
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
            ids, own = texts[number]
            own = np.asarray(own, dtype=np.int64)
            places = ragged_ranges(at, own)
            tokens[places] = ids
            for name, column in columns.items():
                column[places] = template.text_columns[name][number]
            at = at + own
    return Assembled(tokens, lengths, columns)
