"""RoBERTa, SpanBERT, DistilBERT, ALBERT and ELECTRA: settings without a published form, and shared layers."""

from __future__ import annotations

import pytest

from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.models import distilbert
from lmtool.models.encoder_configs import DistilbertConfig
from lmtool.nn.configs import RotaryPositionsConfig
from tests.models.parity import CASES


@pytest.mark.parametrize("name", ["roberta", "spanbert", "distilbert", "albert", "electra"])
def test_rotary_positions_are_refused_in_export(name: str) -> None:
    case = CASES[name]
    with pytest.raises(UserError, match="rotary: .* in transformers supports only learned"):
        case.module.HF_FORMAT.to_hf_config(case.config.model_copy(update={"positions": RotaryPositionsConfig()}))


def test_distilbert_with_other_norm_epsilon_is_refused_in_export() -> None:
    with pytest.raises(UserError, match="norm_epsilon=1e-05"):
        distilbert.HF_FORMAT.to_hf_config(DistilbertConfig(norm_epsilon=1e-5))


def test_albert_shares_one_layer() -> None:
    model = build(CASES["albert"].config, 0)
    assert len(model.layers) == 1 and len(list(model.applied_layers())) == 3
    assert {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("layers.")} == {"0"}
