"""A model that does not fit in memory is refused before the model or the text is processed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from lmtool.costs import memory_of_run as planning
from lmtool.errors import out_of_memory
from tests.commands.conftest import TINY, merge_overrides

TEXT = ["data=text", "data.path=text.txt", "cache_dir=cache", "max_steps=1", "device=cpu"]
ROWS = ["task=sst2", "task.path=rows", "checkpoint=none", "cache_dir=cache", "max_epochs=null", "max_steps=1"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 2 GB; bert's 110 million parameters need 1.76 GB."""
    monkeypatch.setattr(planning, "available_bytes", lambda device: 2 * 10**9)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["model=bert", "model.num_layers=30"], "model.num_layers=12"),
        (["model=bert", "model.vocab_size=2000000"], "model.vocab_size=30522"),
        (["model=bert", "model.hidden_size=7680", "model.num_heads=80"], "model.hidden_size=768 model.num_heads=12"),
        (["model=bert_large"], "model.num_heads=12"),
        (["model=gpt", "model.max_positions=90000000"], "model.max_positions=1024"),
        (["model=gpt_xl", "optimizer=adafactor"], "model.hidden_size=768"),
    ],
)
def test_too_large_model_hints_at_one_that_fits(
    words: list[str], hint: str, place: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pretrain", *TEXT, *words]) == 2
    error, advice = capsys.readouterr().err.splitlines()
    assert "is too large for cpu: weights, gradients and optimizer need " in error and "2 GB are available" in error
    assert advice.startswith("hint: set ") and hint in advice
    assert not Path("runs").exists() and not Path("cache").exists()
    # The model of the hint fits.
    overrides = shlex.split(advice.removeprefix("hint: set ").partition(",")[0])
    config = cli.configuration("pretrain", cli.parse(merge_overrides([*TEXT, *words], overrides)), running=True)
    planning.require_memory(config, planning_precision())


def planning_precision() -> planning.Precision:
    from lmtool.training.precision import select_device, select_precision

    return select_precision("fp32", select_device("cpu"))


def test_frozen_weights_need_less_memory(place: Path, machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ROWS, "model=bert", "model.num_layers=30", "device=cpu"]
    for tuning, fits in (("head", True), ("full", False)):
        config = cli.configuration("finetune", cli.parse([*words, f"tuning={tuning}"]), running=True)
        assert (planning.too_large(config, planning_precision()) is None) == fits
    assert cli.main(["finetune", *words]) == 2
    assert "is too large for cpu" in capsys.readouterr().err and not Path("runs").exists()


def test_plan_reports_too_large_model(place: Path, machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "pretrain", "model=bert", "model.num_layers=30"]) == 0
    assert "model=bert is too large for cpu" in capsys.readouterr().out
    assert cli.main(merge_overrides(["plan", "pretrain", *TINY, "model.hidden_size=1000000", "model.num_heads=1"])) == 0
    assert "set model.hidden_size=768" in capsys.readouterr().out


def test_memory_check_counts_processes_and_shards(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bert with 30 layers has 0.96 GB of weights, and four times as much in training."""
    import torch

    from lmtool.training.precision import Precision

    room = {"cpu": 4 * 10**9, "cuda": 2 * 10**9}
    monkeypatch.setattr(planning, "available_bytes", lambda device: room[device.type])
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    words = [*TEXT, "model=bert", "model.num_layers=30"]

    def message_for(device: str, *typed: str) -> str:
        config = cli.configuration("pretrain", cli.parse([*words, *typed]), running=True)
        problem = planning.too_large(config, Precision("fp32", torch.device(device), ""))
        return "" if problem is None else problem.message

    assert "too large for cuda: weights, gradients and optimizer need" in message_for("cuda")
    assert message_for("cuda", "parallel=fsdp") == ""
    assert "too large for cpu: weights, gradients and optimizer in 4 processes need" in message_for("cpu")
    room["cuda"] = 5 * 10**8
    assert "too large for cuda: shards of weights, gradients and optimizer need" in message_for("cuda", "parallel=fsdp")
    room["cpu"] = 3 * 10**9
    assert "too large for cpu: weights in 4 processes need" in message_for("cuda", "parallel=fsdp")


def test_onednn_error_is_reported_as_out_of_memory() -> None:
    memory = out_of_memory(RuntimeError("could not create a primitive"))
    assert memory is not None and "micro_batch_tokens" in str(memory.hint)


def test_onednn_error_of_a_missing_kernel_is_not_out_of_memory() -> None:
    assert out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution")) is None
