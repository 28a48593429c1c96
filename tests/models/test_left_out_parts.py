"""model.without: transformers whose blocks lack parts, against a plain forward pass written out here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lmtool.cli.main import main
from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models import bert, gpt, llama
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.decoder_configs import LlamaConfig
from lmtool.types import Packed
from tests.figures import quick_runs as quick_runs

PARTS = ("residual", "norm", "scaling", "feed_forward", "projections")
CASES = [None, *[(part,) for part in PARTS], ("residual", "norm"), PARTS]
LENGTHS = (7, 1, 12)
WIDTH, HEADS = 24, 3
SIZES = {
    "vocab_size": 50, "num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "feedforward_size": 40,
    "max_positions": 16,
}  # fmt: skip
FAMILIES = {
    "bert": (BertConfig(**SIZES), bert),
    "gpt": (GptConfig(**SIZES), gpt),
    "llama": (LlamaConfig(**SIZES, num_key_value_heads=HEADS, initializer_std=0.2), llama),
}


def model_without(family, without):
    config = type(FAMILIES[family][0])(**{**dict(FAMILIES[family][0]), "without": without, "initializer_std": 0.2})
    return build(config, 0).double().eval()


def linear(weights, name, x):
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(weights, name, x, without, epsilon):
    if "norm" in without:
        assert f"{name}.weight" not in weights
        return x
    weight = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        return F.layer_norm(x, x.shape[-1:], weight, weights[f"{name}.bias"], epsilon)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotated(x_ALD, base):
    half = x_ALD.shape[-1] // 2
    angles = torch.arange(x_ALD.shape[1]).double()[:, None] * base ** (-torch.arange(half).double() / half)
    first, second = x_ALD[..., :half], x_ALD[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )  # fmt: skip


def attention(weights, path, x, without, causal, base):
    q, k, v = (
        (x if "projections" in without else linear(weights, f"{path}.{name}", x)).view(-1, HEADS, WIDTH // HEADS)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k, v = (states.transpose(0, 1) for states in (q, k, v))
    if base is not None:
        q, k = rotated(q, base), rotated(k, base)
    scores = q @ k.transpose(1, 2)
    if "scaling" not in without:
        scores = scores / math.sqrt(WIDTH // HEADS)
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    return linear(weights, f"{path}.out_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH))


def feed_forward(weights, path, x, family):
    if family == "llama":
        return linear(
            weights,
            f"{path}.fc_out",
            F.silu(linear(weights, f"{path}.fc_gate", x)) * linear(weights, f"{path}.fc_in", x),
        )
    gelu = F.gelu(linear(weights, f"{path}.fc_in", x), approximate="tanh" if family == "gpt" else "none")
    return linear(weights, f"{path}.fc_out", gelu)


def plain_forward(family, model, tokens, without):
    """The states of one text, from the weights alone."""
    weights, config, post = dict(model.state_dict()), model.config, family == "bert"
    epsilon, base = config.norm_epsilon, config.positions.base if family == "llama" else None
    x = weights["embed.token.weight"][tokens]
    if family != "llama":
        x = x + weights["embed.position.weight"][: len(tokens)]
    if post:
        x = norm(weights, "embed.norm", x + weights["embed.segment.weight"][0], without, epsilon)
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        for sublayer, its_norm in (("self_attn", f"{layer}.norm1"), ("ffn", f"{layer}.norm2")):
            if sublayer == "ffn" and "feed_forward" in without:
                assert not [name for name in weights if name.startswith((f"{layer}.ffn", its_norm))]
                continue
            read = x if post else norm(weights, its_norm, x, without, epsilon)
            path = f"{layer}.{sublayer}"
            if sublayer == "ffn":
                out = feed_forward(weights, path, read, family)
            else:
                out = attention(weights, path, read, without, not post, base)
            x = out if "residual" in without else x + out
            x = norm(weights, its_norm, x, without, epsilon) if post else x
    return x if post else norm(weights, "final_norm", x, without, epsilon)


@torch.no_grad()
@pytest.mark.parametrize("without", CASES, ids=lambda parts: "+".join(parts or ("none",)))
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_match_a_plain_forward_of_each(family, without):
    model = model_without(family, without)
    for name, parameter in model.named_parameters():  # norms and biases that are not those of the start
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    tokens = torch.arange(sum(LENGTHS)) * 7 % 50
    states = model(Packed(tokens, LENGTHS))
    plain = [plain_forward(family, model, text, without or ()) for text in tokens.split(LENGTHS)]
    torch.testing.assert_close(states, torch.cat(plain), rtol=0, atol=1e-10)
    read_M = torch.tensor([0, 9, 19])
    torch.testing.assert_close(model(Packed(tokens, LENGTHS), read_M=read_M), states[read_M], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("without", CASES[1:], ids=lambda parts: "+".join(parts))
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_decoders_write_from_a_cache_as_from_the_whole_text(family, without):
    model, tokens = model_without(family, without), torch.arange(12) * 7 % 50
    cache = model.new_cache(1, 12)
    states = [model(Packed(part, (len(part),)), cache=cache) for part in tokens.split((5, 1, 6))]
    torch.testing.assert_close(torch.cat(states), model(Packed(tokens, (12,))), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_and_an_empty_list_leave_out_nothing(family):
    whole, empty = model_without(family, None), model_without(family, ())
    assert whole.state_dict().keys() == empty.state_dict().keys()
    assert all(torch.equal(tensor, empty.state_dict()[name]) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_remaining_weights_start_as_in_the_whole_model(family):
    whole = model_without(family, None).state_dict()
    for part in PARTS:
        assert all(
            torch.equal(tensor, whole[name]) for name, tensor in model_without(family, (part,)).state_dict().items()
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_no_class_for_a_model_without_parts(family):
    config, module = FAMILIES[family]
    module.HF_FORMAT.to_hf_config(config.model_copy(update={"dropout": 0.0}))
    with pytest.raises(UserError, match=r"model.without=\[norm,residual\]: .* has all parts of the block"):
        module.HF_FORMAT.to_hf_config(config.model_copy(update={"without": ("norm", "residual"), "dropout": 0.0}))


def test_shared_key_heads_need_projections():
    with pytest.raises(ValueError, match="num_heads=4 and num_key_value_heads=2"):
        LlamaConfig(**{**SIZES, "num_heads": 4}, num_key_value_heads=2, without=("projections",))


def test_adapters_after_a_missing_sublayer_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("A short text of several words, which is read again and again.\n\n" * 60)
    sizes = ["model.vocab_size=300", "model.hidden_size=16", "model.num_heads=2", "model.feedforward_size=16"]
    data = ["data=text", f"data.path={text}", "max_steps=2", "batch_tokens=256", "max_length=32"]
    run = ["pretrain", "model=gpt_tiny", "model.without=[feed_forward]", "name=partial", *sizes, *data]
    assert main(run) == 0
    assert main(["export", "checkpoint=runs/partial", "output=exported"]) == 2
    assert "model.without=[feed_forward]: GPT-2 in transformers has all parts of the block" in capsys.readouterr().err
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "good words,yes\nbad words,no\n" * 20)
    task = ["finetune", "task=classification", f"task.path={rows}", "checkpoint=runs/partial", "max_steps=2"]
    assert main([*task, "tuning=adapter"]) == 2
    assert "no empty slot for an adapter at backbone.layers.0.ffn_adapter" in capsys.readouterr().err
    assert main([*task, "tuning=lora", "tuning.projections=[q_proj]", "name=tuned"]) == 0


def test_families_without_the_shared_block_have_no_such_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "model=xlnet_tiny", "model.without=[norm]"]) == 2
    assert "unknown key model.without" in capsys.readouterr().err
