"""Llama and Qwen2 against transformers: random tiny configurations of unusual sizes, to 1e-5."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, LENGTHS, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from transformers import LlamaConfig as TheirLlamaConfig
from transformers import LlamaForCausalLM, LlamaModel, Qwen2ForCausalLM, Qwen2Model
from transformers import Qwen2Config as TheirQwen2Config

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import llama, qwen2
from lmtool.models.decoder_configs import LlamaConfig, LlamaEncoderConfig, Qwen2Config
from lmtool.models.heads.lm import LMHead
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.types import Packed

FAMILIES = {
    "llama": (LlamaConfig, llama, TheirLlamaConfig, LlamaForCausalLM, LlamaModel),
    "qwen2": (Qwen2Config, qwen2, TheirQwen2Config, Qwen2ForCausalLM, Qwen2Model),
}


def pair_of(family: str, tied: bool = True) -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    ours, module, theirs, language_model, _ = FAMILIES[family]
    config = ours(
        vocab_size=97, num_layers=3, hidden_size=48, num_heads=6, num_key_value_heads=2, feedforward_size=52,
        max_positions=40, positions=RotaryPositionsConfig(base=5000.0), tied=tied,
    )  # fmt: skip
    published = theirs(
        vocab_size=97, num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=52, max_position_embeddings=40, rms_norm_eps=config.norm_epsilon, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=tied,
    )  # fmt: skip
    head = LMHead()
    if not tied:
        head.untie(97, 48)
    model = language_model(published)
    return Pair(Checkpoint(build(config, 0), lm=head), model, module.to_hf, module.from_hf)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_forward_loss_and_gradients(family, tied):
    pair = loaded(pair_of(family, tied))
    pair.ours.double(), pair.theirs.double()
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    # Their angles are in fp32.
    torch.testing.assert_close(pair.ours.heads["lm"](hidden, table), theirs[mask], rtol=1e-5, atol=1e-5)
    at = torch.arange(sum(LENGTHS))[packed.positions + 1 < torch.tensor(LENGTHS)[packed.documents]]
    wanted = F.cross_entropy(theirs[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
    loss = pair.ours.heads["lm"].loss_sum(hidden[at], table, packed.tokens[at + 1]) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


@pytest.mark.parametrize("family", FAMILIES)
def test_key_map_in_both_directions(family):
    pair, bare = loaded(pair_of(family)), FAMILIES[family][-1]
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    assert published.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in published.items())
    back = pair.from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    assert pair.from_hf(bare(pair.theirs.config).state_dict()).keys() == ours.keys()


@torch.no_grad()
def test_packed_and_cached_are_each_text_alone():
    backbone = loaded(pair_of("llama")).ours.backbone.double()
    packed, _, _, _ = texts()
    together = backbone(packed)
    start, length = packed.starts[1], packed.lengths[1]
    tokens = packed.tokens[start : start + length]
    alone = backbone(Packed(tokens, (length,)))
    torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-12)
    cache = backbone.new_cache(1, 40)
    parts = [backbone(Packed(part, (len(part),)), cache=cache) for part in tokens.split(7)]
    torch.testing.assert_close(torch.cat(parts), alone, rtol=0, atol=1e-12)
    # A cache keeps the heads of keys alone.
    assert cache.layers[0]._keys_NCAD.shape[2] == 2


def test_grouped_queries_read_their_own_head():
    attention = pair_of("llama").ours.backbone.layers[0].self_attn
    k_SAD = torch.randn(5, 2, 8)
    spread = attention.for_queries(k_SAD)
    assert all(torch.equal(spread[:, head], k_SAD[:, head // 3]) for head in range(6))


@pytest.mark.parametrize("family", FAMILIES)
def test_config_map_in_both_directions(family):
    pair, (ours, module, theirs, *_) = pair_of(family), FAMILIES[family]
    config = pair.ours.backbone.config
    published = module.to_hf_config(config)
    given = pair.theirs.config.to_dict()
    assert {key: value for key, value in published.items() if given[key] != value} == {"initializer_range": 0.02}
    section = module.from_hf_config(theirs(**published).to_dict())
    assert ours.model_validate({**config.model_dump(), **section}) == config
    old = {key: value for key, value in published.items() if key != "rope_parameters"}
    assert module.from_hf_config(old)["positions"]["base"] == 10_000.0
    assert module.from_hf_config({**old, "rope_theta": 7.0})["positions"]["base"] == 7.0
    interleaved = RotaryPositionsConfig(base=5000.0, layout="interleaved")
    with pytest.raises(UserError, match="layout=interleaved"):
        module.to_hf_config(config.model_copy(update={"positions": interleaved}))


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type='llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type='linear'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types="),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changed, said):
    published = llama.to_hf_config(pair_of("llama").ours.backbone.config)
    with pytest.raises(UserError, match=said):
        llama.from_hf_config({**published, **changed})


def test_fewer_heads_of_keys_than_a_divisor_are_refused():
    with pytest.raises(ValueError, match="num_heads=9 is not a multiple of num_key_value_heads=4"):
        LlamaConfig(num_key_value_heads=4)


@torch.no_grad()
def test_an_encoder_of_the_same_blocks_sees_both_ways():
    """transformers' layers under a mask that hides nothing."""
    pair = loaded(pair_of("llama"))
    ours = build(LlamaEncoderConfig(**pair.ours.backbone.config.model_dump(exclude={"name"})), 0)
    ours.load_state_dict(pair.ours.backbone.state_dict())
    tokens = torch.arange(13) * 7 % 97
    everything = torch.zeros(1, 1, 13, 13)
    theirs = pair.theirs.model(tokens[None], attention_mask=everything).last_hidden_state[0]
    torch.testing.assert_close(ours(Packed(tokens, (13,))), theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(pair.ours.backbone(Packed(tokens, (13,))), theirs, atol=1e-2)
