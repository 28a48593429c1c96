"""The layer map of student and teacher (distill.layers), for any two depths."""

from __future__ import annotations

import pytest

from lmtool.distillation.configs.base import layer_map
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig, ModelConfig
from lmtool.models.encoder_decoder_configs import BartConfig


def map_text(layers, student_layers, teacher_layers):
    pair = BertConfig(num_layers=student_layers), BertConfig(num_layers=teacher_layers)
    return layer_map(layers, None, *pair).screen_text()


@pytest.mark.parametrize(
    ("layers", "student_layers", "teacher_layers", "expected"),
    [
        ("uniform", 4, 12, "1 <- 3, 2 <- 6, 3 <- 9, 4 <- 12"),  # TinyBERT's g(m) = 3m
        ("uniform", 1, 12, "1 <- 12"),
        ("uniform", 2, 5, "1 <- 3, 2 <- 5"),
        ("uniform", 3, 1, "1 <- 1, 2 <- 1, 3 <- 1"),
        ("last", 3, 12, "3 <- 12"),
        ("pkd_skip", 6, 12, "1 <- 2, 2 <- 4, 3 <- 6, 4 <- 8, 5 <- 10"),
        ("pkd_last", 6, 12, "1 <- 7, 2 <- 8, 3 <- 9, 4 <- 10, 5 <- 11"),
        ({2: 8, 1: 4, 0: 0}, 2, 12, "0 <- 0, 1 <- 4, 2 <- 8"),
    ],
)
def test_rules_match_the_papers(layers, student_layers, teacher_layers, expected):
    assert map_text(layers, student_layers, teacher_layers) == expected


def test_uniform_maps_any_two_depths():
    for student_layers in range(1, 14):
        for teacher_layers in range(1, 14):
            pair = BertConfig(num_layers=student_layers), BertConfig(num_layers=teacher_layers)
            (pairs,) = layer_map("uniform", None, *pair).sides.values()
            assert list(pairs) == list(range(1, student_layers + 1))
            assert list(pairs.values()) == sorted(pairs.values())
            assert min(pairs.values()) >= 1
            assert pairs[student_layers] == teacher_layers


def test_encoder_decoder_has_one_map_per_stack():
    student, teacher = BartConfig(num_layers=2, decoder_layers=1), BartConfig(num_layers=4, decoder_layers=3)
    assert layer_map("uniform", None, student, teacher).screen_text() == "inputs 1 <- 2, 2 <- 4; outputs 1 <- 3"
    assert layer_map("last", {1: 2}, student, teacher).screen_text() == "inputs 2 <- 4; outputs 1 <- 2"
    assert layer_map("uniform", None, student, BertConfig(num_layers=2)).screen_text() == "1 <- 1, 2 <- 2"
    with pytest.raises(UserError, match=r"decoder_layers maps layer 2 .*the student has 1 layer, the teacher 3"):
        layer_map("uniform", {2: 2}, student, teacher)


@pytest.mark.parametrize(
    ("layers", "student_layers", "teacher_layers", "message"),
    [
        ({1: 13}, 2, 12, "maps layer 1 to layer 13 of the teacher: the student has 2 layers, the teacher 12;"),
        ({3: 1}, 2, 12, "maps layer 3 to layer 1 of the teacher: the student has 2 layers, the teacher 12;"),
        ({}, 2, 12, "={} maps no layer"),
        ("pkd_skip", 1, 12, "=pkd_skip leaves no layer"),
        ("pkd_last", 4, 2, "=pkd_last leaves no layer"),
    ],
)
def test_map_beyond_a_depth_is_refused_and_names_both_depths(layers, student_layers, teacher_layers, message):
    with pytest.raises(UserError) as caught:
        map_text(layers, student_layers, teacher_layers)
    assert message in caught.value.message
    assert "distill.layers=uniform" in caught.value.hint


def test_models_without_layers_are_refused():
    lstm = ModelConfig(name="lstm")
    for pair in ((lstm, BertConfig()), (BertConfig(), lstm)):
        with pytest.raises(UserError, match="model=lstm has no layers"):
            layer_map("uniform", None, *pair)
