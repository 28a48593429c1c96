"""Compiled regions: results equal those of eager mode, and one graph serves all sizes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from lmtool.config.registry import build, entries
from lmtool.nn import regions
from lmtool.nn.dropout import DeviceRng, TokenRng, token_keys
from lmtool.nn.prefix import KeyPrefix
from lmtool.nn.stack import Stack, Tap, recompute_layers
from lmtool.training.compiling import compiled
from lmtool.tuning.base import layers
from lmtool.tuning.lora import LoraLinear, set_dropout_rng
from lmtool.types import Packed
from tests.models.test_read import ATTENDING, SIZES, config_of

BATCHES = ((5, 1, 12, 7), (3, 3), (30,), (2, 9, 4, 4, 11), (1, 2))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def texts(lengths, seed):
    tokens = torch.randint(0, 40, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Packed(tokens, lengths, {"segment": torch.zeros_like(tokens)})


def model_of(family, **fields):
    return build(config_of(family, **fields), 0).train()


def outcome(model, lengths, number, device_draws=False, **given):
    """The hidden states of some tokens, and all gradients."""
    sides = [texts(lengths, number)]
    if model.config.architecture == "encoder_decoder":
        sides.append(texts(tuple(length % 7 + 1 for length in lengths), number + 50))
    examples = torch.arange(len(lengths))
    keys = [token_keys(0, number, examples, 0 * examples, side, at > 0) for at, side in enumerate(sides)]
    rng = DeviceRng(number, torch.device("cpu")) if device_draws else TokenRng(keys[0], keys[-1])
    model.zero_grad()
    read_M = torch.arange(0, len(sides[-1].tokens), 2)
    hidden_MH = model(sides[0], rng, *sides[1:], read_M=read_M, **given)
    if hidden_MH.requires_grad:
        hidden_MH.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"hidden": hidden_MH.detach()} | gradients


def assert_same(model, backend="aot_eager", tolerance=1e-6, warm=1, **given):
    """Asserts that compiled results equal eager ones for batches of all sizes, relative to the largest number; only the
    first `warm` batches may compile. Returns the number of graphs minus the number of regions."""
    counters.clear()
    plain = [outcome(model, lengths, number, **given) for number, lengths in enumerate(BATCHES)]
    assert not counters["stats"]["unique_graphs"]
    with compiled(True, backend):
        for number, lengths in enumerate(BATCHES):
            with torch._dynamo.config.patch(error_on_recompile=True) if number >= warm else nullcontext():
                own = outcome(model, lengths, number, **given)
            assert own.keys() == plain[number].keys() and own["hidden"].abs().max() > 0.1
            for name, wanted in plain[number].items():
                torch.testing.assert_close(own[name], wanted, rtol=0, atol=tolerance * (1 + wanted.abs().max().item()))
        assert len(called := regions._active._compiled) >= 2
    return counters["stats"]["unique_graphs"] - len(called)


@pytest.mark.parametrize(
    "family",
    [family if family == "gpt" else pytest.param(family, marks=pytest.mark.slow) for family in ATTENDING],
)
def test_one_graph_per_region_serves_all_layers_and_sizes(family):
    # ModernBERT's first layer has no norm, and therefore a separate graph.
    assert assert_same(model_of(family)) == (family == "modernbert")


def tuned_model():
    """A frozen model with LoRA (with dropout) in some linear layers, trainable norms in one layer, and a prefix."""
    model = model_of("bert", num_layers=3, max_positions=40)
    model.requires_grad_(False)
    model.prefix = KeyPrefix(3, 3, SIZES["hidden_size"])
    torch.nn.init.normal_(model.prefix.weight, generator=torch.Generator().manual_seed(0))
    for number, place in enumerate(layers(model)):
        part, name = (place.layer.ffn, "fc_in") if number == 1 else (place.layer.self_attn, "v_proj")
        lora = LoraLinear(getattr(part, name), 2, 1.0, 0.3)
        lora.lora_dropout.site = number
        torch.nn.init.normal_(lora.lora_a), torch.nn.init.normal_(lora.lora_b)
        setattr(part, name, lora)
        place.layer.register_forward_pre_hook(set_dropout_rng)
    model.layers[2].norm1.requires_grad_(True)
    return model


@pytest.mark.slow
def test_compiled_tuned_model_matches_eager():
    model = tuned_model()
    assert assert_same(model) > 0  # layers that differ have separate graphs
    assert all(part.rng_tensors is None for part in model.modules() if hasattr(part, "rng_tensors"))


class Doubling(Tap):
    def __call__(self, place, x_TH):
        return 2 * x_TH if place.layer == 1 else x_TH


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["shaw", "t5", "alibi", "rotary"])
def test_compiled_positions_and_tap_match_eager(positions):
    kind = next(entry.config for entry in entries("model/positions") if entry.name == positions)
    assert assert_same(model_of("gpt", positions=kind()), tap=Doubling()) == 0


def test_recomputed_layers_and_no_grad_reuse_the_graphs():
    """In the backward pass the regions run again, with the same graphs and the same dropout. Dropout from a device's
    generator differs from eager mode, but is the same in both runs."""
    model = model_of("bert")
    recompute_layers(model)
    assert assert_same(model) == 0
    with compiled(True, "aot_eager"):
        kept = [outcome(model, lengths, 3, device_draws=True) for lengths in BATCHES]
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.recomputes = False
        for lengths, wanted in zip(BATCHES, kept, strict=True):
            own = outcome(model, lengths, 3, device_draws=True)
            assert all(torch.equal(own[name], wanted[name]) for name in wanted)
        with torch.no_grad():
            for lengths in BATCHES:  # few tokens are read, and many
                outcome(model, lengths, 0)
            with torch._dynamo.config.patch(error_on_recompile=True):
                seen = [outcome(model, lengths, 0)["hidden"] for lengths in BATCHES]
    with torch.no_grad():
        for lengths, hidden in zip(BATCHES, seen, strict=True):
            torch.testing.assert_close(outcome(model, lengths, 0)["hidden"], hidden)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler_folder")
@pytest.mark.parametrize("family", ["bert", "gpt", "t5", "bart", "albert"])
def test_inductor_matches_eager(family):
    assert_same(model_of(family).double(), "inductor", tolerance=1e-10)
