"""Word vectors in text files (word2vec, GloVe, fastText): imports them as a model or as an embedding, and exports them.

Each line of a file contains a word and its vector. In files of word2vec and fastText, the first line contains the
number of words and the width of the vectors. A word may contain spaces (GloVe), so the vector is read from the end of
the line.

Shape letters: V vocabulary entries, H width of the vectors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.config.registry import Choice, build, chosen_class, lookup
from lmtool.data.compressed import Broken, compressed_suffixes, open_bytes
from lmtool.errors import CheckFailed, UserError
from lmtool.models.configs import ModelConfig
from lmtool.models.pretransformer_configs import WordVectorsConfig
from lmtool.reporting.console import Output
from lmtool.resolver.commands import ExportConfig, ImportConfig
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tokenizers.configs import WordConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tokenizers.trained import from_words
from lmtool.weights.exporting import ImportedModel, write_folder_atomically, write_import
from lmtool.weights.padded_model import load
from lmtool.weights.saved_model import saved_config

SUFFIXES = compressed_suffixes(".txt", ".vec")
"""Extensions of files with word vectors, which may be compressed."""
_COPY_AGAIN = "copy or download the file again, or remove this line from a copy of it"


@dataclass(frozen=True)
class WordFile:
    """The content of a file with word vectors. words: the V distinct words, in the order of the file. vectors: (V, H),
    float32. duplicates: number of lines that were skipped because an earlier line has the same word."""

    words: list[str]
    vectors: Tensor
    duplicates: int


def is_word_file(path: str | Path) -> bool:
    """Returns whether a path is an existing file with the extension of a file of word vectors."""
    return str(path).lower().endswith(SUFFIXES) and user_path(path).is_file()


def read_words(path: Path) -> WordFile:
    """Reads a file of word vectors. Raises UserError, which names the line, if a line has fewer or more numbers than
    the first line, or if the file contains no words."""
    words: dict[str, None] = {}
    values, duplicates = array("f"), 0
    width = 0
    for number, line in _lines(path):
        parts = line.split(b" ")
        if number == 1:
            header = len(parts) == 2 and all(part.isdigit() for part in parts)
            width = int(parts[1]) if header else _trailing_numbers(parts)
            if width < 2:
                raise UserError(
                    f"{path}:1: the line is not a word with its vector: it ends with {counted(width, 'number')}",
                    "write a word and its numbers per line, separated by spaces; convert a binary word2vec file with "
                    "gensim: save_word2vec_format(..., binary=False)",
                )
            if header:
                continue
        word, row = _parse_line(path, number, parts, width)
        if word in words:
            duplicates += 1
        else:
            words[word] = None
            values.extend(row)
    if not words:
        raise UserError(f"{path} contains no words", "copy or download the file again")
    vectors = torch.from_numpy(np.frombuffer(values, dtype=np.float32).reshape(-1, width).copy())
    return WordFile(list(words), vectors, duplicates)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                stripped = line.rstrip(b" \t\r\n")
                if stripped:
                    yield number, stripped
    except Broken as problem:
        raise UserError(f"{path}: {problem.reason}", problem.hint) from problem
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}", "use a readable file") from problem


def _parse_line(path: Path, number: int, parts: Sequence[bytes], width: int) -> tuple[str, list[float]]:
    count = _trailing_numbers(parts)
    if count < width or any(map(_is_number, parts[1:-width])):  # too few or too many numbers
        raise UserError(
            f"{path}:{number}: the line has {counted(count, 'number')} after the word, but the first line has {width}",
            _COPY_AGAIN,
        )
    try:
        row = [float(part) for part in parts[-width:]]
        word = b" ".join(parts[:-width]).decode()
    except UnicodeDecodeError as problem:
        raise UserError(f"{path}:{number}: the word is not UTF-8", _COPY_AGAIN) from problem
    if not math.isfinite(sum(row)):
        raise UserError(f"{path}:{number}: a number is not finite", _COPY_AGAIN)
    return word, row


def _trailing_numbers(parts: Sequence[bytes]) -> int:
    """Returns how many fields at the end of a line are numbers. The first field is always part of the word."""
    return sum(1 for _ in takewhile(_is_number, reversed(parts[1:])))


def _is_number(part: bytes) -> bool:
    try:
        float(part)
    except ValueError:
        return False
    return True


def write_words(path: Path, words: Sequence[str], vectors: Tensor) -> None:
    """Writes words and their float32 vectors, (V, H), in GloVe's format. Reading the file restores every value
    exactly."""
    with path.open("w", encoding="utf-8") as file:
        for word, row in zip(words, vectors.numpy(), strict=True):
            file.write(f"{word} {' '.join(map(str, row))}\n")


_TABLE = "backbone.embed.token.weight"
# Some files have an entry of this name, whose vector is for words that the file does not list.
_UNKNOWN = "<unk>"
_FILE = "vectors.txt"


def import_vectors(config: ImportConfig, path: Path) -> None:
    """Writes a checkpoint with model=word_vectors, reads it back, and prints what it contains. Raises UserError if the
    file cannot be read, and CheckFailed if the checkpoint is read back with other vectors."""
    file, folder = read_words(path), user_path(config.output)
    lowercase = all(word == word.lower() for word in file.words)
    tokenizer = from_words(WordConfig(lowercase=lowercase), [word for word in file.words if word != _UNKNOWN])
    table_VH = table_of(file, tokenizer)
    model = WordVectorsConfig(vocab_size=len(table_VH), hidden_size=table_VH.shape[1])
    source: JsonObject = {"checkpoint": config.checkpoint, "revision": None, "file": path.name, "ignored_keys": []}
    write_import(ImportedModel({_TABLE: table_VH}, model, tokenizer, source), folder)
    reloaded_VH = load(str(folder), offline=True).model.parts.state_dict()[_TABLE]
    output = Output()
    output.line(f"{folder} · model=word_vectors · {len(file.words):,} words of {table_VH.shape[1]} numbers")
    output.rows(
        [
            ("text", "lowercased: no word has a capital letter" if lowercase else "case is kept"),
            ("duplicates", f"{counted(file.duplicates, 'line')} skipped, with words of earlier lines"),
            ("unreachable", describe_unreachable(file, tokenizer)),
            ("unknown words", f"the vector of {_UNKNOWN}" if _UNKNOWN in file.words else "zeros: the file has none"),
        ]
    )
    if not torch.equal(reloaded_VH, table_VH):
        raise CheckFailed(f"{folder} differs from the file", "keep the file, and import it again")


def table_of(file: WordFile, tokenizer: Tokenizer) -> Tensor:
    """Returns the vectors in the order of the tokenizer's ids, (V, H). Special tokens that the file does not list get
    zeros."""
    if tokenizer.vocab_size < 8:  # the minimum of model.vocab_size
        raise UserError(f"the file has only {counted(len(file.words), 'word')}", "use a file with more words")
    table_VH = torch.zeros(tokenizer.vocab_size, file.vectors.shape[1])
    ids = {word: token_id for token_id, word in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))}
    ids[_UNKNOWN] = tokenizer.role("unk")
    table_VH[torch.tensor([ids[word] for word in file.words])] = file.vectors
    return table_VH


def describe_unreachable(file: WordFile, tokenizer: Tokenizer) -> str:
    """Describes, with examples, how many words of the file are never looked up, because the tokenizer splits them."""
    specials = {_UNKNOWN, *WordConfig().specials.values()}
    words = [word for word in file.words if word not in specials]
    encoded = zip(words, tokenizer.encode_batch(words), strict=True)
    split = [word for word, ids in encoded if len(ids) != 1 or tokenizer.pieces(ids)[0] != word]
    examples = f", such as {', '.join(split[:3])}" if split else ""
    return f"{counted(len(split), 'word')} that the tokenizer splits{examples}"


def export_vectors(config: ExportConfig) -> None:
    """Writes vectors.txt in GloVe's format and reads it back. Raises UserError if the model is contextual, and
    CheckFailed if the file is read back with other vectors."""
    loaded = load(config.checkpoint, offline=config.offline)
    if loaded.config.contextual or loaded.tokenizer is None:
        raise UserError(
            f"format=vectors: model={loaded.config.name} is contextual, so a word has no fixed vector",
            f"lmtool embed checkpoint={config.checkpoint} text=... pooling=none",
        )
    tokenizer, table_VH = loaded.tokenizer, loaded.model.parts.state_dict()[_TABLE].float()
    words = tokenizer.pieces(range(tokenizer.vocab_size))
    ids = [token_id for token_id, word in enumerate(words) if token_id not in tokenizer.special_ids and word]
    exported = [words[token_id] for token_id in ids]
    if "unk" in tokenizer.roles:
        exported, ids = [*exported, _UNKNOWN], [*ids, tokenizer.role("unk")]
    vectors, folder = table_VH[ids], user_path(config.output)

    def fill(draft: Path) -> None:
        write_words(draft / _FILE, exported, vectors)
        file = read_words(draft / _FILE)
        if file.words != exported or not torch.equal(file.vectors, vectors):
            raise CheckFailed(f"{_FILE} differs from the checkpoint", "the folder was not written; report this")

    write_folder_atomically(folder, fill)
    Output().line(f"{folder / _FILE} · {len(exported):,} words of {vectors.shape[1]} numbers")


def import_as_embedding(config: ImportConfig, family: str) -> None:
    """Writes a new model whose token embedding is a checkpoint's word vectors (Kim 2014). All sizes but
    `embedding_size`, the width of the vectors, are the family's defaults, and all other weights are random. Raises
    UserError if the token embedding of the family has no separate width, or is not a single table."""
    loaded, folder = load(config.checkpoint, offline=config.offline), user_path(config.output)
    table_VH, entry = loaded.model.parts.state_dict()[_TABLE].float(), lookup("model", family)
    if entry is None or "embedding_size" not in entry.config.model_fields:
        raise UserError(
            f"model={family} has no token embedding with a separate embedding_size", "set model=cnn or model=lstm"
        )
    sizes: JsonObject = {"vocab_size": len(table_VH), "embedding_size": table_VH.shape[1]}
    model = cast(ModelConfig, entry.config.model_validate(sizes))
    tensors = {f"backbone.{name}": tensor for name, tensor in build(model, 0).state_dict().items()}
    if _TABLE not in tensors or tensors[_TABLE].shape != table_VH.shape:
        raise UserError(f"model={family} has no single table of token vectors", "set model=cnn or model=lstm")
    tensors[_TABLE] = table_VH
    source: JsonObject = {"checkpoint": config.checkpoint, "revision": None}
    write_import(ImportedModel(tensors, model, loaded.tokenizer, source), folder)
    new_count = sum(tensor.numel() for tensor in tensors.values()) - table_VH.numel()
    rows = [
        ("copied", f"{_TABLE.rpartition('.')[0]} {tuple(table_VH.shape)}"),
        ("new", f"all others: {new_count:,} values"),
    ]
    output = Output()
    output.line(f"{folder} · model={family} with the vectors of {config.checkpoint}")
    output.rows(rows)


def holds_vectors(config: ImportConfig) -> bool:
    """Returns whether the model of a checkpoint is not contextual, so that it consists of word vectors."""
    kind = chosen_class(saved_config(config.checkpoint, config.offline).get("model"), Choice("model"))
    return kind is not None and issubclass(kind, ModelConfig) and not kind.contextual
