"""A tokenizer folder in Hugging Face's layout: tokenizer.json, or the files that came before it.

vocab.txt: WordPiece (BERT, ELECTRA, DistilBERT). vocab.json and merges.txt: byte-level pieces (GPT-2, RoBERTa, BART),
or GPT-1's with "</w>". spiece.model: SentencePiece (T5, ALBERT).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from lmtool.errors import UserError
from lmtool.tokenizers import backends
from lmtool.tokenizers.configs import SPECIALS

WHOLE, SETTINGS, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PIECES = ("spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model")
FILES = (WHOLE, SETTINGS, SPECIAL_MAP, "vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", *PIECES)
"""The files of a tokenizer, of which a folder holds some."""
# Classes that take nothing for granted: the files say all.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    if any((folder / name).is_file() for name in (WHOLE, "vocab.txt", *PIECES)):
        return True
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def read_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a folder, and its special tokens by role. UserError where a file is missing or broken."""
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    mapped = read_json(folder / SPECIAL_MAP) if (folder / SPECIAL_MAP).is_file() else {}
    if (folder / WHOLE).is_file():
        backend = _whole(folder / WHOLE)
    else:
        backend = _earlier(folder, settings)
        _add_tokens(backend, folder, settings)
    vocabulary = backend.get_vocab()
    family = None if settings.get("tokenizer_class") in _PLAIN else backends.family_of(vocabulary)
    tokens = {**SPECIALS.get(family or "", {}), **_written(settings), **_written(mapped)}
    tokens = {role: token for role, token in tokens.items() if token in vocabulary}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in dict.fromkeys(tokens.values()) if token not in known]
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in missing])
    return backend, tokens


def _whole(path: Path) -> tokenizers.Tokenizer:
    read_json(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises nothing narrower
        raise broken(path, str(problem)) from problem
    _check_numbers(path, backend.get_vocab())
    return backend


def _earlier(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pieces = next((folder / name for name in PIECES if (folder / name).is_file()), None)
    if pieces is not None:
        return _unigram(pieces, settings)
    if (folder / "vocab.txt").is_file():
        return _wordpiece(folder / "vocab.txt", settings)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _merges(folder, settings)
    what = "has no tokenizer.json" if folder.is_dir() else "is not a folder"
    raise UserError(
        f"tokenizer: {folder} {what}",
        "give a folder that holds tokenizer.json (or vocab.txt, or vocab.json and merges.txt, or spiece.model), such "
        "as a run's checkpoint or what `lmtool tokenizer` wrote",
    )


def _wordpiece(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    # Lines end at "\n" alone: a vocabulary may hold characters that Unicode calls line ends.
    words = read_text(path).split("\n")
    if words and not words[-1]:
        words.pop()
    vocabulary = {word.removesuffix("\r"): number for number, word in enumerate(words)}
    unknown = _token(settings.get("unk_token")) or "[UNK]"
    if unknown not in vocabulary:
        raise broken(path, f"it has no {unknown}")
    return backends.wordpiece(
        vocabulary,
        bool(settings.get("do_lower_case", True)),
        settings.get("strip_accents"),
        bool(settings.get("tokenize_chinese_chars", True)),
        unknown,
    )


def _merges(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocabulary = read_json(folder / "vocab.json")
    if not all(isinstance(number, int) for number in vocabulary.values()):
        raise broken(folder / "vocab.json", "its values are no numbers")
    _check_numbers(folder / "vocab.json", vocabulary)
    lines = read_text(folder / "merges.txt").split("\n")
    merges: list[tuple[str, str]] = []
    for line in lines:
        if line and not line.startswith("#version"):
            first, _, second = line.partition(" ")
            if not second or " " in second:
                raise broken(folder / "merges.txt", f"{line!r} is no pair of pieces")
            merges.append((first, second))
    words_end = "</w>" in "".join(word for word in vocabulary if word.endswith("</w>"))[-4:]
    unknown = "<unk>" if words_end and "<unk>" in vocabulary else None
    options = {"end_of_word_suffix": "</w>", "unk_token": unknown} if words_end else {}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, **options)
    except Exception as problem:  # the library raises nothing narrower
        raise broken(folder / "merges.txt", str(problem)) from problem
    if words_end:
        return backends.word_end(model)
    prefix = bool(settings.get("add_prefix_space", False))
    backend = backends.byte_level(model, prefix)
    if backends.family_of(vocabulary) == "roberta":
        backends.roberta_around(backend, prefix)
    return backend


def _unigram(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    albert = "albert" in str(settings.get("tokenizer_class", "")).lower()
    content = path.read_bytes()
    # ALBERT's vocabulary has BERT's tokens among its pieces.
    kind: backends.Pieces = "albert" if albert or (b"[CLS]" in content and b"[SEP]" in content) else "t5"
    try:
        return backends.unigram(
            content,
            kind,
            int(settings.get("extra_ids", 100)),
            bool(settings.get("do_lower_case", True)),
            bool(settings.get("keep_accents", False)),
        )
    except (ValueError, KeyError) as problem:
        raise broken(path, str(problem)) from problem


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Tokens that stand beside the vocabulary, in the order of their ids."""
    path = folder / "added_tokens.json"
    added = {number: AddedToken(token) for token, number in (read_json(path) if path.is_file() else {}).items()}
    for number, one in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(one, dict) and isinstance(one.get("content"), str) and str(number).isdecimal():
            options = {key: bool(one[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in one}
            added[int(number)] = AddedToken(one["content"], special=bool(one.get("special")), **options)
    for number, token in sorted(added.items()):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != number:
            raise broken(path if path.is_file() else folder / SETTINGS, f"{token.content} cannot have the id {number}")


def _written(settings: Mapping[str, Any]) -> dict[str, str]:
    """Tokens by role from a tokenizer_config.json or special_tokens_map.json."""
    found = {name: _token(settings.get(f"{name}_token")) for name in SPECIALS["bert"] | {"bos": "", "eos": ""}}
    return {name: token for name, token in found.items() if token is not None}


def _token(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _check_numbers(path: Path, vocabulary: Mapping[str, int]) -> None:
    largest, entries = max(vocabulary.values(), default=0), len(vocabulary)
    if largest > 2 * entries + 10_000:  # an id that is no number of an entry would ask for so many embeddings
        raise broken(path, f"it has {entries} entries, but an id of {largest}")


def read_text(path: Path) -> str:
    """A file in UTF-8, its line ends as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise broken(path, str(problem)) from problem


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. UserError naming the file, and the line, where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        raise broken(path, problem.msg, problem.lineno) from problem
    except (UnicodeDecodeError, RecursionError) as problem:
        raise broken(path, str(problem)) from problem
    if not isinstance(content, dict):
        raise broken(path, "it holds no JSON object")
    return content


def broken(path: Path, what: str, line: int | None = None) -> UserError:
    """The error of a file that is not a tokenizer's."""
    at = f"{path}:{line}" if line else str(path)
    return UserError(
        f"{at}: not a readable tokenizer: {' '.join(what.split())[:200]}",
        "copy the file again, or train a tokenizer with `lmtool tokenizer`",
    )
