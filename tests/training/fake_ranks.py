"""One rank of a group of 64: torch's fake process group completes every collective at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache

SIZE = 64


class FakeGroup:
    """A group whose other ranks hold the same values as this one.

    Attributes:
        messages: Number of sums between the hosts.
    """

    size = SIZE

    def __init__(self, rank: int):
        self.rank, self.messages = rank, 0

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        self.messages += 1
        return {name: self.size * count for name, count in counts.items()}

    def add_up(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor


class Traffic(CommDebugMode):
    """Counts collectives, and the bytes of their complete tensors, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    @property
    def calls(self) -> dict[str, int]:
        return {_operation(packet): number for packet, number in self.get_comm_counts().items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.get_total_counts()
        output = super().__torch_dispatch__(function, types, args, kwargs)
        if self.get_total_counts() > before:
            # In-place collectives complete their first argument; a reduce-scatter reads the complete tensor.
            complete = args[1] if function._opname == "_reduce_scatter_base_" else args[0]
            complete = output if isinstance(output, Tensor) else complete
            tensors = [complete] if isinstance(complete, Tensor) else complete
            self.bytes[_operation(function)] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return output


def _operation(function: Any) -> str:
    return str(function).split(".")[1]


def completed_all_reduce(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """An all-reduce with a finished future; the fake group's own future stays empty."""
    dist.all_reduce(tensor)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def forget_rank() -> None:
    """Clear torch's cache of sharding results, which depend on the rank of the last group."""
    _clear_sharding_prop_cache()
