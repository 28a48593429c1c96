"""A mixture of objectives: weights, shared parameters, separate terms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lmtool.config.registry import build
from lmtool.data.loader import PackedLoader
from lmtool.learners.baseline import mean_losses
from lmtool.learners.configs import MixtureConfig
from lmtool.learners.evaluation import evaluate
from lmtool.objectives.configs import DenoisingConfig, MlmConfig
from tests.objectives.objective_fixtures import backbone, gradients, rows_of, split, store, tokenizer

CASES = {
    "encoder": ("bert", "wordpiece", ("mlm", {"name": "span", "pairs": "sop"}), (0.75, 0.25)),
    "with a generator": ("bert", "wordpiece", ("rtd", "mlm"), None),
    "decoder": ("gpt", "bytebpe", ("clm", "prefix_lm"), (2, 1)),
    "encoder-decoder": ("t5", "t5", ("span_corruption", "prefix_lm", "denoising"), None),
}


def built(case):
    family, kind, members, weights = CASES[case]
    tokens = tokenizer(kind)
    config = MixtureConfig(members=members, weights=weights)
    learner = build(config, backbone(family), tokens, 3)
    data = store(tokens)
    return learner, learner.examples(split(data, "joined", "train"), 32), data


@pytest.mark.parametrize("case", CASES)
def test_losses_of_micro_batches_add_up(case):
    learner, examples, _ = built(case)
    learner.train()
    plan = examples.plan(0)
    numbers = np.linspace(0, len(plan) - 1, 12).astype(int)
    whole = examples.batch(plan.rows[numbers], numbers, 0)
    assert len(whole.members) == len(learner.config.members)
    losses, grads = gradients(learner, [whole])
    assert set(losses) == set(learner.loss_weights) == set(whole.targets)
    assert set(grads) == {name for name, _ in learner.named_parameters()}
    parts, part_gradients = gradients(
        learner, [examples.batch(plan.rows[some], some, 0) for some in np.array_split(numbers, 5)]
    )
    assert parts == pytest.approx(losses, rel=1e-5)
    for name, gradient in grads.items():
        torch.testing.assert_close(part_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert whole.tokens == plan.lengths[numbers].sum() or case == "encoder-decoder"
    assert whole.to(torch.device("cpu")).tokens == whole.tokens


@pytest.mark.parametrize("case", CASES)
def test_evaluation_scores_terms_separately(case):
    learner, examples, data = built(case)
    loader = PackedLoader(examples, seed=1, batch_tokens=300, shuffle=False)
    predictors = learner.predictors(split(data), examples)
    scorer = learner.scorer(split(data), examples, predictors)
    scorer.calibrates = scorer.selects = True
    evaluation = evaluate(learner, scorer, loader.epoch_batches(0))
    assert all(own.calibrates and own.selects for own in scorer.members.values())
    assert set(evaluation.terms) == set(learner.loss_weights)
    assert np.isfinite(list(evaluation.metrics().values())).all()
    assert np.isfinite(list(mean_losses(predictors, loader.epoch_batches(0)).values())).all()
    assert sum(len(term.sums_E) > 0 for term in evaluation.terms.values()) == len(learner.loss_weights)
    assert len(learner.samples(rows_of(examples, 4), 2)) == 2
    assert loader.metadata()["examples"] == len(examples.plan(0))
    assert not learner.inspector(examples, 32).measure(3000).broken()


def test_terms_heads_and_example_counts_of_members():
    learner, examples, _ = built("encoder")
    assert learner.loss_weights == {"mlm": 0.75, "span_mlm": 0.25, "span_sbo": 0.25, "span_sop": 0.25}
    assert set(learner.heads) == {"masked_lm", "span_boundary", "pooler", "sentence_order"}
    assert {name.split(".")[0] for name in learner.state_dict()} == {"backbone", "heads"}
    rows = examples.plan(0).rows
    counts = np.bincount(rows["member"])
    assert counts[0] == pytest.approx(3 * counts[1], abs=3)
    sizes = [len(member.plan(0)) for member in examples.members.values()]
    assert any(count >= size - 1 for count, size in zip(counts, sizes, strict=True)), "as long as nothing repeats"
    for member in range(2):
        taken = rows["row"][rows["member"] == member]
        assert len(set(taken)) == len(taken) and taken.max() < sizes[member]
    assert not np.array_equal(rows, examples.plan(1).rows[: len(rows)])
    assert np.array_equal(rows, built("encoder")[1].plan(0).rows)
    learner.eval()
    assert not any(member.training for member in learner.members.values())
    assert {name.split(".")[0] for name in built("with a generator")[0].state_dict()} == {
        "backbone",
        "heads",
        "objective",
    }


def test_invalid_members_and_weights_are_refused():
    for fields, message in (
        ({"members": ("mlm", "mlm")}, "each objective once"),
        ({"members": ("mlm", "nothing")}, "nothing is not one of .*clm, "),
        ({"members": ({"name": "mlm", "probability": 2},)}, "probability"),
        ({"members": ("mlm", "span"), "weights": (1.0,)}, "must have one number above 0 for each member: mlm, span"),
    ):
        with pytest.raises(ValidationError, match=message):
            MixtureConfig(**fields)
    assert [part.name for part in MixtureConfig(members=({"name": "mlm", "pairs": "nsp"}, "rtd")).member_configs()] == [
        "mlm",
        "rtd",
    ]
    assert MixtureConfig(members=("denoising", "mlm"), weights=(3, 1)).predicted_fraction == pytest.approx(
        0.75 * DenoisingConfig().predicted_fraction + 0.25 * MlmConfig().predicted_fraction
    )
