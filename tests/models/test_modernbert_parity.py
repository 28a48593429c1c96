"""ModernBERT against transformers: random tiny configurations of unusual sizes, to 1e-5; its windows against a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import GENERATOR_SEED, Checkpoint, Pair, assert_gradients_equal, loaded, texts
from transformers import ModernBertConfig as TheirConfig
from transformers import ModernBertForMaskedLM, ModernBertForSequenceClassification, ModernBertModel

from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.models import modernbert
from lmtool.models.encoder_configs import ModernbertConfig
from lmtool.models.heads.lm import masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler, summary
from lmtool.nn.attention import attend, reference_attention
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.nn.layout import Layout, Window
from lmtool.nn.prefix import KeyPrefix
from lmtool.types import Packed

CONFIG = ModernbertConfig(
    vocab_size=97, num_layers=5, hidden_size=36, num_heads=3, feedforward_size=52, max_positions=40, local_window=3,
    positions=RotaryPositionsConfig(base=700.0), local_rotary_base=50.0, dropout=0.0,
)  # fmt: skip
HF_FORMAT = TheirConfig(
    vocab_size=97, num_hidden_layers=5, hidden_size=36, num_attention_heads=3, intermediate_size=52,
    max_position_embeddings=40, local_attention=6, initializer_range=0.2, pad_token_id=0, cls_token_id=2,
    sep_token_id=3, bos_token_id=None, eos_token_id=None, num_labels=4,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
)  # fmt: skip
MAPS = (modernbert.to_hf, modernbert.from_hf)


def masked_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    return Pair(Checkpoint(backbone, masked_lm=masked_lm_head(backbone)), ModernBertForMaskedLM(HF_FORMAT), *MAPS)


def classifier_pair() -> Pair:
    torch.manual_seed(GENERATOR_SEED)
    backbone = build(CONFIG, 0)
    heads = {"pooler": pooler(backbone), "classifier": SequenceHead(36, 4)}
    return Pair(Checkpoint(backbone, **heads), ModernBertForSequenceClassification(HF_FORMAT), *MAPS)


def test_forward_loss_and_gradients():
    pair = loaded(masked_pair())
    pair.ours.double(), pair.theirs.double()
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    hidden, table = pair.ours.backbone(packed), pair.ours.backbone.embed.token.weight
    head = pair.ours.heads["masked_lm"]
    # Their angles are in fp32.
    torch.testing.assert_close(head(hidden, table), theirs[mask], rtol=1e-5, atol=1e-5)
    at = torch.tensor([0, 3, 7, 30, 44, 50, 78])
    labels = packed.tokens[at].flip(0)
    wanted = F.cross_entropy(theirs[mask][at], labels)
    loss = head.loss_sum(hidden[at], table, labels) / len(at)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    wanted.backward()
    loss.backward()
    assert_gradients_equal(pair)


def test_classifier():
    pair = loaded(classifier_pair())
    packed, ids, mask, _ = texts()
    theirs = pair.theirs(ids, attention_mask=mask.long()).logits
    heads = pair.ours.heads
    ours = heads["classifier"](heads["pooler"](summary(pair.ours.backbone(packed), packed, "first")))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [masked_pair, classifier_pair])
def test_key_map_in_both_directions(make):
    pair = loaded(make())
    ours, theirs = pair.ours.state_dict(), pair.theirs.state_dict()
    published = pair.to_hf(ours)
    assert published.keys() == theirs.keys() - {"decoder.weight"}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in published.items())
    back = pair.from_hf(published)
    assert back.keys() == ours.keys() and all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    bare = pair.from_hf(ModernBertModel(HF_FORMAT).state_dict())
    assert bare.keys() == {name for name in ours if name.startswith("backbone.")}


def test_config_map_in_both_directions():
    published = modernbert.to_hf_config(CONFIG)
    theirs = HF_FORMAT.to_dict()
    assert {key: value for key, value in published.items() if theirs[key] != value} == {"initializer_range": 0.02}
    section = modernbert.from_hf_config(TheirConfig(**published).to_dict())
    assert ModernbertConfig.model_validate({**CONFIG.model_dump(), **section}) == CONFIG
    old = {key: value for key, value in published.items() if key not in ("rope_parameters", "layer_types")}
    again = modernbert.from_hf_config({**old, "global_attn_every_n_layers": 2, "local_rotary_theta": 1.0})
    assert (again["global_every"], again["positions"]["base"]) == (2, 160_000.0)


@pytest.mark.parametrize(
    "changed,said",
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ({"classifier_activation": "relu"}, "classifier_activation='relu'"),
        ({"norm_bias": True}, "norm_bias=True"),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "layer_types="),
    ],
)
def test_a_variant_that_is_not_computed_is_refused(changed, said):
    with pytest.raises(UserError, match=said):
        modernbert.from_hf_config({**modernbert.to_hf_config(CONFIG), **changed})


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_window_is_a_band(ahead):
    packed = Packed(torch.arange(1, 30), (9, 1, 19))
    layout = Layout.of(packed, Window(3, ahead), ahead)
    keys = 29 + 3 * ahead
    q_TAD = torch.randn(29, 2, 4, dtype=torch.float64)
    k_SAD, v_SAD = torch.randn(2, keys, 2, 4, dtype=torch.float64)
    given = attend(q_TAD, k_SAD, v_SAD, layout)
    torch.testing.assert_close(given, reference_attention(q_TAD, k_SAD, v_SAD, layout), rtol=0, atol=1e-12)
    allow = Window(3, ahead).allow(torch.arange(6)[:, None] + ahead, torch.arange(6 + ahead)[None], torch.zeros(1))
    band = (torch.arange(6)[:, None] - torch.arange(6)[None]).abs() <= 3
    assert allow is not None and torch.equal(allow[:, ahead:], band) and allow[:, :ahead].all()


def test_local_layers_know_of_a_prefix():
    backbone = build(CONFIG, 0)
    assert [type(backbone.mask(number, None)).__name__ for number in range(4)] == ["Full", "Window", "Window", "Full"]
    backbone.prefix = KeyPrefix(2, 5, 36)
    assert backbone.mask(1, None) == Window(3, 2)
