"""T5, BART and the transformer of 2017 against transformers: random tiny configurations of unusual sizes, fp32, to
1e-5."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BartConfig as PublishedBartConfig
from transformers import BartForConditionalGeneration, BartModel, MarianMTModel, T5ForConditionalGeneration
from transformers import MarianConfig as PublishedMarianConfig
from transformers import T5Config as PublishedT5Config

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import bart, t5, transformer
from lmtool.models.encoder_decoder_configs import BartConfig, T5Config, Transformer2017Config
from lmtool.models.heads.lm import lm_head
from lmtool.types import Packed
from tests.models.test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded

INPUTS, OUTPUTS = (5, 40, 1, 17, 16), (7, 1, 23, 40, 16)
SIZES = {"vocab_size": 97, "num_layers": 3, "decoder_layers": 2, "feedforward_size": 52, "max_positions": 40}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def t5_pair(version: str) -> Pair:
    """Heads of width 10 that do not divide the hidden width; distances beyond the last bucket."""
    torch.manual_seed(GENERATOR_SEED)
    kind = {"feedforward": "gated_gelu", "tied": False} if version == "1.1" else {}
    positions = {"name": "t5", "buckets": 12, "max_distance": 20}
    config = T5Config.model_validate(
        {**SIZES, **NO_DROPOUT, **kind, "hidden_size": 36, "num_heads": 5, "head_size": 10, "positions": positions}
    )
    published = PublishedT5Config(
        vocab_size=97,
        d_model=36,
        d_kv=10,
        d_ff=52,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=5,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=20,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if version == "1.1" else "relu",
        tie_word_embeddings=version == "1.0",
    )
    theirs = T5ForConditionalGeneration(published)
    if version == "1.1":
        # transformers ties it by force and keeps the scaling only.
        theirs.lm_head.weight = nn.Parameter(torch.randn(97, 36) * 0.2)
    backbone = build(config, 0)
    return Pair(Checkpoint(backbone, lm=lm_head(backbone)), theirs, t5.to_hf, t5.from_hf)


def bart_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    config = BartConfig(**SIZES, **NO_DROPOUT, hidden_size=36, num_heads=3, activation_dropout=0.0)
    published = PublishedBartConfig(
        vocab_size=97,
        d_model=36,
        max_position_embeddings=40,
        encoder_layers=3,
        decoder_layers=2,
        encoder_ffn_dim=52,
        decoder_ffn_dim=52,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        dropout=0.0,
        init_std=0.2,
    )
    theirs = BartForConditionalGeneration(published)
    theirs.final_logits_bias.normal_()
    backbone = build(config, 0)
    return Pair(Checkpoint(backbone, lm=lm_head(backbone)), theirs, bart.to_hf, bart.from_hf)


def transformer_pair() -> Pair:
    """Marian's architecture is the paper's, but for the order of the channels."""
    torch.manual_seed(GENERATOR_SEED)
    config = Transformer2017Config(**SIZES, **NO_DROPOUT, hidden_size=36, num_heads=3)
    published = PublishedMarianConfig(
        vocab_size=97,
        d_model=36,
        max_position_embeddings=40,
        encoder_layers=3,
        decoder_layers=2,
        encoder_ffn_dim=52,
        decoder_ffn_dim=52,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        init_std=0.2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    theirs = MarianMTModel(published)
    backbone = build(config, 0)
    maps = transformer.to_hf, transformer.from_hf
    return Pair(Checkpoint(backbone, lm=lm_head(backbone)), theirs, *maps)


PAIRS = {
    "t5": lambda: t5_pair("1.0"),
    "t5_v11": lambda: t5_pair("1.1"),
    "bart": bart_pair,
    "transformer": transformer_pair,
}
TIED = {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
TIED |= {f"model.{name}" for name in TIED}
CONSTANT = {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}


def texts(lengths: tuple[int, ...], seed: int) -> tuple[Packed, Tensor, Tensor]:
    """The same texts packed, and as padded ids and mask. Tokens 0 and 1 are transformers' paddings."""
    tokens = torch.randint(2, 97, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.ones(mask.shape, dtype=torch.int64)
    ids[mask] = tokens
    return Packed(tokens, lengths), ids, mask


@pytest.mark.parametrize("name", PAIRS)
def test_forward_loss_and_gradients(name):
    pair = loaded(PAIRS[name]())
    inputs, input_ids, input_mask = texts(INPUTS, 1)
    outputs, output_ids, output_mask = texts(OUTPUTS, 2)
    labels = outputs.tokens.flip(0)
    theirs = pair.theirs(
        input_ids, attention_mask=input_mask.long(), decoder_input_ids=output_ids,
        decoder_attention_mask=output_mask.long(),
    ).logits  # fmt: skip
    hidden = pair.ours.backbone(inputs, None, outputs)
    table, head = pair.ours.backbone.embed.token.weight, pair.ours.heads["lm"]
    torch.testing.assert_close(head(hidden, table), theirs[output_mask], rtol=1e-5, atol=1e-5)
    wanted = F.cross_entropy(theirs[output_mask], labels)
    loss = head.loss_sum(hidden, table, labels) / len(labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    each, best = head.scores(hidden.detach(), table, labels)
    torch.testing.assert_close(each.mean(), wanted, rtol=1e-5, atol=0)
    assert torch.equal(best, theirs[output_mask].argmax(-1))
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


@pytest.mark.parametrize("name", PAIRS)
def test_key_map_in_both_directions(name):
    pair = loaded(PAIRS[name]())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    copies = TIED - {"lm_head.weight"} if name == "t5_v11" else TIED
    copies = copies | CONSTANT if name == "transformer" else copies
    assert published.keys() == theirs.keys() - copies
    for key, tensor in published.items():
        assert torch.equal(tensor, theirs[key]), key
    back = pair.from_hf(published)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in ours.items())


@pytest.mark.parametrize("name", PAIRS)
def test_packed_is_each_text_alone(name):
    pair = loaded(PAIRS[name]())
    backbone = pair.ours.backbone.double()
    inputs, outputs = texts(INPUTS, 1)[0], texts(OUTPUTS, 2)[0]
    together = backbone(inputs, None, outputs)
    for number, (length, start) in enumerate(zip(outputs.lengths, outputs.starts, strict=True)):
        at, size = inputs.starts[number], inputs.lengths[number]
        read = Packed(outputs.tokens[start : start + length], (length,))
        alone = backbone(Packed(inputs.tokens[at : at + size], (size,)), None, read)
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-12)


def test_bare_bart_is_read():
    pair = bart_pair()
    tensors = bart.from_hf(BartModel(pair.theirs.config).state_dict())
    assert tensors.keys() == {name for name in pair.ours.state_dict() if name != "heads.lm.bias"}


def test_leftovers_of_old_files_are_dropped():
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert t5.from_hf({table: torch.zeros(32, 8)}) == {}
    assert bart.from_hf({"encoder.version": torch.zeros(1), "model.decoder.version": torch.zeros(1)}) == {}


def test_head_of_t5_is_told_from_a_copy_of_the_table():
    tensors = t5_pair("1.0").theirs.state_dict()
    assert "lm_head.weight" in tensors and "heads.lm.output.weight" not in t5.from_hf(tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    assert "heads.lm.output.weight" in t5.from_hf(tensors)


def test_transformer_refuses_constants():
    tensors = transformer_pair().theirs.state_dict()
    tensors["final_logits_bias"] = torch.ones(1, 97)
    with pytest.raises(UserError, match="final_logits_bias"):
        transformer.from_hf(tensors)


def test_key_map_keeps_what_it_does_not_know():
    for family, config in ((t5, T5Config()), (bart, BartConfig()), (transformer, Transformer2017Config())):
        assert family.from_hf({"encoder.strange.weight": torch.zeros(2)}).keys() <= {
            "encoder.strange.weight", "model.encoder.strange.weight",
        }  # fmt: skip
        assert "heads.sst2.output.weight" in family.to_hf(
            {"heads.sst2.output.weight": torch.zeros(2), "backbone.embed.token.weight": torch.zeros(4, 2)}, config
        )


def section_of(pair: Pair) -> dict:
    return pair.ours.backbone.config.model_dump()


MAPS = {"t5": t5, "t5_v11": t5, "bart": bart, "transformer": transformer}
CLASSES = {"t5": PublishedT5Config, "bart": PublishedBartConfig, "marian": PublishedMarianConfig}


@pytest.mark.parametrize("name", PAIRS)
def test_config_map_in_both_directions(name):
    pair, family = PAIRS[name](), MAPS[name]
    published = family.to_hf_config(pair.ours.backbone.config)
    kind = CLASSES[published["model_type"]]
    loaded_by_them = kind(**{key: value for key, value in published.items() if key != "model_type"}).to_dict()
    theirs = pair.theirs.config.to_dict()
    neutral = {
        "init_std",
        "initializer_factor",
        "decoder_start_token_id",
        "pad_token_id",
        "eos_token_id",
        "n_positions",
    }
    neutral |= {"forced_eos_token_id"}
    assert {key: value for key, value in loaded_by_them.items() if key not in neutral} == {
        key: value for key, value in theirs.items() if key not in neutral
    }
    for data in (published, json.loads(json.dumps(loaded_by_them))):
        section = {**section_of(pair), **family.from_hf_config(data)}
        assert type(pair.ours.backbone.config).model_validate_json(json.dumps(section)) == pair.ours.backbone.config


@pytest.mark.parametrize("name", PAIRS)
def test_what_has_no_place_in_a_published_config_is_refused(name):
    pair, family = PAIRS[name](), MAPS[name]
    other = type(pair.ours.backbone.config).model_validate({**section_of(pair), "positions": {"name": "alibi"}})
    with pytest.raises(UserError, match="model.positions=alibi"):
        family.to_hf_config(other)
    published = family.to_hf_config(pair.ours.backbone.config)
    wrong = {"feed_forward_proj": "gated-silu"} if family is t5 else {"activation_function": "swish"}
    with pytest.raises(UserError, match=next(iter(wrong))):
        family.from_hf_config({**published, **wrong})
    if family is not t5:
        with pytest.raises(UserError, match="decoder_ffn_dim"):
            family.from_hf_config({**published, "decoder_ffn_dim": 7})
        with pytest.raises(UserError, match="norm_epsilon"):
            family.to_hf_config(type(other).model_validate({**section_of(pair), "norm_epsilon": 1e-6}))


def test_config_of_the_first_t5_is_read():
    """The file of t5-small leaves most keys out and has some of its own."""
    data = {
        "architectures": ["T5WithLMHeadModel"], "d_ff": 2048, "d_kv": 64, "d_model": 512, "decoder_start_token_id": 0,
        "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6,
        "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128,
    }  # fmt: skip
    section = T5Config.model_validate(t5.from_hf_config(data))
    assert (section.feedforward, section.tied, section.layers_of_decoder) == ("relu", True, 6)
    gated = {**data, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    section = T5Config.model_validate(t5.from_hf_config(gated))
    assert (section.feedforward, section.tied) == ("gated_gelu", False)


def test_marian_defaults_are_no_transformer():
    published = transformer.to_hf_config(transformer_pair().ours.backbone.config)
    with pytest.raises(UserError, match="activation_function='gelu'"):
        transformer.from_hf_config({key: value for key, value in published.items() if key != "activation_function"})
