"""Word vectors as text (word2vec, GloVe, fastText): `lmtool import`, where words become the vocabulary, and export."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtool.config.auto import chosen_class
from lmtool.config.saved import JsonObject
from lmtool.config.tables import Choice, build, lookup
from lmtool.data.compressed import Broken, open_bytes, packed
from lmtool.errors import CheckFailed, UserError
from lmtool.models.word_configs import WordVectorsConfig
from lmtool.reporting.console import Output
from lmtool.resolver.schema.run import ExportConfig, ImportConfig
from lmtool.tokenizers.configs import WordConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tokenizers.trained import of_words
from lmtool.weights.exporting import ImportedModel, write_folder_atomically, write_import
from lmtool.weights.load import load, saved_config

# Files of word2vec, GloVe and fastText: one line per word, with its numbers.
#
# The first line of word2vec and fastText has the number of words and the width; GloVe's is a word. A word may contain
# spaces, as some of GloVe's do: the numbers are the last fields of a line.


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


# `lmtool import` of such a file as a vocabulary and model=word_vectors, `lmtool export format=vectors`, and `lmtool
# import model=` of vectors as the token table of another family.
#
# Shape letters: V vocabulary entries, H width of the vectors.


_TABLE = "backbone.embed.token.weight"
# The entry of files that have a vector for words that they do not list.
_UNKNOWN = "<unk>"
_FILE = "vectors.txt"


def import_vectors(config: ImportConfig, path: Path) -> None:
    """Write the checkpoint, read it again, and print what there is. UserError where the file cannot be read."""
    file, folder = read_words(path), Path(config.output).expanduser()
    # Where no word has a capital letter, no text needs one.
    lowercase = all(word == word.lower() for word in file.words)
    tokenizer = of_words(WordConfig(lowercase=lowercase), [word for word in file.words if word != _UNKNOWN])
    table_VH = table_of(file, tokenizer)
    model = WordVectorsConfig(vocab_size=len(table_VH), hidden_size=table_VH.shape[1])
    source: JsonObject = {"checkpoint": config.checkpoint, "revision": None, "file": path.name, "ignored_keys": []}
    write_import(ImportedModel({_TABLE: table_VH}, model, tokenizer, source), folder)
    again = load(str(folder), offline=True)
    same = torch.equal(again.model.parts.state_dict()[_TABLE], table_VH)
    output = Output()
    output.line(f"{folder} · model=word_vectors · {len(file.words):,} words of {table_VH.shape[1]} numbers")
    output.rows(
        [
            ("text", "lowercased: no word has a capital letter" if lowercase else "cased as it stands"),
            ("duplicates", f"{file.duplicates:,} lines of words that came before, left out"),
            ("unreachable", unreachable(file, tokenizer)),
            ("unknown words", f"the vector of {_UNKNOWN}" if _UNKNOWN in file.words else "zeros: the file has none"),
        ]
    )
    if not same:
        raise CheckFailed(f"{folder} is not what was imported", "keep the file, and import it again")


def table_of(file: WordFile, tokenizer: Tokenizer) -> torch.Tensor:
    """(V, H) the vectors by id; of special tokens that the file does not list zeros."""
    if tokenizer.vocab_size < 8:
        raise UserError(f"{len(file.words)} words in the file", "give a file with more")
    table_VH = torch.zeros(tokenizer.vocab_size, file.vectors.shape[1])
    numbers = {word: number for number, word in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))}
    numbers[_UNKNOWN] = tokenizer.role("unk")
    table_VH[torch.tensor([numbers[word] for word in file.words])] = file.vectors
    return table_VH


def unreachable(file: WordFile, tokenizer: Tokenizer) -> str:
    """How many words no text leads to, since it is cut into others, and the first of them."""
    words = [word for word in file.words if word != _UNKNOWN and word not in WordConfig().specials.values()]
    read = zip(words, tokenizer.encode_batch(words), strict=True)
    lost = [word for word, ids in read if len(ids) != 1 or tokenizer.pieces(ids)[0] != word]
    shown = f", such as {', '.join(lost[:3])}" if lost else ""
    return f"{len(lost):,} words that text is cut within{shown}"


def export_vectors(config: ExportConfig) -> None:
    """Write vectors.txt, as GloVe's files are, and read it again. UserError where a word has more than one vector."""
    loaded = load(config.checkpoint, offline=config.offline)
    if loaded.config.contextual or loaded.tokenizer is None:
        raise UserError(
            f"format=vectors: model={loaded.config.name} has no vector of a word, but one of each word in its text",
            f"lmtool embed checkpoint={config.checkpoint} text=... pooling=none",
        )
    tokenizer, table_VH = loaded.tokenizer, loaded.model.parts.state_dict()[_TABLE].float()
    words = tokenizer.pieces(range(tokenizer.vocab_size))
    ids = [number for number, word in enumerate(words) if number not in tokenizer.special_ids and word]
    listed = [words[number] for number in ids]
    if "unk" in tokenizer.roles:
        listed, ids = [*listed, _UNKNOWN], [*ids, tokenizer.role("unk")]
    vectors, folder = table_VH[ids], Path(config.output).expanduser()
    write_folder_atomically(folder, lambda draft: write_words(draft / _FILE, listed, vectors))
    again = read_words(folder / _FILE)
    if again.words != listed or not torch.equal(again.vectors, vectors):
        raise CheckFailed(f"{folder / _FILE} is not what was exported", "keep the checkpoint")
    Output().line(f"{folder / _FILE} · {len(listed):,} words of {vectors.shape[1]} numbers")


def vectors_below(config: ImportConfig, family: str) -> None:
    """Write a new model of a family whose token table holds a checkpoint's word vectors (Kim 2014): the table is as
    wide as they are, all other sizes and weights are the family's own. UserError where it has no such table."""
    loaded, folder = load(config.checkpoint, offline=config.offline), Path(config.output).expanduser()
    table_VH, entry = loaded.model.parts.state_dict()[_TABLE].float(), lookup("model", family)
    if entry is None or "embedding_size" not in entry.config.model_fields:
        raise UserError(
            f"model={family} has no table of token vectors whose width is its own", "give model=cnn or model=lstm"
        )
    sizes: JsonObject = {"vocab_size": len(table_VH), "embedding_size": table_VH.shape[1]}
    model: Any = entry.config.model_validate(sizes)
    tensors = {f"backbone.{name}": tensor for name, tensor in build(model, 0).state_dict().items()}
    if _TABLE not in tensors or tensors[_TABLE].shape != table_VH.shape:
        raise UserError(f"model={family} has no table of tokens alone", "give model=cnn or model=lstm")
    tensors[_TABLE] = table_VH
    source: JsonObject = {"checkpoint": config.checkpoint, "revision": None}
    write_import(ImportedModel(tensors, model, loaded.tokenizer, source), folder)
    new = sum(tensor.numel() for tensor in tensors.values()) - table_VH.numel()
    rows = [("taken", f"{_TABLE.rpartition('.')[0]} {tuple(table_VH.shape)}"), ("new", f"all else: {new:,} values")]
    output = Output()
    output.line(f"{folder} · model={family} over the vectors of {config.checkpoint}")
    output.rows(rows)


def holds_vectors(config: ImportConfig) -> bool:
    """Whether a checkpoint holds word vectors and no more."""
    kind = chosen_class(saved_config(config.checkpoint, config.offline).get("model"), Choice("model"))
    return kind is not None and not getattr(kind, "contextual", True)
