"""GPT of 2018, Llama and Qwen2: features that other families lack."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models import gpt1
from lmtool.models.configs import Gpt1Config
from lmtool.models.decoder_configs import LlamaConfig, LlamaEncoderConfig
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.types import Packed
from tests.models.parity import CASES, loaded


def test_gpt1_needs_feedforward_of_four_widths_and_drops_the_mask():
    config = CASES["gpt1"].config
    with pytest.raises(UserError, match="feedforward_size=100"):
        gpt1.HF_FORMAT.to_hf_config(Gpt1Config.model_validate({**config.model_dump(), "feedforward_size": 100}))
    assert gpt1.HF_FORMAT.from_hf({"h.0.attn.bias": torch.zeros(2), "strange": torch.zeros(2)}).keys() == {"strange"}


@torch.no_grad()
def test_cache_stores_key_value_heads_only():
    backbone = loaded(CASES["llama"].pair()).ours.backbone
    cache = backbone.new_cache(1, 40)
    backbone(Packed(torch.arange(7), (7,)), cache=cache)
    assert cache.layers[0]._keys_NCAD.shape[2] == 2


@torch.no_grad()
def test_cache_and_its_branch_are_freed_without_the_garbage_collector():
    backbone = loaded(CASES["llama"].pair()).ours.backbone
    cache = backbone.new_cache(1, 40)
    gc.disable()
    try:
        backbone(Packed(torch.arange(7), (7,)), cache=cache)
        branch = cache.branch([0, 0])
        keys = [ref(each.layers[0]._keys_NCAD) for each in (cache, branch)]
        del cache, branch
        assert [key() for key in keys] == [None, None]
    finally:
        gc.enable()


def test_grouped_queries_read_their_key_head():
    attention = CASES["llama"].pair().ours.backbone.layers[0].self_attn
    k_SAD = torch.randn(5, 2, 8)
    spread = attention.repeat_for_queries(k_SAD)
    assert all(torch.equal(spread[:, head], k_SAD[:, head // 3]) for head in range(6))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_old_rope_theta_is_read_and_interleaved_layout_refused(name):
    module, config = CASES[name].module, CASES[name].config
    old = {key: value for key, value in module.HF_FORMAT.to_hf_config(config).items() if key != "rope_parameters"}
    assert module.HF_FORMAT.from_hf_config(old)["positions"]["base"] == 10_000.0
    assert module.HF_FORMAT.from_hf_config({**old, "rope_theta": 7.0})["positions"]["base"] == 7.0
    interleaved = RotaryPositionsConfig(base=5000.0, layout="interleaved")
    with pytest.raises(UserError, match="layout=interleaved"):
        module.HF_FORMAT.to_hf_config(config.model_copy(update={"positions": interleaved}))


def test_key_value_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_heads=9 is not a multiple of num_key_value_heads=4"):
        LlamaConfig(num_key_value_heads=4)


@torch.no_grad()
def test_llama_encoder_attends_in_both_directions():
    """The reference is transformers' layers with a mask that hides nothing."""
    pair = loaded(CASES["llama"].pair())
    ours = build(LlamaEncoderConfig(**pair.ours.backbone.config.model_dump(exclude={"name"})), 0)
    ours.load_state_dict(pair.ours.backbone.state_dict())
    tokens = torch.arange(13) * 7 % 97
    everything = torch.zeros(1, 1, 13, 13)
    theirs = pair.theirs.model(tokens[None], attention_mask=everything).last_hidden_state[0]
    torch.testing.assert_close(ours(Packed(tokens, (13,))), theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(pair.ours.backbone(Packed(tokens, (13,))), theirs, atol=1e-2)
