"""DeBERTa and DeBERTa-v3: the table of distances, the terms of the scores, and published configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from lmtool.errors import UserError
from lmtool.models import deberta
from lmtool.models.disentangled import BucketedTable
from lmtool.types import Packed
from tests.models.parity import CASES, loaded

both = pytest.mark.parametrize("name", ["deberta", "deberta_v3"])


def test_weights_not_divisible_by_heads_are_refused():
    tensors = CASES["deberta"].pair().theirs.state_dict()
    with pytest.raises(UserError, match="num_attention_heads=5 .* 108 rows"):
        deberta.HF_FORMAT.from_hf(tensors, {"num_attention_heads": 5})


@pytest.mark.parametrize("buckets,farthest", [(256, 512), (32, 128), (8, 20)])
def test_buckets_match_transformers(buckets, farthest):
    places = BucketedTable(buckets, 4, torch.nn.Identity(), farthest)
    distances = torch.arange(-3 * farthest, 3 * farthest + 1)
    assert torch.equal(places.bucket(distances), make_log_bucket_position(distances, buckets, farthest).long())


@torch.no_grad()
@both
def test_each_term_of_the_scores_changes_the_states(name):
    case = CASES[name]
    tensors = loaded(case.pair()).ours.state_dict()
    pairs = []
    for scores in (("c2p", "p2c"), ("c2p",), ()):
        pairs.append(replace(case, config=case.config.model_copy(update={"scores": scores})).pair())
        pairs[-1].ours.load_state_dict({name: tensors[name] for name in pairs[-1].ours.state_dict()})
    states = [pair.ours.backbone(case.texts().packed) for pair in pairs]
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(states, states[1:], strict=False))


@torch.no_grad()
@both
def test_states_do_not_depend_on_longer_texts_in_the_batch(name):
    """The number of table rows that a tile reads depends on its longest text."""
    backbone = loaded(CASES[name].pair()).ours.backbone.double()
    tokens = torch.arange(1, 60)
    together = backbone(Packed(tokens, (9, 50)))
    torch.testing.assert_close(together[:9], backbone(Packed(tokens[:9], (9,))), rtol=0, atol=1e-12)


@both
def test_config_variants_are_read_and_missing_keys_refused(name):
    module, written = CASES[name].module, CASES[name].module.HF_FORMAT.to_hf_config(CASES[name].config)
    assert module.HF_FORMAT.from_hf_config({**written, "pos_att_type": "p2c|c2p"})["scores"] == ["p2c", "c2p"]
    assert module.HF_FORMAT.from_hf_config({**written, "max_relative_positions": -1})["max_distance"] == 60
    del written["relative_attention"]  # transformers' default is another model
    with pytest.raises(UserError, match="relative_attention=False"):
        module.HF_FORMAT.from_hf_config(written)
