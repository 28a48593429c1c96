"""Tiny finetuning runs in this process, and one that is cut off and resumed."""

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
    """`lmtool finetune` of a tiny BERT, four steps where nothing else is typed."""
    return finetune(name, "model=bert_tiny", *TINY, "checkpoint=none", *STEPS, *more, status=status)


def saved(folder: Path) -> dict[str, Tensor]:
    """All that the last checkpoint of a run holds."""
    last = folder / "checkpoints" / (folder / "checkpoints/last").read_text().strip()
    return {
        f"{name}/{key}": tensor
        for name in ("model", "optimizer")
        for key, tensor in load_file(last / f"{name}.safetensors").items()
    }


def weights(folder: Path | str) -> dict[str, Tensor]:
    """The tensors of the checkpoint that a run stands for."""
    return load_file(checkpoint_folder(str(folder)) / "model.safetensors")


def cut_off(monkeypatch: pytest.MonkeyPatch, started: Callable[[int], Any]) -> None:
    """A run that dies before the checkpoint of its third step. started: runs it, with the status that it ends with."""
    save = Keeper.save

    def dying(self, progress, must=False):
        if progress.step == 3:
            raise KeyboardInterrupt
        return save(self, progress, must)

    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "save", dying)
        started(130)


def assert_same(once: Mapping[str, Tensor], twice: Mapping[str, Tensor]) -> None:
    """The same tensors, bit by bit."""
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], tensor) for key, tensor in twice.items())


def assert_resumes_bitwise(monkeypatch: pytest.MonkeyPatch, name: str, *more: str) -> None:
    """A run that dies and is started again ends as one that is not cut off."""
    whole = run(f"{name}-whole", *more)
    cut_off(monkeypatch, lambda status: run(name, *more, status=status))
    folder = run(name, *more)
    assert "resumes after step 2" in (folder / "log.txt").read_text()
    assert_same(saved(whole), saved(folder))
