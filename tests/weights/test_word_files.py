"""Text files of word vectors: reading, writing, and refusals with line numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from lmtool.errors import UserError
from lmtool.weights.conversion.word_vectors import is_word_file, read_words, write_words

LINES = ["the 0.5 -1 2e-3 4", "cat 1 2 3 4", "the 9 9 9 9", ". . . 0 0 0.25 1"]


def write(path: Path, lines: list[str]) -> Path:
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("header", [[], ["4 4"]])
@pytest.mark.parametrize("name", ["glove.txt", "wiki.vec", "glove.txt.gz"])
def test_word_vectors_are_read(tmp_path: Path, name: str, header: list[str]) -> None:
    path = write(tmp_path / name, [*header, *LINES, ""])
    assert is_word_file(path)
    file = read_words(path)
    assert file.words == ["the", "cat", ". . ."] and file.duplicates == 1
    assert torch.equal(file.vectors, torch.tensor([[0.5, -1, 2e-3, 4], [1, 2, 3, 4], [0, 0, 0.25, 1]]))


def test_written_vectors_are_read_back_exactly(tmp_path: Path) -> None:
    vectors = torch.randn(50, 7) * torch.logspace(-30, 5, 50)[:, None]
    words = [f"w{number}é" for number in range(50)]
    write_words(tmp_path / "vectors.txt", words, vectors)
    again = read_words(tmp_path / "vectors.txt")
    assert again.words == words and torch.equal(again.vectors, vectors)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, "dog 1 2 3"], "vectors.txt:5: the line has 3 numbers after the word, but the first line has 4"),
        ([*LINES, "dog 1 2 3 4 5"], "vectors.txt:5: the line has 5 numbers after the word, but the first line has 4"),
        (["3 5", *LINES], "vectors.txt:2: the line has 4 numbers after the word, but the first line has 5"),
        ([*LINES, "dog 1 2 x 4"], "vectors.txt:5: the line has 1 number after the word, but the first line has 4"),
        ([*LINES, "dog 1 2 nan 4"], "vectors.txt:5: a number is not finite"),
        (["a text, not vectors"], "vectors.txt:1: the line is not a word with its vector: it ends with 0 numbers"),
        (["cat 1"], "vectors.txt:1: the line is not a word with its vector: it ends with 1 number$"),
        ([""], "contains no words"),
    ],
)
def test_invalid_lines_are_refused_with_number(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_words(write(tmp_path / "vectors.txt", lines))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "vectors.txt.gz", LINES * 100)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="stream is truncated"):
        read_words(path)
