"""The text of vocabulary entries: how each kind of tokenizer marks spaces and word continuations."""

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
"""How entries mark word boundaries. continues: "##" before continuations. spelled: the same in GPT-2's byte alphabet,
with a space before words. space: "▁" for a space. bytes: GPT-2's byte alphabet, "Ġ" for a space. end: "</w>" after the
last subword. words: every entry is a word. characters: no marks."""
PREFIX, SPACE, SUFFIX = "##", "▁", "</w>"


@dataclass(frozen=True)
class EntryText:
    """The text of an entry without marks. starts: whether it starts a word. ends: whether it ends a word; None if its
    kind of mark does not tell."""

    text: str
    starts: bool
    ends: bool | None = None


def marks_of(backend: tokenizers.Tokenizer) -> Marks:
    """How a tokenizer marks word boundaries, from its rules."""
    rules = json.loads(backend.to_str())
    model, around = rules["model"], json.dumps([rules["pre_tokenizer"], rules["decoder"]])
    entries = backend.get_vocab()
    if model.get("type") == "WordPiece":
        return "spelled" if '"ByteLevel"' in around else "continues"
    if model.get("type") == "WordLevel":
        return "characters" if any(word.isspace() for word in entries) else "words"
    if any(word.startswith(SPACE) for word in entries):
        return "space"
    return "end" if model.get("end_of_word_suffix") and '"ByteLevel"' not in around else "bytes"


def starts_word(marks: Marks, words: Sequence[str]) -> np.ndarray:
    """(V,) bool: whether an entry starts a word, see `Tokenizer.starts_word`."""
    if marks == "words":
        starts = [True for _ in words]
    elif marks == "characters":
        starts = [not word.isalnum() for word in words]
    elif marks in ("continues", "spelled"):
        starts = [not word.startswith(PREFIX) for word in words]
    elif marks == "space":
        starts = [word.startswith(SPACE) for word in words]
    else:
        # The byte-level alphabet writes white space as "Ġ", "Ċ", "ĉ", "č" and other bytes as themselves.
        starts = [word[:1] in "ĠĊĉč" or (word[:1].isascii() and not word[:1].isalnum()) for word in words]
    return np.array(starts, dtype=bool)


def entry_text(marks: Marks, word: str) -> EntryText | None:
    """The text of an entry; None if it is only part of a character's bytes."""
    if marks == "continues":
        return EntryText(word.removeprefix(PREFIX), not word.startswith(PREFIX))
    if marks == "spelled":
        text = _text(word.removeprefix(PREFIX))
        return None if text is None else EntryText(text.removeprefix(" "), not word.startswith(PREFIX))
    if marks == "space":
        return EntryText(word.removeprefix(SPACE), word.startswith(SPACE))
    if marks == "end":
        return EntryText(word.removesuffix(SUFFIX), True, word.endswith(SUFFIX))
    if marks == "bytes":
        text = _text(word)
        return None if text is None else EntryText(text.removeprefix(" "), text.startswith(" "))
    return EntryText("", True) if word == " " else EntryText(word, marks == "words")


def readable(marks: Marks, word: str) -> str:
    """An entry for display, with bytes as characters and visible white space."""
    if marks == "spelled" and word.startswith(PREFIX):
        return PREFIX + readable("bytes", word.removeprefix(PREFIX))
    if marks in ("bytes", "spelled"):
        text = _text(word)
        word = text if text is not None else "".join(f"<{_BYTES.get(character, 0):02X}>" for character in word)
        word = word.removeprefix(" ") if marks == "spelled" and word != " " else word
    elif marks == "space":
        word = word.replace(SPACE, " ")
    return visible_space(word)


def bytes_of(marks: Marks, word: str) -> bytes:
    """The UTF-8 bytes of an entry without marks; byte-level entries may be parts of characters."""
    if marks in ("bytes", "spelled"):
        plain = word.removeprefix(PREFIX) if marks == "spelled" else word
        if all(character in _BYTES for character in plain):
            return bytes(_BYTES[character] for character in plain).removeprefix(b" ")
        return word.encode()
    entry = entry_text(marks, word)
    return (word if entry is None else entry.text).encode()


def _text(word: str) -> str | None:
    """The text of a byte-level entry, or None."""
    try:
        return bytes(_BYTES[character] for character in word).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return None


def _alphabet() -> dict[str, int]:
    """The byte of each character in GPT-2's alphabet (its encoder.py): printable bytes represent themselves, the others
    the characters from 256 on, in order."""
    characters = set(pre_tokenizers.ByteLevel.alphabet())
    printable = {chr(byte): byte for byte in range(256) if chr(byte) in characters}
    remaining = [byte for byte in range(256) if byte not in printable.values()]
    return printable | {chr(256 + number): byte for number, byte in enumerate(remaining)}


_BYTES = _alphabet()
