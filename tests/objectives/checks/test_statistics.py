"""Measured statistics of every objective: joint confidence intervals hold, and deviations are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.config.registry import build
from lmtool.learners.inspection import RunningStatistics
from lmtool.objectives.configs import (
    ClmConfig,
    DenoisingConfig,
    MlmConfig,
    MntpConfig,
    PlmConfig,
    PrefixLmConfig,
    RtdConfig,
    SpanConfig,
    SpanCorruptionConfig,
)
from tests.objectives.objective_fixtures import backbone, split, store, tokenizer

CASES = {
    "mlm": ("bert", "wordpiece", MlmConfig()),
    "bernoulli": ("bert", "wordpiece", MlmConfig(select="bernoulli", masking="static")),
    "whole words": ("bert", "wordpiece", MlmConfig(whole_word=True)),
    "short windows": ("bert", "wordpiece", MlmConfig(short_window_probability=0.3)),
    "nsp": ("bert", "wordpiece", MlmConfig(pairs="nsp")),
    "sop": ("bert", "wordpiece", MlmConfig(pairs="sop")),
    "span": ("bert", "wordpiece", SpanConfig()),
    "ngram": ("bert", "wordpiece", SpanConfig(lengths="harmonic", longest=3, replace="token", pairs="sop")),
    "plm": ("xlnet", "wordpiece", PlmConfig()),
    "plm reuse": ("xlnet", "wordpiece", PlmConfig(reuse=13)),
    "plm pairs": ("xlnet", "wordpiece", PlmConfig(pairs="unscored")),
    "rtd": ("bert", "wordpiece", RtdConfig(short_window_probability=0.5)),
    "clm": ("gpt", "bytebpe", ClmConfig()),
    "mntp": ("gpt", "roberta", MntpConfig()),
    "hybrid": ("gpt", "roberta", MntpConfig(causal=0.5, select="bernoulli")),
    "hybrid whole words": ("gpt", "roberta", MntpConfig(causal=0.25, whole_word=True)),
    "hybrid spans": ("gpt", "roberta", MntpConfig(causal=0.5, longest_span=3, z_loss=1e-4)),
    "independent spans": ("gpt", "roberta", MntpConfig(longest_span=4, select="bernoulli")),
    "prefix": ("gpt", "bytebpe", PrefixLmConfig()),
    "prefix encoder-decoder": ("t5", "t5", PrefixLmConfig()),
    "span corruption": ("t5", "t5", SpanCorruptionConfig()),
    "denoising": (
        "bart", "roberta",
        DenoisingConfig(token_masking=0.1, token_deletion=0.1, document_rotation=0.5),
    ),
}  # fmt: skip


def inspector_of(family, kind, config, documents="joined", **fields):
    tokens = tokenizer(kind)
    learner = build(config, backbone(family, **fields), tokens, 3)
    return learner.inspector(learner.examples(split(store(tokens), documents), 32), 32)


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("case", CASES)
def test_statistics_of_every_objective_match_the_definition(case, documents):
    stats = inspector_of(*CASES[case], documents).measure(12000)
    assert not stats.broken()
    assert sum(statistic.expected is not None for statistic in stats.statistics.values()) >= 4
    assert all(
        statistic.count > (20 if "first" in statistic.name else 100)
        for statistic in stats.statistics.values()
        if statistic.expected is not None and not statistic.exact
    )


def test_permuted_pairs_have_a_main_finding():
    inspector = inspector_of("xlnet", "wordpiece", PlmConfig(pairs="unscored"))
    assert "of the pairs is a random one" in inspector.main_finding(inspector.measure(500))


def test_plm_inspection_shows_streams_and_measures_lanes():
    inspector = inspector_of("xlnet", "wordpiece", PlmConfig(reuse=13), memory_length=20)
    (entry,) = inspector.describe(1)
    lines = entry["drawing"]
    titles = [title for title, _ in lines]
    pieces, asked = entry["input"]["pieces"], {place["position"] for place in entry["targets"]["plm"]}
    assert titles[:2] == ["memory", "order"] and lines[1][1].split() == [
        pieces[at] for at in sorted(asked, key=entry["input"]["rank"].__getitem__)
    ]
    content, query = titles.index("content stream"), titles.index("query stream")
    assert titles[content + 1 : query] == pieces and titles[query + 1 :] == [pieces[at] for at in sorted(asked)]
    seen = [text.split()[1] for _, text in lines[content + 1 : query]]
    assert all(row[at] == "x" for at, row in enumerate(seen)) and len({row[13:] for row in seen[:13]}) == 1
    assert all(text.split()[1][at] == "." for at, (_, text) in zip(sorted(asked), lines[query + 1 :], strict=True))
    laned = inspector.learner.inspector(inspector.examples.in_lanes(3), 32)
    assert not laned.measure(12000).broken()


@pytest.mark.parametrize(
    ("claimed", "done", "broken"),
    [
        (MlmConfig(mask=0.9, random=0.05), MlmConfig(), "predicted tokens replaced by [MASK]"),
        (MlmConfig(probability=0.3), MlmConfig(), "examples with a wrong number of predicted tokens"),
        (MlmConfig(select="bernoulli", probability=0.2), MlmConfig(), "predicted fraction of text"),
        (SpanConfig(geometric=0.35), SpanConfig(), "words of a span, as sampled"),
        (SpanConfig(), SpanConfig(replace="token"), "spans partly replaced by [MASK]"),
    ],
)
def test_deviation_from_the_config_is_found(claimed, done, broken):
    inspector = inspector_of("bert", "wordpiece", done)
    inspector.config = claimed
    assert broken in {statistic.name for statistic in inspector.measure(20000).broken()}


@pytest.mark.parametrize(
    ("claimed", "broken"),
    [
        (MntpConfig(causal=0.3), "texts read causally"),
        (MntpConfig(causal=0.5, probability=0.3), "examples with a wrong number of predicted tokens"),
        (MntpConfig(causal=0.5, mask=0.9, random=0.05), "predicted tokens replaced by [MASK]"),
    ],
)
def test_deviation_of_the_hybrid_is_found(claimed, broken):
    inspector = inspector_of("gpt", "roberta", MntpConfig(causal=0.5))
    inspector.config = claimed
    assert broken in {statistic.name for statistic in inspector.measure(20000).broken()}


@pytest.mark.parametrize(
    ("claimed", "broken"),
    [
        (MntpConfig(longest_span=3), "tokens of a span, as sampled"),
        (MntpConfig(longest_span=4, probability=0.3), "texts with a wrong number of predicted tokens"),
        (MntpConfig(longest_span=4, mask=0.9, random=0.05), "spans replaced by [MASK]"),
    ],
)
def test_deviation_of_spans_of_tokens_is_found(claimed, broken):
    inspector = inspector_of("gpt", "roberta", MntpConfig(longest_span=4))
    inspector.config = claimed
    assert broken in {statistic.name for statistic in inspector.measure(20000).broken()}


@pytest.mark.parametrize("config", [RtdConfig(), RtdConfig(variant="replace_mlm", generator_size=1.0)])
def test_generator_samples_are_measured_against_probabilities(config, monkeypatch):
    tokens = tokenizer("wordpiece")
    learner = build(config, backbone("bert"), tokens, 3).eval()
    # Large weights, so that the distribution is far from uniform.
    torch.nn.init.normal_(learner.backbone.embed.token.weight, std=1.0, generator=torch.Generator().manual_seed(0))
    inspector = learner.inspector(learner.examples(split(store(tokens), "joined", "train"), 32), 32)
    stats = inspector.measure(12000)
    assert not stats.broken()
    kept, surprise = (
        stats.statistics[name]
        for name in ("samples that are the original token", "negative log-probability of a sample, nats")
    )
    assert surprise.expected_value < np.log(tokens.vocab_size) - 0.3 and kept.count > 500

    def best(head, hidden, table, _, vocabulary):
        return head(hidden, table)[:, :vocabulary].argmax(-1)

    monkeypatch.setattr("lmtool.objectives.rtd.sample_tokens", best)
    assert "negative log-probability of a sample, nats" in {
        statistic.name for statistic in inspector.measure(12000).broken()
    }


def test_static_masks_are_measured_once_per_duplicate():
    inspector = inspector_of("bert", "wordpiece", MlmConfig(masking="static", duplicates=2))
    assert {sampled.epoch for sampled in inspector.sampled_batches(10**9)} == {0, 1}


def test_text_in_no_example_is_counted():
    """A window of one token has nothing to predict and is in no example."""
    tokens = tokenizer("t5")
    learner = build(SpanCorruptionConfig(), backbone("t5"), tokens, 3)
    size = learner.examples(split(store(tokens), "separate", "train"), 32).text_length
    ids = [[[7] * (size + 1)], [[7] * size], [[7] * (2 * size + 1)], [[7]]]
    data = store(Encoded(), ids)
    examples = learner.examples(split(data, "separate", "train"), 32)
    left = learner.inspector(examples, 32).measure(100).statistics["fraction of text in no example"]
    assert (left.total, left.expected, left.count) == (3, 3, 4 * size + 3)


class Encoded:
    """A tokenizer for texts that are lists of ids."""

    def encode(self, text):
        return text


def test_intervals_have_their_level_and_are_not_too_wide():
    draws = np.random.default_rng(0)
    missed = 0
    for _ in range(400):
        stats = RunningStatistics()
        for number, fraction in enumerate((0.8, 0.1, 0.03, 0.5)):
            stats.fraction(str(number), draws.binomial(2000, fraction), 2000, fraction)
        missed += bool(stats.broken())
    assert missed <= 3
    stats = RunningStatistics()
    stats.fraction("far", 2000 * 0.5 + 5.5 * np.sqrt(2000 / 4), 2000, 0.5)
    assert stats.broken(), "five and a half standard deviations are found"


def test_varying_probabilities_add_up():
    stats = RunningStatistics()
    stats.fraction("a", 3, 10, np.linspace(0.1, 0.4, 10))
    statistic = stats.statistics["a"]
    assert (statistic.expected, statistic.expected_value) == (pytest.approx(2.5), pytest.approx(0.25))
    assert statistic.measured == 0.3
    stats.never("b", 0)
    stats.report("c", 5, 10)
    assert stats.tested == 1 and not stats.broken()
    stats.never("b", 2)
    assert [statistic.name for statistic in stats.broken()] == ["b"]
