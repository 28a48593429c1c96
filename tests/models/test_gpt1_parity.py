"""GPT of 2018 against transformers: a random tiny configuration of unusual sizes, fp32, to 1e-5."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, LENGTHS, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel, OpenAIGPTModel

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import gpt1
from lmtool.models.configs import Gpt1Config
from lmtool.models.heads.lm import LMHead
from lmtool.types import Packed


def gpt1_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    config = Gpt1Config(
        vocab_size=97,
        num_layers=3,
        hidden_size=36,
        num_heads=3,
        feedforward_size=144,
        max_positions=40,
        dropout=0.0,
        attention_dropout=0.0,
    )
    published = OpenAIGPTConfig(
        vocab_size=97,
        n_positions=40,
        n_embd=36,
        n_layer=3,
        n_head=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
    )
    ours = Checkpoint(build(config, 0), lm=LMHead())
    return Pair(ours, OpenAIGPTLMHeadModel(published), gpt1.to_hf, gpt1.from_hf)


def test_forward_loss_and_gradients():
    pair = loaded(gpt1_pair())
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    torch.testing.assert_close(pair.ours.heads["lm"](hidden, table), theirs[mask], rtol=1e-5, atol=1e-5)
    at = torch.arange(sum(LENGTHS))[packed.positions + 1 < torch.tensor(LENGTHS)[packed.documents]]
    wanted = F.cross_entropy(theirs[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
    loss = pair.ours.heads["lm"].loss_sum(hidden[at], table, packed.tokens[at + 1]) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


def test_key_map_in_both_directions():
    pair = loaded(gpt1_pair())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    assert published.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in published.items())
    back = pair.from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = OpenAIGPTModel(pair.theirs.config).state_dict()
    assert pair.from_hf(bare).keys() == ours.keys()
    assert gpt1.from_hf({"h.0.attn.bias": torch.zeros(2), "strange": torch.zeros(2)}).keys() == {"strange"}


@torch.no_grad()
def test_packed_and_cached_are_each_text_alone():
    pair = loaded(gpt1_pair())
    backbone = pair.ours.backbone.double()
    packed, _, _, _ = texts()
    together = backbone(packed)
    cache = backbone.new_cache(1, 40)
    start, length = packed.starts[1], packed.lengths[1]
    tokens = packed.tokens[start : start + length]
    alone = backbone(Packed(tokens, (length,)))
    torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-12)
    parts = [backbone(Packed(part, (len(part),)), cache=cache) for part in tokens.split(7)]
    torch.testing.assert_close(torch.cat(parts), alone, rtol=0, atol=1e-12)


def test_config_map_in_both_directions():
    pair = gpt1_pair()
    config = pair.ours.backbone.config
    published = gpt1.to_hf_config(config)
    theirs = pair.theirs.config.to_dict()
    assert {key: value for key, value in published.items() if theirs[key] != value} == {"initializer_range": 0.02}
    section = gpt1.from_hf_config(OpenAIGPTConfig(**published).to_dict())
    assert Gpt1Config.model_validate({**config.model_dump(), **section}) == config
    with pytest.raises(UserError, match="feedforward_size=100"):
        gpt1.to_hf_config(Gpt1Config.model_validate({**config.model_dump(), "feedforward_size": 100}))
    with pytest.raises(UserError, match="afn='relu'"):
        gpt1.from_hf_config({**published, "afn": "relu"})
