"""Layers recomputed in the backward pass: equal gradients, bit for bit, and no needless recomputation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lmtool.config.registry import build, entries
from lmtool.errors import UserError
from lmtool.nn.cache import Carried
from lmtool.nn.dropout import DeviceRng, TokenRng, token_keys
from lmtool.nn.prefix import KeyPrefix
from lmtool.nn.stack import Stack, Tap, recompute_layers
from lmtool.tuning.base import layers
from lmtool.tuning.lora import LoraLinear, set_dropout_rng
from lmtool.types import Packed
from tests.models.test_read import FAMILIES, LENGTHS, READ, SIZES, config_of, packed


class Middle(Tap):
    """Counts the calls at each point, and doubles the states at one of them."""

    def __init__(self):
        self.seen = Counter()

    def __call__(self, place, x_TH):
        self.seen[place] += 1
        return 2 * x_TH if place.layer == 1 else x_TH


class Watching(Tap):
    """Records the attention inputs of the first layer."""

    def __init__(self):
        self.taken = []

    def attention(self, place, kind):
        return self.taken.append if place.layer == 1 else None


def model_of(family, **fields):
    config = config_of(family, **fields)
    model = build(config, 0)
    model.calls = Counter()
    layers = {layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.layers}
    for name, layer in ((name, layer) for name, layer in model.named_modules() if layer in layers):
        layer.register_forward_pre_hook(lambda layer, given, name=name: model.calls.update([name]))
    return model


def select_rng(device_draws, *sides):
    if device_draws:
        return DeviceRng(5, torch.device("cpu"))
    examples = torch.arange(len(LENGTHS))
    keys = [token_keys(0, 1, examples, 0 * examples, side, number > 0) for number, side in enumerate(sides)]
    return TokenRng(keys[0], keys[-1])


def gradients_of(model, recomputes, device_draws=False, tap=None, after=None):
    """The hidden states of some tokens, all gradients, and the number of calls of each layer."""
    sides = [packed(1)] + ([packed(2)] if model.config.architecture == "encoder_decoder" else [])
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        stack.recomputes = recomputes
    model.zero_grad()
    model.calls.clear()
    hidden_MH = model(sides[0], select_rng(device_draws, *sides), *sides[1:], read_M=READ, tap=tap)
    loss = hidden_MH.square().sum()
    if tap is not None and getattr(tap, "taken", None):
        loss = loss + sum(taken.q_TAD.square().sum() for taken in tap.taken)
    if after is not None:
        after()
    if loss.requires_grad:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"hidden": hidden_MH.detach()} | gradients, dict(model.calls)


def assert_equal(model, **how):
    (plain, once), (again, twice) = (gradients_of(model, recomputes, **how) for recomputes in (False, True))
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    return plain, once, twice


@pytest.mark.parametrize("device_draws", [False, True], ids=["token", "device"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_gradients_are_equal(family, device_draws):
    model = model_of(family)
    plain, once, twice = assert_equal(model, device_draws=device_draws)
    assert len(plain) > len(list(model.parameters())) / 2 and plain["hidden"].abs().max() > 0.01
    assert twice == {name: 2 * count for name, count in once.items()} and once


def test_recomputation_ignores_the_generator_state():
    """Each site seeds the generator, so that its state in the backward pass does not matter."""
    model = model_of("bert")
    kept, _ = gradients_of(model, False, device_draws=True)
    disturbed, _ = gradients_of(model, True, device_draws=True, after=lambda: torch.manual_seed(99))
    other = DeviceRng(6, torch.device("cpu"))
    assert all(torch.equal(kept[name], disturbed[name]) for name in kept)
    assert not torch.equal(model(packed(1), other, read_M=READ), kept["hidden"])  # there is dropout


@pytest.mark.parametrize("positions", ["shaw", "t5", "alibi", "rotary"])
def test_recomputed_gradients_of_positions_are_equal(positions):
    kind = next(entry.config for entry in entries("model/positions") if entry.name == positions)
    assert_equal(model_of("gpt", positions=kind()))


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_tap_is_called_once(family):
    taps = [Middle(), Middle()]
    model = model_of(family)
    seen = [gradients_of(model, recomputes, tap=tap)[0] for recomputes, tap in zip((False, True), taps, strict=True)]
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    assert taps[0].seen == taps[1].seen and set(taps[1].seen.values()) == {1}


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_layer_with_attention_tap_is_computed_once(family):
    model, tap = model_of(family), Watching()
    plain, _ = gradients_of(model, False, tap=Watching())
    again, calls = gradients_of(model, True, tap=tap)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert sorted(set(calls.values())) == [1, 2]
    assert len(tap.taken) == sum(count == 1 for count in calls.values()) + (family == "bart")


def test_recomputed_gradients_of_lora_and_prefix_are_equal():
    model = model_of("bert")
    model.requires_grad_(False)
    model.prefix = KeyPrefix(3, SIZES["num_layers"], SIZES["hidden_size"])
    torch.nn.init.normal_(model.prefix.weight, generator=torch.Generator().manual_seed(0))
    for place in layers(model):
        lora = LoraLinear(place.layer.self_attn.v_proj, 2, 1.0, 0.3)
        lora.lora_dropout.site = 7
        torch.nn.init.normal_(lora.lora_a), torch.nn.init.normal_(lora.lora_b)
        place.layer.self_attn.v_proj = lora
        place.layer.register_forward_pre_hook(set_dropout_rng)
    plain, _, _ = assert_equal(model)
    assert len(plain) == 2 + 2 * SIZES["num_layers"]


@pytest.mark.parametrize("trainable_layers", [0, 1])
def test_frozen_layers_are_not_recomputed(trainable_layers):
    """No layer below the first trainable one runs a second time, and no layer at all without gradients."""
    model = model_of("bert")
    model.requires_grad_(False)
    if trainable_layers:
        model.layers[1].requires_grad_(True)
    _, once, twice = assert_equal(model)
    assert twice == {"layers.0": 1, "layers.1": 1 + trainable_layers} and set(once.values()) == {1}
    with torch.no_grad():
        recompute_layers(model)
        model.calls.clear()
        model(packed(1))
    assert set(model.calls.values()) == {1}


def test_cache_is_updated_once():
    model = model_of("gpt")
    recompute_layers(model)
    cache = model.new_cache(len(LENGTHS), 20)
    hidden_TH = model(packed(1), cache=cache)
    assert set(model.calls.values()) == {1} and tuple(cache.lengths) == LENGTHS
    torch.testing.assert_close(hidden_TH, model(packed(1)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if config_of(name, memory_length=3).carries_state])
def test_recomputed_gradients_with_carried_state_are_equal(family):
    """The layers read a segment twice and update the carried state once."""
    model, outcomes = model_of(family, memory_length=3), []
    columns = {"segment": torch.zeros(12, dtype=torch.int64), "rank": torch.arange(12)}
    text = Packed(torch.arange(1, 13), (6, 6), columns)
    rng = TokenRng(token_keys(0, 1, torch.arange(2), torch.zeros(2), text))
    reads = {"query_M": torch.tensor([3, 5, 10]), "reuse": 3} if family == "xlnet" else {}
    for recomputes in (False, True):
        model.recomputes = recomputes
        model.zero_grad()
        state = model.initial_state(2)
        for segment in range(2):
            model.calls.clear()
            carried = Carried(state, (6 * segment,) * 2)
            model(text, rng, carried=carried, **reads).square().sum().backward()
            state = {name: tensor.detach() for name, tensor in carried.after.items()}
        assert model.calls and set(model.calls.values()) == {1 + recomputes}
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        outcomes.append(state | gradients)
    plain, again = outcomes
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)
    assert len(plain) > 3 and all(plain[name].abs().sum() > 0 for name in state)


def test_model_without_stack_is_refused():
    with pytest.raises(UserError, match="gradient_checkpointing=true, but the model has no stack"):
        recompute_layers(torch.nn.Linear(2, 2))
