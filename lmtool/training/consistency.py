"""Consistency checks: all ranks must have the same code, configuration, data, checkpoint and weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import lmtool
from lmtool.errors import UserError
from lmtool.runs import identity
from lmtool.runs.checkpoints import is_sharded
from lmtool.runs.identity import FREE_KEYS, flatten
from lmtool.training.group import ProcessGroup
from lmtool.types import Loader


def versions(plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """lmtool's version, the hash of its files and of plugins, and torch's version."""
    return {
        "lmtool version": lmtool.__version__,
        "lmtool code": identity.fingerprint(plugins),
        "torch version": str(torch.__version__),
    }


def keys(config: Mapping[str, object]) -> dict[str, object]:
    """Returns a configuration as plain data, by dotted key, without the keys that may differ between ranks."""
    return {key: value for key, value in flatten(config).items() if key.split(".")[0] not in FREE_KEYS}


def require_same_training(group: ProcessGroup, learner: nn.Module, loader: Loader) -> None:
    """Raises UserError on all ranks if the training data or the weights of a rank differ from those of rank 0. Weights
    are compared by a sum over their bits; sharded tensors, which differ between ranks, are omitted."""
    if group.size > 1:
        data = {f"training data: {name}": value for name, value in loader.metadata().items()}
        require_same(group, data | {f"weights: {name}": total for name, total in _sums(learner).items()})


def require_same(group: ProcessGroup, values: Mapping[str, object]) -> None:
    """Raises UserError on all ranks if a value, by its name for the message, differs between a rank and rank 0."""
    if group.size == 1:
        return
    all_values = group.all({name: str(value) for name, value in values.items()})
    for rank, local in enumerate(all_values):
        for name in {**all_values[0], **local}:
            value, first = local.get(name, "none"), all_values[0].get(name, "none")
            if value != first:
                raise UserError(
                    f"rank {rank} differs from rank 0: {name} is {_short(value)}, not {_short(first)}",
                    "give all machines the same files (code, data, checkpoint) and the same command",
                )


def _sums(learner: nn.Module) -> dict[str, int]:
    """Returns the sum over the bits of each tensor."""
    tensors = {name: tensor for name, tensor in learner.state_dict().items() if not is_sharded(tensor)}
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum() for tensor in tensors.values()]).tolist()  # one wait for the device
    return dict(zip(tensors, sums, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor as integers: int32 for 4-byte elements, otherwise uint8."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."
