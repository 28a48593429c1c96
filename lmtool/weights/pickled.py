"""Weights in torch's own file format: the one place of lmtool where such a file is opened."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmtool.errors import UserError


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, by name. torch's restricted reader builds tensors and containers and refuses
    everything else, so nothing in the file is executed. UserError where it holds anything else, or is damaged."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # the errors of a reader of pickles, whose module is not imported here
        words = " ".join(str(problem).split())[:160]
        raise UserError(
            f"{path}: no file of tensors alone: {words}", "give a folder with model.safetensors, or copy it again"
        ) from problem
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: it holds more than tensors by name", "give a folder with model.safetensors")
    return {str(name): tensor for name, tensor in content.items()}
