"""The vectorized sentence-pair builder against the definition in BERT's data script."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lmtool.objectives.examples import pairs as pairs_module
from lmtool.objectives.examples.pairs import sentence_pairs


def corpus(documents=3000, sentences=9, seed=0, longest=40):
    draws = np.random.default_rng(seed)
    counts = 1 + draws.poisson(sentences, documents)
    return np.r_[0, np.cumsum(draws.integers(1, longest, counts.sum()))], np.r_[0, np.cumsum(counts)]


def owners(offsets, boundaries, starts):
    """The document of each token index."""
    return np.searchsorted(offsets[boundaries], starts, side="right") - 1


def test_random_segments_are_from_other_documents():
    offsets, boundaries = corpus()
    pairs = sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0)
    a, b = owners(offsets, boundaries, pairs["a_start"]), owners(offsets, boundaries, pairs["b_start"])
    random = pairs["label"] == 1
    assert (a == pairs["document"]).all()
    assert (a[random] != b[random]).all()
    assert (a[~random] == b[~random]).all()
    assert (pairs["b_start"] >= pairs["a_start"] + pairs["a_length"])[~random].all()
    whole = ~random & (pairs["a_length"] + pairs["b_length"] < 61)
    assert (pairs["b_start"] == pairs["a_start"] + pairs["a_length"])[whole].all()
    assert (pairs["a_length"] >= 1).all() and (pairs["b_length"] >= 1).all()
    assert (pairs["a_length"] + pairs["b_length"]).max() == 61


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_sentence_segments_are_single_whole_sentences(kind):
    """Each segment is one whole sentence of any length, and every sentence is in exactly one A or next B."""
    offsets, boundaries = corpus(documents=400)
    pairs = sentence_pairs(offsets, boundaries, 200, 0.5, 3, 0, kind, sentences=True)
    two = (
        np.diff(boundaries)[pairs["document"]] > 1 if kind == "nsp" else np.diff(boundaries)[pairs["document"]] % 2 == 0
    )
    seen = np.zeros(len(offsets) - 1, dtype=int)
    for side in ("a", "b"):
        starts, ends = pairs[f"{side}_start"], pairs[f"{side}_start"] + pairs[f"{side}_length"]
        whole = np.isin(starts, offsets) & np.isin(ends, offsets)
        assert (
            whole[two].all() and ((np.searchsorted(offsets, ends) - np.searchsorted(offsets, starts))[two] == 1).all()
        )
        used = starts if side == "a" or kind == "sop" else starts[pairs["label"] == 0]
        seen += np.bincount(np.searchsorted(offsets, used, side="right") - 1, minlength=len(seen))
    if kind == "nsp":
        assert (seen == 1).all()
        choice = pairs["label"][pairs["choice"] == 1]
        low, high = stats.binom.ppf([5e-4, 1 - 5e-4], len(choice), 0.5)
        assert low <= choice.sum() <= high


def test_labels_are_balanced_where_both_are_possible():
    """B is random for half of the chunks of several sentences and for all of one; for more than half overall."""
    offsets, boundaries = corpus(documents=6000, sentences=6, longest=30)
    pairs = sentence_pairs(offsets, boundaries, 4000, 0.0, 5, 0)  # the first chunk is the whole document
    first = np.r_[True, np.diff(pairs["document"]) > 0]
    several = np.diff(boundaries)[pairs["document"]] >= 2
    choice = pairs["label"][first & several]
    low, high = stats.binom.ppf([5e-4, 1 - 5e-4], len(choice), 0.5)
    assert low <= choice.sum() <= high
    assert pairs["label"][first & ~several].all()
    assert pairs["label"].mean() > 0.5


def test_every_sentence_is_used_once():
    """Every sentence is in exactly one A or one next B: none is lost or read twice."""
    offsets, boundaries = corpus(documents=300)
    pairs = sentence_pairs(offsets, boundaries, 10**6, 0.1, 3, 0)
    seen = np.zeros(offsets[-1], dtype=int)
    for pair in pairs:
        seen[pair["a_start"] : pair["a_start"] + pair["a_length"]] += 1
        if not pair["label"]:
            seen[pair["b_start"] : pair["b_start"] + pair["b_length"]] += 1
    assert (seen == 1).all()


def test_random_documents_are_uniform_and_both_ends_are_truncated():
    offsets, boundaries = corpus(documents=40, sentences=60)
    pairs = np.concatenate([sentence_pairs(offsets, boundaries, 33, 0.0, 7, epoch) for epoch in range(30)])
    random = pairs[pairs["label"] == 1]
    assert stats.chisquare(np.bincount(owners(offsets, boundaries, random["b_start"]), minlength=40)).pvalue > 1e-3
    # A starts with a sentence unless tokens were removed from its front, each with probability 1/2.
    starts = np.isin(pairs["a_start"], offsets[:-1])
    assert 0.2 < np.mean(~starts) < 0.8


def test_short_targets_have_their_probability():
    offsets, boundaries = corpus(documents=40, sentences=6000, longest=3)
    pairs = sentence_pairs(offsets, boundaries, 120, 0.1, 3, 0)
    last = np.r_[np.diff(pairs["document"]) > 0, True]
    # A random B may end with its document, so only pairs with the next text count.
    lengths = (pairs["a_length"] + pairs["b_length"])[~last & (pairs["label"] == 0)]
    # A tenth of the targets is uniform in 2..120, of which 91% are below 110.
    assert np.mean(lengths < 110) == pytest.approx(0.1 * 108 / 119, abs=0.02)


def test_pairs_depend_on_seed_and_epoch_only():
    offsets, boundaries = corpus(documents=200)
    first = sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0)
    assert np.array_equal(first, sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0))
    assert not np.array_equal(first, sentence_pairs(offsets, boundaries, 61, 0.1, 5, 1))
    assert not np.array_equal(first, sentence_pairs(offsets, boundaries, 61, 0.1, 6, 0))


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_block_size_does_not_change_the_pairs(monkeypatch, kind):
    offsets, boundaries = corpus(documents=200)
    boundaries = np.sort(np.append(boundaries, boundaries[[7, 90]]))  # some without sentences
    whole = sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0, kind)
    monkeypatch.setattr(pairs_module, "_BLOCK", 17)
    assert np.array_equal(sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0, kind), whole)


def test_empty_documents_are_skipped_and_single_ones_refused():
    pairs = sentence_pairs(np.array([0, 4, 9, 12]), np.array([0, 0, 2, 2, 3]), 20, 0.1, 1, 0)
    assert set(pairs["document"]) == {1, 3}
    with pytest.raises(ValueError, match="two documents with text; there are 1"):
        sentence_pairs(np.array([0, 4, 9]), np.array([0, 2, 2]), 20, 0.1, 1, 0)


def test_sop_labels_are_balanced_and_segments_consecutive():
    offsets, boundaries = corpus()
    pairs = sentence_pairs(offsets, boundaries, 61, 0.1, 5, 0, "sop")
    a, b = owners(offsets, boundaries, pairs["a_start"]), owners(offsets, boundaries, pairs["b_start"])
    assert np.array_equal(a, pairs["document"]) and np.array_equal(a, b)
    swapped = pairs["label"] == 1
    low, high = stats.binom.ppf([5e-4, 1 - 5e-4], len(pairs), 0.5)
    assert low <= swapped.sum() <= high
    first = np.where(swapped, pairs["b_start"], pairs["a_start"])
    first_length = np.where(swapped, pairs["b_length"], pairs["a_length"])
    second = np.where(swapped, pairs["a_start"], pairs["b_start"])
    assert (second >= first + first_length).all()
    uncut = pairs["a_length"] + pairs["b_length"] < 61
    assert uncut.any() and (second == first + first_length)[uncut].all()
    assert (pairs["a_length"] >= 1).all() and (pairs["b_length"] >= 1).all()
    assert (pairs["a_length"] + pairs["b_length"]).max() == 61


def test_sop_uses_every_sentence_except_single_tokens():
    offsets, boundaries = corpus(documents=300)
    pairs = sentence_pairs(offsets, boundaries, 10**6, 0.1, 3, 0, "sop")
    seen = np.zeros(offsets[-1], dtype=int)
    for pair in pairs:
        for side in "ab":
            seen[pair[f"{side}_start"] : pair[f"{side}_start"] + pair[f"{side}_length"]] += 1
    alone = np.flatnonzero((np.diff(boundaries) == 1) & (np.diff(offsets[boundaries]) == 1))
    expected = np.ones(offsets[-1], dtype=int)
    expected[offsets[boundaries[alone]]] = 0
    # A short target may leave a sentence of one token at the end of a document.
    assert ((seen == expected) | (seen == 0)).all() and (seen != expected).sum() <= 10


def test_sop_splits_a_single_sentence_in_two():
    pairs = sentence_pairs(np.array([0, 7, 8]), np.array([0, 1, 2]), 20, 0.0, 1, 0, "sop")
    assert len(pairs) == 1 and pairs["a_length"] + pairs["b_length"] == 7
    assert len(sentence_pairs(np.array([0, 4, 9]), np.array([0, 2]), 20, 0.0, 1, 0, "sop")) == 1
