"""GPT-BERT's spans of tokens against a plain simulation of their definition. The intervals of a test have a joint
confidence of 99.9%."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from test_masking import ENTRIES, MASK, SEP, SPECIAL, VOCABULARY, holds

from lmtool.objectives.configs import MntpConfig
from lmtool.objectives.corruption.masking import PackedTexts, mask_tiles, mask_tokens

LENGTH, TEXTS = 40, 8000


def texts(count=TEXTS, length=LENGTH, seed=0, epoch=0):
    tokens = np.random.default_rng(seed).integers(5, ENTRIES, count * length)
    return PackedTexts(tokens, np.full(count, length), np.arange(count), 11, epoch)


def is_masked(result, count=TEXTS, length=LENGTH):
    """(N, L) whether a token is predicted."""
    masks = np.zeros(count * length, dtype=bool)
    masks[result.at] = True
    return masks.reshape(count, length)


def simulated(draws, length=LENGTH, longest=3, probability=0.15):
    """One text, token by token: the spans, their random order, and the first of them that reach the budget."""
    spans, start = [], 0
    while start < length:
        end = min(start + int(draws.integers(1, longest + 1)), length)
        spans.append((start, end))
        start = end
    masks, budget = np.zeros(length, dtype=bool), max(1, round(length * probability))
    for number in draws.permutation(len(spans)):
        if masks.sum() >= budget:
            break
        masks[slice(*spans[number])] = True
    return masks


def properties(masks):
    """How often each of the defining properties holds, by name."""
    together = masks[:, :-1] & masks[:, 1:]
    counts = masks.sum(1)
    return {
        **{f"{count} tokens": counts == count for count in (6, 7, 8)},
        **{f"token {place}": masks[:, place] for place in (0, 1, 20, LENGTH - 1)},
        "two neighbours": together[:, 10],
        "three neighbours": (together[:, :-1] & together[:, 1:])[:, 20],
        "the first two": together[:, 0],
    }


def equal_frequencies(first, second):
    """The properties whose frequencies in two samples differ by more than their joint interval."""
    level = stats.norm.ppf(1 - 0.001 / len(first) / 2)
    different = []
    for name in first:
        a, b = first[name], second[name]
        pooled = (a.sum() + b.sum()) / (len(a) + len(b))
        error = np.sqrt(pooled * (1 - pooled) * (1 / len(a) + 1 / len(b)))
        if abs(a.mean() - b.mean()) > level * error:
            different.append(name)
    return different


def test_masks_have_the_distribution_of_a_plain_simulation():
    config, draws = MntpConfig(longest_span=3), np.random.default_rng(5)
    wanted = properties(np.stack([simulated(draws) for _ in range(TEXTS)]))
    assert not equal_frequencies(properties(is_masked(mask_tiles(config, VOCABULARY, texts()))), wanted)
    other = properties(is_masked(mask_tiles(MntpConfig(longest_span=2), VOCABULARY, texts())))
    assert "three neighbours" in equal_frequencies(other, wanted)
    single = properties(is_masked(mask_tokens(config, VOCABULARY, texts())))
    assert "two neighbours" in equal_frequencies(single, wanted)


def test_each_span_has_one_kind_of_replacement():
    source = texts()
    result = mask_tiles(MntpConfig(longest_span=3), VOCABULARY, source)
    first, last = result.spans.T
    sizes = last - first + 1
    assert np.array_equal(np.bincount(result.span_of), sizes) and sizes.max() == 3
    replaced = result.tokens[result.at]
    masked = np.bincount(result.span_of, replaced == MASK)
    assert set((masked / sizes).tolist()) == {0.0, 1.0}
    assert holds((masked > 0).sum(), len(sizes), 0.8, intervals=2)
    kept = np.bincount(result.span_of, replaced == result.labels) == sizes
    regular = ENTRIES - SPECIAL.sum()
    expected = 0.1 + 0.1 * (1.0 / regular) ** sizes.mean()
    assert holds(kept.sum(), len(sizes), expected, intervals=2)
    assert np.array_equal(result.labels, source.tokens[result.at])


@pytest.mark.parametrize("select", ["exact", "bernoulli"])
def test_special_tokens_end_spans_and_texts_do_not_depend_on_their_batch(select):
    config = MntpConfig(longest_span=3, select=select)
    source = texts(200)
    tokens = source.tokens.reshape(200, LENGTH).copy()
    tokens[:, 13] = SEP
    source = source.with_tokens(tokens.ravel(), source.lengths)
    result = mask_tiles(config, VOCABULARY, source)
    assert not SPECIAL[source.tokens[result.at]].any()
    first, last = result.spans.T
    assert not ((first % LENGTH < 13) & (last % LENGTH > 13)).any() and (first // LENGTH == last // LENGTH).all()
    for number in (0, 77, 199):
        alone = mask_tiles(
            config, VOCABULARY, PackedTexts(tokens[number], np.array([LENGTH]), np.array([number]), 11, 0)
        )
        assert np.array_equal(alone.tokens, result.tokens.reshape(200, LENGTH)[number])


def test_single_token_texts_are_masked():
    source = PackedTexts(np.array([7, 9, SEP]), np.array([1, 1, 1]), np.arange(3), 11, 0)
    result = mask_tiles(MntpConfig(longest_span=3), VOCABULARY, source)
    assert result.at.tolist() == [0, 1] and result.spans.tolist() == [[0, 0], [1, 1]]
