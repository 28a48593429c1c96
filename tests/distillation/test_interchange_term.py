"""The interchange term: its loss, and the forward passes that its gradient flows through."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.configs.terms import InterchangeConfig, SoftConfig
from lmtool.distillation.recording import RecordedStates, Teacher, record
from lmtool.nn.stack import TapPoint
from lmtool.objectives.configs import ClmConfig, DenoisingConfig, MlmConfig, SpanCorruptionConfig
from lmtool.training.precision import FP32_CPU
from tests.objectives.objective_fixtures import backbone, rows_of, split, store, tokenizer

OBJECTIVES = {
    "mlm": ("bert", MlmConfig()),
    "nsp": ("bert", MlmConfig(pairs="nsp")),
    "clm": ("gpt", ClmConfig()),
    "span_corruption": ("t5", SpanCorruptionConfig()),
    "denoising": ("bart", DenoisingConfig()),
}
KINDS = {"bert": "wordpiece", "gpt": "bytebpe", "t5": "t5", "bart": "roberta"}


@pytest.fixture(scope="module")
def tokens():
    return {family: tokenizer(kind) for family, kind in KINDS.items()}


def learner(objective, tokens, seed=0, **fields):
    family, config = OBJECTIVES[objective]
    return build(config, backbone(family, seed=seed, dropout=0.0, **fields), tokens[family], 3)


def batch_of(learner, tokens, count=12):
    family = next(family for family, known in tokens.items() if known is learner.tokenizer)
    return rows_of(learner.examples(split(store(tokens[family]), "separate"), 24), count)


def distilled(student, teacher, gold=0.0, **fields):
    frozen = Teacher(teacher.requires_grad_(False).eval(), FP32_CPU, "runs/teacher")
    terms = {"interchange": InterchangeConfig(**fields)}
    return StandardConfig(gold=gold, terms=terms), [frozen], student


def built(student, teacher, **fields):
    config, teachers, student = distilled(student, teacher, **fields)
    return build(config, student, teachers)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_is_zero_for_a_student_equal_to_the_teacher(objective, tokens):
    student = learner(objective, tokens)
    run = built(student, learner(objective, tokens), at="all")
    batch = batch_of(student, tokens)
    counts, output = run.counts(batch), run(batch, 1)
    assert set(output.sums) == set(output.loss_weights) - set(student.loss_weights)
    means = [total / counts[name] for name, total in output.sums.items()]
    assert all(mean.item() == pytest.approx(0.0, abs=1e-6) for mean in means)
    sum(means).backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    assert gradients and max(gradient.abs().max().item() for gradient in gradients) < 2e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_student_of_another_depth_has_positive_loss(objective, tokens):
    """The loss is positive and reproducible for any two depths; the teacher has no gradient."""
    student, teacher = learner(objective, tokens), learner(objective, tokens, seed=1, num_layers=3)
    run = built(student, teacher)
    batch = batch_of(student, tokens)
    first, again, later = run(batch, 1), run(batch, 1), run(batch, 2)
    for name, total in first.sums.items():
        assert total.item() > 1e-4 * run.counts(batch)[name] > 0
        assert torch.equal(again.sums[name], total)
        assert not torch.equal(later.sums[name], total)
    sum(first.sums.values()).backward()
    layers = [module for name, module in student.backbone.named_modules() if name.endswith(("layers.0", "layers.1"))]
    assert layers and all(any(parameter.grad is not None for parameter in layer.parameters()) for layer in layers)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_gradient_flows_through_source_and_base(tokens):
    student, teacher = learner("clm", tokens), learner("clm", tokens, seed=1)
    run = built(student, teacher, proportion=0.5)
    batch = batch_of(student, tokens, 2)
    term = run.distill["interchange"]
    kept = term.tap(teacher=False)
    seen = record(student, batch, 1, kept, losses=False)
    (states,) = kept.states[TapPoint(1)]
    states.retain_grad()
    (total,) = term.sums(seen, run.teacher.predict(batch, term.tap(teacher=True)), 1).values()
    total.backward()
    # Each text is both a base and a source.
    assert all(part.abs().max() > 0 for part in states.grad.split(list(batch.inputs.lengths)))


def test_fully_swapped_loss_is_near_the_soft_loss(tokens):
    """With all tokens swapped after the embedding, each model predicts for the base what it predicts for the source."""
    student, teacher = learner("clm", tokens, num_layers=1), learner("clm", tokens, seed=1)
    run = built(student, teacher, proportion=1.0, temperature=1.0)
    full = rows_of(student.examples(split(store(tokens["gpt"]), "joined"), 24), 8)
    assert len(set(full.inputs.lengths)) == 1
    intervened = run(full, 1).sums["interchange"]
    soft = StandardConfig(gold=0.0, terms={"soft": SoftConfig(temperature=1.0)})
    plain = build(soft, student, [run.teacher])(full, 1).sums["soft"]
    # The sources are a permutation of the batch except for repeats, so that the sums are about equal.
    assert intervened.item() == pytest.approx(plain.item(), rel=0.2) and intervened.item() != plain.item()


def test_single_text_has_count_zero(tokens):
    student = learner("mlm", tokens)
    run = built(student, learner("mlm", tokens, seed=1))
    batch = batch_of(student, tokens, 1)
    assert run.counts(batch)["interchange"] == 0.0 and not run(batch, 1).sums


def test_sites_of_two_depths():
    from lmtool.distillation.configs.base import LayerMap
    from lmtool.models.configs import BertConfig

    def sites(depth, pairs, at="middle"):
        return InterchangeConfig(at=at).sites(LayerMap({"inputs": pairs}), BertConfig(num_layers=depth))

    six = {1: 2, 2: 4, 3: 6, 4: 8, 5: 10, 6: 12}
    assert sites(6, six) == [("inputs", 3, 6)]  # as published
    assert sites(6, six, "all") == [("inputs", own, 2 * own) for own in range(1, 6)]
    assert sites(2, {1: 3, 2: 6}) == [("inputs", 1, 3)]
    assert sites(1, {1: 6}) == sites(1, {1: 6}, "all") == [("inputs", 0, 0)]
    with pytest.raises(ValueError, match="two increasing fractions of the width"):
        InterchangeConfig(dimensions=(0.5, 0.5))


def test_term_retains_no_states_and_has_no_parameters(tokens):
    run = built(learner("clm", tokens), learner("clm", tokens, seed=1))
    run(batch_of(run.student, tokens), 1)
    assert not run.distill["interchange"].recorded and not run.distill.state_dict()
    assert isinstance(run.distill["interchange"].tap(True), RecordedStates)
