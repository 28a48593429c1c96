"""Answers against gold answers, as the official scripts of SQuAD 1.1 and 2.0 score them (Rajpurkar et al. 2016, section
6.1; Rajpurkar, Jia, Liang 2018, section 5), as shares of 1 instead of 100.

A gold answer is a list of texts; none at all: the question has no answer. Shape letters: N questions.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lmtool.learners.metrics.scores import Metric

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
