"""Configurations that parallel=fsdp cannot train are refused, with an alternative."""

from __future__ import annotations

import pytest

from lmtool.cli import main as cli
from lmtool.distillation.configs.modes import StandardConfig
from lmtool.distillation.configs.terms import InterchangeConfig
from lmtool.tuning.configs.adapter import AdapterFusionConfig

PRETRAIN = ("pretrain", "model=bert_tiny")
FINETUNE = ("finetune", "model=bert_tiny", "checkpoint=none", "task=sst2")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ((*PRETRAIN, "precision=fp16"), "precision=fp16 scales the loss"),
        ((*PRETRAIN, "objective=mixture", "objective.members=[mlm,span]"), "objective mixes mlm, span"),
        ((*PRETRAIN, "distill=codistillation"), "distill=codistillation runs several models"),
        ((*FINETUNE[:3], "task=mixture", "task.members=[sst2,rte]"), "task mixes sst2, rte"),
        ((*FINETUNE, "tuning/regularization=mixout"), "tuning/regularization=mixout tracks single weights"),
        ((*FINETUNE, "tuning/schedule=gradual_unfreezing"), "tuning/schedule=gradual_unfreezing tracks"),
        ((*FINETUNE, "forgetting=somewhere.txt"), "forgetting= compares the weights"),
        (("finetune", "model=t5_tiny", "checkpoint=none", "task=xsum"), "is scored on texts that the model generates"),
    ],
)
def test_options_that_cannot_be_sharded_are_refused(typed, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*typed, "parallel=fsdp"]) == 2
    said = capsys.readouterr().err
    assert message in said and "parallel=ddp" in said, said
    assert not any(tmp_path.iterdir())


def test_fusion_and_interchange_conflict_with_fsdp():
    fusion = AdapterFusionConfig.model_construct(name="adapter_fusion")
    assert [problem.key for problem in fusion.conflicts_with_fsdp()] == ["tuning"]
    for weight, keys in ((1.0, ["distill.terms"]), (0.0, [])):
        distill = StandardConfig(teacher="runs/a", terms={"interchange": InterchangeConfig(weight=weight)})
        assert [problem.key for problem in distill.conflicts_with_fsdp()] == keys
