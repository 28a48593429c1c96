"""Scores of answers, against values worked by hand from the definitions of the official scripts."""

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

# Each: predicted, gold answers, exact match, f1 by the rules of 1.1, f1 by those of 2.0.
CASES = [
    # Lower case, article and full stop go: "cat" = "cat".
    ("The cat.", ["cat"], 1, 1, 1),
    # Words a1 = {big, red, dog}, gold = {red, dog, ran}: 2 in common, P = R = 2/3, F1 = 2/3.
    ("big red dog", ["the red dog ran"], 0, 2 / 3, 2 / 3),
    # Counted as often as they come: {no, no, no} and {no, yes}: 1 in common, P = 1/3, R = 1/2, F1 = 2/5.
    ("no no no", ["no yes"], 0, 2 / 5, 2 / 5),
    # Punctuation joins what it divided: "ice-cream" is one word, "ice cream" two: nothing in common.
    ("ice-cream", ["ice cream"], 0, 0, 0),
    # ... and goes before articles are looked for: "a.n." is "an", which is an article: nothing is left of either.
    ("a.n.", ["the"], 1, 0, 1),
    # An article inside a word stays; the dash is not ASCII punctuation and stays, so these two differ.
    ("theatre – another", ["theatre another"], 0, 0.8, 0.8),
    # The best of the gold answers, for each score by itself: F1 with "in May 1990" is 2 * (2/2 * 2/3) / (5/3) = 0.8.
    ("May 1990", ["1990", "in May 1990", "june"], 0, 0.8, 0.8),
    # White space of every kind is one space: the no-break space too.
    ("New\u00a0 York\n", ["new york"], 1, 1, 1),
    # Nothing predicted where there is an answer.
    ("", ["x"], 0, 0, 0),
]


@pytest.mark.parametrize(("predicted", "gold", "exact", "f1", "f1_of_2"), CASES)
def test_scores_are_those_worked_by_hand(predicted, gold, exact, f1, f1_of_2):
    first, second = answer_scores([gold], [predicted]), answer_scores([gold], [predicted], unanswerable=True)
    assert first["exact_match"][0] == exact and second["exact_match"][0] == exact
    assert abs(first["f1"][0] - f1) < 1e-9 and abs(second["f1"][0] - f1_of_2) < 1e-9


def test_an_article_alone_is_no_word():
    assert normalize("A, an; THE") == "" and normalize("anthem") == "anthem"
    assert token_f1("the", "a") == 0 and token_f1("the", "a", empty_agree=True) == 1


def test_no_answer_is_gold_and_predicted():
    # Of 2.0: no gold answer, or only such without a word, is the gold answer "".
    scores = answer_scores([[], [], ["the", "cat"], ["the"]], ["", "cat", "", ""], unanswerable=True)
    assert scores["exact_match"].tolist() == [1, 0, 0, 1] and scores["f1"].tolist() == [1, 0, 0, 1]


# Five questions: scores of the text if it is given, whether there is an answer, how much better no answer is.
F1, ANSWERED, NULL = (
    np.array([1.0, 0.5, 0.0, 0.0, 0.25]),
    np.array([1, 1, 0, 0, 1], bool),
    np.array([-3, 2, -1, 4, 9.0]),
)


def test_the_best_threshold_is_the_official_one():
    # All five without an answer: 2 right. In rising order of the null difference:
    #   -3: +1    -> 3     (the best)
    #   -1: -1    -> 2     (no answer there)
    #    2: +0.5  -> 2.5
    #    4: -1    -> 1.5
    #    9: +0.25 -> 1.75
    value, score = best_threshold(F1, ANSWERED, NULL)
    assert value == -3 and abs(score - 3 / 5) < 1e-9
    # Where nothing that is given is right, giving nothing is best: below all null differences.
    value, score = best_threshold(np.zeros(5), ANSWERED, NULL)
    assert value < -3 and abs(score - 2 / 5) < 1e-9


def test_shares_of_questions_with_and_without_an_answer():
    names = ["exact_match", "f1", "has_answer_exact_match", "has_answer_f1", "no_answer_accuracy"]
    names += ["best_exact_match", "best_f1"]  # each with a threshold of its own
    given = {"exact_match": np.array([1, 0, 1.0, 0, 0]), "f1": np.array([1, 0.5, 1.0, 0, 0])}
    raw = {"exact_match": np.zeros(5), "f1": F1}
    scores = summarize(names, given, raw, ANSWERED, NULL)
    expected = [2 / 5, 2.5 / 5, 1 / 3, 1.5 / 3, 1 / 2, 2 / 5, 3 / 5]
    assert list(scores) == names and np.allclose(list(scores.values()), expected, atol=1e-9)


def searched(gold, texts, null, score):
    """The best mean over all thresholds, by the rules of evaluate-v2.0 in words: below the threshold a text is given;
    a given text is worth its score where there is an answer, else 0 (and 1 where it is empty); not giving one is worth
    1 where there is no answer."""
    means = []
    for threshold in [-np.inf, *null]:
        values = [
            (score(text, answers) if answers else float(not text)) if difference <= threshold else float(not answers)
            for text, answers, difference in zip(texts, gold, null, strict=True)
        ]
        means.append(np.mean(values))
    return max(means)


def test_a_text_that_normalizes_to_nothing_is_an_answer_for_the_best_threshold():
    # "the" where there is no answer: the plain scores of 2.0 count it right, the search for a threshold does not.
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
            best = searched(gold, texts, null, lambda text, own, name=name: answer_scores([own], [text], True)[name][0])
            assert abs(best_threshold(raw[name], answered, null).score - best) < 1e-9
