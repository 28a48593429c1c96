"""BigBird against transformers: random tiny configurations of unusual sizes, to 1e-5, in training mode, where it draws
its random blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded
from torch import Tensor
from transformers import BigBirdConfig as TheirConfig
from transformers import BigBirdForMaskedLM, BigBirdForSequenceClassification, BigBirdModel

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import bigbird
from lmtool.models.encoder_configs import BigbirdConfig
from lmtool.models.heads.lm import masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.block_sparse import BlockPattern, Blocks
from lmtool.nn.layout import Full
from lmtool.nn.prefix import KeyPrefix
from lmtool.types import Packed

CONFIG = BigbirdConfig(
    vocab_size=97, num_layers=3, hidden_size=36, num_heads=3, feedforward_size=52, max_positions=80, block_size=4,
    random_blocks=2, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
HF_FORMAT = TheirConfig(
    vocab_size=97, num_hidden_layers=3, hidden_size=36, num_attention_heads=3, intermediate_size=52,
    max_position_embeddings=80, block_size=4, num_random_blocks=2, initializer_range=0.2, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, sep_token_id=3, num_labels=4,
)  # fmt: skip
# A text that takes 20 blocks to the full, one that leaves three places of its 18th, and one that is dense.
LENGTHS = (80, 69, 29)
POOLER = ("bert.pooler.weight", "bert.pooler.bias")


def from_hf(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the pooler of every published class: it is no part of these two."""
    return bigbird.from_hf({name: tensor for name, tensor in tensors.items() if name not in POOLER})


MAPS = (bigbird.to_hf, from_hf)


def masked_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    return Pair(Checkpoint(backbone, masked_lm=masked_lm_head(backbone)), BigBirdForMaskedLM(HF_FORMAT), *MAPS)


def classifier_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    heads = {"pooler": pooler(backbone), "classifier": SequenceHead(36, 4)}
    return Pair(Checkpoint(backbone, **heads), BigBirdForSequenceClassification(HF_FORMAT), *MAPS)


def texts() -> tuple[Packed, list[tuple[Tensor, Tensor]]]:
    """Packed, and the tokens and segments of each text as a batch of one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 97, (sum(LENGTHS),), generator=generator)
    segments = torch.randint(2, (sum(LENGTHS),), generator=generator)
    rows = zip(tokens[None].split(LENGTHS, 1), segments[None].split(LENGTHS, 1), strict=True)
    return Packed(tokens, LENGTHS, {"segment": segments}), list(rows)


def theirs_of(pair: Pair) -> Tensor:
    """Their logits of each text, one after the other: what a batch's longest text is decides how they treat all."""
    pair.theirs.train()
    every = []
    for ids, segments in texts()[1]:
        pair.theirs.bert.set_attention_type("block_sparse")
        every.append(
            pair.theirs(ids, attention_mask=torch.ones_like(ids), token_type_ids=segments).logits.flatten(0, -2)
        )
    return torch.cat(every)


def test_forward_loss_and_gradients():
    pair = loaded(masked_pair())
    pair.ours.double(), pair.theirs.double()
    packed, _ = texts()
    theirs = theirs_of(pair)
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    head = pair.ours.heads["masked_lm"]
    torch.testing.assert_close(head(hidden, table), theirs, rtol=1e-8, atol=1e-8)
    at = torch.tensor([0, 3, 7, 30, 44, 50, 78, 79, 80, 122, 148, 149, 170])
    labels = packed.tokens[at].flip(0)
    wanted = F.cross_entropy(theirs[at], labels)
    loss = head.loss_sum(hidden[at], table, labels) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


def test_classifier():
    pair = loaded(classifier_pair())
    packed, _ = texts()
    heads = pair.ours.heads
    ours = heads["classifier"](heads["pooler"](summary(pair.ours.backbone(packed), packed, "first")))
    torch.testing.assert_close(ours, theirs_of(pair), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [masked_pair, classifier_pair])
def test_key_map_in_both_directions(make):
    pair = loaded(make())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    copies = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias", *POOLER}
    assert published.keys() == theirs.keys() - copies
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in published.items())
    back = pair.from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = pair.from_hf(BigBirdModel(HF_FORMAT).state_dict())
    assert bare.keys() - {"pooler.weight", "pooler.bias"} == {name for name in ours if name.startswith("backbone.")}


def test_config_map_in_both_directions():
    published = bigbird.to_hf_config(CONFIG)
    theirs = HF_FORMAT.to_dict()
    assert {key: value for key, value in published.items() if theirs.get(key) != value} == {"initializer_range": 0.02}
    section = bigbird.from_hf_config(TheirConfig(**published).to_dict())
    assert BigbirdConfig.model_validate({**CONFIG.model_dump(), **section}) == CONFIG
    with pytest.raises(UserError, match="pattern_seed=3"):
        bigbird.to_hf_config(CONFIG.model_copy(update={"pattern_seed": 3}))


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"attention_type": "original_full"}, "attention_type='original_full'"),
        ({"rescale_embeddings": True}, "rescale_embeddings=True"),
        ({"use_bias": False}, "use_bias=False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changed, said):
    with pytest.raises(UserError, match=said):
        bigbird.from_hf_config({**bigbird.to_hf_config(CONFIG), **changed})


def test_longer_texts_alone_are_seen_by_blocks():
    backbone = build(CONFIG, 0)
    assert backbone.blocks.longest_dense == 36
    assert backbone.mask(1, Packed(torch.arange(40), (36, 4))) == Full()
    backbone.prefix = KeyPrefix(3, 5, 36)
    assert backbone.mask(1, Packed(torch.arange(41), (37, 4))) == Blocks(BlockPattern(4, 2, 3, 1), (37, 4), 3)
