"""XLNet against transformers: random tiny configurations of unusual sizes, in double precision; its two streams against
their definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from torch import Tensor
from transformers import XLNetConfig as TheirConfig
from transformers import XLNetForSequenceClassification, XLNetLMHeadModel, XLNetModel

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import xlnet
from lmtool.models.encoder_configs import XlnetConfig
from lmtool.models.heads.lm import lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.cache import Carried
from lmtool.types import Packed

CONFIG = XlnetConfig(
    vocab_size=97, num_layers=3, hidden_size=36, num_heads=3, feedforward_size=52, max_positions=60, dropout=0.0,
    attention_dropout=0.0, initializer_std=0.2,
)  # fmt: skip
HF_FORMAT = TheirConfig(
    vocab_size=97, n_layer=3, d_model=36, n_head=3, d_inner=52, dropout=0.0, summary_last_dropout=0.0, num_labels=4,
    initializer_range=0.2, mem_len=None,
)  # fmt: skip


def lm_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    theirs = XLNetLMHeadModel(HF_FORMAT).eval()
    inner = theirs.transformer
    in_fp32 = inner.relative_positional_encoding
    inner.relative_positional_encoding = lambda *sizes, **more: in_fp32(*sizes, **more).to(inner.dtype)
    return loaded(Pair(Checkpoint(backbone, lm=lm_head(backbone)), theirs, xlnet.to_hf, xlnet.from_hf))


def classifier_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    ours = Checkpoint(backbone, pooler=pooler(backbone), classifier=SequenceHead(36, 4))
    theirs = XLNetForSequenceClassification(HF_FORMAT).eval()
    return loaded(Pair(ours, theirs, xlnet.to_hf, xlnet.from_hf))


def ranked(packed: Packed, seed: int = 3) -> tuple[Packed, Tensor]:
    """The texts with ranks, and the places of what is predicted: two fifths of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    order_T = torch.rand(len(packed.tokens), generator=generator)
    asked_T = torch.rand(len(packed.tokens), generator=generator) < 0.4
    rank_T = torch.where(asked_T, order_T.argsort().argsort(), -1)
    return Packed(packed.tokens, packed.lengths, {**packed.columns, "rank": rank_T}), asked_T.nonzero()[:, 0]


def test_content_stream_alone():
    pair = lm_pair()
    pair.ours.double(), pair.theirs.double()
    packed, ids, mask, segments = texts()
    theirs = pair.theirs(ids, attention_mask=mask.double(), token_type_ids=segments).logits
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    head = pair.ours.heads["lm"]
    # Their sinusoids are in fp32.
    torch.testing.assert_close(head(hidden, table), theirs[mask], rtol=1e-5, atol=1e-5)
    some = torch.tensor([0, 3, 7, 30, 44, 50, 78])
    torch.testing.assert_close(pair.ours.backbone(packed, read_M=some), hidden[some], rtol=0, atol=1e-12)


def target_mapping(packed: Packed, at: Tensor, longest: int) -> tuple[Tensor, list[Tensor]]:
    """Their form of the places that are predicted, and these by text."""
    documents = range(len(packed.lengths))
    places = [at[packed.documents[at] == number] - packed.starts[number] for number in documents]
    mapping = torch.zeros(len(places), max(map(len, places)), longest, dtype=torch.float64)
    for number, own in enumerate(places):
        mapping[number, torch.arange(len(own)), own] = 1
    return mapping, places


@pytest.mark.parametrize("memory", [0, 7])
def test_two_streams_loss_and_gradients(memory):
    pair = lm_pair()
    pair.ours.double(), pair.theirs.double()
    packed, ids, mask, segments = texts()
    packed, at = ranked(packed)
    ranks = torch.full(ids.shape, -1)
    ranks[mask] = packed.columns["rank"]
    # Their own word: i may not see j where rank_i <= rank_j and j is predicted.
    hidden_ij = ((ranks[:, :, None] <= ranks[:, None, :]) & (ranks >= 0)[:, None, :]).double()
    mapping, places = target_mapping(packed, at, ids.shape[1])
    before = torch.randn(len(ids), 3, memory, 36, dtype=torch.float64, requires_grad=True)
    mems = list(before.permute(1, 2, 0, 3)) if memory else None
    output = pair.theirs(
        ids, attention_mask=mask.double(), token_type_ids=segments, perm_mask=hidden_ij, target_mapping=mapping,
        mems=mems, use_mems=True,
    )  # fmt: skip
    wanted_MV = torch.cat([output.logits[number, : len(own)] for number, own in enumerate(places)])
    head, table = pair.ours.heads["lm"], pair.ours.backbone.embed.token.weight
    pair.ours.backbone.config = CONFIG.model_copy(update={"memory_length": memory})
    carried = Carried({"memory": before}, (memory,) * len(ids)) if memory else None
    hidden_MH = pair.ours.backbone(packed, query_M=at, carried=carried, reuse=4)
    # Where nothing is seen they look at everything.
    sees = torch.tensor(
        [
            memory > 0 or bool(((ranks[n] < ranks[n, place]) & mask[n]).any())
            for n, own in enumerate(places)
            for place in own
        ]
    )
    assert (~sees).any() == (memory == 0)
    torch.testing.assert_close(head(hidden_MH, table)[sees], wanted_MV[sees], rtol=1e-5, atol=1e-5)
    labels = packed.tokens[at]
    wanted = F.cross_entropy(wanted_MV[sees], labels[sees])
    loss = head.loss_sum(hidden_MH[sees], table, labels[sees]) / int(sees.sum())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)
    if carried is not None:  # of each text its first four tokens, behind what is left of before
        kept = [min(4, length) for length in packed.lengths]
        for number, count in enumerate(kept):
            theirs = torch.stack([layer[memory : memory + count, number] for layer in output.mems])
            own = torch.cat([before[number, :, count:], theirs], 1)
            torch.testing.assert_close(carried.after["memory"][number], own, rtol=1e-5, atol=1e-5)


def test_classifier():
    pair = classifier_pair()
    packed, ids, mask, segments = texts()
    single = Packed(packed.tokens[5:45], (40,), {"segment": packed.columns["segment"][5:45]})
    wanted = pair.theirs(ids[1:2], token_type_ids=segments[1:2]).logits
    heads = pair.ours.heads
    ours = heads["classifier"](heads["pooler"](summary(pair.ours.backbone(single), single, "last")))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lm_pair, classifier_pair])
def test_key_map_in_both_directions(make):
    pair = make()
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    assert published.keys() == theirs.keys() - {"lm_loss.weight"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in published.items())
    back = pair.from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = pair.from_hf(XLNetModel(HF_FORMAT).state_dict())
    assert bare.keys() == {name for name in ours if name.startswith("backbone.")}


def test_config_map_in_both_directions():
    published = xlnet.to_hf_config(CONFIG)
    theirs = HF_FORMAT.to_dict()
    assert {key: value for key, value in published.items() if theirs[key] != value} == {}
    section = xlnet.from_hf_config(TheirConfig(**published).to_dict())
    assert XlnetConfig.model_validate({**CONFIG.model_dump(), **section}) == CONFIG


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"ff_activation": "relu"}, "ff_activation='relu'"),
        ({"attn_type": "uni"}, "attn_type='uni'"),
        ({"clamp_len": 5}, "clamp_len=5"),
        ({"bi_data": True}, "bi_data=True"),
        ({"untie_r": False}, "untie_r=False"),
        ({"d_head": 5}, "d_head=5"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changed, said):
    with pytest.raises(UserError, match=said):
        xlnet.from_hf_config({**xlnet.to_hf_config(CONFIG), **changed})
