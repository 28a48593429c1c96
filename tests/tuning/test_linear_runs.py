"""Runs with lora, ia3, bitfit, last_n and a scalar mix: they resume bit for bit, keep frozen weights, and export as
published models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.weights.reading import read
from tests.breadth import slow_but
from tests.commands.conftest import finetune, pretrain, skip_reports, working_in

METHODS = {
    "lora": ("tuning=lora", "tuning.dropout=0.2", "tuning.projections=[q_proj,out_proj,fc_in]"),
    "ia3": ("tuning=ia3",),
    "bitfit": ("tuning=bitfit",),
    "last_n": ("tuning=last_n", "tuning.layers=1"),
    "mix": ("tuning=head", "tuning.layers=scalar_mix"),
}
LAST = Path("checkpoints") / "step_00000004"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with labeled rows and a pretrained model."""
    place = tmp_path_factory.mktemp("linear")
    with working_in(place):
        pretrain("base", "max_steps=2")
    return place


@pytest.mark.parametrize("method", slow_but({"lora", "mix"}, METHODS))
def test_run_resumes_bitwise_and_exports(base, monkeypatch, capsys, method):
    monkeypatch.chdir(base)
    skip_reports(monkeypatch)
    words = [*METHODS[method], "checkpoint=runs/base", "max_steps=4", "checkpoint_every=2"]
    run, cut = finetune(method, *words), Path("runs") / f"{method}_cut"
    shutil.copytree(run, cut)
    shutil.rmtree(cut / LAST)
    (cut / "result.json").unlink()
    finetune(cut.name, *words)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (cut / LAST / name).read_bytes() == (run / LAST / name).read_bytes()
    tensors, before = (read(str(checkpoint)).tensors for checkpoint in (run / LAST, "runs/base"))
    learns = json.loads((run / "facts.json").read_text())["learns"]
    backbone = [name for name in before if name.startswith("backbone.")]
    moved = sum(before[name].numel() for name in backbone if not torch.equal(tensors[name], before[name]))
    assert (moved > 0) == (method in ("bitfit", "last_n")) and moved <= learns["backbone"]["trainable"]
    mix, printed = json.loads((run / "result.json").read_text()).get("layer_mix"), capsys.readouterr().out
    assert (mix is not None) == (method == "mix") == ("· gamma " in printed)
    assert mix is None or (len(mix["weights"]) == 2 and sum(mix["weights"]) == pytest.approx(1) and mix["gamma"] != 1)
    status = cli.main(["export", f"checkpoint={run}", f"output={method}_merged"])
    assert status == (2 if method == "mix" else 0)
    assert ("the head reads several layers" in capsys.readouterr().err) == (method == "mix")


def test_frozen_random_backbone_warns(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    skip_reports(monkeypatch)
    finetune("none", "tuning=lora", "checkpoint=none", "model=bert_tiny", "max_steps=1")
    assert "parameters of the backbone are random and frozen" in capsys.readouterr().out
