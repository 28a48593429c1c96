"""The text of vocabulary entries, and how each kind of tokenizer marks spaces and word continuations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from lmtool.system.terminal import visible_space

Marks = Literal["continues", "spelled", "space", "bytes", "end", "words", "characters"]
"""How entries mark word boundaries. continues: "##" before continuations. spelled: as continues, but in GPT-2's byte
alphabet with "Ġ" before words. space: "▁" for a space. bytes: GPT-2's byte alphabet, "Ġ" for a space. end: "</w>" after
the last subword. words: every entry is a word. characters: no marks."""
PREFIX, SPACE, SUFFIX = "##", "▁", "</w>"


@dataclass(frozen=True)
class EntryText:
    """The text of an entry without marks. starts, ends: whether the entry starts or ends a word; `ends` is None if the
    marks do not tell."""

    text: str
    starts: bool
    ends: bool | None = None


def marks_of(backend: tokenizers.Tokenizer) -> Marks:
    """Infers from a tokenizer's rules and entries how it marks word boundaries."""
    rules = json.loads(backend.to_str())
    model, steps = rules["model"], json.dumps([rules["pre_tokenizer"], rules["decoder"]])
    entries = backend.get_vocab()
    if model.get("type") == "WordPiece":
        return "spelled" if '"ByteLevel"' in steps else "continues"
    if model.get("type") == "WordLevel":
        return "characters" if any(word.isspace() for word in entries) else "words"
    if any(word.startswith(SPACE) for word in entries):
        return "space"
    return "end" if model.get("end_of_word_suffix") and '"ByteLevel"' not in steps else "bytes"


def starts_word(marks: Marks, words: Sequence[str]) -> np.ndarray:
    """Returns (V,) bool: whether each entry starts a word, see `Tokenizer.starts_word`."""
    if marks == "words":
        starts = [True for _ in words]
    elif marks == "characters":
        starts = [not word.isalnum() for word in words]
    elif marks in ("continues", "spelled"):
        starts = [not word.startswith(PREFIX) for word in words]
    elif marks == "space":
        starts = [word.startswith(SPACE) for word in words]
    else:
        # The byte alphabet writes white space as "Ġ", "Ċ", "ĉ" and "č", and printable ASCII characters as themselves.
        starts = [word[:1] in "ĠĊĉč" or (word[:1].isascii() and not word[:1].isalnum()) for word in words]
    return np.array(starts, dtype=bool)


def entry_text(marks: Marks, word: str) -> EntryText | None:
    """Returns the text of an entry; None if the entry has only some of the bytes of a character."""
    if marks == "continues":
        return EntryText(word.removeprefix(PREFIX), not word.startswith(PREFIX))
    if marks == "spelled":
        text = _decode(word.removeprefix(PREFIX))
        return None if text is None else EntryText(text.removeprefix(" "), not word.startswith(PREFIX))
    if marks == "space":
        return EntryText(word.removeprefix(SPACE), word.startswith(SPACE))
    if marks == "end":
        return EntryText(word.removesuffix(SUFFIX), True, word.endswith(SUFFIX))
    if marks == "bytes":
        text = _decode(word)
        return None if text is None else EntryText(text.removeprefix(" "), text.startswith(" "))
    return EntryText("", True) if word == " " else EntryText(word, marks == "words")


def readable(marks: Marks, word: str) -> str:
    """Returns an entry for display, with visible white space, and bytes decoded or written as <E2>."""
    if marks == "spelled" and word.startswith(PREFIX):
        return PREFIX + readable("bytes", word.removeprefix(PREFIX))
    if marks in ("bytes", "spelled"):
        text = _decode(word)
        word = text if text is not None else "".join(f"<{_BYTES.get(character, 0):02X}>" for character in word)
        word = word.removeprefix(" ") if marks == "spelled" and word != " " else word
    elif marks == "space":
        word = word.replace(SPACE, " ")
    return visible_space(word)


def entry_bytes(marks: Marks, word: str) -> bytes:
    """Returns the UTF-8 bytes of an entry without marks, which may be only some of the bytes of a character."""
    if marks in ("bytes", "spelled"):
        plain = word.removeprefix(PREFIX) if marks == "spelled" else word
        if all(character in _BYTES for character in plain):
            return bytes(_BYTES[character] for character in plain).removeprefix(b" ")
        return word.encode()
    entry = entry_text(marks, word)
    return (word if entry is None else entry.text).encode()


def _decode(word: str) -> str | None:
    """None if the bytes are not valid UTF-8."""
    try:
        return bytes(_BYTES[character] for character in word).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return None


def _alphabet() -> dict[str, int]:
    """The byte for each character of GPT-2's alphabet (encoder.py of its release): printable characters stand for their
    own byte, and the characters from 256 on for the other bytes, in order."""
    characters = set(pre_tokenizers.ByteLevel.alphabet())
    printable = {chr(byte): byte for byte in range(256) if chr(byte) in characters}
    remaining = [byte for byte in range(256) if byte not in printable.values()]
    return printable | {chr(256 + number): byte for number, byte in enumerate(remaining)}


_BYTES = _alphabet()
