"""What a source of text offers, and which documents are held out.

Shape letters: D documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lmtool import streams
from lmtool.errors import UserError

SPLITS = ("train", "validation")

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): called from time to time while something long goes on."""

# The held-out documents are the same for every seed, so that seeds share a store and their scores compare.
_SPLIT_SEED = 0


@runtime_checkable
class Source(Protocol):
    """Text in two splits, "train" and "validation". `fingerprint` is a hash of all that it holds."""

    fingerprint: str

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, always the same in the same order."""

    def count(self, split: str) -> int:
        """How many there are."""

    def facts(self) -> dict[str, Any]:
        """What the screens and the report say about it; plain data."""


def held_out(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """(D,) bool: the documents held out for validation, of (D,) sizes; D is 2 or more.

    A seeded share of the documents. Where that is less than one, the document whose size is nearest to that share
    of the text, so that neither side is left with next to nothing.
    """
    count = len(sizes)
    chosen = np.zeros(count, dtype=bool)
    number = min(round(fraction * count), count - 1)
    if number >= 1:
        draws = streams.uniform(_SPLIT_SEED, "sample", 0, np.arange(count), 1)[:, 0]
        chosen[np.argsort(draws, kind="stable")[:number]] = True
    else:
        chosen[np.argmin(np.abs(np.asarray(sizes) - fraction * np.sum(sizes)))] = True
    return chosen


_BORDERS = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s"), re.compile(r"\s"))


def split_document(text: str, fraction: float) -> tuple[str, str]:
    """One document as two: its last `fraction` is for validation, cut at a blank line, else the end of a line, of a
    sentence, or a word, whichever is found within a twentieth of the text. UserError where it has no border."""
    wanted = round(len(text) * (1 - fraction))
    reach = max(len(text) // 20, 20)
    for near in (reach, len(text)):
        for border in _BORDERS:
            places = [match.start() for match in border.finditer(text, max(wanted - near, 0), wanted + near)]
            for place in sorted(places, key=lambda one: abs(one - wanted)):
                first, second = text[:place], text[place:].lstrip()
                if first.strip() and second:
                    return first, second
    raise UserError(
        "the text is one document of one word: nothing can be held out for validation",
        "give more text with data.path=, or other text with data.validation=",
    )


def splits_of(split: str) -> str:
    """The split's name, checked."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {SPLITS}")
    return split
