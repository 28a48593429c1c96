"""Tiny finetuning runs in this process, and the comparison of a resumed run with an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lmtool.runs.finding import checkpoint_folder
from lmtool.training.keeper import Keeper
from tests.commands.conftest import TINY, finetune

STEPS = ["max_steps=4", "max_epochs=null", "log_every=1", "checkpoint_every=1", "evaluate_every=4"]


def run(name: str, *more: str, status: int = 0) -> Path:
    """`lmtool finetune` of a tiny BERT, for four steps by default."""
    return finetune(name, "model=bert_tiny", *TINY, "checkpoint=none", *STEPS, *more, status=status)


def saved(folder: Path) -> dict[str, Tensor]:
    """The tensors of model and optimizer in the last checkpoint of a run."""
    last = folder / "checkpoints" / (folder / "checkpoints/last").read_text().strip()
    return {
        f"{name}/{key}": tensor
        for name in ("model", "optimizer")
        for key, tensor in load_file(last / f"{name}.safetensors").items()
    }


def weights(folder: Path | str) -> dict[str, Tensor]:
    """The tensors of the checkpoint that `checkpoint=RUN` loads."""
    return load_file(checkpoint_folder(str(folder)) / "model.safetensors")


def interrupt(monkeypatch: pytest.MonkeyPatch, start: Callable[[int], Any]) -> None:
    """Interrupts a run before the checkpoint of its third step. start: runs it, given the expected exit status."""
    save = Keeper.save

    def dying(self, progress, must=False):
        if progress.step == 3:
            raise KeyboardInterrupt
        return save(self, progress, must)

    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "save", dying)
        start(130)


def assert_same(once: Mapping[str, Tensor], twice: Mapping[str, Tensor]) -> None:
    """Asserts that both have the same tensors, bit for bit."""
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], tensor) for key, tensor in twice.items())


def assert_resumes_bitwise(monkeypatch: pytest.MonkeyPatch, name: str, *more: str) -> None:
    """Asserts that a run that is interrupted and resumed ends with the tensors of an uninterrupted run."""
    whole = run(f"{name}-whole", *more)
    interrupt(monkeypatch, lambda status: run(name, *more, status=status))
    folder = run(name, *more)
    assert "resumes after step 2" in (folder / "log.txt").read_text()
    assert_same(saved(whole), saved(folder))
