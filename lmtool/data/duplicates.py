"""Duplicate texts: exact ones, and near-duplicates by MinHash (Broder 1997; Lee et al. 2022, "Deduplicating
Training Data Makes Language Models Better").

Two texts are equal if their words are, regardless of case, punctuation and spacing. They are near-duplicates if the
Jaccard similarity of their sets of character 5-grams reaches a threshold. MinHash proposes the pairs, of which it
misses few; each is then measured exactly, so that every reported pair is one.

Texts are read several times and not held: an index holds 40 bytes of each text and 512 more of each of `MOST_TEXTS` at
most. It reads the texts of proposed pairs again, and holds those while it measures them. Time is linear in the text.

Shape letters: N texts, K sampled texts, P pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b

import numpy as np

from lmtool.random_streams import Permutation

SHINGLE = 5
"""Characters of a shingle."""
MOST_TEXTS = 100_000
"""Maximum number of distinct texts of an index that are compared for near-duplicates; a seeded sample of them."""
_PERMUTATIONS = 128
_WEIGHTS = (0.01, 0.99)  # of false candidates, which are measured, and of pairs that are missed
_BUCKET = 8  # texts of a bucket that are proposed: the first ones, so that many similar texts take linear time
_MEASURED = 4  # pairs of a text that are measured: those with the most similar signatures
_TOLERANCE = 0.15  # of a similarity estimated from signatures: more than three standard deviations
_CHUNK = 4096
_CACHED = 256  # texts whose shingles are held
_PART = 1_000_000  # characters whose shingles are computed at a time
_WORDS = re.compile(r"\w+")
_PRIMES = np.array([2654435761, 2246822519, 3266489917, 668265263, 374761393], dtype=np.uint64)
_FACTORS, _SUMMANDS = np.random.default_rng(1).integers(0, 2**32, (2, _PERMUTATIONS, 1), dtype=np.uint32) | np.uint32(1)


@dataclass(frozen=True)
class Matches:
    """repeated: (N,) int64, the number of the text that each text repeats, -1 if none. similarity: (N,) float64, 1 if
    they are equal."""

    repeated: np.ndarray
    similarity: np.ndarray


class TextIndex:
    """Texts by their numbers, and which of them repeat others.

    Args:
        texts: Iterated more than once.
        threshold: Minimum similarity of near-duplicates, in (0, 1); None finds equal texts only.
        seed: Of the sample, if there are more than `MOST_TEXTS` distinct texts.
        keys: (N,) uint64, the texts' `key_of`, if they are known.
    """

    def __init__(
        self,
        texts: Iterable[str],
        threshold: float | None = None,
        seed: int = 0,
        keys: np.ndarray | None = None,
    ):
        self._texts, self._threshold = texts, threshold
        self._keys = np.fromiter(map(key_of, texts), np.uint64) if keys is None else keys
        self._distinct, self._firsts, inverse = np.unique(self._keys, return_index=True, return_inverse=True)
        self._first = self._firsts[inverse]  # (N,) the first of the texts equal to each
        sampled = np.sort(self._firsts)
        if len(sampled) > MOST_TEXTS:
            sampled = np.sort(sampled[Permutation(len(sampled), seed, "sample", 0)(np.arange(MOST_TEXTS))])
        self._sampled = sampled if threshold is not None else sampled[:0]  # (K,) numbers
        self._signatures = np.empty((len(self._sampled), _PERMUTATIONS), dtype=np.uint32)
        for row, (_, text) in enumerate(numbered(texts, self._sampled)):
            self._signatures[row] = _signature(shingles_of(normalized(text)))

    @property
    def compared(self) -> tuple[int, int]:
        """How many texts are compared for near-duplicates, of how many distinct ones."""
        return len(self._sampled), len(self._distinct)

    def repeats(self) -> Matches:
        """What each text repeats of those before it: the first equal one; for the first, the most similar."""
        later = self._first != np.arange(len(self._keys))
        matches = Matches(np.where(later, self._first, -1), np.where(later, 1.0, 0.0))
        self._measure(self, matches)
        return matches

    def overlap(self, other: TextIndex) -> Matches:
        """What each text of another index repeats of these: the first equal one, else the most similar."""
        at = np.searchsorted(self._distinct, other._keys).clip(max=max(len(self._distinct) - 1, 0))
        equal = self._distinct[at] == other._keys if len(self._distinct) else np.zeros(len(at), dtype=bool)
        matches = Matches(np.full(len(at), -1), equal.astype(np.float64))
        matches.repeated[equal] = self._firsts[at[equal]]
        self._measure(other, matches)
        for values in (matches.repeated, matches.similarity):  # equal texts of the other repeat the same one
            values[:] = values[other._first]
        return matches

    def _measure(self, other: TextIndex, matches: Matches) -> None:
        """Adds to `matches` the near-duplicates here of those texts of an index that match nothing yet."""
        rows = np.flatnonzero(matches.repeated[other._sampled] < 0)
        pairs_P2 = self._candidates(other._signatures[rows], rows if other is self else None)
        numbers, repeated = other._sampled[rows[pairs_P2[:, 0]]], self._sampled[pairs_P2[:, 1]]
        first, second = (
            dict(numbered(other._texts, np.unique(numbers))),
            dict(numbered(self._texts, np.unique(repeated))),
        )
        first_shingles, second_shingles = (
            lru_cache(_CACHED)(lambda number, texts=texts: shingles_of(normalized(texts[number])))
            for texts in (first, second)
        )
        threshold = self._threshold or 0.0
        for number, earlier in zip(numbers.tolist(), repeated.tolist(), strict=True):
            similarity = jaccard(first_shingles(number), second_shingles(earlier))
            if similarity >= threshold and similarity > matches.similarity[number]:
                matches.repeated[number], matches.similarity[number] = earlier, similarity

    def _candidates(self, signatures: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """(P, 2) rows of `signatures` and rows of the index that may be similar, in ascending order.

        before: of each of the signatures the row of the index before which its candidates are; None: all may be.
        """
        pairs = np.zeros(0, dtype=np.int64)  # the two rows as one number
        size = max(len(self._signatures), 1)
        rows = _rows_of_a_band(self._threshold) if self._threshold is not None else _PERMUTATIONS + 1
        for start in range(0, _PERMUTATIONS - rows + 1, rows):
            wanted, keys = (_combined(values[:, start : start + rows]) for values in (signatures, self._signatures))
            order = np.argsort(keys, kind="stable")
            left, right = (np.searchsorted(keys[order], wanted, side) for side in ("left", "right"))
            for step in range(_BUCKET):
                found = np.flatnonzero(left + step < right)
                others = order[left[found] + step]
                if before is not None:
                    found, others = found[others < before[found]], others[others < before[found]]
                pairs = np.union1d(pairs, found * size + others)
        estimated = np.concatenate([
            (signatures[chunk // size] == self._signatures[chunk % size]).mean(axis=1, dtype=np.float32)
            for chunk in np.split(pairs, range(_CHUNK, len(pairs), _CHUNK))
        ])  # fmt: skip
        likely = estimated >= (self._threshold or 0.0) - _TOLERANCE
        pairs, estimated = pairs[likely], estimated[likely]
        order = np.lexsort((-estimated, pairs // size))
        ranked = pairs[order] // size
        rank = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
        pairs = np.sort(pairs[order[rank < _MEASURED]])
        return np.stack([pairs // size, pairs % size], axis=1)


def numbered(texts: Iterable[str], numbers: np.ndarray) -> Iterator[tuple[int, str]]:
    """The texts of these numbers, which ascend, each with its number."""
    wanted = iter(numbers.tolist())
    number = next(wanted, None)
    if number is None:
        return
    for at, text in enumerate(texts):
        if at == number:
            yield at, text
            number = next(wanted, None)
            if number is None:
                return


def normalized(text: str) -> str:
    """The words of a text, lowercased, with a space between them; where it has none, the text itself."""
    return " ".join(_WORDS.findall(text.lower())) or " ".join(text.split())


def key_of(text: str) -> int:
    """64 bits that equal texts share; of two other texts of a million, with a chance of 3e-8."""
    return int.from_bytes(blake2b(normalized(text).encode("utf-8", "surrogatepass"), digest_size=8).digest())


def shingles_of(text: str) -> np.ndarray:
    """Sorted hashes (uint32) of the different shingles of a normalized text; of a short text, of all of it."""
    starts = range(0, max(len(text) - SHINGLE + 1, 1), _PART)
    parts = [_shingle_hashes(text[start : start + _PART + SHINGLE - 1]) for start in starts]
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _shingle_hashes(text: str) -> np.ndarray:
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    width = min(SHINGLE, len(points))
    if width == 0:
        return np.zeros(1, dtype=np.uint32)
    count = len(points) - width + 1
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(width):
        mixed = (mixed ^ points[place : place + count]) * _PRIMES[place]
        mixed ^= mixed >> np.uint64(29)
    hashes = np.sort((mixed >> np.uint64(16)).astype(np.uint32))  # np.unique takes twice as long
    return hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Share of the elements of two sorted sets that both have."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _signature(shingles: np.ndarray) -> np.ndarray:
    """(128,) uint32: the minimum of each of as many hash functions of the shingles."""
    smallest = np.full(_PERMUTATIONS, 2**32 - 1, dtype=np.uint32)
    for start in range(0, len(shingles), _CHUNK):
        hashed = _FACTORS * shingles[start : start + _CHUNK] + _SUMMANDS
        np.minimum(smallest, hashed.min(axis=1), out=smallest)
    return smallest


def _combined(columns: np.ndarray) -> np.ndarray:
    """(K,) uint64: one hash of each row of a band."""
    combined = np.zeros(len(columns), dtype=np.uint64)
    for column in columns.T:
        combined = (combined ^ column) * _PRIMES[0]
        combined ^= combined >> np.uint64(29)
    return combined


@cache
def _rows_of_a_band(threshold: float) -> int:
    """Signature rows of a band, for the best balance between false candidates and missed pairs."""
    similarity = (np.arange(1000) + 0.5) / 1000
    costs = []
    for rows in range(1, _PERMUTATIONS + 1):
        proposed = 1 - (1 - similarity**rows) ** (_PERMUTATIONS // rows)
        false, missed = proposed[similarity < threshold].sum(), (1 - proposed[similarity >= threshold]).sum()
        costs.append(_WEIGHTS[0] * false + _WEIGHTS[1] * missed)
    return int(np.argmin(costs)) + 1
