"""Every family of transformers, at the sizes of `CASES`, against the transformers classes: logits, losses, gradients,
tensors and configurations, in double precision."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.errors import UserError
from lmtool.models import bert, gpt
from lmtool.models.configs import GptConfig
from lmtool.types import Packed
from tests.models.parity import (
    CASES,
    OUTPUT_LENGTHS,
    VOCABULARY,
    Pair,
    Texts,
    assert_gradients_equal,
    loaded,
    sentence_logits,
)  # fmt: skip

CLASSIFIED = [name for name, case in CASES.items() if case.classifier is not None]
BARE = [name for name, case in CASES.items() if case.bare is not None]
CACHED = [name for name, case in CASES.items() if case.config.architecture == "decoder"]
THEIR_LOGITS = {"next_sentence": "seq_relationship_logits", "sentence_order": "sop_logits"}


def losses(pair: Pair, head: str, hidden_TH: Tensor, read: Texts, output: object) -> tuple[Tensor, Tensor]:
    """Our loss and theirs for a head, after comparing the logits. The token loss is the chunked one of learners, which
    never computes all logits at once."""
    generator = torch.Generator().manual_seed(5)
    default = "prediction_logits" if hasattr(output, "prediction_logits") else "logits"
    theirs, module = getattr(output, THEIR_LOGITS.get(head, default)), pair.ours.heads[head]
    if head in THEIR_LOGITS:
        logits = sentence_logits(pair, head, hidden_TH, read.packed)
        torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5)
        labels = torch.randint(2, (len(logits),), generator=generator)
        return F.cross_entropy(logits, labels), F.cross_entropy(theirs, labels)
    theirs = theirs[read.mask]
    if head == "replaced_token":
        logits = module(hidden_TH)
        torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5)
        replaced = torch.rand(len(logits), generator=generator, dtype=torch.float64).round()
        return tuple(F.binary_cross_entropy_with_logits(values, replaced) for values in (logits, theirs))
    table = pair.ours.backbone.embed.token.weight
    torch.testing.assert_close(module(hidden_TH, table), theirs, rtol=1e-5, atol=1e-5)
    at_M = torch.randperm(len(theirs), generator=generator)[: len(theirs) // 3]
    labels_M = torch.randint(VOCABULARY, (len(at_M),), generator=generator)
    wanted = F.cross_entropy(theirs[at_M], labels_M)
    losses_M, best_M = module.scores(hidden_TH[at_M].detach(), table, labels_M)
    torch.testing.assert_close(losses_M.mean().double(), wanted, rtol=1e-5, atol=0)
    assert torch.equal(best_M, theirs[at_M].argmax(-1))
    return module.loss_sum(hidden_TH[at_M], table, labels_M) / len(at_M), wanted


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_match_transformers(name: str) -> None:
    case = CASES[name]
    pair, texts = loaded(case.pair()).double(), case.texts()
    rows, read = texts.arguments(), texts
    if case.two_stacks:
        read = Texts.random(OUTPUT_LENGTHS, seed=2)
        rows |= read.decoder_arguments()
        hidden_TH = pair.ours.backbone(texts.packed, None, read.packed)
    else:
        hidden_TH = pair.ours.backbone(texts.packed)
    output = case.call(pair.theirs, rows)
    pairs = [losses(pair, head, hidden_TH, read, output) for head in case.heads if head != "pooler"]
    ours, theirs = (sum(values) for values in zip(*pairs, strict=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    ours.backward()
    theirs.backward()
    assert_gradients_equal(pair)


@pytest.mark.parametrize("name", CLASSIFIED)
def test_classifier_logits_match_transformers(name: str) -> None:
    """A token's state, a linear layer with the family's activation, and a linear layer."""
    case = CASES[name]
    pair, texts = loaded(case.classifier_pair()).double(), case.texts(case.classified)
    ours = sentence_logits(pair, "classifier", pair.ours.backbone(texts.packed), texts.packed)
    torch.testing.assert_close(ours, case.call(pair.theirs, texts.arguments()).logits, rtol=1e-5, atol=1e-5)
    assert pair.to_hf(pair.ours.state_dict()).keys() == pair.theirs.state_dict().keys() - case.unused
    assert case.module.HF_FORMAT.class_of_heads(pair.ours.heads).name == type(pair.theirs).__name__


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", CASES)
def test_key_map_round_trip(name: str) -> None:
    case = CASES[name]
    pair = loaded(case.pair())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    written = pair.to_hf(ours)
    assert case.tied <= theirs.keys()
    assert_same(written, {key: tensor for key, tensor in theirs.items() if key not in case.tied | case.unused})
    assert_same(pair.from_hf(written), ours)


@pytest.mark.parametrize("name", BARE)
def test_key_map_reads_bare_models(name: str) -> None:
    case = CASES[name]
    assert case.bare is not None
    pair = case.pair()
    tensors = pair.from_hf(case.bare(case.published).state_dict())
    backbone = {key for key in pair.ours.state_dict() if key.startswith("backbone.")}
    assert backbone <= tensors.keys() <= backbone | {"heads.pooler.dense.weight", "heads.pooler.dense.bias"}


@pytest.mark.parametrize("name", CASES)
def test_config_map_round_trip(name: str) -> None:
    """Through the config class of transformers, which reads and writes config.json."""
    case = CASES[name]
    written, theirs = case.module.HF_FORMAT.to_hf_config(case.config), case.published.to_dict()
    assert written.keys() - theirs.keys() <= {"position_embedding_type"}  # present in transformers 4
    assert {key for key in written.keys() & theirs.keys() if theirs[key] != written[key]} == case.changed
    read = type(case.published)(**{key: value for key, value in written.items() if key != "model_type"}).to_dict()
    assert read["model_type"] == case.published.model_type
    section = json.loads(case.config.model_dump_json()) | case.module.HF_FORMAT.from_hf_config(read)
    assert type(case.config).model_validate_json(json.dumps(section)) == case.config


@pytest.mark.parametrize("name", CASES)
def test_packed_matches_separate_texts(name: str) -> None:
    case = CASES[name]
    backbone = loaded(case.pair()).double().ours.backbone
    texts = case.texts().packed
    outputs = Texts.random(OUTPUT_LENGTHS, seed=2).packed if case.two_stacks else None
    together = backbone(texts) if outputs is None else backbone(texts, None, outputs)
    separate = [
        backbone(text) if outputs is None else backbone(text, None, part)
        for text, part in zip(documents(texts), documents(outputs or texts), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(separate), rtol=0, atol=1e-12)


def documents(packed: Packed) -> list[Packed]:
    """Each text of a batch as a separate batch."""
    ends = [start + length for start, length in zip(packed.starts, packed.lengths, strict=True)]
    return [
        Packed(
            packed.tokens[start:end],
            (end - start,),
            {name: column[start:end] for name, column in packed.columns.items()},
        )
        for start, end in zip(packed.starts, ends, strict=True)
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", CACHED)
def test_cached_parts_match_the_whole_text(name: str) -> None:
    backbone = loaded(CASES[name].pair()).double().ours.backbone
    text = documents(CASES[name].texts().packed)[1]
    cache = backbone.new_cache(1, 40)
    parts = [backbone(Packed(part, (len(part),)), cache=cache) for part in text.tokens.split(7)]
    torch.testing.assert_close(torch.cat(parts), backbone(Packed(text.tokens, text.lengths)), rtol=0, atol=1e-12)


REFUSED = [
    ("roberta", {"hidden_act": "relu"}),
    ("roberta", {"pad_token_id": 0}),
    ("spanbert", {"position_embedding_type": "relative_key"}),
    ("distilbert", {"activation": "relu"}),
    ("albert", {"num_hidden_groups": 2}),
    ("albert", {"hidden_act": "swish"}),
    ("electra", {"tie_word_embeddings": 0.5}),
    ("modernbert", {"hidden_activation": "relu"}),
    ("modernbert", {"classifier_activation": "relu"}),
    ("modernbert", {"norm_bias": True}),
    ("modernbert", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}),
    ("bigbird", {"attention_type": "original_full"}),
    ("bigbird", {"rescale_embeddings": True}),
    ("bigbird", {"use_bias": False}),
    ("bigbird", {"hidden_act": "gelu"}),
    ("deberta", {"relative_attention": False}),
    ("deberta", {"talking_head": True}),
    ("deberta", {"position_buckets": 256}),
    ("deberta_v3", {"relative_attention": False}),
    ("deberta_v3", {"share_att_key": False}),
    ("deberta_v3", {"norm_rel_ebd": "none"}),
    ("deberta_v3", {"conv_kernel_size": 3}),
    ("deberta_v3", {"type_vocab_size": 2}),
    ("xlnet", {"ff_activation": "relu"}),
    ("xlnet", {"attn_type": "uni"}),
    ("xlnet", {"clamp_len": 5}),
    ("xlnet", {"bi_data": True}),
    ("xlnet", {"untie_r": False}),
    ("xlnet", {"d_head": 5}),
    ("gpt1", {"afn": "relu"}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"attention_bias": True}),
    ("llama", {"layer_types": ["sliding_attention"] * 3}),
    ("t5", {"feed_forward_proj": "gated-silu"}),
    ("bart", {"activation_function": "swish"}),
    ("bart", {"decoder_ffn_dim": 7}),
    ("transformer", {"activation_function": "swish"}),
    ("transformer", {"decoder_ffn_dim": 7}),
]


@pytest.mark.parametrize("name,changed", REFUSED, ids=[f"{name}-{next(iter(changed))}" for name, changed in REFUSED])
def test_unsupported_config_values_are_refused(name: str, changed: dict[str, object]) -> None:
    case = CASES[name]
    ((key, value),) = changed.items()
    shown = {"rope_parameters": "rope_type='llama3'", "rope_scaling": "type='linear'", "layer_types": "layer_types="}
    with pytest.raises(UserError, match=shown.get(key, key if name in ("bart", "transformer") else f"{key}={value!r}")):
        case.module.HF_FORMAT.from_hf_config({**case.module.HF_FORMAT.to_hf_config(case.config), **changed})


def test_key_map_keeps_unknown_names():
    strange = {"bert.encoder.layer.0.adapter.weight": torch.zeros(2), "cls.predictions.bias": torch.zeros(3)}
    assert bert.HF_FORMAT.from_hf(strange).keys() == {"bert.encoder.layer.0.adapter.weight", "heads.masked_lm.bias"}
    kept = {"heads.sst2.output.weight": torch.zeros(2)}
    assert gpt.HF_FORMAT.to_hf(kept, GptConfig()).keys() == kept.keys()


def test_key_map_reads_old_names():
    old = {"bert.embeddings.LayerNorm.gamma": torch.zeros(2), "bert.embeddings.position_ids": torch.zeros(2)}
    assert bert.HF_FORMAT.from_hf(old).keys() == {"backbone.embed.norm.weight"}
