"""Layer-wise learning rate decay: levels from parameter names, and the rates of each level."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmtool.training.optimizers import layer_decayed, levels
from lmtool.types import ParameterGroup

ENCODER = [
    "backbone.embed.token.weight", "backbone.embed.norm.weight", "backbone.layers.0.ffn.fc_in.weight",
    "backbone.layers.1.ffn.fc_in.weight", "backbone.layers.1.ffn.fc_in.lora_a", "backbone.final_norm.weight",
    "heads.pooler.dense.weight", "heads.sst2.output.weight",
]  # fmt: skip


def test_encoder_levels_follow_layers() -> None:
    assert levels(ENCODER) == {
        "head": ["heads.pooler.dense.weight", "heads.sst2.output.weight"],
        "layer 2": [
            "backbone.layers.1.ffn.fc_in.weight", "backbone.layers.1.ffn.fc_in.lora_a", "backbone.final_norm.weight",
        ],
        "layer 1": ["backbone.layers.0.ffn.fc_in.weight"],
        "embeddings": ["backbone.embed.token.weight", "backbone.embed.norm.weight"],
    }  # fmt: skip


def test_layers_are_ordered_by_number() -> None:
    names = [f"backbone.layers.{number}.norm.weight" for number in range(11)]
    assert list(levels(names)) == ["head", *(f"layer {number}" for number in range(11, 0, -1))]


def test_decoder_levels_are_above_encoder() -> None:
    names = [
        "backbone.embed.token.weight", "backbone.encoder.layers.0.w", "backbone.encoder.final_norm.weight",
        "backbone.decoder.layers.0.w", "backbone.decoder.embed.position.weight", "heads.lm.output.weight",
    ]  # fmt: skip
    assert levels(names) == {
        "head": names[5:], "decoder layer 1": names[3:4], "encoder layer 1": names[1:3],
        "embeddings": [names[0], names[4]],
    }  # fmt: skip


def test_model_without_layers_has_two_levels() -> None:
    assert levels(["backbone.embed.token.weight", "backbone.lstm.weight"]) == {
        "head": ["backbone.lstm.weight"], "embeddings": ["backbone.embed.token.weight"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("decay", "scales"), [(0.8, [1.0, 0.8, 0.64, 0.512]), (1 / 2.6, [1, 1 / 2.6, 1 / 6.76, 1 / 17.576])]
)
def test_learning_rates_decay_from_head_to_embeddings(decay: float, scales: list[float]) -> None:
    """ELECTRA's decay of 0.8 and ULMFiT's 1 / 2.6, on two layers and the groups' own scales."""
    pairs = [(name, nn.Parameter(torch.zeros(2))) for name in ENCODER]
    groups = [ParameterGroup("decay", pairs[:6], 2.0), ParameterGroup("rest", pairs[6:], 1.0, 0.0)]
    assert layer_decayed(groups, ENCODER, 1.0) == groups
    rates = {
        name: (group.learning_rate_scale, group.weight_decay_scale)
        for group in layer_decayed(groups, ENCODER, decay)
        for name, _ in group.parameters
    }
    expected = {
        name: scale for scale, members in zip(scales, levels(ENCODER).values(), strict=True) for name in members
    }
    assert rates == {
        name: (pytest.approx(scale if name.startswith("heads") else 2 * scale), float(not name.startswith("heads")))
        for name, scale in expected.items()
    }


def test_frozen_layers_count_as_levels() -> None:
    """The rate of a layer depends on its position in the model, not on the other trained layers."""
    learning = ParameterGroup("all", [(ENCODER[2], nn.Parameter(torch.zeros(2)))])
    (group,) = layer_decayed([learning], ENCODER, 0.5)
    assert group.learning_rate_scale == 0.25


def test_peer_models_have_separate_levels() -> None:
    own = ["backbone.embed.token.weight", "backbone.layers.0.weight", "heads.task.weight"]
    deeper = [*own, "backbone.layers.1.weight"]
    names = [*own, *(f"distill.peer_1.{name}" for name in deeper)]
    group = ParameterGroup("all", [(name, torch.nn.Parameter(torch.zeros(1))) for name in names])
    rates = {name: cut.learning_rate_scale for cut in layer_decayed([group], names, 0.5) for name, _ in cut.parameters}
    assert rates["backbone.layers.0.weight"] == 0.5
    assert rates["distill.peer_1.backbone.layers.0.weight"] == 0.25
    assert rates["heads.task.weight"] == rates["distill.peer_1.heads.task.weight"] == 1
