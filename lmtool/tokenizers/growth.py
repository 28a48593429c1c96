"""How much longer the rules of a stranger's tokenizer may make a text: they are a program, and a dozen steps that each
write ten characters for one fill any memory."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unicodedata import normalize

from lmtool.tokenizers.classes import broken

MOST = 1000
"""Characters for one: the published families have at most 66, for the rarest character."""
_PARTS = ("normalizer", "pre_tokenizer"), ("decoder",), ("post_processor",)
_MAY_BE_EMPTY = ("?", "*", "|", "^", "$", "{0", "{,", "()", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G", r"\K")
"""Of a pattern that could match where nothing stands."""


def require_bounded(path: Path, content: Mapping[str, Any]) -> None:
    """UserError where the rules of a tokenizer.json may write more than `MOST` characters for one. path: of the file,
    for the error."""
    for names in _PARTS:
        longest, written = 1.0, list[str]()
        for step in (step for name in names for step in _steps(content.get(name))):
            longest *= _growth(step, written)
        if longest > MOST:
            raise broken(path, f"its {' and '.join(names)} may write more than {MOST:,} characters for one")


def require_bounded_characters(path: Path, characters: bytes) -> None:
    """The same of SentencePiece's map of characters."""
    if _longest_of(characters) > MOST:
        raise broken(path, f"its map of characters may write more than {MOST:,} for one")


def _steps(rule: Any) -> Iterator[Mapping[str, Any]]:
    """A rule's steps in their order."""
    if not isinstance(rule, Mapping):
        return
    inner = [value for value in rule.values() if isinstance(value, list)] if rule.get("type") == "Sequence" else []
    if not inner:
        yield rule
    for step in (step for steps in inner for step in steps):
        yield from _steps(step)


def _growth(step: Mapping[str, Any], written: list[str]) -> float:
    """Characters that a step may write for one; of a layout, how often it repeats a text. written: what the steps
    before it write, to which this one's is added."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        written.append(content)
        return _of_replacement(step.get("pattern"), len(content))
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return max((len(normalize(kind, text)) / max(len(text), 1) for text in written), default=1.0)
    if kind == "Precompiled":
        try:
            return float(_longest_of(base64.b64decode(str(step.get("precompiled_charsmap")))))
        except ValueError:  # the library says so
            return 1.0
    if kind == "TemplateProcessing":
        layouts = [step[name] for name in ("single", "pair") if isinstance(step.get(name), list)]
        return float(max((sum("Sequence" in piece for piece in layout) for layout in layouts), default=1))
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(str(kind), 1.0)


def _of_replacement(pattern: Any, length: int) -> float:
    """Of a pattern that is replaced by so many characters."""
    text, regular = "", True
    if isinstance(pattern, Mapping):
        regular = "Regex" in pattern
        text = str(pattern.get("Regex", pattern.get("String", "")))
    if not text or (regular and any(mark in text for mark in _MAY_BE_EMPTY)):
        return 1.0 + length
    return max(1.0, length if regular else math.ceil(length / len(text)))


def _longest_of(characters: bytes) -> int:
    """Bytes of the longest text that the map has: behind its size and its trie they stand end to end, each with a
    zero."""
    if len(characters) < 4:
        return 1
    (trie,) = struct.unpack("<I", characters[:4])
    return max(map(len, characters[4 + trie :].split(b"\0")))
