"""Backbones that return the states of some tokens (read_M): states and gradients equal those of the full output."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build, entries
from lmtool.models import configs, decoder_configs, encoder_configs, encoder_decoder_configs, pretransformer_configs
from lmtool.models.configs import TransformerConfig
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.types import Packed

SIZES = {
    "vocab_size": 40, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "max_positions": 32,
    "dropout": 0.2, "attention_dropout": 0.2,
}  # fmt: skip
OF_SOME = {
    "num_key_value_heads": 1, "block_size": 1, "random_blocks": 1, "cell_size": 12, "filters": ((1, 4), (3, 4)),
    "highways": 1, "word_length": 8,
}  # fmt: skip
MODULES = {
    module.__name__
    for module in (
        configs,
        decoder_configs,
        pretransformer_configs,
        encoder_configs,
        encoder_decoder_configs,
    )
}
FAMILIES = sorted(
    entry.name
    for entry in entries("model")
    if entry.config.__module__ in MODULES and entry.name not in ("cnn", "word_vectors")  # these have no stack
)
ATTENDING = sorted(
    entry.name for entry in entries("model") if entry.name in FAMILIES and issubclass(entry.config, TransformerConfig)
)
LENGTHS = (5, 1, 12, 7)


def test_at_least_ten_families_attend():
    assert len(ATTENDING) >= 10


def config_of(family, **fields):
    """A family at the test's sizes, for the fields that it has; one key head for two query heads, and blocks so small
    that texts of more than 7 tokens are not dense."""
    config = next(entry.config for entry in entries("model") if entry.name == family)
    sizes = SIZES | OF_SOME | fields
    return config(**{name: value for name, value in sizes.items() if name in config.model_fields})


READ = torch.tensor([0, 3, 5, 6, 16, 18, 24])


def packed(seed: int) -> Packed:
    tokens = torch.randint(0, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    return Packed(tokens, LENGTHS, {"segment": torch.zeros_like(tokens)})


@pytest.mark.parametrize("family", FAMILIES)
def test_selected_tokens_match_the_full_output(family):
    config = config_of(family)
    backbone = build(config, 0).double()
    inputs, outputs = packed(1), packed(2) if config.architecture == "encoder_decoder" else None
    examples = torch.arange(len(LENGTHS))
    runs = []
    for read in (None, READ):
        keys = [token_keys(0, 1, examples, examples * 0, side) for side in (inputs, outputs) if side is not None]
        rng = TokenRng(keys[0], keys[-1])
        sides = (inputs, rng) if outputs is None else (inputs, rng, outputs)
        hidden = backbone(*sides, read_M=read)
        chosen = hidden if read is not None else hidden[READ]
        backbone.zero_grad()
        chosen.square().sum().backward()
        runs.append((chosen.detach(), {name: parameter.grad for name, parameter in backbone.named_parameters()}))
    (whole, gradients), (some, own) = runs
    torch.testing.assert_close(some, whole, rtol=1e-10, atol=1e-12)
    assert whole.abs().max() > 0.01
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-9, atol=1e-12)
