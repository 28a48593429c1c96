"""Whether the processes of a group train the same model on the same data with the same code, before they begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lmtool
from lmtool.errors import UserError
from lmtool.runs.cut import is_cut
from lmtool.training.group import Group
from lmtool.types import Loader

_AGAIN = "give all machines the same files: code, data, checkpoint"


def require_alike(group: Group, learner: nn.Module, loader: Loader) -> None:
    """UserError, on all processes, where one of them differs from rank 0: it names the first difference. Weights are
    compared by a sum over their bits, tensor by tensor; not those that are cut, of which each has another part."""
    if group.size == 1:
        return
    versions = {"lmtool": lmtool.__version__, "torch": torch.__version__}
    own = {"versions": versions, "training data": loader.facts(), "weights": _sums(learner)}
    everyone = group.all(own)
    for rank, theirs in enumerate(everyone):
        for kind, facts in everyone[0].items():
            if difference := _difference(facts, theirs[kind]):
                raise UserError(f"rank {rank} has other {kind} than rank 0: {difference}", _AGAIN)


def _sums(learner: nn.Module) -> dict[str, int]:
    tensors = {name: tensor for name, tensor in learner.state_dict().items() if not is_cut(tensor)}
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum() for tensor in tensors.values()]).tolist()  # one wait for the device
    return dict(zip(tensors, sums, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as integers, of four bytes where they are as wide."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first key in which two differ."""
    for name in [*first, *(name for name in other if name not in first)]:
        if first.get(name) != other.get(name):
            return f"{name} is {other.get(name)}, and {first.get(name)} there"
    return None
