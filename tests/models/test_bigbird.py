"""BigBird: the texts that use block-sparse attention, and a setting that has no published form."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models import bigbird
from lmtool.models.encoder_configs import BigbirdConfig
from lmtool.nn.block_sparse import BlockPattern, Blocks
from lmtool.nn.layout import Full
from lmtool.nn.prefix import KeyPrefix
from lmtool.types import Packed
from tests.models.parity import CASES

CONFIG = CASES["bigbird"].config


@pytest.mark.parametrize("change", [{"pattern_seed": 3}, {"random_plan": "uniform"}])
def test_other_random_blocks_are_refused_in_export(change):
    ((key, value),) = change.items()
    with pytest.raises(UserError, match=f"model.{key}={value}"):
        bigbird.HF_FORMAT.to_hf_config(CONFIG.model_copy(update=change))


def test_published_weights_keep_the_plan_of_transformers():
    published = bigbird.HF_FORMAT.from_hf_config(CASES["bigbird"].published.to_dict())
    assert published["random_plan"] == "transformers" and CONFIG.random_plan == "transformers"
    assert BigbirdConfig().random_plan == "uniform"


def test_only_texts_longer_than_longest_dense_use_blocks():
    backbone = build(CONFIG, 0)
    assert backbone.blocks.longest_dense == 36
    assert backbone.mask(1, Packed(torch.arange(40), (36, 4))) == Full()
    backbone.prefix = KeyPrefix(3, 5, 36)
    assert backbone.mask(1, Packed(torch.arange(41), (37, 4))) == Blocks(
        BlockPattern(4, 2, 3, 1, "transformers"), (37, 4), 3
    )
