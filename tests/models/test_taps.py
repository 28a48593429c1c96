"""Taps in every family: states and attention weights equal those of transformers, replaced states are used by the
layers above, and taps combine with read_M."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmtool.config.registry import build
from lmtool.nn import tiled as attended
from lmtool.nn.context import Context
from lmtool.nn.dropout import TokenRng, token_keys
from lmtool.nn.stack import Tap, TapPoint, Taps
from lmtool.types import Packed
from lmtool.weights.padded_model import load
from tests.models.test_read import FAMILIES as OWN
from tests.models.test_read import LENGTHS, READ, SIZES, config_of, packed
from tests.weights.published_folders import FAMILIES, make, sample


class Seen(Tap):
    """Records all states and attention weights."""

    def __init__(self):
        self.states, self.attentions = {}, {}

    def __call__(self, place, x_TH):
        self.states[place] = x_TH
        return x_TH

    def attention(self, place, kind):
        return lambda attended: self.attentions.update({(place, kind): attended.weights()})


class Changed(Tap):
    """Replaces the states at one point."""

    def __init__(self, place, change):
        self.place, self.change = place, change

    def __call__(self, place, x_TH):
        return self.change(x_TH) if place == self.place else x_TH


class Below(Tap):
    """Wants the states below the last layer."""

    def wants(self, place):
        return place.layer < SIZES["num_layers"]


def of_family(family, **fields):
    """A tiny model of a family in double precision, and its arguments besides the inputs."""
    config = config_of(family, **fields)
    outputs = {"outputs": packed(2)} if config.architecture == "encoder_decoder" else {}
    return build(config, 0).double(), outputs


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory):
    """A transformers model and ours with its weights, on the same rows: our backbone, the real tokens of each side, the
    output of transformers, our hidden states, and the tap."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make(request.param, folder)
    theirs.set_attn_implementation("eager")
    if request.param == "bigbird":
        # Short texts are dense; transformers switches in the first forward pass, too late to collect the weights.
        theirs.bert.set_attention_type("original_full")
    backbone, tap = load(folder).model.parts.backbone, Seen()
    ids, mask, decoder_ids = sample(backbone.config.architecture == "encoder_decoder")
    given = {"inputs": (ids, mask.bool())}
    if decoder_ids is not None:
        given["outputs"] = decoder_ids, torch.ones_like(decoder_ids, dtype=torch.bool)
    sides = {name: Packed(ids[real], tuple(real.sum(1).tolist())) for name, (ids, real) in given.items()}
    more = {} if decoder_ids is None else {"decoder_input_ids": decoder_ids}
    with torch.no_grad():
        output = theirs(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, output_attentions=True, **more
        )  # fmt: skip
        hidden_TH = backbone(sides["inputs"], tap=tap, **{name: sides[name] for name in sides if name == "outputs"})
    return backbone, {name: real for name, (_, real) in given.items()}, output, hidden_TH, tap


def named(side, sides, name):
    """The name of a side's field in an output of transformers."""
    return name if len(sides) == 1 else f"{'encoder' if side == 'inputs' else 'decoder'}_{name}"


def test_tapped_states_match_transformers(published):
    backbone, sides, output, hidden_TH, tap = published
    for side, real in sides.items():
        expected = [states[real] for states in output[named(side, sides, "hidden_states")]]
        states = [tap.states[TapPoint(layer, side)] for layer in range(len(expected))]
        # transformers applies the final norm to the last states.
        if side == list(sides)[-1]:
            states[-1] = hidden_TH
        else:
            states[-1] = backbone.encoder.leave(states[-1])
        for x_TH, wanted_TH in zip(states, expected, strict=True):
            if backbone.config.name == "transformer":  # Marian has the sines of positions first, then the cosines.
                x_TH = torch.cat([x_TH[:, ::2], x_TH[:, 1::2]], 1)
            torch.testing.assert_close(x_TH, wanted_TH, rtol=0, atol=1e-5)


def test_tapped_attention_weights_match_transformers(published):
    _, sides, output, _, tap = published
    kinds = [(side, side, "self_attn", named(side, sides, "attentions")) for side in sides]
    if len(sides) == 2:
        kinds.append(("outputs", "inputs", "cross_attn", "cross_attentions"))
    for side, read, kind, name in kinds:
        for layer, expected in enumerate(output[name], 1):
            for row, weights_ALK in enumerate(tap.attentions[TapPoint(layer, side), kind]):
                wanted_ALK = expected[row][:, sides[side][row]][..., sides[read][row]]
                torch.testing.assert_close(weights_ALK, wanted_ALK, rtol=0, atol=1e-5)
    assert len(tap.attentions) == sum(len(output[name]) for *_, name in kinds)


@pytest.mark.parametrize("family", OWN)
def test_recording_tap_changes_nothing(family):
    backbone, outputs = of_family(family)
    tap = Seen()
    with torch.no_grad():
        plain, tapped = backbone(packed(1), **outputs), backbone(packed(1), **outputs, tap=tap)
    assert torch.equal(plain, tapped)
    depths = backbone.config.depths
    assert depths.keys() == {"inputs", *outputs}
    assert set(tap.states) == {TapPoint(layer, side) for side in depths for layer in range(depths[side] + 1)}


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_replaced_states_are_used_by_the_layers_above(family, layer):
    """The expected states come from the layers above, called one by one on the replaced states."""
    backbone, outputs = of_family(family)
    side = "outputs" if outputs else "inputs"
    depth = backbone.config.depths[side]
    seen, changed = Seen(), Changed(TapPoint(min(layer, depth), side), lambda x_TH: x_TH.flip(0) + 1.0)
    with torch.no_grad():
        plain, got = backbone(packed(1), **outputs, tap=seen), backbone(packed(1), **outputs, tap=changed)
        x_TH = seen.states[changed.place].flip(0) + 1.0
        stack, texts, more = backbone, packed(1), {}
        if outputs:
            stack, texts, encoded = backbone.decoder, packed(2), backbone.encode(packed(1))
            more = {"encoded": encoded, "cross_layout": encoded.layout(texts)}
        for number in range(layer, depth):
            position = stack.position(number, SimpleNamespace(position=stack.embed.position))
            context = Context.of(texts, stack.mask(number, texts), position, **more)
            x_TH = list(stack.applied_layers())[number](x_TH, context)
        torch.testing.assert_close(got, stack.leave(x_TH), rtol=0, atol=1e-12)
    assert not torch.allclose(got, plain)


@pytest.mark.parametrize("family", OWN)
def test_tap_receives_all_tokens_when_some_are_read(family):
    backbone, outputs = of_family(family)
    examples = torch.arange(len(LENGTHS))
    keys = [token_keys(0, 1, examples, examples * 0, packed(1), outputs=side) for side in (False, True)]
    results = []
    for tap, read_M in ((None, None), (Seen(), READ), (Changed(TapPoint(1), lambda x_TH: 2 * x_TH), READ)):
        hidden = backbone(packed(1), TokenRng(*keys), **outputs, read_M=read_M, tap=tap)
        results.append(hidden if read_M is not None else hidden[READ])
        backbone.zero_grad()
        results[-1].square().sum().backward()
        results.append({name: parameter.grad for name, parameter in backbone.named_parameters()})
        if isinstance(tap, Seen):
            assert all(len(x_TH) == sum(LENGTHS) for x_TH in tap.states.values())
    plain, gradients, read, own, other, _ = results
    torch.testing.assert_close(read, plain, rtol=1e-10, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(other, plain)


def test_attention_weights_are_computed_for_taps_only(monkeypatch):
    backbone, _ = of_family("bert")
    calls = []
    real = attended.attention_weights
    monkeypatch.setattr(attended, "attention_weights", lambda *given: calls.append(1) or real(*given))
    rows = []
    backbone.layers[-1].ffn.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    for tap in (None, Tap(), Seen(), Below(), Taps(Below(), Below())):
        backbone(packed(1), read_M=READ, tap=tap)
    assert len(calls) == SIZES["num_layers"]
    assert rows == [len(READ), sum(LENGTHS), sum(LENGTHS), len(READ), len(READ)]


def test_tapped_attention_weights_have_gradients():
    backbone, _ = of_family("gpt")
    tap = Seen()
    backbone(packed(1), tap=tap)
    (weights, *_) = tap.attentions[TapPoint(2), "self_attn"]
    weights.square().sum().backward()
    assert backbone.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("family", ["bert", "gpt", "t5"])
def test_softmax_of_tapped_scores_matches_the_weights(family):
    backbone, outputs = of_family(family)
    seen = []

    class Scores(Tap):
        def attention(self, place, kind):
            return seen.append if kind == "self_attn" else None

    backbone(packed(1), **outputs, tap=Scores())
    for attention in seen:
        weights = attention.weights()
        for tile, numbers in zip(attention.scores(), attention.layout.classes, strict=True):
            scores = tile.scores_RALK if tile.allow is None else tile.scores_RALK.masked_fill(~tile.allow, -torch.inf)
            for row, number in enumerate(numbers):
                length = attention.layout.query.lengths[number]
                assert tile.real_RL[row].sum() == length
                torch.testing.assert_close(scores[row].softmax(-1)[:, :length, :length], weights[number])
