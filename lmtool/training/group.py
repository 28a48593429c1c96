"""The processes that train together: what they exchange, how torch connects them, and checks that all ranks have the
same code, configuration, data, checkpoint and weights."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.system.ranks import ADDRESS, PORT, START_AGAIN, RankInfo, rank_info
from lmtool.training.sharding import is_sharded
from lmtool.types import Loader

Value = TypeVar("Value")


class ProcessGroup(Protocol):
    """The processes that train together. rank: the rank of this process, from 0. size: their number.

    All processes call the same methods in the same order. Values are plain objects that pickle accepts; they are sent
    between the hosts, so that no device waits for them.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Sums counts by name over all processes; a name that a process lacks counts as 0."""

    def first(self, value: Value) -> Value:
        """Returns the value of rank 0, on all ranks."""

    def all(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in order."""

    def wait(self) -> None:
        """Returns once all processes have called it, however long that takes."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sums the tensor in place over all processes on their devices; the host does not wait."""


class SingleProcess:
    """The group of one process."""

    rank, size = 0, 1

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        return dict(counts)

    def first(self, value: Value) -> Value:
        return value

    def all(self, value: Value) -> list[Value]:
        return [value]

    def wait(self) -> None: ...

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor


ALONE = SingleProcess()


def sum_by_name(counts: list[Mapping[str, float]]) -> dict[str, float]:
    """Sums counts by name in a fixed order, so that all processes get the same sums."""
    totals: dict[str, float] = {}
    for part in counts:
        for name, count in part.items():
            totals[name] = totals.get(name, 0.0) + count
    return totals


TIMEOUT = timedelta(minutes=10)
"""Maximum time to wait for a process that hangs. If a process dies, its connection closes at once."""
PATIENCE = timedelta(days=7)
"""Maximum time of `wait`: rank 0 may be tokenizing a corpus."""

# Counts are sent in one message of `_FRAME_BYTES` bytes, the first `_HEADER_BYTES` of which say how many bytes follow.
# torch's functions for objects send two messages, and every step waits for them.
_FRAME_BYTES, _HEADER_BYTES = 512, 8


class Processes:
    """A `ProcessGroup` over torch's initialized default process group. Hosts communicate over gloo; devices over NCCL
    on CUDA, and over gloo on a CPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._patient_group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def sum(self, counts: Mapping[str, float]) -> dict[str, float]:
        data = json.dumps(dict(counts)).encode()
        texts = self._gather_bytes(data, _FRAME_BYTES)
        if (longest := max(map(len, texts))) > _FRAME_BYTES - _HEADER_BYTES:
            texts = self._gather_bytes(data, longest + _HEADER_BYTES)
        return sum_by_name([json.loads(text) for text in texts])

    def first(self, value: Value) -> Value:
        values = [value if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]  # type: ignore[return-value]

    def all(self, value: Value) -> list[Value]:
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        """Returns the bytes of each rank; zeros, as many as there are bytes, if they do not fit in a frame of `size`
        bytes."""
        fits = data if len(data) <= size - _HEADER_BYTES else b""
        frame = (len(data).to_bytes(_HEADER_BYTES, "little") + fits).ljust(size, b"\0")
        frames = list(torch.empty(self.size, size, dtype=torch.uint8).unbind())
        dist.all_gather(frames, torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        received = [frame.numpy().tobytes() for frame in frames]
        return [data[_HEADER_BYTES:].ljust(length, b"\0")[:length] for data in received for length in [_length(data)]]

    def wait(self) -> None:
        dist.barrier(self._patient_group)

    def add_up(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor


def _length(frame: bytes) -> int:
    return int.from_bytes(frame[:_HEADER_BYTES], "little")


@contextmanager
def process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """Yields the group that this process was started in; a single process if the environment names no others.

    device: the device on which this process computes. Raises UserError if torch lacks the backend, the rendezvous port
    is in use, or not all processes arrive within TIMEOUT.
    """
    process = rank_info(os.environ)
    if process.size == 1:
        yield ALONE
        return
    backend = backend_of(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = dist.PrefixStore(f"lmtool/{next(_GROUPS_JOINED)}", _store(process))
        dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.size, timeout=TIMEOUT)
    except dist.DistError as error:
        raise _join_error(process, error) from error
    try:
        yield Processes()
    finally:
        dist.destroy_process_group()


_GROUPS_JOINED = itertools.count()
"""The number of groups that this process has joined: one for each run of a suite. It is part of the keys in the store,
so that a group does not read the addresses of an earlier one."""


@cache
def _store(process: RankInfo) -> dist.Store:
    """The store in which processes find each other, torchrun's or rank 0's, lasts as long as the processes."""
    store, _, _ = next(dist.rendezvous("env://", process.rank, process.size, timeout=TIMEOUT))
    return store


def backend_of(device: torch.device) -> str:
    """Returns the communication backend. Raises UserError if this build of torch lacks it."""
    available_backends = {"gloo": dist.is_available() and dist.is_gloo_available()}
    if device.type == "cuda":
        available_backends["nccl"] = dist.is_available() and dist.is_nccl_available()
    for name, available in available_backends.items():
        if not available:
            raise UserError(
                f"torch {torch.__version__} was built without {name}, which several processes need on {device.type}",
                "install another build of torch, or train in one process: devices=1",
            )
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join_error(process: RankInfo, error: Exception) -> UserError:
    address, port = os.environ[ADDRESS], os.environ[PORT]
    who = f"rank {process.rank} of {process.size}"
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return UserError(
            f"{who}: {PORT}={port} of this machine is in use",
            f"{START_AGAIN} --master-port=OTHER, or --master-port=0 for a free one",
        )
    if isinstance(error, dist.DistNetworkError) or "timeout" in text.lower() or "timed out" in text.lower():
        return UserError(
            f"{who} did not meet the others at {address}:{port} within {TIMEOUT.seconds // 60} minutes",
            f"read the messages of the other ranks; {ADDRESS} must be the address of rank 0's machine",
        )
    return UserError(f"{who}: the processes could not be joined: {text.splitlines()[0]}", START_AGAIN)


def require_same_training(group: ProcessGroup, learner: nn.Module, loader: Loader) -> None:
    """Raises UserError on all ranks if the training data or the weights of a rank differ from those of rank 0. Weights
    are compared by a sum over their bits; sharded tensors, which differ between ranks, are omitted."""
    if group.size > 1:
        data = {f"training data: {name}": value for name, value in loader.metadata().items()}
        require_same(group, data | {f"weights: {name}": total for name, total in _bit_sums(learner).items()})


def require_same(group: ProcessGroup, values: Mapping[str, object]) -> None:
    """Raises UserError on all ranks if a value differs between a rank and rank 0. values: by the name that the
    message uses."""
    if group.size == 1:
        return
    all_values = group.all({name: str(value) for name, value in values.items()})
    for rank, local in enumerate(all_values):
        for name in {**all_values[0], **local}:
            value, first = local.get(name, "none"), all_values[0].get(name, "none")
            if value != first:
                raise UserError(
                    f"rank {rank} differs from rank 0: {name} is {_shorten(value)}, not {_shorten(first)}",
                    "give all machines the same files (code, data, checkpoint) and the same command",
                )


def _bit_sums(learner: nn.Module) -> dict[str, int]:
    tensors = {name: tensor for name, tensor in learner.state_dict().items() if not is_sharded(tensor)}
    if not tensors:
        return {}
    sums = torch.stack([_bits(tensor).sum() for tensor in tensors.values()]).tolist()  # one wait for the device
    return dict(zip(tensors, sums, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as integers: int32 for 4-byte elements, otherwise uint8."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)


def _shorten(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."
