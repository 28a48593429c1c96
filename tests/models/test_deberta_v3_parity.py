"""DeBERTa V3 against transformers: random tiny configurations of unusual sizes, in double precision."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2ForSequenceClassification, DebertaV2Model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.heads.lm import masked_lm_head
from lmtool.heads.sequence import SequenceHead, pooler, summary
from lmtool.models import deberta_v3
from lmtool.models.disentangled import BucketedPlaces
from lmtool.models.encoder_configs import DebertaV3Config
from lmtool.types import Packed

SIZES = {
    "vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52, "max_positions": 60,
    "buckets": 8, "max_distance": 20, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MAPS = (deberta_v3.to_published, deberta_v3.from_published)


def published(config: DebertaV3Config) -> DebertaV2Config:
    return DebertaV2Config(**{**deberta_v3.published_config(config), "initializer_range": 0.2, "num_labels": 4})


def masked_pair(**fields) -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    config = DebertaV3Config(**SIZES | fields)
    backbone = build(config, 0)
    theirs = DebertaV2ForMaskedLM(published(config)).eval()
    return Pair(Checkpoint(backbone, masked_lm=masked_lm_head(backbone)), theirs, *MAPS)


@pytest.mark.parametrize(
    "fields", [{}, {"positions": {"name": "learned"}}, {"scores": ("c2p",)}, {"scores": ("p2c",)}, {"buckets": 64}]
)
def test_forward_loss_and_gradients(fields):
    """Texts longer than the buckets are, and shorter."""
    pair = loaded(masked_pair(**fields))
    pair.ours.double(), pair.theirs.double()
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    head = pair.ours.heads["masked_lm"]
    # Their scale is in fp32.
    torch.testing.assert_close(head(hidden, table), theirs[mask], rtol=1e-6, atol=1e-6)
    at = torch.tensor([0, 3, 7, 30, 44, 50, 78])
    labels = packed.tokens[at].flip(0)
    wanted = F.cross_entropy(theirs[mask][at], labels)
    loss = head.loss_sum(hidden[at], table, labels) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-7, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


def test_classifier():
    torch.manual_seed(GENERATOR_SEED)
    config = DebertaV3Config(**SIZES)
    backbone = build(config, 0)
    heads = {"pooler": pooler(backbone), "classifier": SequenceHead(36, 4)}
    theirs = DebertaV2ForSequenceClassification(published(config)).eval()
    pair = loaded(Pair(Checkpoint(backbone, **heads), theirs, *MAPS))
    packed, ids, mask, _ = texts()
    wanted = pair.theirs(ids, attention_mask=mask.long()).logits
    heads = pair.ours.heads
    ours = heads["classifier"](heads["pooler"](summary(pair.ours.backbone(packed), packed, "first")))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_key_map_in_both_directions():
    pair = loaded(masked_pair())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    given = pair.to_published(ours)
    assert given.keys() == theirs.keys() - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in given.items())
    back = pair.from_published(given)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = pair.from_published(DebertaV2Model(pair.theirs.config).state_dict())
    assert bare.keys() == {name for name in ours if name.startswith("backbone.")}


@pytest.mark.parametrize("buckets,farthest", [(256, 512), (32, 128), (8, 20)])
def test_buckets_are_the_published_ones(buckets, farthest):
    places = BucketedPlaces(buckets, 4, torch.nn.Identity(), farthest)
    distances = torch.arange(-3 * farthest, 3 * farthest + 1)
    assert torch.equal(places.place(distances), make_log_bucket_position(distances, buckets, farthest).long())


@torch.no_grad()
def test_each_term_of_the_scores_changes_the_states():
    states = [loaded(masked_pair(scores=terms)).ours.backbone(texts()[0]) for terms in [("c2p", "p2c"), ("c2p",), ()]]
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(states, states[1:], strict=False))


@torch.no_grad()
def test_a_text_reads_the_same_beside_a_long_one():
    """The rows of the table that a tile reads go by its longest text."""
    backbone = loaded(masked_pair()).ours.backbone.double()
    tokens = torch.arange(1, 60)
    together = backbone(Packed(tokens, (9, 50)))
    torch.testing.assert_close(together[:9], backbone(Packed(tokens[:9], (9,))), rtol=0, atol=1e-12)


def test_config_map_in_both_directions():
    config = DebertaV3Config(**SIZES)
    given = deberta_v3.published_config(config)
    theirs = published(config).to_dict()
    assert {key: value for key, value in given.items() if theirs[key] != value} == {"initializer_range": 0.02}
    section = deberta_v3.from_published_config(DebertaV2Config(**given).to_dict())
    assert (
        DebertaV3Config.model_validate_json(json.dumps({**json.loads(config.model_dump_json()), **section})) == config
    )
    assert deberta_v3.from_published_config({**given, "pos_att_type": "p2c|c2p"})["scores"] == ["p2c", "c2p"]


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"relative_attention": False}, "relative_attention=False"),
        ({"share_att_key": False}, "share_att_key=False"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd='none'"),
        ({"conv_kernel_size": 3}, "conv_kernel_size=3"),
        ({"type_vocab_size": 2}, "type_vocab_size=2"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changed, said):
    with pytest.raises(UserError, match=said):
        deberta_v3.from_published_config({**deberta_v3.published_config(DebertaV3Config(**SIZES)), **changed})
