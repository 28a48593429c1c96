"""Metrics of spans of text: entities in sequences of tags, and answers to questions."""

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

# Precision, recall and F1 of entities, as in the script conlleval of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000).
#
# A predicted entity is correct if its first word, its last word and its type are correct. A tag is `O`, or one of B, I,
# E, S, followed by a hyphen and a type. An I or E that does not continue an entity of its type begins a new one.
#
# Shape letters: M words, S sentences, C tags, E entities.


_OUTSIDE, _BEGIN, _INSIDE, _END, _SINGLE = range(5)
_PREFIXES = {"B": _BEGIN, "I": _INSIDE, "E": _END, "S": _SINGLE}


@dataclass(frozen=True)
class EntityScores:
    """The numbers of gold entities, of predicted entities, and of correctly predicted entities (`right`)."""

    gold: int
    predicted: int
    right: int

    @property
    def precision(self) -> float:
        """The fraction of predicted entities that are correct; 0 if no entity is predicted."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The fraction of gold entities that are predicted; 0 if there are no gold entities."""
        return self.right / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.right / (self.gold + self.predicted) if self.right else 0.0


class EntityTags:
    """Finds the entities in sequences of tags, and compares gold and predicted entities. labels: the C tags, in the
    order of their ids."""

    def __init__(self, labels: Sequence[str]):
        parts = [("O", "", "") if label == "O" else label.partition("-") for label in labels]
        self.types = tuple(sorted({kind for _, dash, kind in parts if dash}))
        type_index = {kind: index for index, kind in enumerate(self.types)}
        self._prefix_C = np.array([_PREFIXES.get(prefix, _OUTSIDE) if dash else _OUTSIDE for prefix, dash, _ in parts])
        self._type_C = np.array([type_index[kind] if dash else -1 for _, dash, kind in parts])

    def begins(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        """Returns whether an entity begins at each word, (M,) bool. tags_M: the tag ids of the words of all sentences,
        concatenated. lengths_S: the number of words of each sentence."""
        prefix_M, type_M = self._prefix_C[tags_M], self._type_C[tags_M]
        before_M, type_before_M = np.roll(prefix_M, 1), np.roll(type_M, 1)
        first_words = (np.cumsum(lengths_S) - lengths_S)[lengths_S > 0]
        before_M[first_words], type_before_M[first_words] = _OUTSIDE, -1
        ended_M = (before_M == _OUTSIDE) | (before_M == _END) | (before_M == _SINGLE) | (type_before_M != type_M)
        continues_M = (prefix_M == _INSIDE) | (prefix_M == _END)
        return (prefix_M == _BEGIN) | (prefix_M == _SINGLE) | (continues_M & ended_M)

    def entities(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the entities in order: the index of the first word (E,), the index after the last word (E,), and the
        type (E,)."""
        begins_M = self.begins(tags_M, lengths_S)
        breaks_M = begins_M | (self._prefix_C[tags_M] == _OUTSIDE)
        breaks_M[(np.cumsum(lengths_S) - lengths_S)[lengths_S > 0]] = True
        start_E, breaks = np.flatnonzero(begins_M), np.append(np.flatnonzero(breaks_M), len(tags_M))
        return start_E, breaks[np.searchsorted(breaks, start_E, side="right")], self._type_C[tags_M][start_E]

    def stray_entities(self, tags_M: np.ndarray, lengths_S: np.ndarray) -> int:
        """Returns the number of entities that begin with an I or E tag, instead of B or S."""
        prefix_M = self._prefix_C[tags_M][self.begins(tags_M, lengths_S)]
        return int(np.sum((prefix_M == _INSIDE) | (prefix_M == _END)))

    def score(self, gold_M: np.ndarray, predicted_M: np.ndarray, lengths_S: np.ndarray) -> dict[str, EntityScores]:
        """Returns the scores of each type of entity."""
        if not self.types:
            return {}
        gold, predicted = self.entities(gold_M, lengths_S), self.entities(predicted_M, lengths_S)
        matches = np.intersect1d(self._keys(*gold, len(gold_M)), self._keys(*predicted, len(gold_M)))
        matched_types = matches % len(self.types)  # `_keys` adds the type last
        counts = [np.bincount(kinds, minlength=len(self.types)) for kinds in (gold[2], predicted[2], matched_types)]
        return {kind: EntityScores(*(int(count[index]) for count in counts)) for index, kind in enumerate(self.types)}

    def counts(self, gold_M: np.ndarray, predicted_M: np.ndarray, lengths_S: np.ndarray) -> np.ndarray:
        """Returns for each sentence the numbers (S, 3) of gold entities, predicted entities, and correctly predicted
        entities, which can be summed over any sentences."""
        gold, predicted = self.entities(gold_M, lengths_S), self.entities(predicted_M, lengths_S)
        words = len(gold_M)
        matches = np.intersect1d(self._keys(*gold, words), self._keys(*predicted, words))
        matched_starts = matches // (max(len(self.types), 1) * (words + 1))  # `_keys` begins with the start
        sentence_M = np.repeat(np.arange(len(lengths_S)), lengths_S)
        starts = (gold[0], predicted[0], matched_starts)
        return np.stack([np.bincount(sentence_M[start_E], minlength=len(lengths_S)) for start_E in starts], axis=1)

    def _keys(self, start_E: np.ndarray, end_E: np.ndarray, type_E: np.ndarray, words: int) -> np.ndarray:
        return (start_E.astype(np.int64) * (words + 1) + end_E) * len(self.types) + type_E


def total(scores: dict[str, EntityScores]) -> EntityScores:
    """Returns the scores over all types, as the official F1 counts them. scores: the scores of each type."""
    values = scores.values()
    return EntityScores(*(sum(getattr(value, name) for value in values) for name in ("gold", "predicted", "right")))


# Answers to questions, scored as in the official scripts of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, section 6.1;
# Rajpurkar, Jia, Liang 2018, section 5), but as fractions instead of percentages.
#
# Each question has a list of gold answers; an empty list means that the question has no answer.
#
# Shape letters: N questions.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

ANSWER_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("exact_match"),
        Metric("f1"),
        # Restricted to the questions that have an answer, and to the questions that have none. For the latter, exact
        # match and F1 are equal.
        Metric("has_answer_exact_match"),
        Metric("has_answer_f1"),
        Metric("no_answer_accuracy"),
        # With the threshold that gives the best score on the scored questions themselves.
        Metric("best_exact_match"),
        Metric("best_f1"),
    )
}


@lru_cache(maxsize=1 << 16)
def normalize(text: str) -> str:
    """Returns a text in lower case, without ASCII punctuation and articles, and with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, gold: str) -> float:
    """Returns 1.0 if two answers are equal after `normalize`, otherwise 0.0."""
    return float(normalize(predicted) == normalize(gold))


def token_f1(predicted: str, gold: str, empty_agree: bool = False) -> float:
    """Returns the harmonic mean of precision and recall of the words of an answer, as multisets. empty_agree: whether
    the score of two answers without any word is 1, as in SQuAD 2.0. In SQuAD 1.1 it is 0."""
    predicted_words, gold_words = normalize(predicted).split(), normalize(gold).split()
    if empty_agree and not (predicted_words and gold_words):
        return float(predicted_words == gold_words)
    common = sum((Counter(predicted_words) & Counter(gold_words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def answer_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], unanswerable: bool = False
) -> dict[str, np.ndarray]:
    """Returns the exact_match (N,) and f1 (N,) of each question: the best score over its gold answers. unanswerable:
    whether questions may have no answer, as in SQuAD 2.0: an empty prediction means that there is no answer, and gold
    answers without a word are ignored."""
    exact, f1 = np.zeros(len(gold)), np.zeros(len(gold))
    for number, (answers, text) in enumerate(zip(gold, predicted, strict=True)):
        if unanswerable:
            answers = [answer for answer in answers if normalize(answer)] or [""]
        exact[number] = max((exact_match(text, answer) for answer in answers), default=0.0)
        f1[number] = max((token_f1(text, answer, unanswerable) for answer in answers), default=0.0)
    return {"exact_match": exact, "f1": f1}


def threshold_scores(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns scores (N,) by name, as SQuAD 2.0 computes them for its search of the best threshold.

    They differ from `answer_scores` for questions without an answer: any text scores 0, even a text such as "the", from
    which `normalize` removes all words.
    """
    wrong_N = np.array([bool(text) and not answers for answers, text in zip(gold, predicted, strict=True)], bool)
    return {name: np.where(wrong_N, 0.0, values) for name, values in answer_scores(gold, predicted, True).items()}


class Threshold(NamedTuple):
    """A threshold for predicting that a question has no answer. value: the threshold. A question whose null difference
    is larger is predicted to have no answer. The null difference is the score of "no answer" minus the score of the
    best answer. score: the mean score of all questions with this threshold."""

    value: float
    score: float


def best_threshold(scores_N: np.ndarray, answered_N: np.ndarray, null_N: np.ndarray) -> Threshold:
    """Returns the threshold with the best mean score, computed as in `find_best_thresh` of evaluate-v2.0. If it is best
    to predict no answer for every question, the threshold is below all null differences. scores_N: the score of the
    best answer of each question, see `threshold_scores`. answered_N: whether it has a gold answer. null_N: its null
    difference, see `Threshold`."""
    if not len(null_N):
        return Threshold(0.0, 0.0)
    order = np.argsort(null_N, kind="stable")
    no_answer_sum = float(np.sum(~answered_N))
    # As the threshold rises to the null difference of a question, its answer replaces the prediction of no answer.
    sums = no_answer_sum + np.cumsum(scores_N[order] - ~answered_N[order])
    best = int(sums.argmax())
    if sums[best] <= no_answer_sum:
        return Threshold(float(null_N.min()) - 1.0, no_answer_sum / len(null_N))
    return Threshold(float(null_N[order[best]]), float(sums[best]) / len(null_N))


def summarize(
    names: Sequence[str],
    scores: dict[str, np.ndarray],
    best_text_scores: dict[str, np.ndarray],
    answered_N: np.ndarray,
    null_N: np.ndarray,
) -> dict[str, float]:
    """Returns the mean scores by name, of names in ANSWER_METRICS. scores: the scores (N,) of the predicted answers,
    see `answer_scores`. best_text_scores: the `threshold_scores` (N,) of the best text of each question, even where no
    answer is predicted. answered_N, null_N: see `best_threshold`."""

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if len(values) else 0.0

    means: dict[str, Callable[[], float]] = {
        "exact_match": lambda: mean(scores["exact_match"]),
        "f1": lambda: mean(scores["f1"]),
        "has_answer_exact_match": lambda: mean(scores["exact_match"][answered_N]),
        "has_answer_f1": lambda: mean(scores["f1"][answered_N]),
        "no_answer_accuracy": lambda: mean(scores["exact_match"][~answered_N]),
        "best_exact_match": lambda: best_threshold(best_text_scores["exact_match"], answered_N, null_N).score,
        "best_f1": lambda: best_threshold(best_text_scores["f1"], answered_N, null_N).score,
    }
    return {name: means[name]() for name in names}
