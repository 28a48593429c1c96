"""Fidelity and interchange accuracy: agreement of student and teacher on held-out text."""

from __future__ import annotations

import pytest
import torch

from lmtool.distillation.interchange import REGIONS, Site, _text_indices, agreement
from lmtool.distillation.recording import Teacher
from lmtool.models.heads.predicted import Values
from lmtool.training.precision import FP32_CPU
from lmtool.types import Batch, Packed, Target
from tests.distillation.test_interchange_term import OBJECTIVES, batch_of, learner, tokens  # noqa: F401


def measured(student, teacher, sites, batches):
    return agreement(student, Teacher(teacher.eval(), FP32_CPU, "runs/teacher"), sites, batches, FP32_CPU)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_identical_models_agree_fully_and_different_ones_less(objective, tokens):  # noqa: F811
    student, other = learner(objective, tokens), learner(objective, tokens, seed=1)
    batches = [batch_of(student, tokens), batch_of(student, tokens, 5)]
    sides = ("inputs", "outputs") if batches[0].outputs is not None else ("inputs",)
    sites = [Site(side, layer, layer) for side in sides for layer in (0, 1)]
    targets = sum(len(target.labels) for batch in batches for target in batch.targets.values())
    same = measured(student, learner(objective, tokens), sites, batches)
    accuracy = same["interchange_accuracy"]
    assert same["fidelity"] == {"value": 1.0, "n": targets} and accuracy["value"] == 1.0
    assert accuracy["n"] == sum(cell["n"] for cell in accuracy["cells"]) == targets * len(sites)
    assert len(accuracy["cells"]) == len(sites) * REGIONS and accuracy["texts"] == 17
    assert accuracy["changed"]["n"] > 0 and accuracy["changed"]["value"] == 1.0
    apart = measured(student, other, sites, batches)
    assert apart["fidelity"]["value"] < 1.0 and apart["interchange_accuracy"]["value"] < 1.0
    assert measured(student, other, sites, batches) == apart


def test_unmeasurable_agreement_has_a_reason(tokens):  # noqa: F811
    student = learner("clm", tokens)
    student.interpret_logits = lambda head, logits, batch: ("clm", Values(torch.zeros(3)))
    said = measured(student, learner("clm", tokens), [], [batch_of(student, tokens)])
    assert said["fidelity"] is None and "do not predict classes" in said["fidelity_reason"]
    student = learner("clm", tokens)
    said = measured(student, learner("clm", tokens), [], [batch_of(student, tokens)])
    assert said["fidelity"]["value"] == 1.0 and "no layers" in said["interchange_accuracy_reason"]


def test_single_text_has_fidelity_but_no_interchange_accuracy(tokens):  # noqa: F811
    student = learner("clm", tokens)
    said = measured(student, learner("clm", tokens), [Site("inputs", 1, 1)], [batch_of(student, tokens, 1)])
    assert said["fidelity"]["value"] == 1.0
    assert (
        said["interchange_accuracy"] is None and "no batch contained two texts" in said["interchange_accuracy_reason"]
    )


def test_text_indices_of_targets():
    packed = Packed(torch.zeros(9, dtype=torch.int64), (4, 5))
    batch = Batch(packed, {}, torch.arange(2), torch.zeros(2, dtype=torch.int32))
    labels = torch.zeros(3, dtype=torch.int64)
    assert _text_indices(Target(labels, at=torch.tensor([0, 4, 8])), batch, 3).tolist() == [0, 1, 1]
    assert _text_indices(Target(labels, span=torch.tensor([[1, 2], [3, 3], [5, 8]])), batch, 3).tolist() == [0, 0, 1]
    assert _text_indices(Target(None), batch, 2).tolist() == [0, 1]
    assert _text_indices(Target(None), batch, 6).tolist() == [0, 0, 0, 1, 1, 1]
    assert _text_indices(Target(None), batch, 1).tolist() == [0]
    assert _text_indices(Target(None), batch, 3) is None
