"""Scores of spans of text: entities in sequences of tags, and answers against gold answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lmtool.learners.metrics.scores import Metric

# Entities in sequences of tags, and how many of them are found: the scores of conlleval (Tjong Kim Sang and Buchholz
# 2000; its chunk rules are those of the published script of CoNLL-2000).
#
# An entity is right where its first word, its last word and its type are. Tags are `O`, or one of B, I, E, S, a
# hyphen and a type; one that continues nothing (I after O, or after another type) begins an entity.
#
# Shape letters: M words, S sentences, C tags, E entities, K types.


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


# Answers against gold answers, as the official scripts of SQuAD 1.1 and 2.0 score them (Rajpurkar et al. 2016,
# section 6.1; Rajpurkar, Jia, Liang 2018, section 5), as fractions instead of percentages.
#
# A gold answer is a list of texts; none at all: the question has no answer. Shape letters: N questions.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

ANSWER_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("exact_match"), Metric("f1"),
        # Of the questions that have an answer, and of those that have none (where both scores are the same).
        Metric("has_answer_exact_match"), Metric("has_answer_f1"), Metric("no_answer_accuracy"),
        # With the threshold that is the best one for this score on these very questions.
        Metric("best_exact_match"), Metric("best_f1"),
    )
}  # fmt: skip


@lru_cache(maxsize=1 << 16)
def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation, without articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, gold: str) -> float:
    """Whether two answers are the same once normalized."""
    return float(normalized(predicted) == normalized(gold))


def token_f1(predicted: str, gold: str, empty_agree: bool = False) -> float:
    """Harmonic mean of precision and recall of words, counted as often as they come.

    empty_agree: two answers without a word agree, as in SQuAD 2.0; in 1.1 they share none.
    """
    predicted_words, gold_words = normalized(predicted).split(), normalized(gold).split()
    if empty_agree and not (predicted_words and gold_words):
        return float(predicted_words == gold_words)
    same = sum((Counter(predicted_words) & Counter(gold_words)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted_words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def answer_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], unanswerable: bool = False
) -> dict[str, np.ndarray]:
    """(N,) exact_match and f1, each the best over the gold answers.

    unanswerable: by the rules of SQuAD 2.0: an empty prediction says that there is no answer; gold answers without a
    word do not count.
    """
    exact, f1 = np.zeros(len(gold)), np.zeros(len(gold))
    for number, (answers, text) in enumerate(zip(gold, predicted, strict=True)):
        if unanswerable:
            answers = [answer for answer in answers if normalized(answer)] or [""]
        exact[number] = max((exact_match(text, answer) for answer in answers), default=0.0)
        f1[number] = max((token_f1(text, answer, unanswerable) for answer in answers), default=0.0)
    return {"exact_match": exact, "f1": f1}


def threshold_scores(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, np.ndarray]:
    """(N,) scores by the rules of SQuAD 2.0, as its search for the best threshold counts them: where there is no
    answer any text scores 0, even one that normalizes to nothing ("the"), to which `answer_scores` gives 1."""
    wrong_N = np.array([bool(text) and not answers for answers, text in zip(gold, predicted, strict=True)], bool)
    return {name: np.where(wrong_N, 0.0, values) for name, values in answer_scores(gold, predicted, True).items()}


class Threshold(NamedTuple):
    """value: a question whose null difference is above it has no answer. score: the mean with it."""

    value: float
    score: float


def best_threshold(scores_N: np.ndarray, answered_N: np.ndarray, null_N: np.ndarray) -> Threshold:
    """The threshold of the best mean score, as `find_best_thresh` of evaluate-v2.0 finds it.

    scores_N: of each prediction where it is given, see `threshold_scores`. answered_N: whether there is a gold answer.
    null_N: how much better the null answer is than the prediction. Where giving none is best, the value is below all of
    null_N.
    """
    if not len(null_N):
        return Threshold(0.0, 0.0)
    order = np.argsort(null_N, kind="stable")
    none_given = float(np.sum(~answered_N))
    # What a question changes when its answer is given, as the threshold rises to its null difference.
    sums = none_given + np.cumsum(scores_N[order] - ~answered_N[order])
    best = int(sums.argmax())
    if sums[best] <= none_given:
        return Threshold(float(null_N.min()) - 1.0, none_given / len(null_N))
    return Threshold(float(null_N[order[best]]), float(sums[best]) / len(null_N))


def summarized(
    names: Sequence[str],
    scores: dict[str, np.ndarray],
    raw: dict[str, np.ndarray],
    answered_N: np.ndarray,
    null_N: np.ndarray,
) -> dict[str, float]:
    """The named scores. scores: those of the given answers. raw: `threshold_scores` of the best texts, whether given or
    not."""

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if len(values) else 0.0

    known: dict[str, Callable[[], float]] = {
        "exact_match": lambda: mean(scores["exact_match"]),
        "f1": lambda: mean(scores["f1"]),
        "has_answer_exact_match": lambda: mean(scores["exact_match"][answered_N]),
        "has_answer_f1": lambda: mean(scores["f1"][answered_N]),
        "no_answer_accuracy": lambda: mean(scores["exact_match"][~answered_N]),
        "best_exact_match": lambda: best_threshold(raw["exact_match"], answered_N, null_N).score,
        "best_f1": lambda: best_threshold(raw["f1"], answered_N, null_N).score,
    }
    return {name: known[name]() for name in names}
