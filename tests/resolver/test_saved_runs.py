"""Saved configurations of earlier versions, which lack newer keys."""

from __future__ import annotations

import copy

from lmtool.cli import main as cli
from lmtool.config import saved
from lmtool.resolver.commands import PretrainConfig
from lmtool.resolver.decoding import with_defaults


def test_members_of_saved_mixture_get_new_keys() -> None:
    words = ["objective=mixture", "objective.members=[mlm,pydocs]", "model=bert_tiny"]
    config = cli.configuration("pretrain", cli.parse(words), running=False)
    assert isinstance(config, PretrainConfig)
    objective = config.objective.replace_members(config.objective.member_configs())
    data = saved.save(config.model_copy(update={"objective": objective}), "pretrain")
    earlier = copy.deepcopy(data)
    del earlier["objective"]["members"][1]["task"]["truncation"]
    assert with_defaults(earlier) == data
