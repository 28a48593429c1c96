"""Word vectors as text, a line a word and its numbers: the files of word2vec, GloVe and fastText.

word2vec's and fastText's first line is the number of words and the width, GloVe's is a word. A word may hold spaces, as
some of GloVe's do: the numbers are the last ones of a line.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmtool.data.compressed import Broken, open_bytes, packed
from lmtool.errors import UserError

SUFFIXES = packed(".txt", ".vec")
"""Ends of the names of such files."""
_COPY = "copy or download it again, or take the line out of a copy"


@dataclass(frozen=True)
class WordFile:
    """words: V different ones. vectors: (V, H) float32. duplicates: lines of a word that an earlier line has, whose
    vector counts."""

    words: list[str]
    vectors: Tensor
    duplicates: int


def is_word_file(path: str | Path) -> bool:
    """Whether a path names such a file, by its end."""
    return str(path).lower().endswith(SUFFIXES) and Path(path).expanduser().is_file()


def read_words(path: Path) -> WordFile:
    """Read one. UserError, with file and line, where a line has another width than the first one or no numbers."""
    words: dict[str, None] = {}
    values, duplicates = array("f"), 0
    width = 0
    for number, line in _lines(path):
        parts = line.split(b" ")
        if number == 1:
            header = len(parts) == 2 and all(part.isdigit() for part in parts)
            width = int(parts[1]) if header else _numbers_behind(parts)
            if width < 2:
                raise UserError(
                    f"{path}:1: no word and its vector: {width} numbers at the end of the line",
                    "a line is a word and its numbers, with spaces between; a binary file of word2vec becomes such "
                    "text by gensim's binary=False",
                )
            if header:
                continue
        word, row = _word(path, number, parts, width)
        if word in words:
            duplicates += 1
        else:
            words[word] = None
            values.extend(row)
    if not words:
        raise UserError(f"{path}: no word in it", _COPY)
    vectors = torch.from_numpy(np.frombuffer(values, dtype=np.float32).reshape(-1, width).copy())
    return WordFile(list(words), vectors, duplicates)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, by their numbers, without the white space at their ends."""
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                stripped = line.rstrip(b" \t\r\n")
                if stripped:
                    yield number, stripped
    except Broken as problem:
        raise UserError(f"{path}: {problem.reason}", problem.hint) from problem
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}", "give a file that may be read") from problem


def _word(path: Path, number: int, parts: Sequence[bytes], width: int) -> tuple[str, list[float]]:
    """The word and the vector of a line."""
    if _numbers_behind(parts) < width or any(map(_is_number, parts[1:-width])):
        count = _numbers_behind(parts)
        raise UserError(f"{path}:{number}: {count} numbers behind the word; the first line has {width}", _COPY)
    try:
        row = [float(part) for part in parts[-width:]]
        word = b" ".join(parts[:-width]).decode()
    except UnicodeDecodeError as problem:
        raise UserError(f"{path}:{number}: its word is not UTF-8", _COPY) from problem
    if not math.isfinite(sum(row)):
        raise UserError(f"{path}:{number}: a number that is not finite", _COPY)
    return word, row


def _numbers_behind(parts: Sequence[bytes]) -> int:
    """How many numbers end a line, behind its first part."""
    return next((place for place, part in enumerate(reversed(parts[1:])) if not _is_number(part)), len(parts) - 1)


def _is_number(part: bytes) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


def write_words(path: Path, words: Sequence[str], vectors: Tensor) -> None:
    """Write words and their (V, H) vectors as GloVe's files have them: every float32 comes back as it was."""
    with path.open("w", encoding="utf-8") as file:
        for word, row in zip(words, vectors.numpy(), strict=True):
            file.write(f"{word} {' '.join(map(str, row))}\n")
