"""Consistency checks: all ranks must have the same code, configuration, data, checkpoint and model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

import lmtool
from lmtool.errors import UserError
from lmtool.runs import identity
from lmtool.runs.checkpoints import is_cut
from lmtool.runs.identity import FREE_KEYS, flatten
from lmtool.training.group import ProcessGroup
from lmtool.types import Loader

# Whether the processes of a group train the same model on the same data with the same code, before they begin.


_SAME_FILES = "give all machines the same files: code, data, checkpoint"


def require_same_training(group: ProcessGroup, learner: nn.Module, loader: Loader) -> None:
    """UserError, on all processes, where one of them differs from rank 0: it names the first difference. Weights are
    compared by a sum over their bits, tensor by tensor; not those that are cut, of which each has another part."""
    if group.size == 1:
        return
    versions = {"lmtool": lmtool.__version__, "torch": torch.__version__}
    local = {"versions": versions, "training data": loader.metadata(), "weights": _sums(learner)}
    everyone = group.all(local)
    for rank, remote in enumerate(everyone):
        for kind, metadata in everyone[0].items():
            if difference := _difference(metadata, remote[kind]):
                raise UserError(f"rank {rank} has other {kind} than rank 0: {difference}", _SAME_FILES)


def _sums(learner: nn.Module) -> dict[str, int]:
    tensors = {name: tensor for name, tensor in learner.state_dict().items() if not is_cut(tensor)}
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum() for tensor in tensors.values()]).tolist()  # one wait for the device
    return dict(zip(tensors, sums, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as integers: int32 for 4-byte elements, otherwise uint8."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)


def _difference(first: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    """The first key in which two differ."""
    for name in [*first, *(name for name in other if name not in first)]:
        if first.get(name) != other.get(name):
            return f"{name} is {other.get(name)}, and {first.get(name)} there"
    return None


# Whether the processes that train together are of one mind: the same code, configuration, data and checkpoint.


_SAME = "give all machines the same files and the same command"


def versions(plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """What computes: lmtool's version and the hash of its files, and torch's version."""
    return {
        "lmtool version": lmtool.__version__,
        "lmtool code": identity.fingerprint(plugins),
        "torch version": str(torch.__version__),
    }


def keys(config: Mapping[str, object]) -> dict[str, object]:
    """A configuration as plain data, by dotted key, without the keys that may differ between ranks."""
    return {key: value for key, value in flatten(config).items() if key.split(".")[0] not in FREE_KEYS}


def require_same(group: ProcessGroup, things: Mapping[str, object]) -> None:
    """UserError, on all processes, where one has another value than rank 0: it names the first difference with both
    values. things: by what they are called, plain values."""
    if group.size == 1:
        return
    everyone = group.all({name: str(value) for name, value in things.items()})
    for rank, remote in enumerate(everyone):
        for name, local, first in _differing(remote, everyone[0]):
            raise UserError(
                f"rank {rank} has another {name} than rank 0: {_short(local)}, and {_short(first)} there", _SAME
            )


def _differing(local: Mapping[str, str], first: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in [*first, *(name for name in local if name not in first)]:
        values = local.get(name, "none"), first.get(name, "none")
        if values[0] != values[1]:
            yield name, *values


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."
