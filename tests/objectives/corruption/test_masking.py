"""Measured statistics of masking against its definition, with joint confidence of 99.9%."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary, mask_tokens

ENTRIES = 503
CLS, SEP, MASK = 2, 3, 4
SPECIAL = np.arange(ENTRIES) < 5
# A third of the entries continue a word.
STARTS = SPECIAL | (np.arange(ENTRIES) % 3 != 0)
VOCABULARY = Vocabulary(MASK, SPECIAL, STARTS)


def corpus(examples=2500, seed=0, longest=80):
    """Packed [CLS] text [SEP] of random lengths."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(3, longest, examples)
    tokens = draws.integers(5, ENTRIES, lengths.sum())
    ends = np.cumsum(lengths)
    tokens[ends - lengths], tokens[ends - 1] = CLS, SEP
    return tokens, lengths


def masked(tokens, lengths, seed=11, epoch=0, examples=None, **fields):
    examples = np.arange(len(lengths)) if examples is None else examples
    return mask_tokens(MlmConfig(**fields), VOCABULARY, PackedTexts(tokens, lengths, examples, seed, epoch))


def holds(count, total, fraction, intervals=4, level=0.999):
    """Whether `count` of `total` is in its confidence interval, at a joint `level` of `intervals` intervals."""
    tail = (1 - level) / intervals / 2
    low, high = stats.binom.ppf([tail, 1 - tail], total, fraction)
    return low <= count <= high


@pytest.mark.parametrize("select", ["exact", "bernoulli"])
def test_masked_random_and_unchanged_fractions_match_the_config(select):
    tokens, lengths = corpus()
    result = masked(tokens, lengths, select=select)
    total = len(result.at)
    replaced = result.tokens[result.at]
    regular = ENTRIES - SPECIAL.sum()
    assert holds((replaced == MASK).sum(), total, 0.8)
    # The random branch may sample the original token, which then looks unchanged.
    assert holds((replaced == result.labels).sum(), total, 0.1 + 0.1 / regular)
    assert holds(((replaced != MASK) & (replaced != result.labels)).sum(), total, 0.1 * (1 - 1 / regular))
    if select == "bernoulli":
        assert holds(total, (~SPECIAL[tokens]).sum(), 0.15)
    changed = np.flatnonzero(result.tokens != tokens)
    assert np.isin(changed, result.at).all()
    assert np.array_equal(result.labels, tokens[result.at])
    assert not SPECIAL[result.labels].any()


def test_random_tokens_are_uniform_over_regular_tokens():
    tokens, lengths = corpus(examples=4000)
    drawn = masked(tokens, lengths, mask=0.0, random=1.0).tokens
    drawn = drawn[masked(tokens, lengths, mask=0.0, random=1.0).at]
    counts = np.bincount(drawn, minlength=ENTRIES)
    assert counts[SPECIAL].sum() == 0
    assert stats.chisquare(counts[~SPECIAL]).pvalue > 1e-3


def test_exact_selection_has_the_count_of_every_example():
    tokens, lengths = corpus()
    result = masked(tokens, lengths)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(documents[result.at], minlength=len(lengths))
    expected = [max(1, round(0.15 * (length - 2))) for length in lengths]
    assert counts.tolist() == expected


def test_positions_are_equally_likely():
    lengths = np.full(6000, 22)
    tokens = np.tile(np.r_[CLS, np.full(20, 100), SEP], 6000)
    places = masked(tokens, lengths).at % 22
    assert stats.chisquare(np.bincount(places, minlength=22)[1:21]).pvalue > 1e-3


@pytest.mark.parametrize("select", ["exact", "bernoulli"])
def test_whole_word_masking_never_splits_words(select):
    tokens, lengths = corpus(examples=800)
    result = masked(tokens, lengths, whole_word=True, select=select)
    selected = np.zeros(len(tokens), dtype=bool)
    selected[result.at] = True
    text = ~SPECIAL[tokens]
    first = text & (STARTS[tokens] | ~np.r_[False, text[:-1]])
    word = np.cumsum(first)[text]
    sizes, taken = np.bincount(word), np.bincount(word, selected[text])
    assert np.isin(taken[sizes > 0] / sizes[sizes > 0], [0.0, 1.0]).all()
    if select == "exact":
        documents = np.repeat(np.arange(len(lengths)), lengths)
        counts = np.bincount(documents[result.at], minlength=len(lengths))
        budget = np.maximum(1, np.rint(0.15 * (lengths - 2)))
        assert (counts >= 1).all()
        assert (counts <= budget)[lengths > 30].all()
        assert counts.sum() == pytest.approx(budget.sum(), rel=0.03)


def test_masks_do_not_depend_on_the_batch():
    tokens, lengths = corpus(examples=60)
    together = masked(tokens, lengths)
    starts = np.cumsum(lengths) - lengths
    for example in (0, 17, 59):
        part = slice(starts[example], starts[example] + lengths[example])
        alone = masked(tokens[part], lengths[[example]], examples=np.array([example]))
        assert np.array_equal(alone.tokens, together.tokens[part])


def test_dynamic_masks_overlap_by_chance_and_static_ones_repeat():
    tokens, lengths = corpus(examples=1500)

    def overlap(first, second):
        return len(np.intersect1d(first.at, second.at)) / len(np.union1d(first.at, second.at))

    chance = 0.15 / (2 - 0.15)
    assert overlap(masked(tokens, lengths, epoch=0), masked(tokens, lengths, epoch=1)) == pytest.approx(
        chance, abs=0.012
    )
    assert overlap(masked(tokens, lengths), masked(tokens, lengths, seed=12)) == pytest.approx(chance, abs=0.012)
    static = [masked(tokens, lengths, epoch=epoch, masking="static", duplicates=3) for epoch in range(4)]
    assert np.array_equal(static[0].tokens, static[3].tokens)
    assert overlap(static[0], static[1]) == pytest.approx(chance, abs=0.012)


def test_text_without_regular_tokens_is_unchanged():
    for fields in ({}, {"whole_word": True}, {"select": "bernoulli"}):
        result = masked(np.array([CLS, SEP]), np.array([2]), **fields)
        assert len(result.at) == 0 and result.tokens.tolist() == [CLS, SEP]


@pytest.mark.parametrize("fields", [{}, {"whole_word": True}])
def test_texts_without_special_tokens_do_not_depend_on_their_batch(fields):
    """The first token of a text may continue a word, but not that of another text."""
    tokens, lengths = np.random.default_rng(4).integers(5, ENTRIES, 3000), np.full(100, 30)
    assert not STARTS[tokens[::30]].all()
    together = masked(tokens, lengths, **fields).tokens.reshape(100, 30)
    for number, text in enumerate(tokens.reshape(100, 30)):
        alone = masked(text, lengths[:1], examples=np.array([number]), **fields)
        assert np.array_equal(alone.tokens, together[number])
