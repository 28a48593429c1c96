"""Entities in sequences of tags, and how many of them are found: the scores of conlleval (Tjong Kim Sang and Buchholz
2000; its chunk rules are those of the published script of CoNLL-2000).

An entity is right where its first word, its last word and its type are. Tags are `O`, or one of B, I, E, S, a hyphen
and a type; one that continues nothing (I after O, or after another type) begins an entity.

Shape letters: M words, S sentences, C tags, E entities, K types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
_PREFIXES = {"B": _BEGIN, "I": _INSIDE, "E": _END, "S": _SINGLE}


@dataclass(frozen=True)
class EntityScores:
    """Entities in gold, in the predictions, and in both."""

    gold: int
    predicted: int
    right: int

    @property
    def precision(self) -> float:
        """Of the predicted entities the share that is right; 0 where there are none."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Of the gold entities the share that is found; 0 where there are none."""
        return self.right / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of both."""
        return 2 * self.right / (self.gold + self.predicted) if self.right else 0.0


class EntityTags:
    """C tags by number, read as prefix and type."""

    def __init__(self, labels: Sequence[str]):
        parts = [("O", "", "") if label == "O" else label.partition("-") for label in labels]
        self.types = tuple(sorted({kind for _, dash, kind in parts if dash}))
        number = {kind: index for index, kind in enumerate(self.types)}
        self._prefix_C = np.array([_PREFIXES.get(prefix, _OUTSIDE) if dash else _OUTSIDE for prefix, dash, _ in parts])
        self._type_C = np.array([number[kind] if dash else -1 for _, dash, kind in parts])

    def begins(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        """(M,) bool: where an entity begins. lengths_S: words of each sentence, laid end to end."""
        prefix_M, type_M = self._prefix_C[tags_M], self._type_C[tags_M]
        before_M, type_before_M = np.roll(prefix_M, 1), np.roll(type_M, 1)
        firsts = (np.cumsum(lengths_S) - lengths_S)[lengths_S > 0]
        before_M[firsts], type_before_M[firsts] = _OUTSIDE, -1
        ended_M = (before_M == _OUTSIDE) | (before_M == _END) | (before_M == _SINGLE) | (type_before_M != type_M)
        continues_M = (prefix_M == _INSIDE) | (prefix_M == _END)
        return (prefix_M == _BEGIN) | (prefix_M == _SINGLE) | (continues_M & ended_M)

    def entities(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(E,) first words, words behind the last ones, and types, in order."""
        begins_M = self.begins(tags_M, lengths_S)
        breaks_M = begins_M | (self._prefix_C[tags_M] == _OUTSIDE)
        breaks_M[(np.cumsum(lengths_S) - lengths_S)[lengths_S > 0]] = True
        start_E, breaks = np.flatnonzero(begins_M), np.append(np.flatnonzero(breaks_M), len(tags_M))
        return start_E, breaks[np.searchsorted(breaks, start_E, side="right")], self._type_C[tags_M][start_E]

    def stray(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> int:
        """How many entities begin with I (or E) though nothing comes before it: they count as beginning there."""
        prefix_M = self._prefix_C[tags_M][self.begins(tags_M, lengths_S)]
        return int(np.sum((prefix_M == _INSIDE) | (prefix_M == _END)))

    def score(self, gold_M: np.ndarray, predicted_M: np.ndarray, lengths_S: np.ndarray) -> dict[str, EntityScores]:
        """The entities of each type."""
        if not self.types:
            return {}
        gold, predicted = self.entities(gold_M, lengths_S), self.entities(predicted_M, lengths_S)
        both = np.intersect1d(self._keys(*gold, len(gold_M)), self._keys(*predicted, len(gold_M))) % len(self.types)
        counts = [np.bincount(kinds, minlength=len(self.types)) for kinds in (gold[2], predicted[2], both)]
        return {kind: EntityScores(*(int(count[index]) for count in counts)) for index, kind in enumerate(self.types)}

    def counts(self, gold_M: np.ndarray, predicted_M: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        """(S, 3) entities of each sentence: gold, predicted, in both. Those of several sentences add up."""
        gold, predicted = self.entities(gold_M, lengths_S), self.entities(predicted_M, lengths_S)
        words = len(gold_M)
        both = np.intersect1d(self._keys(*gold, words), self._keys(*predicted, words))
        both = both // (max(len(self.types), 1) * (words + 1))
        sentence_M = np.repeat(np.arange(len(lengths_S)), lengths_S)
        starts = (gold[0], predicted[0], both)
        return np.stack([np.bincount(sentence_M[start_E], minlength=len(lengths_S)) for start_E in starts], axis=1)

    def _keys(self, start_E: np.ndarray, end_E: np.ndarray, type_E: np.ndarray, words: int) -> np.ndarray:
        """(E,) int64, the same for the same entity alone."""
        return (start_E.astype(np.int64) * (words + 1) + end_E) * len(self.types) + type_E


def total(scores: dict[str, EntityScores]) -> EntityScores:
    """Of all types together: what the official F1 is of."""
    values = scores.values()
    return EntityScores(*(sum(getattr(value, name) for value in values) for name in ("gold", "predicted", "right")))
