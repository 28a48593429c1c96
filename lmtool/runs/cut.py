"""Tensors of which each of several processes holds some rows (torch's DTensors, of training/sharded.py): complete for a
checkpoint, and cut again from one. So a checkpoint is the same whatever trained it, on however many processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def is_cut(tensor: Tensor) -> bool:
    """Whether a process holds some rows of it alone."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes most of a second, and few runs have any


def complete(tensor: Any) -> Tensor:
    """All of a tensor, on its device. Of one that is cut every process must call it."""
    full: Tensor = tensor.detach().full_tensor() if is_cut(tensor) else tensor
    return full


def gathered(tensors: Mapping[str, Tensor], keeps: bool) -> dict[str, Tensor]:
    """Tensors complete, those that were cut on the host; nothing where they are not kept. Every process must call it. A
    tensor under several names stays one. A device holds one of them at a time, the host of the process that keeps them
    holds all."""
    own: dict[int, Tensor | None] = {}
    for tensor in tensors.values():
        if id(tensor) not in own:
            full = complete(tensor)
            own[id(tensor)] = None if not keeps else full.cpu() if is_cut(tensor) else full
    kept = {name: own[id(tensor)] for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in kept.items() if tensor is not None}


def cut_like(value: Tensor, like: Any) -> Tensor:
    """A complete tensor, of which this process keeps the rows that it holds of `like`; all of it where that is not
    cut."""
    if not is_cut(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has read all of it: nothing is sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
