"""Every shipped encoder-decoder preset: YAML equals class defaults, it builds on the meta device, and parameter counts
and initial weights are as published."""

from __future__ import annotations

import math

import pytest
import torch
from test_model_presets import CONF, read, written

from lmtool.config.registry import build
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.models.heads.lm import BackboneLMHead, lm_head
from lmtool.types import Packed

HF_FORMAT = {
    "t5": 222_903_552,
    "t5_small": 60_506_624,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_v11_small": 76_961_152,
    "t5_v11_base": 247_577_856,
    "bart": 139_420_416,
    "bart_large": 406_291_456,
    # Table 3 of the paper has 65 and 213 million, for a vocabulary of "about 37000".
    "transformer": 63_082_496,
    "transformer_big": 214_245_376,
    "rnn_attention": 61_822_000,
}
FAMILIES = (T5Config, BartConfig, Transformer2017Config)
PRESETS = sorted(
    path.stem
    for path in CONF.glob("*.yaml")
    if path.stem.split("_")[0] in ("t5", "bart", "transformer", "rnn") and not path.stem.startswith("transformer_xl")
)
SMALL = {"vocab_size": 300, "num_layers": 2, "hidden_size": 96, "num_heads": 3, "feedforward_size": 160}


@pytest.mark.parametrize("config", FAMILIES)
def test_yaml_matches_class_defaults(config):
    assert written(config().name) == config().model_dump()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_published_parameter_count(name):
    config = read(name)
    with torch.device("meta"):
        model = build(config, 0)
        head = lm_head(model)
    parameters = sum(parameter.numel() for part in (model, head) for parameter in part.parameters())
    if name in HF_FORMAT:
        assert parameters == HF_FORMAT[name]
    else:
        assert name.endswith("_tiny") and parameters < 2.2e6


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("_tiny")])
def test_tiny_preset_has_gradients_everywhere(name):
    model = build(read(name), 0)
    model(Packed(torch.arange(9), (4, 5)), None, Packed(torch.arange(8), (6, 2))).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_decoder_layers_sets_the_decoder_depth():
    model = build(T5Config(**SMALL, decoder_layers=1), 0)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)


def std(parameter: torch.Tensor) -> float:
    return parameter.detach().std().item()


def test_t5_initial_weights_match_the_publication():
    parts = dict(build(T5Config(**SMALL, head_size=40, tied=False), 0).named_parameters())
    width, inner = 96, 120
    assert std(parts["embed.token.weight"]) == pytest.approx(1.0, rel=0.02)
    for stack, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "cross_attn")):
        layer = f"{stack}.layers.1."
        assert std(parts[f"{layer}{attention}.q_proj.weight"]) == pytest.approx((width * 40) ** -0.5, rel=0.03)
        assert std(parts[f"{layer}{attention}.k_proj.weight"]) == pytest.approx(width**-0.5, rel=0.03)
        assert std(parts[f"{layer}{attention}.out_proj.weight"]) == pytest.approx(inner**-0.5, rel=0.03)
        assert std(parts[f"{layer}ffn.fc_out.weight"]) == pytest.approx(160**-0.5, rel=0.03)
    assert std(parts["decoder.embed.position.weight"]) == pytest.approx(width**-0.5, rel=0.3)
    assert all(torch.equal(tensor, torch.ones(width)) for name, tensor in parts.items() if "norm" in name)


def test_transformer_initial_embeddings_have_unit_scale():
    model = build(Transformer2017Config(**SMALL), 0)
    assert std(model.embed.tokens(torch.arange(300))) == pytest.approx(1.0, rel=0.02)
    assert std(model.decoder.layers[0].ffn.fc_in.weight) == pytest.approx(math.sqrt(2 / (96 + 160)), rel=0.03)


def test_lm_head_of_each_family():
    def head(config):
        return lm_head(build(config, 0))

    tied, own = head(T5Config(**SMALL)), head(T5Config(**SMALL, tied=False))
    assert isinstance(tied, BackboneLMHead) and tied.scale == 96**-0.5 and not list(tied.parameters())
    assert isinstance(own, BackboneLMHead) and own.scale == 1.0 and own.output.weight.shape == (300, 96)
    bart = head(BartConfig(**SMALL))
    assert not list(bart.parameters()) and bart.state_dict()["bias"].shape == (300,)
    hidden, table = torch.randn(4, 96), torch.randn(300, 96)
    torch.testing.assert_close(tied(hidden, table), hidden @ table.T / math.sqrt(96))
    assert torch.equal(own(hidden, table), own.output(hidden))
    plain = head(Transformer2017Config(**SMALL))
    assert torch.equal(plain(hidden, table), torch.nn.functional.linear(hidden, table))
