"""T5's span corruption and prefixes against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lmtool.errors import UserError
from lmtool.objectives.configs import SpanCorruptionConfig
from lmtool.objectives.corruption.masking import PackedTexts
from lmtool.objectives.corruption.noises import corrupt_spans, noise_counts, prefix_lengths, restore, text_length

SENTINELS = np.arange(32099, 31999, -1)
CONFIG = SpanCorruptionConfig()


def corpus(examples=400, longest=300, seed=0):
    draws = np.random.default_rng(seed)
    lengths = draws.integers(2, longest, examples)
    return draws.integers(5, 32000, lengths.sum()), lengths


def corrupted(tokens, lengths, epoch=0, examples=None, config=CONFIG):
    examples = np.arange(len(lengths)) if examples is None else examples
    return corrupt_spans(config, SENTINELS, PackedTexts(tokens, lengths, np.asarray(examples), 3, epoch))


def parts(flat, lengths):
    return np.split(flat, np.cumsum(lengths)[:-1])


@pytest.mark.parametrize(("inputs", "raw", "targets"), [(512, 568, 114), (128, 141, 29), (1024, 1137, 229)])
def test_lengths_match_the_published_ones(inputs, raw, targets):
    assert text_length(inputs, 1, CONFIG) == raw
    noise, spans = noise_counts(np.array([raw]), CONFIG)
    assert raw - noise[0] + spans[0] + 1 == inputs
    assert noise[0] + spans[0] + 1 == targets


def test_text_length_is_the_longest_that_fits_both_sides():
    for density in (0.05, 0.15, 0.5, 0.8):
        config = SpanCorruptionConfig(density=density)
        for limit in range(8, 200, 7):
            raw = text_length(limit, 1, config)

            def longer(length, config=config):
                noise, spans = noise_counts(np.array([length]), config)
                return max(length - noise[0], noise[0]) + spans[0] + 1

            assert longer(raw) <= limit < longer(raw + 1)
    with pytest.raises(UserError, match="max_length=2"):
        text_length(2, 1, CONFIG)


def test_inputs_and_targets_restore_the_text():
    tokens, lengths = corpus()
    whole = corrupted(tokens, lengths)
    noise, spans = noise_counts(lengths, CONFIG)
    assert np.array_equal(whole.input_lengths, lengths - noise + spans)
    assert np.array_equal(whole.target_lengths, noise + spans)
    sides = (tokens, lengths), (whole.inputs, whole.input_lengths), (whole.targets, whole.target_lengths)
    for text, inputs, targets, count in zip(*(parts(*side) for side in sides), spans, strict=True):
        for side in (inputs, targets):
            assert side[np.isin(side, SENTINELS)].tolist() == SENTINELS[:count].tolist()
        assert not np.isin(inputs[0], SENTINELS), "inputs begin with text"
        assert targets[0] == SENTINELS[0] and np.isin(inputs[-1], SENTINELS)
        single = corrupted(text, np.array([len(text)]))
        assert np.array_equal(restore(single, SENTINELS), text)
    alone = corrupted(tokens[-lengths[-1] :], lengths[-1:], examples=np.array([len(lengths) - 1]))
    assert np.array_equal(alone.inputs, whole.inputs[-whole.input_lengths[-1] :])
    assert not np.array_equal(corrupted(tokens, lengths, epoch=1).noise, whole.noise)


def test_segmentations_are_equally_likely():
    """4 of 12 tokens are noise in 2 spans: 3 segmentations of the noise times 7 of the rest."""
    config, lengths = SpanCorruptionConfig(density=1 / 3, mean_length=2.0), np.full(6300, 12)
    drawn = corrupted(np.arange(lengths.sum()) % 30000, lengths, config=config)
    patterns, counts = np.unique(drawn.noise.reshape(-1, 12), axis=0, return_counts=True)
    assert len(patterns) == 21 and (patterns.sum(1) == 4).all() and not patterns[:, 0].any() and patterns[:, -1].all()
    assert stats.chisquare(counts).pvalue > 1e-3


def test_prefix_lengths_are_uniform_and_leave_targets():
    prefixes = prefix_lengths(np.full(9000, 10), np.arange(9000), 1, 0)
    counts = np.bincount(prefixes, minlength=11)
    assert counts[0] == counts[10] == 0
    assert stats.chisquare(counts[1:10]).pvalue > 1e-3
    assert prefix_lengths(np.array([2, 2]), np.arange(2), 1, 0).tolist() == [1, 1]
