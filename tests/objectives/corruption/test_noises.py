"""BART's noises against their definitions. The intervals of a test have a joint confidence of 99.9%."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from test_masking import ENTRIES, MASK, SPECIAL, STARTS, VOCABULARY, holds

from lmtool.objectives.corruption.masking import PackedTexts
from lmtool.objectives.corruption.noises import (
    delete,
    infill,
    mask_each,
    permute_sentences,
    poisson_probabilities,
    rotate,
)


def texts(examples=1500, longest=90, seed=0, epoch=0):
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, longest, examples)
    return PackedTexts(draws.integers(5, ENTRIES, lengths.sum()), lengths, np.arange(examples), 7, epoch)


def apart(some):
    return np.split(some.tokens, np.cumsum(some.lengths)[:-1])


def words_of(text):
    """The words of a text, as arrays of tokens."""
    starts = STARTS[text] | (np.arange(len(text)) == 0)
    return np.split(text, np.flatnonzero(starts)[1:])


def test_span_lengths_are_poisson():
    whole = texts(4000)
    infilled = infill(whole, VOCABULARY, 0.3, 3.0, 0.0, 200)
    fractions = poisson_probabilities(3.0)
    assert fractions[:11] == pytest.approx(stats.poisson.pmf(np.arange(11), 3.0)) and fractions.sum() == pytest.approx(
        1
    )
    # The last span of a text is biased, because it ends the text; long texts with many spans make the bias small.
    long = PackedTexts(np.full(60000, 8), np.full(6, 10000), np.arange(6), 1, 0)
    drawn = infill(long, VOCABULARY, 0.3, 3.0, 0.0, 20000).sampled_lengths
    counts = np.bincount(drawn, minlength=12)
    for length in range(12):
        assert holds(counts[length], len(drawn), stats.poisson.pmf(length, 3.0), intervals=12)
    assert fractions[0] == pytest.approx(0.0498, abs=5e-5)
    assert abs(drawn.mean() - 3) < 3.3 * np.sqrt(3 / len(drawn))
    assert (infilled.texts.tokens == MASK).any()


def test_infilling_masks_the_expected_number_of_whole_words():
    whole = texts()
    infilled = infill(whole, VOCABULARY, 0.3, 3.0, 0.0, 200)
    counts = [len(words_of(text)) for text in apart(whole)]
    assert infilled.masked.tolist() == np.ceil(0.3 * np.array(counts) - 1e-9).astype(int).tolist()
    for text, noisy, masked, count in zip(apart(whole), apart(infilled.texts), infilled.masked, counts, strict=True):
        kept = noisy[noisy != MASK]
        rest = iter(text.tolist())
        assert all(token in rest for token in kept.tolist()), "the remaining tokens keep their order"
        # Remaining words are whole; only the first word of a text may begin with a continuation piece.
        begun = STARTS[kept].sum()
        assert begun == count - masked - (not STARTS[text[0]] and kept[:1].tolist() == text[:1].tolist())
        assert len(kept) <= len(text) - masked
        assert (noisy == MASK).sum() >= (masked > 0)
        if count == masked:
            assert not len(kept)


def test_infilling_positions_are_equally_likely():
    """One span of one word at five positions."""
    tokens = np.tile(np.array([6, 7, 9, 10, 12]), 5000)
    whole = PackedTexts(tokens, np.full(5000, 5), np.arange(5000), 2, 0)
    plain = VOCABULARY.__class__(MASK, SPECIAL, np.ones(ENTRIES, dtype=bool))
    infilled = infill(whole, plain, 0.2, 3.0, 0.0, 5)
    # Without room for insertions, each text has one mask at one of five positions.
    assert (infilled.texts.lengths == 5).all()
    places = (infilled.texts.tokens.reshape(-1, 5) == MASK).argmax(1)
    assert stats.chisquare(np.bincount(places, minlength=5)).pvalue > 1e-3


def test_random_replaces_a_fraction_of_the_masks():
    whole = texts(3000)
    plain = infill(whole, VOCABULARY, 0.3, 3.0, 0.0, 200).texts
    mixed = infill(whole, VOCABULARY, 0.3, 3.0, 0.1, 200).texts
    masks = plain.tokens == MASK
    assert holds((mixed.tokens[masks] != MASK).sum(), masks.sum(), 0.1, intervals=1)
    assert (
        np.array_equal(mixed.tokens[~masks], plain.tokens[~masks])
        and not SPECIAL[mixed.tokens[masks & (mixed.tokens != MASK)]].any()
    )


def test_permutation_moves_whole_sentences():
    draws = np.random.default_rng(1)
    sizes = [draws.integers(1, 6, draws.integers(1, 8)) for _ in range(300)]
    lengths = np.array([counts.sum() for counts in sizes])
    tokens = np.arange(lengths.sum())
    sentences = np.repeat(np.arange(sum(map(len, sizes))), np.concatenate(sizes))
    whole = PackedTexts(tokens, lengths, np.arange(300), 3, 0)
    moved = permute_sentences(whole, sentences, 1.0)
    assert np.array_equal(moved.lengths, lengths)
    for before, after in zip(apart(whole), apart(moved), strict=True):
        assert sorted(after) == before.tolist()
        runs = np.split(after, np.flatnonzero(np.diff(sentences[after]) != 0) + 1)
        assert all(len(run) == (sentences[before] == sentences[run[0]]).sum() for run in runs)
    half = permute_sentences(whole, sentences, 0.5)
    kept = sum(np.array_equal(*both) for both in zip(apart(whole), apart(half), strict=True))
    assert kept > sum(np.array_equal(*both) for both in zip(apart(whole), apart(moved), strict=True))
    assert np.array_equal(permute_sentences(whole, sentences, 0.0).tokens, tokens)


def test_sentence_orders_are_equally_likely():
    whole = PackedTexts(np.tile(np.arange(3), 6000), np.full(6000, 3), np.arange(6000), 3, 0)
    moved = permute_sentences(whole, np.arange(18000), 1.0).tokens.reshape(-1, 3)
    _, counts = np.unique(moved, axis=0, return_counts=True)
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-3


def test_masking_and_deletion_have_their_counts():
    whole = texts()
    masked = mask_each(whole, VOCABULARY, 0.3, 0.0)
    changed = np.add.reduceat(masked.tokens == MASK, whole.starts)
    assert changed.tolist() == np.maximum(1, np.rint(0.3 * whole.lengths)).tolist()
    shorter = delete(whole, 0.3)
    expected = np.maximum(whole.lengths - np.maximum(1, np.rint(0.3 * whole.lengths)), 1)
    assert shorter.lengths.tolist() == expected.tolist()
    for before, after in zip(apart(whole), apart(shorter), strict=True):
        # A subsequence.
        rest = iter(before.tolist())
        assert all(token in rest for token in after.tolist())


def test_rotation_start_is_uniform():
    whole = PackedTexts(np.tile(np.arange(7), 7000), np.full(7000, 7), np.arange(7000), 5, 0)
    turned = rotate(whole, 1.0).tokens.reshape(-1, 7)
    assert ((np.diff(turned, axis=1) % 7) == 1).all()
    assert stats.chisquare(np.bincount(turned[:, 0], minlength=7)).pvalue > 1e-3
    half = rotate(whole, 0.5).tokens.reshape(-1, 7)
    assert holds((half[:, 0] == 0).sum(), 7000, 0.5 + 0.5 / 7, intervals=1)


def test_noise_does_not_depend_on_the_batch():
    def noisy(some):
        filled = infill(some, VOCABULARY, 0.3, 3.0, 0.1, 200).texts
        return rotate(delete(mask_each(filled, VOCABULARY, 0.2, 0.1), 0.1), 1.0)

    whole = texts(40)
    together = noisy(whole)
    starts = together.starts
    for example in (0, 13, 39):
        part = slice(whole.starts[example], whole.starts[example] + whole.lengths[example])
        text = PackedTexts(whole.tokens[part], whole.lengths[[example]], np.array([example]), 7, 0)
        alone = noisy(text)
        assert np.array_equal(
            alone.tokens, together.tokens[starts[example] : starts[example] + together.lengths[example]]
        )
    assert not np.array_equal(noisy(texts(40, epoch=1)).tokens, together.tokens)
