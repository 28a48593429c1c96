"""Mixtures of text sources: fractions, batches, predictors and scores, for every objective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lmtool.config.registry import Choice, build
from lmtool.data.examples import SplitData
from lmtool.data.loader import PackedLoader
from lmtool.learners import configs as learner_configs  # noqa: F401  enters the mixture into its table
from lmtool.learners.evaluation import TermScorer, evaluate
from lmtool.learners.mixed_sources import MixedSources, concatenate, examples_of, predictors_of, scorer_of
from lmtool.objectives import configs as objective_configs  # noqa: F401  enters the others
from tests.objectives.objective_fixtures import backbone, gradients, sentences, store, tokenizer

CASES = {
    "mlm": ("bert", "wordpiece", {"name": "mlm"}),
    "mlm nsp": ("bert", "wordpiece", {"name": "mlm", "pairs": "nsp"}),
    "span": ("bert", "wordpiece", {"name": "span"}),
    "rtd": ("bert", "wordpiece", {"name": "rtd"}),
    "clm": ("gpt", "bytebpe", {"name": "clm"}),
    "prefix_lm": ("gpt", "bytebpe", {"name": "prefix_lm"}),
    "prefix_lm t5": ("t5", "t5", {"name": "prefix_lm"}),
    "span_corruption": ("t5", "t5", {"name": "span_corruption"}),
    "denoising": ("t5", "t5", {"name": "denoising"}),
    "mixture": ("bert", "wordpiece", {"name": "mixture", "members": ["mlm", {"name": "span", "pairs": "sop"}]}),
}
FEW = ("mlm nsp", "clm", "span_corruption", "mixture")
WIDE = [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def built(case, fractions=(0.75, 0.25), split="train"):
    family, kind, section = CASES[case]
    tokens = tokenizer(kind)
    learner = build(Choice("objective").validate(section), backbone(family), tokens, 3)
    stores = {"books": store(tokens, sentences(40)), "web": store(tokens, sentences(12, 5))}
    for own in stores.values():
        own.metadata.update({"tokens": len(own.tokens), "words": 50, "bytes": 200, "documents": 9, "characters": 200})
        own.metadata["unknown_fraction"] = 0.0
    members = {title: SplitData(split, own) for title, own in stores.items()}
    data = SplitData(split, members=members, fractions=fractions)
    return learner, data, examples_of(learner, data, 32)


def sources_of(examples):
    """The mixtures of text sources: a single one, or one per objective."""
    return [examples] if isinstance(examples, MixedSources) else list(examples.members.values())


@pytest.mark.parametrize("case", WIDE)
def test_mixed_batch_equals_the_sum_of_the_parts(case):
    """A mixed batch has the losses and gradients of its parts, and a separate random stream for each example."""
    learner, data, examples = built(case)
    learner.train()
    plan = examples.plan(0)
    numbers = np.linspace(0, len(plan) - 1, 12).astype(int)
    whole = examples.batch(plan.rows[numbers], numbers, 0)
    assert len(set(zip(whole.examples.tolist(), whole.parts.tolist(), strict=True))) == len(whole.examples)
    for own in sources_of(examples):
        titles = {own.members_of(batch)[0] for batch in parts_of(whole, own)}
        assert titles <= {0, 1}
    losses, grads = gradients(learner, [whole])
    parts, part_gradients = gradients(
        learner, [examples.batch(plan.rows[some], some, 0) for some in np.array_split(numbers, 5)]
    )
    assert parts == pytest.approx(losses, rel=1e-5)
    for name, gradient in grads.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def parts_of(batch, examples):
    members = getattr(batch, "members", None)
    return [batch] if members is None else [own for _, own in members]


@pytest.mark.parametrize("case", WIDE)
def test_sources_are_scored_together_and_separately(case):
    learner, data, examples = built(case, split="validation")
    train = replace(data, split="train")
    predictors = predictors_of(learner, train, examples_of(learner, train, 32))
    loader = PackedLoader(examples, seed=1, batch_tokens=300, shuffle=False)
    together = evaluate(learner, scorer_of(learner, data, examples, predictors), loader.epoch_batches())
    if case == "mixture":
        assert {f"{name}_{text}_loss" for name in ("mlm", "span") for text in data.members} <= together.scores.keys()
        return
    own = {}
    for title, part in examples.members.items():
        wanted = PackedLoader(examples, seed=1, batch_tokens=300, shuffle=False)
        scorer = TermScorer(learner, predictors)
        number = list(examples.members).index(title)
        batches = (batch for batch in wanted.epoch_batches())
        scored = OneSource(scorer, examples, number)
        own[title] = evaluate(learner, scored, batches)
        assert len(part.plan(0)) == sum(rows["member"] == number for rows in examples.plan(0).rows)
    for title, evaluation in own.items():
        assert together.scores[f"{title}_loss"] == pytest.approx(evaluation.loss, rel=1e-5)
    for term, whole in together.terms.items():
        sums = [evaluation.terms[term] for evaluation in own.values()]
        assert whole.count == sum(part.count for part in sums)
        if whole.baseline is not None and case != "rtd":
            assert whole.loss == pytest.approx(sum(p.loss * p.count for p in sums) / whole.count, rel=1e-5)
    assert together.metrics()["loss"] == together.loss


class OneSource:
    """Scores the targets of one source only, selected by document numbers, independently of the scorer."""

    def __init__(self, scorer, examples, number):
        self.scorer, self.examples, self.number = scorer, examples, number

    def outputs(self, batch):
        return self.scorer.outputs(batch)

    def take(self, batch, outputs):
        for name, scores in outputs.items():
            own = torch.from_numpy(self.examples.members_of(batch))[scores.documents] == self.number
            kept = replace(
                scores, losses=scores.losses[own], labels=scores.labels[own], predictions=scores.predictions[own],
                documents=scores.documents[own],
            )  # fmt: skip
            self.scorer.add_term(name, batch, kept)

    def result(self):
        return self.scorer.result()


def test_fractions_are_met_and_repeats_are_sampled_anew():
    learner, data, examples = built("mlm", (0.2, 0.8))
    rows = examples.plan(0).rows
    sizes = [len(part.plan(0)) for part in examples.members.values()]
    counts = np.bincount(rows["member"])
    assert len(rows) == pytest.approx(sum(sizes), abs=1) and counts[1] / len(rows) == pytest.approx(0.8, abs=0.02)
    assert counts[1] > 2 * sizes[1] and rows["again"].max() >= 2
    same = np.flatnonzero((rows["member"] == 1) & (rows["row"] == rows["row"][-1]))
    drawn = [examples.batch(rows[[place]], np.array([place]), 0) for place in same]
    assert len({tuple(batch.inputs.tokens.tolist()) for batch in drawn}) > 1
    assert len({int(batch.examples[0]) for batch in drawn}) == len(drawn)
    _, _, whole = built("mlm", None)
    assert whole.member_counts(whole.plan(0).rows) == dict(zip(examples.members, sizes, strict=True))
    assert whole.fractions == pytest.approx(np.array(sizes) / sum(sizes))
    assert (examples.plan(1).rows["row"] != rows["row"]).any()
    assert np.array_equal(built("mlm", (0.2, 0.8))[2].plan(1).rows, examples.plan(1).rows)


def test_unigram_predictor_weights_sources_by_fraction():
    learner, data, examples = built("clm", (0.25, 0.75))
    mixed = predictors_of(learner, data, examples)["clm"]
    own = [learner.predictors(data.members[title], part)["clm"] for title, part in examples.members.items()]
    expected = 0.25 * np.exp(-own[0].losses_C) + 0.75 * np.exp(-own[1].losses_C)
    np.testing.assert_allclose(np.exp(-mixed.losses_C), expected)
    assert np.exp(-mixed.losses_C).sum() == pytest.approx(1)


def test_concatenating_a_single_batch_returns_the_batch():
    _, _, examples = built("clm")
    batch = examples.batch(examples.plan(0).rows[:1], np.arange(1), 0)
    assert concatenate([batch]) is batch
