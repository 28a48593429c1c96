"""Initial weights: the published distributions, and dependence on seed and name only."""

from __future__ import annotations

import math

import pytest
import torch

from lmtool.config.registry import build
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.encoder_configs import (
    AlbertConfig,
    DistilbertConfig,
    ElectraConfig,
    RobertaConfig,
    SpanbertConfig,
)

SIZES = {"vocab_size": 500, "num_layers": 4, "hidden_size": 128, "num_heads": 4, "feedforward_size": 512}
# The standard deviation of a standard normal truncated at two.
CUT = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def matrices(model):
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter.numel() > 10_000
    }


def test_bert_weights_are_truncated_normal():
    for name, weight in matrices(build(BertConfig(**SIZES), 1)).items():
        assert weight.std().item() == pytest.approx(0.02 * CUT, rel=0.02), name
        assert weight.abs().max() <= 0.04, name
        assert abs(weight.mean()) < 5 * 0.02 / weight.numel() ** 0.5, name


def test_gpt_weights_are_normal_with_scaled_residual_projections():
    weights = matrices(build(GptConfig(**SIZES), 1))
    for name, weight in weights.items():
        residual = name.endswith(("out_proj.weight", "fc_out.weight"))
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.02), name
        assert weight.abs().max() > 2.5 * weight.std(), name
    assert sum(name.endswith(("out_proj.weight", "fc_out.weight")) for name in weights) == 8


@pytest.mark.parametrize(
    "config",
    [BertConfig, GptConfig, RobertaConfig, SpanbertConfig, DistilbertConfig, AlbertConfig, ElectraConfig],
)
def test_biases_are_zero_and_norms_are_one(config):
    for name, parameter in build(config(**SIZES), 1).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_weights_depend_on_seed_and_name_only():
    first, again, other = (build(BertConfig(**SIZES), seed).state_dict() for seed in (3, 3, 4))
    deeper = build(BertConfig(**SIZES | {"num_layers": 5}), 3).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and torch.equal(tensor, deeper[name])
        assert tensor.ndim == 1 or not torch.equal(tensor, other[name])
    layers = [tensor for name, tensor in first.items() if name.endswith("q_proj.weight")]
    assert not any(torch.equal(layers[0], layer) for layer in layers[1:])


def test_building_keeps_the_global_generator_state():
    before = torch.get_rng_state()
    build(GptConfig(**SIZES), 0)
    assert torch.equal(before, torch.get_rng_state())
