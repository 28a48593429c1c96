"""Training on a CUDA device: numbers, saved state, randomness and memory. Run by `make gpu`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmtool.config.registry import build
from lmtool.nn.dropout import DeviceRng
from lmtool.runs import checkpoints
from lmtool.training.configs import AdamWConfig
from lmtool.training.loop import train
from lmtool.types import ParameterGroup

from .fakes import FakeLearner, FakeLoader, evaluator, open_run, settings, train_rows

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture
def fixed_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels, so that a bitwise comparison tests only saving and restoring; default kernels are faster
    and not deterministic."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run_training(path: Path, steps: int, **changes: Any) -> Any:
    """Train a fresh learner up to a step. Returns the result and the learner."""
    learner = FakeLearner()
    with open_run(path) as run:
        wanted = settings(device=DEVICE, max_steps=steps, checkpoint_every=5, **changes)
        return train(learner, FakeLoader(), evaluator(learner), run, wanted), learner


def rows(path: Path) -> list[dict[str, Any]]:
    return train_rows([json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_matches_uninterrupted_run(precision: str, tmp_path: Path, fixed_order: None) -> None:
    """Weights, optimizer, scaler and rows of a run of 10 steps, and of a run resumed after step 5."""
    _, whole = run_training(tmp_path / "whole", 10, precision=precision)
    run_training(tmp_path / "cut", 10, precision=precision)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000010")
    (tmp_path / "cut" / "result.json").unlink(missing_ok=True)
    result, resumed = run_training(tmp_path / "cut", 10, precision=precision)
    assert result.steps == 10 and result.device.startswith(DEVICE) and result.precision == precision
    for name, value in whole.state_dict().items():
        assert value.device.type == DEVICE and torch.equal(resumed.state_dict()[name], value), name
    states = [
        checkpoints.read_tensors(tmp_path / run / "checkpoints" / "step_00000010", checkpoints.OPTIMIZER)
        for run in ("whole", "cut")
    ]
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(states[1][key], states[0][key]) for key in states[0]
    )
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_losses_match_fp32(precision: str, tmp_path: Path) -> None:
    losses = {}
    for name in ("fp32", precision):
        run_training(tmp_path / name, 20, precision=name)
        losses[name] = [row["loss"] for row in rows(tmp_path / name) if row["split"] == "train"]
    assert losses["fp32"][-1] < losses["fp32"][0]
    # Both use the same dropout seeds.
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.05)


def test_fp16_scaler_is_saved(tmp_path: Path) -> None:
    """The scale multiplies the losses of the next steps."""
    result, _ = run_training(tmp_path, 5, precision="fp16")
    state = json.loads((result.last / "state.json").read_text())
    assert state["scaler"]["scale"] > 0


def test_peak_memory_is_measured_on_device(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    result, learner = run_training(tmp_path, 5)
    # Weights, gradients and two moments, in fp32.
    assert result.peak_memory_bytes >= 16 * sum(parameter.numel() for parameter in learner.parameters())
    assert result.peak_memory_bytes == torch.cuda.max_memory_allocated()


def test_fused_adamw_matches_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    start, given = torch.randn(37, 12, generator=generator), torch.randn(4, 37, 12, generator=generator)
    values = []
    for device in ("cpu", DEVICE):
        parameter = nn.Parameter(start.to(device, copy=True))
        optimizer = build(AdamWConfig(lr=0.01, weight_decay=0.1), [ParameterGroup("all", [("one", parameter)])])
        assert optimizer.param_groups[0]["fused"]
        for gradient in given:
            parameter.grad = gradient.to(device)
            optimizer.step()
        values.append(parameter.detach().cpu())
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-6)


def test_device_dropout_is_a_function_of_seed() -> None:
    device, x = torch.device(DEVICE, 0), torch.ones(500, 64, device=DEVICE)
    first = DeviceRng(3, device).drop(x, 0.25)
    assert torch.equal(first, DeviceRng(3, device).drop(x, 0.25))
    assert not torch.equal(first, DeviceRng(4, device).drop(x, 0.25))
    assert abs(float((first == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5
    assert sorted(first.unique().tolist()) == pytest.approx([0.0, 4 / 3])
