"""Conversion of weights to another family: equal hidden states, every tensor reported, and other formulas refused."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.decoder_configs import LlamaConfig
from lmtool.models.encoder_configs import (
    AlbertConfig,
    DebertaV3Config,
    DistilbertConfig,
    ModernbertConfig,
    RobertaConfig,
)
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.types import Packed
from lmtool.weights.conversion.architectures import convert_architecture, largest_difference
from lmtool.weights.saved_model import CheckpointModel

SIZES = {
    "vocab_size": 29, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "feedforward_size": 20, "max_positions": 11,
}  # fmt: skip


def model_of(family, head="masked_lm", **fields):
    model = CheckpointModel(build(family(**{**SIZES, **fields}), 3), {f"heads.{head}.": torch.zeros(1)})
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize(
    ("family", "name", "resized", "new"),
    [
        (BertConfig, "roberta", {"position", "segment"}, set()),
        (RobertaConfig, "bert", {"position", "segment"}, set()),
        (BertConfig, "electra", set(), set()),
        (BertConfig, "distilbert", {"position"}, set()),
        (DistilbertConfig, "spanbert", set(), {"segment"}),
    ],
)
def test_conversion_with_same_mask_keeps_states(family, name, resized, new):
    source = model_of(family)
    tensors = {**source.state_dict(), "objective.more": torch.zeros(1)}
    conversion = convert_architecture(source, name, tensors)
    assert conversion.config.name == name and conversion.masks is None
    assert largest_difference(source, conversion) == pytest.approx(0, abs=1e-5)
    assert {key.split(".")[2] for key in conversion.resized} == resized
    assert {key.split(".")[2] for key in conversion.initial_values} == new and set(
        conversion.initial_values.values()
    ) <= {"zero"}
    lost = {"objective.more"} | ({"backbone.embed.segment.weight"} if name == "distilbert" else set())
    assert set(conversion.left_out) == lost
    own = conversion.model.state_dict()
    assert own.keys() == {*conversion.copied, *conversion.resized, *conversion.initial_values}
    assert all(torch.equal(own[key], tensors[key]) for key in conversion.copied)
    assert {key for key in own if key.startswith("heads.")} == {key for key in tensors if key.startswith("heads.")}


def test_conversion_changes_only_mask():
    source = model_of(LlamaConfig, "lm", num_key_value_heads=2)
    conversion = convert_architecture(source, "llama_encoder", source.state_dict())
    assert conversion.masks == ("Causal", "Full") and largest_difference(source, conversion) == 0
    own = {name: tensor for name, tensor in source.state_dict().items() if name.startswith("backbone.")}
    assert conversion.copied == list(own) and not conversion.initial_values and not conversion.resized
    assert not conversion.left_out
    tokens = Packed(torch.arange(7), (7,))
    states, whole = source.hidden(tokens), conversion.model.hidden(tokens)
    assert (states[0] - whole[0]).abs().max() > 1e-2  # the first token attends to later tokens
    model = model_of(type(conversion.config), "masked_lm", num_key_value_heads=2)
    back = convert_architecture(model, "llama", model.state_dict())
    assert back.masks == ("Full", "Causal") and {name.split(".")[1] for name in back.left_out} == {"masked_lm"}
    assert back.copied == list(own) and all(torch.equal(model.state_dict()[n], back.model.state_dict()[n]) for n in own)


def test_missing_biases_are_zero():
    source = model_of(LlamaConfig, "lm", num_key_value_heads=2)
    conversion = convert_architecture(source, "qwen2", source.state_dict())
    assert largest_difference(source, conversion) == 0 and len(conversion.initial_values) == 2 * 3
    with pytest.raises(UserError, match=r"layers\.\*\.self_attn.q_proj loses its bias; [^;]*; [^;]*$"):
        convert_architecture(model_of(type(conversion.config), "lm", num_key_value_heads=2), "llama", {})


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        (BertConfig, "bert", "the checkpoint already has model=bert"),
        (BertConfig, "robrta", "model=robrta does not exist"),
        (
            BertConfig,
            "modernbert",
            r"differently; layers.* is PreNormLayer, was .*; layers.*.ffn is GatedF.* \(and .* more\)",
        ),
        (
            BertConfig,
            "gpt",
            r"embed.norm \(LayerNorm\) is only in the checkpoint; layers.* is PreNormLayer, was PostN",
        ),
        (BertConfig, "gpt1", r"layers.*.ffn has activation=gelu tanh, had gelu"),
        (BertConfig, "albert", "the layers are run differently"),
        (BertConfig, "bart", "not a single stack of layers"),
        (ModernbertConfig, "llama", "run differently"),
        (AlbertConfig, "bert", "differently"),
        (DebertaV3Config, "bert", "differently"),
        (GptConfig, "llama", r"\.norm1 is RMSNorm, was LayerNorm; layers.*.ffn is GatedFeedForward, was Feed"),
    ],
)
def test_incompatible_families_are_refused(family, name, message):
    with pytest.raises(UserError, match=message):
        convert_architecture(model_of(family), name, {})


def test_unsupported_positions_are_refused():
    source = model_of(BertConfig, positions=RotaryPositionsConfig())
    assert largest_difference(source, convert_architecture(source, "roberta", {})) == pytest.approx(0, abs=1e-5)
    with pytest.raises(UserError, match="embed.segment is only in the checkpoint"):
        convert_architecture(source, "distilbert", {})
