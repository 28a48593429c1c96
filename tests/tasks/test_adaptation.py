"""Domain adaptation with unlabeled texts: gradient reversal (dann) and covariance matching (coral)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from task_fixtures import TEXTS, backbone, evaluation, singles, table, task_config, tokenizer

from lmtool.config.registry import Choice, build
from lmtool.data.loader import PackedLoader
from lmtool.errors import UserError
from lmtool.models.encoder_decoder_configs import T5Config
from lmtool.tasks.kinds.sequence import PairedExamples
from lmtool.tasks.loading import load_task, target_rows

WORDS = tokenizer()
LOSSES = {"dann": {"steps": 10, "hidden_size": 7}, "coral": {}}


def load_data_and_learner(folder, name, kind="classification", labels=("good", "bad"), **fields):
    """A task with unlabeled texts of another domain, and its learner."""
    table(folder / "own.tsv", ["text", "label"], singles(20, list(labels)))
    table(folder / "other.tsv", ["text"], [(text,) for text in TEXTS[:6]])
    domain = {"name": name, "target": str(folder / "other.tsv"), **LOSSES[name], **fields}
    config = task_config(kind, path=folder / "own.tsv", domain=domain)
    data = load_task(config, 0, folder, True)
    data = replace(data, unlabeled=target_rows(config, folder, True))
    return data, data.config.learner(backbone(dropout=0.0), WORDS, 0)


def first_batch(data, learner, count=8):
    examples = learner.examples(data.splits()["train"], 32)
    plan = examples.plan(0)
    return examples, examples.batch(plan.rows[:count], np.arange(count), 0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("kind", "labels"), [("classification", ("good", "bad")), ("regression", (0.5, 2.0)), ("multi_label", ("a", "a,b"))]
)
def test_domain_loss_leaves_task_loss_unchanged(tmp_path, name, kind, labels) -> None:
    """The domain loss adds a term with gradients for its head and the backbone, but not for the task's head."""
    data, learner = load_data_and_learner(tmp_path, name, kind, labels)
    examples, batch = first_batch(data, learner)
    learner.eval()
    sums = learner(batch, 5).sums
    term = f"{kind}_domain"
    assert set(sums) == {kind, term} == set(learner.loss_weights)
    source = dict(batch.members)[kind]
    assert sums[kind].item() == pytest.approx(learner(source, 5).sums[kind].item(), rel=1e-6)
    counts = learner.counts(batch)
    assert counts[term] == (16.0 if name == "dann" else 1.0)
    sums[term].backward()
    learned = {part for part, tensor in learner.named_parameters() if tensor.grad is not None and tensor.grad.any()}
    assert any(part.startswith("backbone.layers") for part in learned) and f"heads.{kind}.output.weight" not in learned
    assert any(part.startswith(f"heads.{term}.") for part in learned) == (name == "dann")
    held_out = learner.examples(data.splits()["dev"], 32)
    assert not isinstance(held_out, PairedExamples)
    scored = evaluation(learner, data.validation["dev"])
    assert set(scored.terms) == {kind}


def test_dann_reverses_gradient(tmp_path) -> None:
    data, learner = load_data_and_learner(tmp_path, "dann")
    _, batch = first_batch(data, learner)
    learner.eval()
    method = learner.adaptation
    assert method.strength(0) == 0.0 and method.strength(10) == method.strength(99) == pytest.approx(0.99990920)
    assert method.strength(5) == pytest.approx(2 / (1 + math.exp(-5)) - 1)
    features = torch.randn(6, 32, requires_grad=True)
    head = learner.heads["classification_domain"]
    method.loss(features[:3], features[3:], head, 5).backward()
    reversed_by = features.grad.clone()
    again = features.detach().requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    torch.nn.functional.cross_entropy(head(again), labels, reduction="sum").backward()
    torch.testing.assert_close(reversed_by, -method.strength(5) * again.grad)
    learner(batch, 0).sums["classification_domain"].backward()
    assert not any(tensor.grad is not None and tensor.grad.any() for tensor in learner.backbone.parameters())


def test_coral_loss_matches_covariances() -> None:
    method = build(Choice("task/domain").validate({"name": "coral", "target": "x"}))
    source, target = torch.randn(9, 4), torch.randn(5, 4)
    gap = np.cov(source.numpy(), rowvar=False) - np.cov(target.numpy(), rowvar=False)
    assert float(method.loss(source, target, None, 1)) == pytest.approx((gap**2).sum() / (4 * 16), rel=1e-5)
    assert float(method.loss(source, source, None, 1)) == 0.0
    assert math.isfinite(float(method.loss(source[:1], target[:1], None, 1)))


def test_source_and_target_texts_are_paired(tmp_path) -> None:
    data, learner = load_data_and_learner(tmp_path, "coral")
    examples, batch = first_batch(data, learner)
    plan, own = examples.plan(0), len(data.train)
    assert len(plan) == own and examples.metadata()["target_examples"] == 6
    times = np.bincount(plan.rows["target"], minlength=6)
    assert times.min() == own // 6 and times.max() <= own // 6 + 1
    assert not np.array_equal(plan.rows["target"], examples.plan(1).rows["target"])
    assert np.array_equal(plan.rows, first_batch(data, learner)[0].plan(0).rows)
    assert batch.tokens == plan.lengths[:8].sum()
    source, target = (part for _, part in batch.members)
    assert not set(source.examples.tolist()) & set(target.examples.tolist()) and not target.targets
    steps = list(PackedLoader(examples, 0, batch_examples=4).epoch_batches())
    assert sum(len(part.members[0][1].inputs.lengths) for part in steps) == own
    assert learner.inspector(examples, 32).measure(200).broken() == []


def test_invalid_target_files_are_refused(tmp_path) -> None:
    config = task_config("classification", path=tmp_path, domain={"name": "dann", "target": "gone.tsv"})
    with pytest.raises(UserError, match="task.domain.target=gone.tsv does not exist"):
        target_rows(config, tmp_path, True)
    table(tmp_path / "wrong.tsv", ["body"], [("a",), ("b",)])
    wrong = task_config("classification", path="x", domain={"name": "dann", "target": str(tmp_path / "wrong.tsv")})
    with pytest.raises(UserError, match="no column text to read"):
        target_rows(wrong, tmp_path, True)
    written = task_config("classification", head="text_to_text", domain={"name": "coral", "target": "x"})
    assert "task.domain=coral" in written.first_conflict(T5Config()).message
