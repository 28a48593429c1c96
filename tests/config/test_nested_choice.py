"""The nested group `model/positions`: as a choice, by its values, against a checkpoint's, and its error messages."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

from lmtool.config import compose
from lmtool.config.decode import decode
from lmtool.errors import ConfigError
from lmtool.nn.configs import LearnedPositionsConfig, RotaryPositionsConfig
from lmtool.resolver.commands import PretrainConfig
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.rules import violations


def composed(*typed: str) -> dict[str, Any]:
    read = compose.read_overrides(typed, compose.accepted_overrides("pretrain"))
    assert not read.problems
    return compose.compose("pretrain", read)


def problems(*typed: str, **how: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        decode(PretrainConfig, composed(*typed), rules=partial(violations, running=False), **how)
    return {problem.key: f"{problem.message} | {problem.hint}" for problem in caught.value.problems}


def test_positions_are_set_as_group_and_by_values() -> None:
    config = decode_config(
        "pretrain", composed("model=gpt_tiny", "model/positions=rotary", "model.positions.base=500000.0")
    )
    assert config.model.positions == RotaryPositionsConfig(base=500000.0)
    assert config.model_dump()["model"]["positions"]["layout"] == "half_split"
    assert decode_config("pretrain", composed("model=gpt_tiny")).model.positions == LearnedPositionsConfig()


def test_config_without_positions_decodes_to_learned() -> None:
    data = composed("model=bert_tiny")
    del data["model"]["positions"]
    assert decode_config("pretrain", data).model.positions == LearnedPositionsConfig()


def test_positions_must_match_checkpoint() -> None:
    saved = {"model": copy.deepcopy(composed("model=bert_tiny")["model"]), "tokenizer": {"name": "wordpiece"}}
    decode(PretrainConfig, composed("model=bert_tiny"), checkpoint_config=saved)
    decode(PretrainConfig, composed("model=bert_tiny") | {"model": {"name": "auto"}}, checkpoint_config=saved)
    rotary = composed("model=bert_tiny", "model/positions=rotary")
    del saved["model"]["positions"]
    decode(PretrainConfig, composed("model=bert_tiny"), checkpoint_config=saved)
    with pytest.raises(ConfigError) as caught:
        decode(PretrainConfig, rotary, checkpoint_config=saved)
    assert "model.positions=rotary, but the checkpoint has model.positions=learned" in str(caught.value.problems)


@pytest.mark.parametrize(
    ("typed", "key", "message"),
    [
        ("model.positions.bse=3", "model.positions.bse", "did you mean model.positions.base=3?"),
        ("model.positions.base=0", "model.positions.base", "allowed: a number, above 1"),
        ("model.positions.name=alibbi", "model.positions.name", "did you mean model.positions.name=alibi?"),
        (
            "model.positions.layout=halfsplit",
            "model.positions.layout",
            "did you mean model.positions.layout=half_split?",
        ),
        ("model.num_heads=128", "model.positions", "the head size of model=bert is 1 | set model/positions=alibi"),
    ],
)
def test_positions_error_has_key_and_hint(typed: str, key: str, message: str) -> None:
    assert message in problems("model=bert_tiny", "model/positions=rotary", typed)[key]


def test_two_positions_are_refused() -> None:
    read = compose.read_overrides(
        ["model/positions=rotary", "model.positions=alibi"], compose.accepted_overrides("pretrain")
    )
    assert [problem.message for problem in read.problems] == [
        "model/positions=rotary and model/positions=alibi: a run takes one model/positions"
    ]


def test_misspelled_positions_suggests_nearest_name() -> None:
    read = compose.read_overrides(["model/positions=alibbi"], compose.accepted_overrides("pretrain"))
    assert [problem.hint for problem in read.problems] == ["did you mean model/positions=alibi?"]


def test_positions_with_model_auto_must_match_checkpoint() -> None:
    data = composed("model/positions=alibi")
    assert data["model"]["name"] == "auto" and decode(PretrainConfig, data).model.positions.name == "alibi"
    saved = {"model": composed("model=bert_tiny")["model"], "tokenizer": {"name": "wordpiece"}}
    assert "but the checkpoint has model.positions=learned" in str(
        problems("model/positions=rotary", checkpoint_config=saved)
    )
