"""DeBERTa's generations against transformers: random tiny configurations of unusual sizes, in double precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import deberta, deberta_v3
from lmtool.models.disentangled import BucketedTable
from lmtool.models.encoder_configs import DebertaConfig, DebertaV3Config, DisentangledConfig
from lmtool.models.heads.lm import masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.types import Packed

SIZES = {
    "vocab_size": 97, "num_layers": 3, "hidden_size": 36, "num_heads": 3, "feedforward_size": 52, "max_positions": 60,
    "max_distance": 20, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


@dataclass
class Generation:
    module: ModuleType
    config: type[DisentangledConfig]
    prefix: str
    own: dict[str, Any]

    def sized(self, **fields: Any) -> DisentangledConfig:
        return self.config(**SIZES | self.own | fields)

    def their(self, name: str) -> Any:
        return getattr(transformers, self.prefix + name)

    def published(self, config: DisentangledConfig) -> Any:
        data = {**self.module.to_hf_config(config), "initializer_range": 0.2, "num_labels": 4}
        return self.their("Config")(**data)

    def pair(self, ours: Checkpoint, theirs: Any) -> Pair:
        read = partial(self.module.from_hf, config=theirs.config.to_dict())
        return Pair(ours, theirs, self.module.to_hf, read)

    def masked(self, **fields: Any) -> Pair:
        torch.manual_seed(GENERATOR_SEED)
        config = self.sized(**fields)
        backbone = build(config, 0)
        theirs = self.their("ForMaskedLM")(self.published(config)).eval()
        ours = Checkpoint(backbone, masked_lm=masked_lm_head(backbone))
        with torch.no_grad():  # zeros as they are drawn
            for name, parameter in theirs.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.2)
        return self.pair(ours, theirs)


V1 = Generation(deberta, DebertaConfig, "Deberta", {})
V3 = Generation(deberta_v3, DebertaV3Config, "DebertaV2", {"buckets": 8})
VARIANTS = [{}, {"positions": {"name": "learned"}}, {"scores": ("c2p",)}, {"scores": ("p2c", "p2c")}]
both = pytest.mark.parametrize("generation", [V1, V3], ids=["deberta", "deberta_v3"])


@pytest.mark.parametrize(
    "generation,fields",
    [*((each, fields) for each in (V1, V3) for fields in VARIANTS), (V1, {"max_distance": 64}), (V3, {"buckets": 64})],
)
def test_forward_loss_and_gradients(generation, fields):
    """Texts longer than the table reaches, and shorter."""
    pair = loaded(generation.masked(**fields))
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


@both
def test_classifier(generation):
    torch.manual_seed(GENERATOR_SEED)
    config = generation.sized()
    backbone = build(config, 0)
    heads = {"pooler": pooler(backbone), "classifier": SequenceHead(36, 4)}
    theirs = generation.their("ForSequenceClassification")(generation.published(config)).eval()
    pair = loaded(generation.pair(Checkpoint(backbone, **heads), theirs))
    packed, ids, mask, _ = texts()
    wanted = pair.theirs(ids, attention_mask=mask.long()).logits
    heads = pair.ours.heads
    ours = heads["classifier"](heads["pooler"](summary(pair.ours.backbone(packed), packed, "first")))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@both
def test_key_map_in_both_directions(generation):
    pair = loaded(generation.masked(num_heads=4))
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    given = pair.to_hf(ours)
    assert given.keys() == theirs.keys() - {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in given.items())
    back = pair.from_hf(given)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = pair.from_hf(generation.their("Model")(pair.theirs.config).state_dict())
    assert bare.keys() == {name for name in ours if name.startswith("backbone.")}


def test_rows_that_are_not_those_of_whole_heads_are_refused():
    tensors = V1.masked().theirs.state_dict()
    with pytest.raises(UserError, match="num_attention_heads=5 .* 108 rows"):
        deberta.from_hf(tensors, {"num_attention_heads": 5})


@pytest.mark.parametrize("buckets,farthest", [(256, 512), (32, 128), (8, 20)])
def test_buckets_are_the_published_ones(buckets, farthest):
    places = BucketedTable(buckets, 4, torch.nn.Identity(), farthest)
    distances = torch.arange(-3 * farthest, 3 * farthest + 1)
    assert torch.equal(places.bucket(distances), make_log_bucket_position(distances, buckets, farthest).long())


@torch.no_grad()
@both
def test_each_term_of_the_scores_changes_the_states(generation):
    terms = [("c2p", "p2c"), ("c2p",), ()]
    states = [loaded(generation.masked(scores=scores)).ours.backbone(texts()[0]) for scores in terms]
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(states, states[1:], strict=False))


@torch.no_grad()
@both
def test_a_text_reads_the_same_beside_a_long_one(generation):
    """The rows of the table that a tile reads go by its longest text."""
    backbone = loaded(generation.masked()).ours.backbone.double()
    tokens = torch.arange(1, 60)
    together = backbone(Packed(tokens, (9, 50)))
    torch.testing.assert_close(together[:9], backbone(Packed(tokens[:9], (9,))), rtol=0, atol=1e-12)


@both
def test_config_map_in_both_directions(generation):
    config = generation.sized()
    given = generation.module.to_hf_config(config)
    theirs = generation.published(config).to_dict()
    assert {key: value for key, value in given.items() if theirs[key] != value} == {"initializer_range": 0.02}
    read = generation.module.from_hf_config
    section = read(generation.their("Config")(**given).to_dict())
    assert type(config).model_validate_json(json.dumps({**json.loads(config.model_dump_json()), **section})) == config
    assert read({**given, "pos_att_type": "p2c|c2p"})["scores"] == ["p2c", "c2p"]
    assert read({**given, "max_relative_positions": -1})["max_distance"] == 60


@pytest.mark.parametrize(
    "generation,changed,said",
    [
        (V1, {"relative_attention": False}, "relative_attention=False"),
        (V1, {"talking_head": True}, "talking_head=True"),
        (V1, {"position_buckets": 256}, "position_buckets=256"),
        (V3, {"relative_attention": False}, "relative_attention=False"),
        (V3, {"share_att_key": False}, "share_att_key=False"),
        (V3, {"norm_rel_ebd": "none"}, "norm_rel_ebd='none'"),
        (V3, {"conv_kernel_size": 3}, "conv_kernel_size=3"),
        (V3, {"type_vocab_size": 2}, "type_vocab_size=2"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(generation, changed, said):
    with pytest.raises(UserError, match=said):
        generation.module.from_hf_config({**generation.module.to_hf_config(generation.sized()), **changed})


@both
def test_without_a_word_of_relative_places_it_is_another_model(generation):
    given = generation.module.to_hf_config(generation.sized())
    del given["relative_attention"]
    with pytest.raises(UserError, match="relative_attention=False"):
        generation.module.from_hf_config(given)
