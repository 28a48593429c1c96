"""ModernBERT: local windows against a band mask, and configurations of earlier versions."""

from __future__ import annotations

import pytest
import torch

from lmtool.config.registry import build
from lmtool.models import modernbert
from lmtool.nn.attention import attend, reference_attention
from lmtool.nn.layout import Layout, Window
from lmtool.nn.prefix import KeyPrefix
from lmtool.types import Packed
from tests.models.parity import CASES

CONFIG = CASES["modernbert"].config


def test_config_of_earlier_version_is_read():
    written = modernbert.HF_FORMAT.to_hf_config(CONFIG)
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "layer_types")}
    section = modernbert.HF_FORMAT.from_hf_config({**old, "global_attn_every_n_layers": 2, "local_rotary_theta": 1.0})
    assert (section["global_every"], section["positions"]["base"]) == (2, 160_000.0)


@pytest.mark.parametrize("ahead", [0, 2])
def test_window_attention_matches_a_band_mask(ahead):
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


def test_local_windows_include_a_prefix():
    backbone = build(CONFIG, 0)
    assert [type(backbone.mask(number, None)).__name__ for number in range(4)] == ["Full", "Window", "Window", "Full"]
    backbone.prefix = KeyPrefix(2, 5, 36)
    assert backbone.mask(1, None) == Window(3, 2)
