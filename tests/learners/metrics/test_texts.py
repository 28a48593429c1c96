"""Scores of generated texts, computed by hand from their definitions, and the error for a missing package."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from lmtool.errors import UserError
from lmtool.learners.metrics.texts import TEXT_METRICS, TextScores, require_scorers

sacrebleu = pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")

# Tokens of both texts: 4 + 4, of which 3 + 4 are in a reference; pairs: 3 + 3, 2 + 2; triples: 2 + 2, 1 + 0; no four.
TEXTS = ["the cat sat down", "a big dog ran"]
REFERENCES = [["the cat sat up"], ["a dog ran off", "big dog"]]


def text_scores(names, texts, references):
    return TextScores(names, texts, references).scores()


def test_scores_of_selected_rows_match_a_separate_corpus():
    names = [name for name in TEXT_METRICS if name != "rouge2"]
    texts, references = [*TEXTS, "the end of it all"], [*REFERENCES, ["the end of all this"]]
    scores = TextScores(names, texts, references)
    chosen = np.array([2, 0, 2])
    wanted = text_scores(names, [texts[row] for row in chosen], [references[row] for row in chosen])
    assert scores.scores(chosen) == pytest.approx(wanted, abs=1e-9)
    streams = [[row[0] for row in references], [None, "big dog", None]]
    assert scores.scores()["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, streams).score, abs=1e-9)
    assert scores.scores()["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts, streams).score, abs=1e-9)


def test_bleu_with_several_references_matches_hand_computed_value():
    """The references of the second text contain `a`, `dog`, `ran` and `big`, and the pairs `big dog` and `dog ran`. The
    closest reference always has 4 tokens, so that there is no brevity penalty. Without matching 4-grams, their
    precision is half a match among 2 (exponential smoothing)."""
    precisions = [7 / 8, 4 / 6, 1 / 4, (1 / 2) / 2]
    wanted = 100 * math.exp(sum(math.log(precision) for precision in precisions) / 4)
    assert text_scores(["bleu"], TEXTS, REFERENCES)["bleu"] == pytest.approx(wanted, abs=1e-9)


def test_rouge_uses_the_best_reference():
    """Words: 3 of 4 and 4; 3 of 4 and 4 (`a dog ran off`) against 2 of 4 and 2. Pairs: 2 of 3 and 3; `dog ran`, 1 of 3
    and 3, against `big dog`, 1 of 3 and 1: F = 2/4. Longest common subsequences: 3; 3."""
    scores = text_scores(["rouge1", "rouge2", "rougeL"], TEXTS, REFERENCES)
    assert scores["rouge1"] == pytest.approx(3 / 4, abs=1e-9)
    assert scores["rouge2"] == pytest.approx((2 / 3 + 1 / 2) / 2, abs=1e-9)
    assert scores["rougeL"] == pytest.approx(3 / 4, abs=1e-9)


def test_chrf_of_short_texts_matches_hand_computed_value():
    """`ab` against `ac`: characters 1 of 2 and 2, pairs 0 of 1 and 1, nothing longer. F2 is 1/2 and 0."""
    assert text_scores(["chrf"], ["ab"], [["ac"]])["chrf"] == pytest.approx(100 * (1 / 2 + 0) / 2, abs=1e-6)


def test_exact_match_strips_spaces_and_perfect_texts_score_full():
    assert text_scores(["exact_match"], [" a b ", "c"], [["x", "a b"], ["C"]])["exact_match"] == 0.5
    perfect = text_scores(list(TEXT_METRICS), ["one two three four"], [["other", "one two three four"]])
    assert perfect == pytest.approx({"bleu": 100, "chrf": 100, **dict.fromkeys(list(perfect)[2:], 1.0)})


def test_missing_scorer_package_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    require_scorers(["exact_match", "rouge1"])
    with pytest.raises(UserError, match="the metric bleu needs the package sacrebleu") as caught:
        require_scorers(["exact_match", "bleu"])
    assert "lmtool[scores]" in caught.value.hint
