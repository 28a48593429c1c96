"""The vectorised pair builder against the definition in BERT's data script."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import stats

from lmtool.errors import UserError
from lmtool.objectives.pairs import sentence_pairs


def corpus(documents=3000, sentences=9, seed=0, longest=40):
    draws = np.random.default_rng(seed)
    counts = 1 + draws.poisson(sentences, documents)
    return np.r_[0, np.cumsum(draws.integers(1, longest, counts.sum()))], np.r_[0, np.cumsum(counts)]


def owners(offsets, borders, starts):
    """The document each flat place lies in."""
    return np.searchsorted(offsets[borders], starts, side="right") - 1


def test_a_random_segment_is_of_another_document_and_a_next_one_follows():
    offsets, borders = corpus()
    pairs = sentence_pairs(offsets, borders, 61, 0.1, 5, 0)
    a, b = owners(offsets, borders, pairs["a_start"]), owners(offsets, borders, pairs["b_start"])
    random = pairs["random"] == 1
    assert (a == pairs["document"]).all()
    assert (a[random] != b[random]).all()
    assert (a[~random] == b[~random]).all()
    assert (pairs["b_start"] >= pairs["a_start"] + pairs["a_length"])[~random].all()
    whole = ~random & (pairs["a_length"] + pairs["b_length"] < 61)
    assert (pairs["b_start"] == pairs["a_start"] + pairs["a_length"])[whole].all()
    assert (pairs["a_length"] >= 1).all() and (pairs["b_length"] >= 1).all()
    assert (pairs["a_length"] + pairs["b_length"]).max() == 61


def test_balance_given_that_there_was_a_choice():
    """Half are random where the chunk had two sentences; all are where it had one; so more than half overall."""
    offsets, borders = corpus(documents=6000, sentences=6, longest=30)
    pairs = sentence_pairs(offsets, borders, 4000, 0.0, 5, 0)  # so long that the first chunk is the whole document
    first = np.r_[True, np.diff(pairs["document"]) > 0]
    several = np.diff(borders)[pairs["document"]] >= 2
    choice = pairs["random"][first & several]
    low, high = stats.binom.ppf([5e-4, 1 - 5e-4], len(choice), 0.5)
    assert low <= choice.sum() <= high
    assert pairs["random"][first & ~several].all()
    assert pairs["random"].mean() > 0.5


def test_unused_sentences_are_put_back():
    """Every sentence stands in exactly one A or one following B: nothing is lost and nothing read twice."""
    offsets, borders = corpus(documents=300)
    pairs = sentence_pairs(offsets, borders, 10**6, 0.1, 3, 0)
    seen = np.zeros(offsets[-1], dtype=int)
    for pair in pairs:
        seen[pair["a_start"] : pair["a_start"] + pair["a_length"]] += 1
        if not pair["random"]:
            seen[pair["b_start"] : pair["b_start"] + pair["b_length"]] += 1
    assert (seen == 1).all()


def test_other_documents_and_cut_ends_are_fair():
    offsets, borders = corpus(documents=40, sentences=60)
    pairs = np.concatenate([sentence_pairs(offsets, borders, 33, 0.0, 7, epoch) for epoch in range(30)])
    random = pairs[pairs["random"] == 1]
    assert stats.chisquare(np.bincount(owners(offsets, borders, random["b_start"]), minlength=40)).pvalue > 1e-3
    # A starts with a sentence unless tokens were cut off its front, each by a fair coin.
    starts = np.isin(pairs["a_start"], offsets[:-1])
    assert 0.2 < np.mean(~starts) < 0.8


def test_short_targets_have_their_share():
    offsets, borders = corpus(documents=40, sentences=6000, longest=3)
    pairs = sentence_pairs(offsets, borders, 120, 0.1, 3, 0)
    last = np.r_[np.diff(pairs["document"]) > 0, True]
    # A random B may end with its document: only pairs of text that follows.
    lengths = (pairs["a_length"] + pairs["b_length"])[~last & (pairs["random"] == 0)]
    # A uniform target of 2..120 falls short of 110 in 91% of the tenth that is short.
    assert np.mean(lengths < 110) == pytest.approx(0.1 * 108 / 119, abs=0.02)


def test_a_pure_function_of_seed_and_epoch():
    offsets, borders = corpus(documents=200)
    first = sentence_pairs(offsets, borders, 61, 0.1, 5, 0)
    assert np.array_equal(first, sentence_pairs(offsets, borders, 61, 0.1, 5, 0))
    assert not np.array_equal(first, sentence_pairs(offsets, borders, 61, 0.1, 5, 1))
    assert not np.array_equal(first, sentence_pairs(offsets, borders, 61, 0.1, 6, 0))


def test_documents_without_sentences_and_single_documents():
    pairs = sentence_pairs(np.array([0, 4, 9, 12]), np.array([0, 0, 2, 2, 3]), 20, 0.1, 1, 0)
    assert set(pairs["document"]) == {1, 3}
    with pytest.raises(UserError, match="two documents with text; there are 1"):
        sentence_pairs(np.array([0, 4, 9]), np.array([0, 2, 2]), 20, 0.1, 1, 0)


def test_fast_enough():
    offsets, borders = corpus(documents=20000, sentences=6, longest=60)
    start = time.perf_counter()
    pairs = sentence_pairs(offsets, borders, 125, 0.1, 3, 0)
    assert len(pairs) / (time.perf_counter() - start) * 60 > 50_000
