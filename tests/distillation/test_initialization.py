"""Initialization of a student from layers of its teacher (distill.initialize)."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import Several
from lmtool.distillation.configs.base import ModelPair, initial_layers
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.standard import start_from
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig
from lmtool.models.encoder_configs import DistilbertConfig
from tests.distillation.test_layer_terms import learner
from tests.models.test_read import FAMILIES


@pytest.mark.parametrize(
    ("initialize", "student_layers", "teacher_layers", "expected"),
    [
        ("alternate", 6, 12, (1, 3, 5, 8, 10, 12)),  # DistilBERT's 0, 2, 4, 7, 9, 11
        ("alternate", 1, 12, (1,)),
        ("alternate", 3, 2, (1, 2, 2)),
        ((2, 4), 2, 4, (2, 4)),
        ("none", 2, 4, None),
    ],
)
def test_initial_layers_of_each_rule(initialize, student_layers, teacher_layers, expected):
    student, teacher = DistilbertConfig(num_layers=student_layers), BertConfig(num_layers=teacher_layers)
    assert initial_layers(initialize, student, teacher).get("inputs") == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_copied_layers_equal_the_teacher_bitwise(family):
    student, teacher = learner(family), learner(family, seed=1, num_layers=3)
    layers = initial_layers("alternate", student.backbone.config, teacher.backbone.config)
    start_from(student, teacher, "runs/t", layers)
    teacher_tensors = teacher.state_dict()
    for name, tensor in student.state_dict().items():
        source = name if student.backbone.config.shares_layers else name.replace("layers.1.", "layers.2.")
        assert torch.equal(tensor, teacher_tensors[source]), name
    with torch.no_grad():
        next(student.backbone.parameters()).zero_()
    assert next(teacher.backbone.parameters()).any()  # student and teacher share no memory


def test_segment_embeddings_are_left_out_of_the_copy():
    student, teacher = learner("distilbert"), learner("bert", seed=1)
    summary = start_from(student, teacher, "runs/t", {"inputs": (2, 1)})
    assert summary == "embeddings; layers 1 = 2, 2 = 1"
    copied = teacher.state_dict()["backbone.layers.1.ffn.fc_in.weight"]
    assert torch.equal(student.backbone.layers[0].ffn.fc_in.weight, copied)
    other = learner("bert")
    initial = other.backbone.embed.segment.weight.clone()
    start_from(other, learner("distilbert", seed=1), "runs/t", {"inputs": (1, 2)})
    assert torch.equal(other.backbone.embed.segment.weight, initial)


def test_other_layer_kinds_and_tuned_teachers_are_refused():
    with pytest.raises(UserError, match="has a different kind of layer"):
        start_from(learner("gpt"), learner("gpt1"), "runs/t", {"inputs": (1, 2)})
    tuned = learner()
    tuned.added_names = frozenset(["backbone.layers.0.self_attn.q_proj.lora_a"])
    with pytest.raises(UserError, match="the parameters that a tuning method added"):
        start_from(learner(), tuned, "runs/t", {"inputs": (1, 2)})


@pytest.mark.parametrize(
    ("initialize", "sizes", "message"),
    [
        ("alternate", {"hidden_size": 192}, r"the student has model.hidden_size=192, its teacher 768"),
        ((1, 2), {"num_layers": 3}, r"distill.initialize=\[1, 2\]: name a layer .*, 1 to 12, .* student's 3 layers"),
        ((1, 13), {"num_layers": 2}, r"distill.initialize=\[1, 13\]: name a layer .*, 1 to 12, .* student's 2 layers"),
    ],
)
def test_size_mismatch_message_names_both_sizes(initialize, sizes, message):
    config = StandardConfig(teacher="t", initialize=initialize, terms=Several("distill/term").validate({"soft": {}}))
    problem = next(config.conflicts_of_pair(ModelPair(BertConfig(**sizes), BertConfig())), None)
    assert problem.key == "distill.initialize" and problem.hint
    with pytest.raises(UserError, match=message):
        raise UserError(problem.message)
