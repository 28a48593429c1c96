"""Permutations and their targets against the definition. The intervals of a test have a joint confidence of 99.9%."""

from __future__ import annotations

import numpy as np
import pytest
from test_masking import SPECIAL, STARTS, VOCABULARY, corpus, holds

from lmtool.objectives.configs import PlmConfig
from lmtool.objectives.corruption.masking import PackedTexts
from lmtool.objectives.corruption.permutation import ngram_probabilities, permute


def permuted(tokens, sizes, /, seed=11, epoch=0, examples=None, **fields):
    examples = np.arange(len(sizes)) if examples is None else examples
    return permute(PlmConfig(**fields), VOCABULARY, PackedTexts(tokens, sizes, examples, seed, epoch))


def test_one_in_context_tokens_is_predicted_in_harmonic_ngrams():
    tokens, lengths = corpus(longest=160)
    result = permuted(tokens, lengths)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    text = np.bincount(documents[~SPECIAL[tokens]], minlength=len(lengths))
    predicted = np.bincount(documents[result.at], minlength=len(lengths))
    assert predicted.tolist() == np.maximum(np.rint(text / 6), 1).tolist()
    assert not SPECIAL[result.labels].any() and np.array_equal(result.labels, tokens[result.at])
    assert np.array_equal(result.tokens, tokens)
    fractions = ngram_probabilities(5)
    assert fractions @ np.arange(1, 6) == pytest.approx(2.19, abs=0.005)
    for count, share in zip(np.bincount(result.sampled_lengths, minlength=6)[1:], fractions, strict=True):
        assert holds(count, len(result.sampled_lengths), share, intervals=5)
    opens = STARTS[tokens] | np.append(True, SPECIAL[tokens][:-1])
    assert opens[result.starts].all() and np.isin(result.starts, result.at).all()


def test_ngrams_stay_within_their_contexts():
    """In a text of one-token words, the distance of two n-grams never exceeds both contexts, and single tokens are
    few."""
    tokens, lengths = np.full(6000, np.flatnonzero(STARTS & ~SPECIAL)[0]), np.array([6000])
    result = permuted(tokens, lengths)
    assert np.diff(result.starts).min() >= 1 and np.diff(result.starts).max() <= 2 * 6 * 5
    assert result.single.sum() <= 5 and len(result.at) == 1000


def test_permutation_orders_are_uniform():
    tokens, lengths = np.full(4 * 4000, np.flatnonzero(~SPECIAL)[0]), np.full(4000, 4)
    tokens[3::4] = np.flatnonzero(SPECIAL)[0]
    tokens[2::4] = np.flatnonzero(SPECIAL)[0]
    ranks = permuted(tokens, lengths, context=2).ranks.reshape(-1, 4)
    # Two tokens are special, and one of the others is predicted.
    assert (np.sort(ranks, 1) == [0, 1, 2, 3]).all()
    for first in (1, 2, 3):
        for second in {1, 2, 3} - {first}:
            times = ((ranks[:, 2] == first) & (ranks[:, 3] == second)).sum()
            assert holds(times, 4000, 1 / 6, intervals=6)


def test_reused_tokens_have_lower_ranks_than_the_rest():
    tokens, lengths = corpus(examples=50)
    result = permuted(tokens, lengths, reuse=7)
    first = np.cumsum(lengths) - lengths
    for start, length in zip(first, lengths, strict=True):
        ranks = result.ranks[start : start + length]
        if length > 7:
            assert ranks[:7].max() < ranks[7:].min()
            behind = slice(start + 7, start + length)
            ordered = np.isin(np.arange(behind.start, behind.stop), result.at) | SPECIAL[tokens[behind]]
            others = ranks[7:][~ordered]
            assert len(np.unique(others)) <= 1 and (ranks[7:][ordered] > max(others, default=0)).all()


def test_permutations_do_not_depend_on_the_batch():
    tokens, lengths = corpus(examples=40)
    together = permuted(tokens, lengths, reuse=9)
    start = int(lengths[:13].sum())
    part = slice(start, start + int(lengths[13]))
    alone = permuted(tokens[part], lengths[13:14], examples=np.array([13]), reuse=9)
    assert np.array_equal(alone.ranks, together.ranks[part])
    assert np.array_equal(alone.at + start, together.at[(together.at >= part.start) & (together.at < part.stop)])
    assert not np.array_equal(permuted(tokens, lengths, epoch=1).ranks, permuted(tokens, lengths).ranks)


@pytest.mark.parametrize("reuse", [0, 1])
def test_single_regular_token_is_predicted(reuse):
    """The only regular token is predicted."""
    word, special = np.flatnonzero(~SPECIAL)[0], np.flatnonzero(SPECIAL)[0]
    result = permuted(np.array([word, special]), np.array([2]), reuse=reuse)
    assert result.at.tolist() == [0] and sorted(result.ranks.tolist()) == [1, 2 + reuse]
    empty = permuted(np.array([special]), np.array([1]), reuse=reuse)
    assert len(empty.at) == 0


def test_reuse_with_pairs_is_refused():
    with pytest.raises(ValueError, match="reuse=4 needs running text"):
        PlmConfig(reuse=4, pairs="unscored")
