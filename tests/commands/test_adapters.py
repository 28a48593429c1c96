"""Adapters through the commands: frozen weights stay, reload and resume are exact, and trained adapters are reused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lmtool.cli import main as cli
from lmtool.weights.padded_model import load
from tests.commands.conftest import finetune, pretrain

STEPS = ["max_epochs=null", "max_steps=4", "checkpoint_every=2", "evaluate_every=4", "log_every=1", "optimizer.lr=1e-2"]


def weights(run: Path) -> dict[str, Tensor]:
    """The weights of the last checkpoint."""
    checkpoints = run / "checkpoints"
    return load_file(checkpoints / (checkpoints / "last").read_text().strip() / "model.safetensors")


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The predictions that `evaluate` writes, after checking its score against the run's."""
    capsys.readouterr()
    assert cli.main(["evaluate", f"checkpoint={run}", "precision=fp32", "device=cpu", "output=scored.jsonl"]) == 0
    assert f"{result(run)['value']:.4f}"[:5] in capsys.readouterr().out
    lines = Path("scored.jsonl").read_text().splitlines()
    Path("scored.jsonl").unlink()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("model", "placement"),
    [("bert_tiny", "houlsby"), ("t5_tiny", "parallel"), pytest.param("gpt_tiny", "pfeiffer", marks=pytest.mark.slow)],
)
def test_adapter_run_reloads_exports_and_resumes(
    place: Path, capsys: pytest.CaptureFixture[str], model: str, placement: str
) -> None:
    start = pretrain("start", "max_steps=2", model=model)
    run = finetune("run", f"checkpoint={start}", "tuning=adapter", f"tuning.placement={placement}", *STEPS)
    before, after = weights(start), weights(run)
    added = {name for name in after if "_adapter." in name}
    assert added and all(after[name].abs().sum() > 0 for name in added)
    # Frozen weights are not saved; the base has them.
    kept = {name for name in after.keys() - added if not name.startswith("heads.")}
    assert bool(kept) == (placement == "houlsby") and all("norm" in name for name in kept)
    assert all(not torch.equal(after[name], before[name]) for name in kept)
    loaded = load(run).model.parts.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in after.items())
    answers = evaluated(run, capsys)
    assert len(answers) == 40
    if model == "bert_tiny":
        assert cli.main(["export", f"checkpoint={run}", "output=exported"]) == 2
        assert "cannot be merged into the weights of the model" in capsys.readouterr().err
        finetune("again", f"checkpoint={run}", "tuning=adapter", status=2)
        assert "tuning.stack_on=[RUN]" in capsys.readouterr().err
        assert cli.main(["export", f"checkpoint={run}", "output=small", "format=delta"]) == 0
        assert cli.main(["predict", "checkpoint=small", "input=rows/dev.tsv", "output=small.jsonl", "device=cpu"]) == 0
        guesses = [json.loads(line)["prediction"] for line in Path("small.jsonl").read_text().splitlines()]
        assert guesses == [row["prediction"] for row in answers]
    resumed = Path("runs/resumed")
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000004")
    (resumed / "checkpoints" / "last").write_text("step_00000002\n")
    (resumed / "checkpoints" / "best").unlink()
    (resumed / "result.json").unlink()
    assert cli.main(["resume", str(resumed)]) == 0
    again = weights(resumed)
    assert again.keys() == after.keys()
    assert not [name for name in after if not torch.equal(again[name], after[name])]


def test_trained_adapters_are_stacked_and_fused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = pretrain("start", "max_steps=2")
    common = [f"checkpoint={start}", *STEPS]
    first = finetune("first", *common, "tuning=adapter", "tuning.bottleneck=3")
    gradual = ["tuning/schedule=gradual_unfreezing", "tuning.schedule.every_steps=1"]
    second = finetune("second", *common, "tuning=adapter", "seed=1", *gradual)
    stacked = finetune("stacked", *common, "tuning=adapter", f"tuning.stack_on=[{first},{second}]")
    fused = finetune("fused", *common, "tuning=adapter_fusion", f"tuning.adapters=[{first},{second}]")
    slot = "backbone.layers.0.ffn_adapter."
    for run, inside in ((stacked, "below"), (fused, "adapters")):
        after = weights(run)
        for number, source in enumerate((first, second)):
            for name, tensor in weights(source).items():
                if name.startswith(slot):
                    assert torch.equal(after[name.replace(slot, f"{slot}{inside}.{number}.")], tensor)
    assert weights(stacked)[f"{slot}top.up.weight"].abs().sum() > 0
    assert not torch.equal(weights(fused)[f"{slot}value.weight"].fill_diagonal_(0), torch.zeros(32, 32))
    rows = [json.loads(line) for line in (fused / "metrics.jsonl").read_text().splitlines()]
    assert any("value_penalty" in key for row in rows for key in row)
    # The checkpoint contains the adapters, so the source runs can be deleted.
    expected = {run: (run / "predictions.jsonl").read_text() for run in (stacked, fused)}
    assert_unsuitable_runs_refused(first, second, common, capsys)
    for folder in (first, second):
        shutil.rmtree(folder)
    for run, predictions in expected.items():
        guesses = [json.loads(line)["prediction"] for line in predictions.splitlines()]
        assert [row["prediction"] for row in evaluated(run, capsys)] == guesses


def assert_unsuitable_runs_refused(
    first: Path, second: Path, common: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs whose adapters cannot be fused are refused in one line each."""
    full = finetune("full", *common)
    normed = finetune("normed", *common, "tuning=adapter", "tuning.train_norms=true")
    other = pretrain("other", "max_steps=2", "seed=7")
    cases = [
        ([*common, f"tuning.adapters=[{full},{first}]"], "runs/full was trained with tuning=full"),
        (
            [*common, f"tuning.adapters=[{normed},{first}]"],
            "runs/normed: the layers' norms were trained together with the adapters",
        ),
        ([*common, f"tuning.adapters=[{first}]"], "names 1 run; a fusion mixes 2 or more"),
        ([*common, "tuning.adapters=[runs/nowhere,runs/first]"], "runs/nowhere: no such folder"),
        ([f"checkpoint={other}", f"tuning.adapters=[{first},{second}]"], "were trained on a model with other weights"),
    ]
    capsys.readouterr()
    for words, said in cases:
        finetune("refused", "tuning=adapter_fusion", *words, status=2)
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["error", "hint"] and said in lines[0]
