"""BERT and GPT-2 against transformers: random tiny configurations of unusual sizes, fp32, to 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig as PublishedBertConfig
from transformers import BertForPreTraining, BertModel, GPT2Config, GPT2LMHeadModel, GPT2Model

from lmtool.config.tables import build
from lmtool.models import bert, gpt
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.models.heads.lm import LMHead, MaskedLMHead
from lmtool.models.heads.sequence import Pooler, SequenceHead, summary
from lmtool.types import Packed

SIZES = {"vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52}
LENGTHS = (5, 40, 1, 17, 16)
GENERATOR_SEED = 11


class Checkpoint(nn.Module):
    """Backbone and heads under the names of a checkpoint."""

    def __init__(self, backbone: nn.Module, **heads: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads)


@dataclass
class Pair:
    ours: Checkpoint
    theirs: nn.Module
    names: Callable
    from_hf: Callable

    def to_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.names(tensors, self.ours.backbone.config)


def bert_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    config = BertConfig(**SIZES, max_positions=40, dropout=0.0, attention_dropout=0.0)
    published = PublishedBertConfig(
        vocab_size=97,
        num_hidden_layers=3,
        hidden_size=36,
        num_attention_heads=3,
        intermediate_size=52,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    ours = Checkpoint(
        build(config, 0),
        masked_lm=MaskedLMHead(36, 97, "gelu", config.norm_epsilon),
        pooler=Pooler(36),
        next_sentence=SequenceHead(36, 2),
    )
    return Pair(ours, BertForPreTraining(published), bert.to_hf, bert.from_hf)


def gpt_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    config = GptConfig(**SIZES, max_positions=40, dropout=0.0, attention_dropout=0.0)
    published = GPT2Config(
        vocab_size=97,
        n_layer=3,
        n_embd=36,
        n_head=3,
        n_inner=52,
        n_positions=40,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Pair(Checkpoint(build(config, 0), lm=LMHead()), GPT2LMHeadModel(published), gpt.to_hf, gpt.from_hf)


PAIRS = {"bert": bert_pair, "gpt": gpt_pair}


def loaded(pair: Pair) -> Pair:
    """Their weights in our model, every name accounted for. Biases are made to differ from zero first."""
    with torch.no_grad():
        for parameter in pair.theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    pair.ours.load_state_dict(pair.from_hf(pair.theirs.state_dict()), strict=True)
    return pair


def texts() -> tuple[Packed, Tensor, Tensor, Tensor]:
    """The same texts packed, and as padded ids, attention mask and segments."""
    generator = torch.Generator().manual_seed(1)
    # Token 0 is transformers' padding, whose row never learns.
    tokens = torch.randint(1, 97, (sum(LENGTHS),), generator=generator)
    segments = torch.randint(2, (sum(LENGTHS),), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids, types = torch.zeros(mask.shape, dtype=torch.int64), torch.zeros(mask.shape, dtype=torch.int64)
    ids[mask], types[mask] = tokens, segments
    return Packed(tokens, LENGTHS, {"segment": segments}), ids, mask, types


def assert_gradients_equal(pair: Pair) -> None:
    """Their gradients, renamed, are ours, relative to each tensor's largest; a key's bias has none but rounding."""
    theirs = pair.from_hf({name: parameter.grad for name, parameter in pair.theirs.named_parameters()})
    ours = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=0.1)
        difference = (ours[name] - gradient).abs().max() / scale
        assert difference < 1e-5, (name, difference)


def test_bert_forward_loss_and_gradients():
    pair = loaded(bert_pair())
    packed, ids, mask, types = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long(), token_type_ids=types)
    ours, heads = pair.ours, pair.ours.heads
    hidden = ours.backbone(packed)
    logits = heads["masked_lm"](hidden, ours.backbone.embed.token.weight)
    order = heads["next_sentence"](heads["pooler"](summary(hidden, packed, "first")))
    torch.testing.assert_close(logits, theirs.prediction_logits[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(order, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    at = torch.tensor([0, 3, 7, 30, 44, 50, 78])
    labels, next_labels = packed.tokens[at].flip(0), torch.tensor([0, 1, 1, 0, 1])
    wanted = F.cross_entropy(theirs.prediction_logits[mask][at], labels) + F.cross_entropy(
        theirs.seq_relationship_logits, next_labels
    )
    # The loss as learners take it: the rows that predict first, then the head, never all logits.
    loss = heads["masked_lm"].loss_sum(hidden[at], ours.backbone.embed.token.weight, labels) / len(at)
    loss = loss + F.cross_entropy(order, next_labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


def test_gpt_forward_loss_and_gradients():
    pair = loaded(gpt_pair())
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    hidden = pair.ours.backbone(packed)
    table = pair.ours.backbone.embed.token.weight
    torch.testing.assert_close(pair.ours.heads["lm"](hidden, table), theirs[mask], rtol=1e-5, atol=1e-5)
    at = torch.arange(sum(LENGTHS))[packed.positions + 1 < torch.tensor(LENGTHS)[packed.documents]]
    labels = packed.tokens[at + 1]
    wanted = F.cross_entropy(theirs[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
    loss = pair.ours.heads["lm"].loss_sum(hidden[at], table, labels) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


@pytest.mark.parametrize("name", PAIRS)
def test_key_map_in_both_directions(name):
    pair = loaded(PAIRS[name]())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "lm_head.weight"}
    assert published.keys() == theirs.keys() - tied
    for key, tensor in published.items():
        assert torch.equal(tensor, theirs[key]), key
    back = pair.from_hf(published)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in ours.items())


@pytest.mark.parametrize("name,bare", [("bert", BertModel), ("gpt", GPT2Model)])
def test_key_map_reads_bare_models(name, bare):
    pair = PAIRS[name]()
    tensors = pair.from_hf(bare(pair.theirs.config).state_dict())
    wanted = {key for key in pair.ours.state_dict() if key.startswith(("backbone.", "heads.pooler."))}
    assert tensors.keys() == wanted


def test_key_map_keeps_what_it_does_not_know():
    strange = {"bert.encoder.layer.0.adapter.weight": torch.zeros(2), "cls.predictions.bias": torch.zeros(3)}
    assert bert.from_hf(strange).keys() == {"bert.encoder.layer.0.adapter.weight", "heads.masked_lm.bias"}
    kept = {"heads.sst2.output.weight": torch.zeros(2)}
    assert gpt.to_hf(kept, GptConfig()).keys() == kept.keys()


def test_key_map_reads_old_names():
    old = {"bert.embeddings.LayerNorm.gamma": torch.zeros(2), "bert.embeddings.position_ids": torch.zeros(2)}
    assert bert.from_hf(old).keys() == {"backbone.embed.norm.weight"}
