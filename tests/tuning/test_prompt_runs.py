"""Runs with prompts and prefixes: they resume bit for bit, keep frozen weights, and give the same predictions after
export and loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtool.cli import main as cli
from lmtool.weights.reading import read
from tests.commands.conftest import finetune, pretrain, skip_reports, working_in

METHODS = {
    "prompt": ("tuning=prompt", "tuning.length=5", "tuning.init=class_labels"),
    "prefix": ("tuning=prefix", "tuning.length=5"),
    "lstm": ("tuning=ptuning", "tuning.length=5"),
}
LAST = Path("checkpoints") / "step_00000008"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with labeled rows and a pretrained model."""
    place = tmp_path_factory.mktemp("prompts")
    with working_in(place):
        pretrain("base", "max_steps=2")
    return place


@pytest.mark.parametrize("method", METHODS)
def test_run_resumes_bitwise_and_keeps_predictions(base, monkeypatch, capsys, method):
    monkeypatch.chdir(base)
    skip_reports(monkeypatch)
    words = [*METHODS[method], "checkpoint=runs/base", "max_steps=8", "checkpoint_every=4"]
    run, cut = finetune(method, *words), Path("runs") / f"{method}_cut"
    screen = capsys.readouterr().out
    assert "virtual tokens a text 5" in screen and "hardly change" not in screen
    shutil.copytree(run, cut)
    shutil.rmtree(cut / LAST)
    (cut / "result.json").unlink()
    finetune(cut.name, *words)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (cut / LAST / name).read_bytes() == (run / LAST / name).read_bytes()
    tensors, before = (read(str(checkpoint)).tensors for checkpoint in (run / LAST, "runs/base"))
    kept = [name for name in before if name.startswith("backbone.")]
    assert all(torch.equal(tensors[name], before[name]) for name in kept)
    added = {name for name in tensors if name.startswith("backbone.")} - set(kept)
    learned = sum(tensors[name].numel() for name in tensors if name in added or name.startswith("heads.sst2."))
    assert json.loads((run / "result.json").read_text())["trainable_parameters"] == learned
    assert cli.main(["export", f"checkpoint={run}", f"output={method}_alone", "format=delta"]) == 0
    small = load_file(Path(f"{method}_alone/model.safetensors"))
    left = {name for name in small if name.startswith("backbone.")}
    # Without the reparametrization of a prefix and the encoder of prompts.
    assert left <= added and all(name.endswith(("prefix.weight", "virtual.weight")) for name in left)
    alone = [f"checkpoint={method}_alone", "device=cpu", "precision=fp32"]
    assert cli.main(["evaluate", *alone, f"output={method}_alone.jsonl"]) == 0
    for mine, theirs in zip(
        *(
            map(json.loads, Path(path).read_text().splitlines())
            for path in (f"{method}_alone.jsonl", run / "predictions.jsonl")
        ),
        strict=True,
    ):
        assert mine["prediction"] == theirs["prediction"] and mine["score"] == pytest.approx(theirs["score"], abs=1e-6)
    common = [f"checkpoint={run}", "device=cpu", "precision=fp32"]
    assert cli.main(["evaluate", *common, f"output={method}.jsonl"]) == 0
    assert Path(f"{method}.jsonl").read_text() == (run / "predictions.jsonl").read_text()
    first = json.loads((run / "predictions.jsonl").read_text().splitlines()[0])
    assert cli.main(["predict", *common, f"text={first['sentence']}", f"output={method}_first.jsonl"]) == 0
    (again,) = map(json.loads, Path(f"{method}_first.jsonl").read_text().splitlines())
    assert again["prediction"] == first["prediction"] and again["score"] == pytest.approx(first["score"], abs=1e-6)


def test_low_learning_rate_for_prompts_warns(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    skip_reports(monkeypatch)
    words = ["tuning=prompt", "tuning.length=5", "checkpoint=runs/base", "max_steps=1"]
    finetune("slow", *words, "optimizer=adamw", "optimizer.lr=0.001")
    assert "optimizer.lr=0.001: soft prompts hardly change below 0.01" in capsys.readouterr().out
