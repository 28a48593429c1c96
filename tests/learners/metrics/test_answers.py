"""Scores of answers (SQuAD 1.1 and 2.0) against values computed by hand from the official definitions."""

from __future__ import annotations

import numpy as np
import pytest

from lmtool.learners.metrics.spans import (
    answer_scores,
    best_threshold,
    normalize,
    summarize,
    threshold_scores,
    token_f1,
)

# Predicted text, gold answers, exact match, F1 by the rules of SQuAD 1.1, F1 by those of 2.0.
CASES = [
    # Case, article and full stop are removed: "cat" = "cat".
    ("The cat.", ["cat"], 1, 1, 1),
    # Predicted words {big, red, dog}, gold {red, dog, ran}: 2 in common, P = R = 2/3, F1 = 2/3.
    ("big red dog", ["the red dog ran"], 0, 2 / 3, 2 / 3),
    # Words are multisets: {no, no, no} and {no, yes}: 1 in common, P = 1/3, R = 1/2, F1 = 2/5.
    ("no no no", ["no yes"], 0, 2 / 5, 2 / 5),
    # Punctuation is removed without a space: "ice-cream" is one word, "ice cream" two: nothing in common.
    ("ice-cream", ["ice cream"], 0, 0, 0),
    # ... and is removed before articles: "a.n." becomes the article "an", so that both texts are empty.
    ("a.n.", ["the"], 1, 0, 1),
    # An article inside a word stays; the dash is not ASCII punctuation and stays, so these two differ.
    ("theatre – another", ["theatre another"], 0, 0.8, 0.8),
    # Each score is the best over the gold answers: F1 with "in May 1990" is 2 * (2/2 * 2/3) / (5/3) = 0.8.
    ("May 1990", ["1990", "in May 1990", "june"], 0, 0.8, 0.8),
    # Any white space, the no-break space too, is one space.
    ("New\u00a0 York\n", ["new york"], 1, 1, 1),
    # An empty prediction where there is an answer.
    ("", ["x"], 0, 0, 0),
]


@pytest.mark.parametrize(("predicted", "gold", "exact", "f1", "f1_of_2"), CASES)
def test_answer_scores_match_hand_computed_values(predicted, gold, exact, f1, f1_of_2):
    first, second = answer_scores([gold], [predicted]), answer_scores([gold], [predicted], unanswerable=True)
    assert first["exact_match"][0] == exact and second["exact_match"][0] == exact
    assert abs(first["f1"][0] - f1) < 1e-9 and abs(second["f1"][0] - f1_of_2) < 1e-9


def test_normalize_removes_articles():
    assert normalize("A, an; THE") == "" and normalize("anthem") == "anthem"
    assert token_f1("the", "a") == 0 and token_f1("the", "a", empty_agree=True) == 1


def test_empty_prediction_is_correct_for_unanswerable_questions():
    # In SQuAD 2.0, no gold answers, or only gold answers without words, mean the gold answer "".
    scores = answer_scores([[], [], ["the", "cat"], ["the"]], ["", "cat", "", ""], unanswerable=True)
    assert scores["exact_match"].tolist() == [1, 0, 0, 1] and scores["f1"].tolist() == [1, 0, 0, 1]


# Five questions: the F1 of the predicted text, whether there is an answer, and the null score difference.
F1, ANSWERED, NULL = (
    np.array([1.0, 0.5, 0.0, 0.0, 0.25]),
    np.array([1, 1, 0, 0, 1], bool),
    np.array([-3, 2, -1, 4, 9.0]),
)


def test_best_threshold_matches_hand_computed_values():
    # All five without an answer: 2 right. In rising order of the null difference:
    #   -3: +1    -> 3     (the best)
    #   -1: -1    -> 2     (no answer there)
    #    2: +0.5  -> 2.5
    #    4: -1    -> 1.5
    #    9: +0.25 -> 1.75
    value, score = best_threshold(F1, ANSWERED, NULL)
    assert value == -3 and abs(score - 3 / 5) < 1e-9
    # Where every text is wrong, answering nothing is best: a threshold below all null differences.
    value, score = best_threshold(np.zeros(5), ANSWERED, NULL)
    assert value < -3 and abs(score - 2 / 5) < 1e-9


def test_summary_scores_answerable_and_unanswerable_questions():
    names = ["exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_accuracy"]
    names += ["best_exact_match", "best_f1"]  # each with its best threshold
    given = {"exact_match": np.array([1, 0, 1.0, 0, 0]), "f1": np.array([1, 0.5, 1.0, 0, 0])}
    raw = {"exact_match": np.zeros(5), "f1": F1}
    scores = summarize(names, given, raw, ANSWERED, NULL)
    expected = [2 / 5, 2.5 / 5, 1 / 3, 1.5 / 3, 1 / 2, 2 / 5, 3 / 5]
    assert list(scores) == names and np.allclose(list(scores.values()), expected, atol=1e-9)


def exhaustive_best_score(gold, texts, null, score):
    """The best mean over all thresholds, by the rules of evaluate-v2.0: up to the threshold the answer is the text,
    with its score where there is a gold answer, else 0 (1 if empty); above it the answer is empty and scores 1 where
    there is no gold answer."""
    means = []
    for threshold in [-np.inf, *null]:
        values = [
            (score(text, answers) if answers else float(not text)) if difference <= threshold else float(not answers)
            for text, answers, difference in zip(texts, gold, null, strict=True)
        ]
        means.append(np.mean(values))
    return max(means)


def test_best_threshold_counts_article_only_texts_as_answers():
    # "the" where there is no answer: correct for the scores of 2.0, wrong for the search of a threshold.
    assert answer_scores([[]], ["the"], unanswerable=True)["f1"][0] == 1
    assert threshold_scores([[], [], ["the"]], ["the", "", "."])["f1"].tolist() == [0, 1, 1]
    random = np.random.default_rng(5)
    words = ["the", ".", "", "cat", "the cat", "dog", "big cat"]
    for _ in range(60):
        count = int(random.integers(1, 9))
        texts = [str(word) for word in random.choice(words, count)]
        gold = [[] if random.random() < 0.5 else [str(random.choice(words[3:]))] for _ in range(count)]
        null = random.permutation(count).astype(float)
        raw, answered = threshold_scores(gold, texts), np.array(list(map(bool, gold)))
        for name in ("exact_match", "f1"):
            best = exhaustive_best_score(
                gold, texts, null, lambda text, own, name=name: answer_scores([own], [text], True)[name][0]
            )
            assert abs(best_threshold(raw[name], answered, null).score - best) < 1e-9
