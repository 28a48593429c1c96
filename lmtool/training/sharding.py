"""Tensors of which each process has some rows: gathered to save them, sharded to load them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.runs.checkpoints import mismatches

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is sharded: each process then has some of its rows."""
    return hasattr(tensor, "full_tensor")  # importing DTensor takes most of a second, and few runs shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on the same device. All processes must call this for a sharded tensor."""
    return cast("DTensor", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], writes: bool) -> dict[str, Tensor]:
    """Gathers sharded tensors on the host, one at a time; unsharded tensors stay on their device. A tensor with several
    names stays shared. All processes must call this; a process without `writes` gets {}."""
    by_id: dict[int, Tensor | None] = {}
    for tensor in tensors.values():
        if id(tensor) not in by_id:
            full = full_tensor(tensor)
            by_id[id(tensor)] = None if not writes else full.cpu() if is_sharded(tensor) else full
    return {name: gathered for name, tensor in tensors.items() if (gathered := by_id[id(tensor)]) is not None}


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Shards a full tensor like `example`; returns it unchanged if `example` is not sharded."""
    if not is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("DTensor", example)
    # Every process has the full tensor, so none needs to be sent (src_data_rank=None).
    return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


def load_weights(
    learner: nn.Module, tensors: Mapping[str, Tensor], origin: str | Path, excluded: Collection[str] = ()
) -> None:
    """Loads all weights into the learner, except those in `excluded`, which training does not change. Raises UserError
    with the first three differences if names or shapes differ. origin: the checkpoint in the message."""
    current = {name: tensor for name, tensor in learner.state_dict().items() if name not in excluded}
    differences = mismatches(current, tensors)
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{origin} does not fit the model: {'; '.join(sorted(differences)[:3])}{more}",
            "resume with the configuration it was trained with, or set another name=",
        )
    sharded = {name: shard_like(tensor, current[name]) for name, tensor in tensors.items()}
    learner.load_state_dict(sharded, strict=not excluded)
