"""Soft targets at every token (DistilBERT), beside a loop over the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmtool.config.registry import build
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.configs.terms import HardConfig, SoftConfig
from lmtool.distillation.recording import Teacher
from lmtool.learners.configs import MixtureConfig
from lmtool.learners.mixed_examples import combine
from lmtool.objectives.configs import MlmConfig
from lmtool.training.precision import FP32_CPU
from tests.objectives.objective_fixtures import backbone, rows_of, split, store, tokenizer


@pytest.fixture(scope="module")
def words():
    return tokenizer("wordpiece")


def learner(words, seed=0, config=None, **fields):
    return build(config or MlmConfig(), backbone("bert", seed=seed, dropout=0.0, **fields), words, 3)


def student_of(student, teacher, **terms):
    frozen = Teacher(teacher.requires_grad_(False).eval(), FP32_CPU, "runs/teacher")
    return build(StandardConfig(gold=1.0, every_token=True, terms=terms), student, [frozen])


def logits_at_every_token(learner, batch):
    return learner.masked_lm(learner.backbone(batch.inputs, None), learner.table_VW)


@pytest.mark.parametrize("pairs", ["none", "nsp"])
def test_soft_targets_cover_every_token(words, pairs):
    config = MlmConfig(pairs=pairs)
    student, teacher = learner(words, config=config), learner(words, 1, config, num_layers=3)
    batch = rows_of(student.examples(split(store(words), "separate"), 24), 12)
    alone = student(batch, 1).sums["mlm"].item()
    run = student_of(student, teacher, soft=SoftConfig(temperature=2.0))
    name = "soft" if pairs == "none" else "soft_mlm"
    sums, counts = run(batch, 1).sums, run.counts(batch)
    assert counts[name] == len(batch.inputs.tokens) > 3 * counts["mlm"]
    ours, theirs = (logits_at_every_token(model, batch) / 2.0 for model in (student, teacher))
    expected = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="sum") * 2.0**2
    assert sums[name].item() == pytest.approx(expected.item(), rel=1e-5)
    # The student's own loss and scores are of the masked tokens as before.
    assert sums["mlm"].item() == pytest.approx(alone, rel=1e-6)
    assert len(student.score(batch)["mlm"].losses) == counts["mlm"]
    gradient = torch.autograd.grad(sums[name], student.table_VW, retain_graph=True)[0]
    assert torch.allclose(gradient, torch.autograd.grad(expected, student.table_VW)[0], atol=1e-4)


def test_hard_labels_cover_every_token(words):
    student, teacher = learner(words), learner(words, 1)
    batch = rows_of(student.examples(split(store(words), "separate"), 24), 12)
    run = student_of(student, teacher, hard=HardConfig())
    labels = logits_at_every_token(teacher, batch).argmax(-1)
    expected = F.cross_entropy(logits_at_every_token(student, batch), labels, reduction="sum")
    assert run(batch, 1).sums["hard"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_member_of_mixture_is_compared_at_every_token(words):
    config = MixtureConfig(members=("mlm", "span"))
    student, teacher = learner(words, config=config), learner(words, 1, config)
    data = split(store(words), "separate")
    parts = [(name, rows_of(member.examples(data, 24), 6)) for name, member in student.named_members()]
    run = student_of(student, teacher, soft=SoftConfig())
    mixed, only_spans = combine(parts), combine(parts[1:])
    counts = run.counts(mixed)
    tokens = {name: len(batch.inputs.tokens) for name, batch in parts}
    assert counts["soft_mlm"] == tokens["mlm"] and counts["soft_span_mlm"] == tokens["span"]
    assert run.counts(only_spans)["soft_mlm"] == 0
    (name, batch), *_ = parts
    ours, theirs = (logits_at_every_token(model.members["mlm"], batch) / 2.0 for model in (student, teacher))
    expected = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="sum") * 4.0
    assert run(mixed, 1).sums["soft_mlm"].item() == pytest.approx(expected.item(), rel=1e-5)
