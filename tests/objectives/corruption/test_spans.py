"""Span masking against its definition. The intervals of a test have a joint confidence of 99.9%."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_masking import CLS, ENTRIES, MASK, SEP, SPECIAL, STARTS, VOCABULARY, corpus, holds

from lmtool.models.heads.sequence import SpanBoundaryHead
from lmtool.objectives.configs import SpanConfig
from lmtool.objectives.corruption.masking import PackedTexts, length_probabilities, mask_spans


def masked(tokens, sizes, /, seed=11, epoch=0, examples=None, **fields):
    examples = np.arange(len(sizes)) if examples is None else examples
    return mask_spans(SpanConfig(**fields), VOCABULARY, PackedTexts(tokens, sizes, examples, seed, epoch))


def test_truncated_length_distributions_are_normalized():
    fractions = length_probabilities(SpanConfig())
    assert fractions.sum() == pytest.approx(1) and len(fractions) == 10
    assert fractions @ np.arange(1, 11) == pytest.approx(3.797, abs=5e-4)
    assert fractions[0] == pytest.approx(0.224, abs=5e-4) and fractions[9] == pytest.approx(0.030, abs=5e-4)
    assert length_probabilities(SpanConfig(lengths="harmonic", longest=3)) == pytest.approx([6 / 11, 3 / 11, 2 / 11])


@pytest.mark.parametrize("fields", [{}, {"lengths": "harmonic", "longest": 3}])
def test_sampled_lengths_follow_their_distribution(fields):
    tokens, lengths = corpus(longest=160)
    drawn = masked(tokens, lengths, **fields).sampled_lengths
    fractions = length_probabilities(SpanConfig(**fields))
    counts = np.bincount(drawn, minlength=len(fractions) + 1)
    assert counts[0] == 0 and len(counts) == len(fractions) + 1
    for count, share in zip(counts[1:], fractions, strict=True):
        assert holds(count, len(drawn), share, intervals=len(fractions))


def test_every_example_masks_the_budget_and_nothing_else():
    tokens, lengths = corpus()
    result = masked(tokens, lengths)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(documents[result.at], minlength=len(lengths))
    assert counts.tolist() == np.ceil(0.15 * (lengths - 2) - 1e-9).tolist()
    assert np.array_equal(result.labels, tokens[result.at]) and not SPECIAL[result.labels].any()
    assert np.isin(np.flatnonzero(result.tokens != tokens), result.at).all()


def test_spans_are_whole_words_except_where_the_budget_ends():
    tokens, lengths = corpus(examples=600)
    result = masked(tokens, lengths)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    text = ~SPECIAL[tokens]
    opens = text & (STARTS[tokens] | ~np.r_[False, text[:-1]])
    first, last = result.spans.T
    assert opens[first].all()
    ends_word = opens[last + 1] | ~text[last + 1]
    cut = np.bincount(documents[first[~ends_word]], minlength=len(lengths))
    assert cut.max() == 1, "the budget cuts at most one span of an example"
    assert np.array_equal(documents[first], documents[last])
    # Adjacent spans are merged.
    assert (first[1:] > last[:-1] + 1).all()
    inside = np.concatenate([np.arange(start, end + 1) for start, end in result.spans])
    assert np.array_equal(inside, result.at)
    assert np.array_equal(result.span_of, np.repeat(np.arange(len(first)), last - first + 1))


def test_replacement_is_decided_per_span():
    tokens, lengths = corpus(examples=2500)
    result = masked(tokens, lengths)
    hidden = result.tokens[result.at] == MASK
    spans = len(result.spans)
    share = np.bincount(result.span_of, hidden, spans) / np.bincount(result.span_of, minlength=spans)
    assert np.isin(share, [0.0, 1.0]).all()
    assert holds(share.sum(), spans, 0.8, intervals=2)
    same = np.bincount(result.span_of, result.tokens[result.at] != result.labels, spans) == 0
    # A span of n random tokens looks unchanged with probability 1/(V-5)^n.
    assert holds(same.sum(), spans, 0.1 + 0.1 * 0.5 / (ENTRIES - 5), intervals=2)
    each = masked(tokens, lengths, replace="token")
    assert holds((each.tokens[each.at] == MASK).sum(), len(each.at), 0.8, intervals=1)


def test_spans_depend_on_the_epoch_and_not_on_the_batch():
    tokens, lengths = corpus(examples=60)
    together = masked(tokens, lengths)
    starts = np.cumsum(lengths) - lengths
    for example in (0, 17, 59):
        part = slice(starts[example], starts[example] + lengths[example])
        alone = masked(tokens[part], lengths[[example]], examples=np.array([example]))
        assert np.array_equal(alone.tokens, together.tokens[part])
    assert not np.array_equal(masked(tokens, lengths, epoch=1).at, together.at)
    static = {"masking": "static", "duplicates": 2}
    assert np.array_equal(masked(tokens, lengths, epoch=2, **static).at, masked(tokens, lengths, **static).at)


def test_bordered_spans_have_text_on_both_sides():
    tokens = np.array([CLS, 10, 11, 13, SEP, 14, 16, 17, SEP])
    seen = set()
    for epoch in range(60):
        result = masked(tokens, np.array([9]), epoch=epoch, longest=1)
        for (first, last), bordered in zip(result.spans, result.bordered, strict=True):
            assert bordered == (not SPECIAL[tokens[first - 1]] and not SPECIAL[tokens[last + 1]])
            assert not SPECIAL[tokens[first : last + 1]].any()
            seen.add(bool(bordered))
    assert seen == {True, False}


def test_text_without_regular_tokens_is_unchanged():
    result = masked(np.array([CLS, SEP]), np.array([2]))
    assert len(result.at) == len(result.spans) == len(result.span_of) == 0
    assert result.tokens.tolist() == [CLS, SEP]


def test_boundary_head_reads_both_neighbors_and_the_position():
    torch.manual_seed(0)
    head = SpanBoundaryHead(8, 30, 4, 5)
    hidden = torch.randn(9, 8, requires_grad=True)
    table = torch.randn(30, 8)
    features = head.features(hidden[torch.tensor([[2, 6]])], torch.tensor([1]))
    logits = head(features, table)
    logits.square().sum().backward()
    touched = hidden.grad.abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [2, 6]
    other = head(head.features(hidden[torch.tensor([[2, 6]])], torch.tensor([2])), table)
    assert not torch.allclose(logits, other)
    # y = norm(gelu(W2 norm(gelu(W1 [left; right; place]))))
    joined = torch.cat([hidden[2], hidden[6], head.position.weight[1]])
    gelu = torch.nn.functional.gelu
    plain = head.norm2(gelu(head.dense2(head.norm1(gelu(head.dense1(joined))))))
    torch.testing.assert_close(logits[0], table @ plain + head.bias)
