"""Duplicate texts: exact ones, and near-duplicates by MinHash (Broder 1997; Lee et al. 2022, "Deduplicating
Training Data Makes Language Models Better").

Two texts are equal where their words are, whatever their case, punctuation and spacing. They are near-duplicates where
the Jaccard similarity of their sets of five characters in a row is at least a threshold. MinHash proposes the pairs,
of which it misses few; each is then measured exactly, so that none is reported that is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtool.errors import UserError

SHINGLE = 5
"""Characters of a shingle."""
_PERMUTATIONS = 128
_WEIGHTS = (0.1, 0.9)  # of false candidates, which are measured, and of pairs that are missed
_WORDS = re.compile(r"\w+")
_PRIMES = np.array([2654435761, 2246822519, 3266489917, 668265263, 374761393], dtype=np.uint64)


@dataclass(frozen=True)
class Match:
    """A text that an index holds: its number, and how similar it is, 1 where it is equal."""

    number: int
    similarity: float


class TextIndex:
    """Texts by their numbers, and which of them another text repeats.

    threshold: least similarity of near-duplicates, in (0, 1); None: equal texts alone are found, and the library
    datasketch is not needed. UserError where it is needed and not installed.
    """

    def __init__(self, threshold: float | None = None):
        self._threshold = threshold
        self._equal: dict[str, int] = {}
        self._shingles: dict[int, np.ndarray] = {}
        self._hashing: Any = None
        if threshold is not None:
            try:
                from datasketch import MinHash, MinHashLSH
            except ModuleNotFoundError as problem:
                raise UserError(
                    "near-duplicates are found by the library datasketch, which is not installed",
                    "pip install 'lmtool[check]', or near=null for equal texts alone",
                ) from problem
            self._hashing = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=int)
            self._buckets = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, weights=_WEIGHTS)

    def match(self, text: str) -> Match | None:
        """The text that this one repeats: an equal one, else the most similar."""
        key = normalized(text)
        if key in self._equal:
            return Match(self._equal[key], 1.0)
        if self._hashing is None:
            return None
        shingles = shingles_of(key)
        return self._best(shingles, self._sketch(shingles))

    def add(self, number: int, text: str) -> Match | None:
        """Hold a text, unless an equal one is held. Returns what it repeats."""
        key = normalized(text)
        if key in self._equal:
            return Match(self._equal[key], 1.0)
        self._equal[key] = number
        if self._hashing is None:
            return None
        shingles = shingles_of(key)
        sketch = self._sketch(shingles)
        match = self._best(shingles, sketch)
        self._shingles[number] = shingles
        self._buckets.insert(number, sketch)
        return match

    def _sketch(self, shingles: np.ndarray) -> object:
        sketch = self._hashing.copy()
        sketch.update_batch(shingles.tolist())
        return sketch

    def _best(self, shingles: np.ndarray, sketch: object) -> Match | None:
        assert self._threshold is not None
        candidates = sorted(self._buckets.query(sketch))
        matches = [Match(number, jaccard(shingles, self._shingles[number])) for number in candidates]
        matches = [match for match in matches if match.similarity >= self._threshold]
        return max(matches, key=lambda match: match.similarity, default=None)


def normalized(text: str) -> str:
    """The words of a text, lowercased, with a space between them; where it has none, the text itself."""
    return " ".join(_WORDS.findall(text.lower())) or " ".join(text.split())


def shingles_of(text: str) -> np.ndarray:
    """Sorted hashes (uint32) of the different shingles of a normalized text; of a short text, of all of it."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    width = min(SHINGLE, len(points))
    if width == 0:
        return np.zeros(1, dtype=np.uint32)
    count = len(points) - width + 1
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        mixed = (mixed ^ points[place : place + count]) * _PRIMES[place]
        mixed ^= mixed >> np.uint64(29)
    return np.unique((mixed >> np.uint64(16)).astype(np.uint32))


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Share of the elements of two sorted sets that both have."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def repeats(texts: Iterable[str], threshold: float | None = None) -> tuple[TextIndex, dict[int, Match]]:
    """An index of texts, and by its number what each text repeats of those before it."""
    index = TextIndex(threshold)
    found = ((number, index.add(number, text)) for number, text in enumerate(texts))
    return index, {number: match for number, match in found if match is not None}


def overlap(texts: Iterable[str], index: TextIndex) -> Iterator[tuple[int, Match]]:
    """The texts, by their numbers, that repeat one of an index."""
    for number, text in enumerate(texts):
        match = index.match(text)
        if match is not None:
            yield number, match
