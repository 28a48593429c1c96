"""LoRA, (IA)3, BitFit and last_n on every architecture: neutral at the start, frozen weights unchanged, and the same
outputs after merging and reassembling."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads
from lmtool.tuning.lora import ScaledOutputs
from lmtool.types import Packed
from lmtool.weights.assemble import assemble
from lmtool.weights.reading import Weights
from tests.tuning.tuning_fixtures import (
    FAMILIES,
    LENGTHS,
    TASK,
    batch_for,
    first_conflict,
    hashes,
    model_config,
    outputs_of,
    side,
    train,
    tuned,
    tuning_config,
)

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")
LORA = {"name": "lora", "rank": 3, "dropout": 0.3, "projections": EVERYWHERE}
METHODS = {
    "lora": {"name": "lora"},
    "lora everywhere": LORA,
    "dora": {"name": "lora", "rank": 3, "dora": True, "projections": EVERYWHERE},
    "lora with all biases": {"name": "lora", "bias": "all"},
    "lora with adapted biases": {"name": "lora", "bias": "lora_only"},
    "ia3": {"name": "ia3"},
    "bitfit": {"name": "bitfit"},
    "last_n": {"name": "last_n", "layers": 1},
    "head": {"name": "head"},
}
FAMILY_SIZES = {
    **dict.fromkeys(("bert", "gpt", "bart", "albert", "electra", "deberta_v3"), [{}]),
    "t5": [{}, {"feedforward": "gated_gelu"}],
    **dict.fromkeys(("llama", "llama_encoder", "qwen2"), [{"num_key_value_heads": 1}]),
    "modernbert": [{}],
}
PAIRS = [
    (family, name)
    for family in FAMILIES
    for name in METHODS
    if (family, name)
    not in {("t5", "bitfit"), ("albert", "last_n"), *(("t5", name) for name in METHODS if "bias" in name)}
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_methods_start_neutral_train_and_merge(family, name):
    config = model_config(family)
    base = outputs_of(tuned(config, None))
    learner = tuned(config, METHODS[name])
    # At the start, outputs equal the base model's exactly.
    assert torch.equal(outputs_of(learner), base)
    before = hashes(learner)
    optimizer = train(learner)
    after = hashes(learner)
    learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    moved = {name for name in before if before[name] != after[name]}
    # Every trainable parameter changes, except biases of keys, which do not affect the softmax.
    still = {name for name in learns - moved if not name.endswith(".k_proj.bias")}
    assert moved <= learns and not still
    assert learner.tuning.delta_names(learner) == learns and learner.added_names <= learns
    assert all(parameter.grad is None for parameter in learner.parameters())
    states = {id(parameter) for parameter in optimizer.state}
    assert states <= {id(parameter) for parameter in learner.parameters() if parameter.requires_grad}
    tuned_output = outputs_of(learner)
    assert not torch.equal(tuned_output, base)
    # Merged into the weights, the model is plain and has the same outputs.
    learner.tuning.merge(learner)
    assert {type(module) for module in learner.backbone.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    assert set(hashes(learner)) == set(hashes(tuned(config, None)))
    torch.testing.assert_close(outputs_of(learner), tuned_output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tuning", [LORA, {**LORA, "dora": True}, {"name": "ia3"}], ids=["lora", "dora", "ia3"])
def test_reassembled_model_has_same_outputs(family, tuning):
    config = model_config(family)
    learner = tuned(config, tuning)
    train(learner)
    blueprint = SimpleNamespace(
        model=config, seed=0, learner_config=build(TASK), tuning_config=tuning_config(**tuning), exits=()
    )
    tensors = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    again, _ = assemble(blueprint, None, trained=Weights(tensors, Path("here"), "here"))
    assert torch.equal(outputs_of(again), outputs_of(learner))
    assert again.added_names == learner.added_names


@pytest.mark.parametrize("family", ["bert", "t5"])
@pytest.mark.parametrize("name", [name for name in METHODS if "bias" not in name and name != "bitfit"])
def test_bf16_outputs_are_close_to_fp32(family, name):
    learner = tuned(model_config(family, dropout=0.0, attention_dropout=0.0), METHODS[name])
    train(learner)
    batch, full = batch_for(learner), outputs_of(learner)
    with torch.autocast("cpu", torch.bfloat16):
        half = outputs_of(learner, batch)
        learner.train()(batch, 1).sums[learner.term].backward()
    torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.02)
    assert all(parameter.grad.isfinite().all() for parameter in learner.parameters() if parameter.grad is not None)


def test_lora_init_is_a_function_of_name_and_seed():
    one, other = (tuned(model_config("bert"), {"name": "lora"}) for _ in range(2))
    first, second = ("backbone.layers.0.self_attn.q_proj.lora_a", "backbone.layers.1.self_attn.q_proj.lora_a")
    drawn = dict(one.named_parameters())
    assert torch.equal(drawn[first], dict(other.named_parameters())[first]) and not torch.equal(
        *map(drawn.get, (first, second))
    )
    # Kaiming uniform with a = sqrt(5).
    assert 0.2 < drawn[first].abs().max() <= 16**-0.5
    assert not drawn[first.replace("lora_a", "lora_b")].any()


@pytest.mark.parametrize("stabilised", [False, True])
def test_lora_scale_matches_definition(stabilised):
    learner = tuned(model_config("bert"), {**LORA, "dropout": 0.0, "rank_stabilised": stabilised})
    linear = learner.backbone.layers[0].ffn.fc_in
    nn.init.normal_(linear.lora_b)
    x = torch.randn(4, 16)
    scale = 16 / 3**0.5 if stabilised else 16 / 3
    expected = x @ (linear.weight + scale * linear.lora_b @ linear.lora_a).T + linear.bias
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt", "bart", "albert"])
def test_lora_dropout_is_independent_of_batch(family, dora):
    """Dropout is a function of token and step."""
    learner = tuned(model_config(family, dropout=0.0, attention_dropout=0.0), {**LORA, "dora": dora}).train()
    for name, parameter in learner.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        whole, again, other = (learner.outputs(batch_for(learner), step) for step in (1, 1, 2))
        part = learner.outputs(batch_for(learner, [2, 0]), 1)
    assert torch.equal(whole, again) and not torch.allclose(whole, other)
    torch.testing.assert_close(part, whole[[2, 0]], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs_of(learner), whole)


def test_shared_albert_layer_has_one_pair_of_matrices():
    learner = tuned(model_config("albert"), {"name": "lora"})
    assert sum(name.endswith("lora_a") for name, _ in learner.named_parameters()) == 2


@pytest.mark.parametrize(
    ("family", "fields", "layers"),
    [
        ("bert", {"num_layers": 5}, {3, 4}),  # a quarter of the layers, rounded up
        ("gpt", {"num_layers": 3}, {2}),
        ("bart", {"num_layers": 2, "decoder_layers": 3}, {2}),
    ],
)
def test_last_n_trains_top_layers_of_read_stack(family, fields, layers):
    learner = tuned(model_config(family, **fields), {"name": "last_n"})
    learns = {name for name, parameter in learner.backbone.named_parameters() if parameter.requires_grad}
    stack = "decoder.layers." if family == "bart" else "layers."
    assert {
        int(name.removeprefix(stack).split(".")[0]) for name in learns if not name.startswith("final_norm")
    } == layers
    assert ("final_norm.weight" in learns) == (family == "gpt")


@pytest.mark.parametrize(
    ("family", "fields", "tuning", "hint"),
    [
        ("t5", {}, {"name": "bitfit"}, "tuning=ia3"),
        ("albert", {}, {"name": "last_n"}, "tuning=lora"),
        ("bert", {}, {"name": "last_n", "layers": 3}, "tuning.layers=2"),
        ("bart", {"decoder_layers": 1}, {"name": "last_n", "layers": 2}, "tuning.layers=1"),
        ("bert", {}, {"name": "lora", "projections": ("fc_gate", "fc_in")}, "tuning.projections=[fc_in]"),
        ("t5", {}, {"name": "lora", "projections": ("fc_gate",)}, "tuning.projections=[fc_in]"),
        ("bert", {}, {"name": "head", "layers": "concat_last_4"}, "tuning.layers=scalar_mix"),
        ("t5", {}, {"name": "lora", "bias": "lora_only"}, "tuning.bias=none"),
    ],
)
def test_incompatible_methods_are_refused_with_hint(family, fields, tuning, hint):
    problem = first_conflict(tuning_config(**tuning), model_config(family, **fields), TASK)
    assert problem is not None and hint in problem.hint
    assert tuning["name"] in problem.message or "tuning." in problem.message


@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_lora_adapts_fc_gate_of_gated_families(family):
    for fields in FAMILY_SIZES[family]:
        config = model_config(family, **fields)
        tuning = {"name": "lora", "projections": ("fc_gate",)}
        gates = [name for name, _ in build(config, 0).named_modules() if name.endswith("fc_gate")]
        assert (first_conflict(tuning_config(**tuning), config, TASK) is None) == bool(gates)
        if gates:
            learner = tuned(config, tuning)
            assert sum(name.endswith("fc_gate.lora_a") for name, _ in learner.named_parameters()) == len(gates)


@pytest.mark.parametrize(
    ("family", "fields", "expected_message"),
    [
        (
            "bert",
            {"rank": 17},
            "tuning.rank=17: an update of q_proj (16 x 16) has at most rank 16; tuning.rank=16",
        ),
        ("bert", {"rank": 17, "projections": ("fc_in",)}, "an update of fc_in (16 x 24) has at most rank 16"),
        ("llama", {"rank": 9, "projections": ("q_proj", "v_proj")}, "an update of v_proj (16 x 8) has at most rank 8"),
        ("t5", {"rank": 9, "projections": ("k_proj",)}, "an update of k_proj (16 x 8) has at most rank 8"),
        ("bert", {"rank": 16}, None),
        ("t5", {"rank": 16, "projections": ("fc_out",)}, None),
    ],
)
def test_rank_above_width_warns(family, fields, expected_message):
    sizes = {"llama": {"num_key_value_heads": 1}, "t5": {"head_size": 4}}.get(family, {})
    warnings = tuning_config(name="lora", **fields).warnings(None, model_config(family, **sizes))
    assert len(warnings) == (expected_message is not None) and (expected_message or "") in "".join(warnings)


def test_method_without_trainable_parameters_is_refused():
    words = TASK.model_copy(update={"head": "text_to_text"})
    t5 = model_config("t5")
    head = tuning_config(name="head")
    assert "tuning=lora" in first_conflict(head, t5, words).hint
    assert (
        first_conflict(head, model_config("t5", tied=False), words) is None and first_conflict(head, t5, TASK) is None
    )
    headless = SimpleNamespace(learner=lambda backbone, *_: ModelWithHeads(backbone, 0))
    blueprint = SimpleNamespace(model=t5, seed=0, tuning_config=head, learner_config=headless, exits=())
    with pytest.raises(UserError, match="trains no parameter"):
        assemble(blueprint, None)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_lora_outputs_and_gradients_match_peft(family, dora, tmp_path):
    """In both, DoRA's row norms are constants in the gradient."""
    import peft
    import transformers

    from lmtool.weights.padded_model import load
    from tests.weights.published_folders import make

    make(family, folder := tmp_path / "published")
    names = {"bert": ("query", "value"), "t5": ("q", "v")}[family]
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    config = peft.LoraConfig(r=3, lora_alpha=16, target_modules=list(names), init_lora_weights=False, use_dora=dora)
    theirs = peft.get_peft_model(theirs, config).eval()
    ours = load(folder).model
    ours.parts.tune(build(tuning_config(name="lora", rank=3, dora=dora)))
    ours.eval()
    given = {name: tensor for name, tensor in theirs.named_parameters() if "lora_" in name}
    own = {name: tensor for name, tensor in ours.parts.named_parameters() if "lora_" in name}
    assert len(own) == len(given) and given
    # Both list encoder layers before decoder layers, and queries before values.
    with torch.no_grad():
        for mine, other in zip(_ordered(own), _ordered(given), strict=True):
            own[mine].copy_(given[other])
    ids = torch.arange(20).reshape(2, 10) * 7 % 300 + 5
    inputs = {"input_ids": ids} if family == "bert" else {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    with torch.no_grad():
        expected = theirs(**inputs).last_hidden_state
        found = ours(**inputs).hidden
        plain = load(folder).model(**inputs).hidden
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-3)
    ours(**inputs).hidden.pow(3).sum().backward()
    theirs(**inputs).last_hidden_state.pow(3).sum().backward()
    for mine, other in zip(_ordered(own), _ordered(given), strict=True):
        largest = float(given[other].grad.abs().max())
        torch.testing.assert_close(own[mine].grad, given[other].grad, rtol=1e-3, atol=1e-5 * largest)


def _ordered(names):
    """Names of LoRA tensors sorted by stack, layer, attention, linear map and matrix."""
    ranks = {"q_proj": 0, "query": 0, "q": 0, "v_proj": 1, "value": 1, "v": 1}
    attentions = {"self_attn": 0, "SelfAttention": 0, "attention": 0, "cross_attn": 1, "EncDecAttention": 1}

    def place(name):
        pieces = name.split(".")
        numbers = [int(piece) for piece in pieces if piece.isdigit()]
        return (
            "decoder" in pieces,
            numbers[0],
            max(attentions.get(piece, 0) for piece in pieces),
            next(ranks[piece] for piece in reversed(pieces) if piece in ranks),
            [kind in name.lower() for kind in ("lora_magnitude", "lora_b")],
        )

    return sorted(names, key=place)


@pytest.mark.parametrize("tuning", [LORA, {"name": "ia3"}], ids=lambda fields: fields["name"])
@pytest.mark.parametrize("family", ["gpt", "bart", "t5"])
def test_cached_decoding_matches_full_forward(family, tuning):
    """Decoding token by token with a cache gives the states of the whole text."""
    learner = tuned(model_config(family), tuning)
    train(learner)
    backbone, whole = learner.eval().backbone, side((6, 6))
    columns = whole.tokens.unflatten(0, (2, 6)).T

    with torch.no_grad():
        cache = backbone.new_cache(2, 6)
        steps = [Packed(column.contiguous(), (1, 1)) for column in columns]
        if family == "gpt":
            expected = backbone(whole)
            given = [backbone(step, cache=cache) for step in steps]
        else:
            expected = backbone(side(), None, Packed(whole.tokens.repeat(2), (6,) * 4))[:12]
            encoded = backbone.encode(Packed(side().tokens[: sum(LENGTHS[:2])], LENGTHS[:2]))
            given = [backbone.decode(encoded, step, cache=cache) for step in steps]
    torch.testing.assert_close(torch.stack(given, 1).flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_scaled_outputs_keep_autocast_dtype():
    """Scaled keys and values must have the dtype of the unscaled queries."""
    with torch.autocast("cpu", torch.bfloat16):
        assert ScaledOutputs(nn.Linear(4, 4))(torch.ones(2, 4)).dtype == torch.bfloat16
