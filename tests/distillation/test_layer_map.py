"""Which layer learns from which, for any two depths."""

from __future__ import annotations

import pytest

from lmtool.distillation.configs.base import layer_map
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig, ModelConfig
from lmtool.models.encoder_decoder_configs import BartConfig


def words(layers, own, its):
    return layer_map(layers, None, BertConfig(num_layers=own), BertConfig(num_layers=its)).screen_text()


@pytest.mark.parametrize(
    ("layers", "own", "its", "shown"),
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
def test_rules_of_the_papers(layers, own, its, shown):
    assert words(layers, own, its) == shown


def test_by_default_every_two_depths_have_a_map():
    for own in range(1, 14):
        for its in range(1, 14):
            (pairs,) = layer_map("uniform", None, BertConfig(num_layers=own), BertConfig(num_layers=its)).sides.values()
            assert list(pairs) == list(range(1, own + 1))
            assert list(pairs.values()) == sorted(pairs.values())
            assert min(pairs.values()) >= 1
            assert pairs[own] == its


def test_each_stack_of_an_encoder_decoder_has_its_own():
    own, its = BartConfig(num_layers=2, decoder_layers=1), BartConfig(num_layers=4, decoder_layers=3)
    assert layer_map("uniform", None, own, its).screen_text() == "inputs 1 <- 2, 2 <- 4; outputs 1 <- 3"
    assert layer_map("last", {1: 2}, own, its).screen_text() == "inputs 2 <- 4; outputs 1 <- 2"
    assert layer_map("uniform", None, own, BertConfig(num_layers=2)).screen_text() == "1 <- 1, 2 <- 2"
    with pytest.raises(UserError, match=r"decoder_layers maps layer 2 .*the student has 1 layer, the teacher 3"):
        layer_map("uniform", {2: 2}, own, its)


@pytest.mark.parametrize(
    ("layers", "own", "its", "said"),
    [
        ({1: 13}, 2, 12, "maps layer 1 to layer 13 of the teacher: the student has 2 layers, the teacher 12;"),
        ({3: 1}, 2, 12, "maps layer 3 to layer 1 of the teacher: the student has 2 layers, the teacher 12;"),
        ({}, 2, 12, "={} maps no layer"),
        ("pkd_skip", 1, 12, "=pkd_skip leaves no layer"),
        ("pkd_last", 4, 2, "=pkd_last leaves no layer"),
    ],
)
def test_a_map_that_does_not_fit_names_both_depths(layers, own, its, said):
    with pytest.raises(UserError) as caught:
        words(layers, own, its)
    assert said in caught.value.message
    assert "distill.layers=uniform" in caught.value.hint


def test_models_without_layers_are_refused():
    lstm = ModelConfig(name="lstm")
    for pair in ((lstm, BertConfig()), (BertConfig(), lstm)):
        with pytest.raises(UserError, match="model=lstm has no layers"):
            layer_map("uniform", None, *pair)
