"""Exact duplicates of texts, and near-duplicates by MinHash (Broder 1997; Lee et al. 2022, "Deduplicating Training Data
Makes Language Models Better").

Texts are equal if they have the same words, regardless of case, punctuation and spacing. They are near-duplicates if
the Jaccard similarity of their sets of character 5-grams reaches a threshold. MinHash proposes candidate pairs and
misses few; the exact similarity of each candidate is then computed.

Texts are read several times instead of being stored: an index has 40 bytes per text, and 512 more for each of at most
`MOST_TEXTS` texts. Only the texts of candidate pairs are in memory. Time is linear in the text.

Shape letters: N texts, K sampled texts, P pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import islice

import numpy as np

from lmtool.random_streams import Permutation

SHINGLE = 5
"""Characters of a shingle."""
MOST_TEXTS = 100_000
"""Maximum number of distinct texts in an index that are compared for near-duplicates; if there are more, a seeded
sample of this size is compared."""
_PERMUTATIONS = 128
_WEIGHTS = (0.01, 0.99)  # costs of a false candidate and of a missed pair
_BUCKET = 8  # candidates from a bucket: its first texts, so that many similar texts take linear time
_MEASURED = 4  # candidates of a text whose similarity is computed: those with the most similar signatures
_TOLERANCE = 0.15  # for the similarity estimated from signatures: more than three standard deviations
_CHUNK = 4096
_CACHED = 256  # texts whose shingles are cached
_PART = 1_000_000  # characters whose shingles are computed at a time
_WORDS = re.compile(r"\w+")
_PRIMES = np.array([2654435761, 2246822519, 3266489917, 668265263, 374761393], dtype=np.uint64)
_FACTORS, _SUMMANDS = np.random.default_rng(1).integers(0, 2**32, (2, _PERMUTATIONS, 1), dtype=np.uint32) | np.uint32(1)


@dataclass(frozen=True)
class Matches:
    """The text that each text repeats. repeated: (N,) int64 number of that text, -1 if there is none. similarity: (N,)
    float64, 1 for equal texts."""

    repeated: np.ndarray
    similarity: np.ndarray


class TextIndex:
    """An index of numbered texts, which are iterated more than once, that finds duplicates. threshold: minimum
    similarity of near-duplicates, in (0, 1); None: find only equal texts. seed: of the sample if there are more than
    `MOST_TEXTS` distinct texts. keys: (N,) uint64 `key_of` each text, if they are known."""

    def __init__(
        self,
        texts: Iterable[str],
        threshold: float | None = None,
        seed: int = 0,
        keys: np.ndarray | None = None,
    ):
        self._texts, self._threshold = texts, threshold
        self._keys = np.fromiter(map(key_of, texts), np.uint64) if keys is None else keys
        self._distinct, self._first_of_key, inverse = np.unique(self._keys, return_index=True, return_inverse=True)
        self._first_equal = self._first_of_key[inverse]  # (N,) number of the first equal text
        sampled = np.sort(self._first_of_key)
        if len(sampled) > MOST_TEXTS:
            sampled = np.sort(sampled[Permutation(len(sampled), seed, "sample", 0)(np.arange(MOST_TEXTS))])
        self._sampled = sampled if threshold is not None else sampled[:0]  # (K,) numbers
        self._signatures = np.empty((len(self._sampled), _PERMUTATIONS), dtype=np.uint32)
        for row, (_, text) in enumerate(texts_with_numbers(texts, self._sampled)):
            self._signatures[row] = _signature(shingles_of(normalize(text)))

    @property
    def compared(self) -> tuple[int, int]:
        """Number of texts that are compared for near-duplicates, and number of distinct texts."""
        return len(self._sampled), len(self._distinct)

    def repeats(self) -> Matches:
        """Returns the earlier text that each text repeats: the first equal one, otherwise the most similar one."""
        later = self._first_equal != np.arange(len(self._keys))
        matches = Matches(np.where(later, self._first_equal, -1), np.where(later, 1.0, 0.0))
        self._measure(self, matches)
        return matches

    def overlap(self, other: TextIndex) -> Matches:
        """Returns the text of this index that each text of another index repeats: the first equal one, otherwise the
        most similar one."""
        indices = np.searchsorted(self._distinct, other._keys).clip(max=max(len(self._distinct) - 1, 0))
        equal = self._distinct[indices] == other._keys if len(self._distinct) else np.zeros(len(indices), dtype=bool)
        matches = Matches(np.full(len(indices), -1), equal.astype(np.float64))
        matches.repeated[equal] = self._first_of_key[indices[equal]]
        self._measure(other, matches)
        for values in (matches.repeated, matches.similarity):  # copy the result of the first of equal texts
            values[:] = values[other._first_equal]
        return matches

    def _measure(self, other: TextIndex, matches: Matches) -> None:
        """Adds near-duplicates in this index of those texts of another index that have no match yet."""
        rows = np.flatnonzero(matches.repeated[other._sampled] < 0)
        pairs_P2 = self._candidates(other._signatures[rows], rows if other is self else None)
        numbers, repeated = other._sampled[rows[pairs_P2[:, 0]]], self._sampled[pairs_P2[:, 1]]
        shingles, repeated_shingles = (
            lru_cache(_CACHED)(lambda number, texts=texts: shingles_of(normalize(texts[number])))
            for texts in (
                dict(texts_with_numbers(other._texts, np.unique(numbers))),
                dict(texts_with_numbers(self._texts, np.unique(repeated))),
            )
        )
        threshold = self._threshold or 0.0
        for number, earlier in zip(numbers.tolist(), repeated.tolist(), strict=True):
            similarity = jaccard(shingles(number), repeated_shingles(earlier))
            if similarity >= threshold and similarity > matches.similarity[number]:
                matches.repeated[number], matches.similarity[number] = earlier, similarity

    def _candidates(self, signatures: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """Returns (P, 2): rows of `signatures` and rows of the index that may be similar, in ascending order. before:
        for each signature, only earlier rows of the index are candidates."""
        pairs = np.zeros(0, dtype=np.int64)  # both rows as one number
        size = max(len(self._signatures), 1)
        rows = _rows_of_a_band(self._threshold) if self._threshold is not None else _PERMUTATIONS + 1
        for start in range(0, _PERMUTATIONS - rows + 1, rows):
            queries, keys = (_hash_rows(values[:, start : start + rows]) for values in (signatures, self._signatures))
            order = np.argsort(keys, kind="stable")
            left, right = (np.searchsorted(keys[order], queries, side) for side in ("left", "right"))
            for step in range(_BUCKET):
                query_rows = np.flatnonzero(left + step < right)
                candidates = order[left[query_rows] + step]
                if before is not None:
                    is_earlier = candidates < before[query_rows]
                    query_rows, candidates = query_rows[is_earlier], candidates[is_earlier]
                pairs = np.union1d(pairs, query_rows * size + candidates)
        chunks = np.split(pairs, range(_CHUNK, len(pairs), _CHUNK))
        equal = (signatures[chunk // size] == self._signatures[chunk % size] for chunk in chunks)
        estimated = np.concatenate([part.mean(axis=1, dtype=np.float32) for part in equal])
        likely = estimated >= (self._threshold or 0.0) - _TOLERANCE
        pairs, estimated = pairs[likely], estimated[likely]
        order = np.lexsort((-estimated, pairs // size))
        ranked = pairs[order] // size
        rank = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
        pairs = np.sort(pairs[order[rank < _MEASURED]])
        return np.stack([pairs // size, pairs % size], axis=1)


def texts_with_numbers(texts: Iterable[str], numbers: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yields the texts with these numbers, in ascending order, each with its number."""
    wanted = set(numbers.tolist())
    for index, text in enumerate(islice(texts, max(wanted, default=-1) + 1)):
        if index in wanted:
            yield index, text


def normalize(text: str) -> str:
    """Returns the lowercased words of a text, separated by spaces; if there are none, the text without repeated
    spaces."""
    return " ".join(_WORDS.findall(text.lower())) or " ".join(text.split())


def key_of(text: str) -> int:
    """Returns a 64-bit hash of a normalized text. Among a million different texts the probability of a collision is
    3e-8."""
    return int.from_bytes(blake2b(normalize(text).encode("utf-8", "surrogatepass"), digest_size=8).digest())


def shingles_of(text: str) -> np.ndarray:
    """Returns sorted distinct hashes (uint32) of the shingles of a normalized text; a text shorter than a shingle is
    one."""
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
    for offset in range(width):
        mixed = (mixed ^ points[offset : offset + count]) * _PRIMES[offset]
        mixed ^= mixed >> np.uint64(29)
    hashes = np.sort((mixed >> np.uint64(16)).astype(np.uint32))  # np.unique takes twice as long
    return hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the fraction of the elements of two sorted sets that are in both."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _signature(shingles: np.ndarray) -> np.ndarray:
    """(128,) uint32: the minimum over the shingles of each hash function."""
    smallest = np.full(_PERMUTATIONS, 2**32 - 1, dtype=np.uint32)
    for start in range(0, len(shingles), _CHUNK):
        hashed = _FACTORS * shingles[start : start + _CHUNK] + _SUMMANDS
        np.minimum(smallest, hashed.min(axis=1), out=smallest)
    return smallest


def _hash_rows(columns: np.ndarray) -> np.ndarray:
    combined = np.zeros(len(columns), dtype=np.uint64)
    for column in columns.T:
        combined = (combined ^ column) * _PRIMES[0]
        combined ^= combined >> np.uint64(29)
    return combined


@cache
def _rows_of_a_band(threshold: float) -> int:
    """The number of signature rows per band with the lowest cost of false candidates and missed pairs."""
    similarity = (np.arange(1000) + 0.5) / 1000
    costs = []
    for rows in range(1, _PERMUTATIONS + 1):
        proposed = 1 - (1 - similarity**rows) ** (_PERMUTATIONS // rows)
        false, missed = proposed[similarity < threshold].sum(), (1 - proposed[similarity >= threshold]).sum()
        costs.append(_WEIGHTS[0] * false + _WEIGHTS[1] * missed)
    return int(np.argmin(costs)) + 1
