"""Engines run a learner's forward pass and sum gradients over the processes of a group.

`Plain` is for one process. With `Ddp` (torch's DistributedDataParallel) each process has all weights, with `Fsdp`
(torch's FSDP2) some rows of each. Gradients are summed, not averaged: each term's loss is already divided by its count
over all processes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmtool.errors import UserError
from lmtool.nn.stack import Stack
from lmtool.training.configs import Parallel
from lmtool.training.group import ALONE, ProcessGroup
from lmtool.training.precision import Precision
from lmtool.types import Batch, Learner


@dataclass(frozen=True)
class ForwardLoss:
    """The contribution of a forward pass to the loss of its step. loss: a scalar, or None. terms: by name, the
    contribution to the term's mean."""

    loss: Tensor | None
    terms: dict[str, Tensor]


class Engine(Protocol):
    learner: Learner
    group: ProcessGroup

    def start_step(self, step: int) -> None:
        """Called before the forward passes of each optimizer step, with the step's number from 1."""

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        """Returns the contribution of a micro-batch, on the device. counts: the number of targets of each term in the
        step, over all processes."""

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Returns the context of the forward and backward pass of a micro-batch. last: whether it is the last one of
        the step, in which gradients are summed over processes."""


class Plain:
    """The engine of one process."""

    def __init__(self, learner: Learner, group: ProcessGroup = ALONE):
        self.learner, self.group = learner, group

    def start_step(self, step: int) -> None:
        self.learner.on_step(step)

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        return part_of_loss(self.learner, batch, step, counts, precision)

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


class Ddp(Plain):
    """The engine with torch's DistributedDataParallel, rebuilt when the set of trained parameters changes (gradual
    unfreezing)."""

    def __init__(self, learner: Learner, group: ProcessGroup):
        super().__init__(learner, group)
        assert isinstance(learner, nn.Module)
        self._parameters = list(learner.parameters())
        self._requires_grad: list[bool] = []
        self._wrapped: DistributedDataParallel | None = None

    def start_step(self, step: int) -> None:
        super().start_step(step)
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._requires_grad:
            self._requires_grad = trainable
            self._wrap()

    def _wrap(self) -> None:
        if self._wrapped is not None:
            self._wrapped._remove_autograd_hooks()
            self._wrapped = None
        if not any(self._requires_grad):
            return
        anchor = next(parameter for parameter in self._parameters if parameter.requires_grad)
        with warnings.catch_warnings():
            # The replacement of this argument in torch 2.13 does not exist in earlier versions.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._wrapped = DistributedDataParallel(
                _LossModule(self.learner, anchor),
                find_unused_parameters=True,  # so that unused parameters have no gradient, as in one process
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                init_sync=False,  # require_same_training has compared the weights
            )
        # A lambda, because DDP rejects string annotations.
        self._wrapped.register_comm_hook(None, lambda state, bucket: _summed(bucket.buffer()))

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        if self._wrapped is None:
            return super().__call__(batch, step, counts, precision)
        part: ForwardLoss = self._wrapped(batch, step, counts, precision)
        return part

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        with nullcontext() if last or self._wrapped is None else self._wrapped.no_sync():
            yield


class _LossModule(nn.Module):
    """Returns a learner's loss, from which DDP finds the parameters of the backward pass. It always depends on the
    trained parameter `anchor`; otherwise a process whose batch has no targets would let the others wait forever."""

    def __init__(self, learner: Learner, anchor: nn.Parameter):
        super().__init__()
        self.learner = learner
        self._anchor = [anchor]  # in a list, so that it is not a parameter of this module

    def forward(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        part = part_of_loss(self.learner, batch, step, counts, precision)
        if part.loss is not None and part.loss.requires_grad:
            return part
        zero = 0.0 * self._anchor[0].flatten()[:1].sum()
        return ForwardLoss(zero if part.loss is None else part.loss + zero, part.terms)


def part_of_loss(
    learner: Learner, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision
) -> ForwardLoss:
    """Runs a forward pass. Each term's sum is divided by its count over all micro-batches and processes of the step, so
    that the number of micro-batches and processes does not change the loss. A term without targets in the step is
    omitted."""
    with precision.autocast():
        output = learner(batch, step)
    means = {name: total.float() / counts[name] for name, total in output.sums.items() if counts[name]}
    if not means:
        return ForwardLoss(None, {})
    loss = torch.stack([output.loss_weights[name] * mean for name, mean in means.items()]).sum()
    return ForwardLoss(loss, {name: mean.detach() for name, mean in means.items()})


def _summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


# Weights, gradients and optimizer state sharded over processes with torch's FSDP2 (`fully_shard`; Zhao et al. 2023,
# "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; Rajbhandari et al. 2020, "ZeRO", stage 3).
#
# Each layer is a unit, and everything outside layers is another one. A process stores some rows of each tensor, and
# gathers a unit to compute with it, in fp32: weights are cast under autocast, as in one process.


def shard(learner: nn.Module, device: torch.device, group: ProcessGroup) -> None:
    """Shards every parameter of a learner along its first dimension over the processes, in place. The parameters become
    new objects. A learner on the host is moved to the device layer by layer. Raises UserError if a parameter is a
    scalar, or if torch is too old."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise UserError(
            f"parallel=fsdp needs torch 2.13 or newer; this is {torch.__version__}",
            "update torch, or set parallel=ddp",
        )
    for name, parameter in learner.named_parameters():
        if parameter.ndim == 0:
            raise UserError(
                f"parallel=fsdp shards the rows of parameters, but {name} is a scalar",
                "set parallel=ddp, or make it a vector of one element",
            )
    mesh = init_device_mesh(device.type, (group.size,))
    for module in (*_layers(learner), learner):
        unit = fully_shard(module, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)  # sum gradients
        unit.set_force_sum_reduction_for_comms(True)
        # Another process may use the parameters that this one does not.
        unit.set_reduce_scatter_unused_params(True)


@contextmanager
def outside_layers(learner: nn.Module) -> Iterator[None]:
    """Makes the parameters outside layers complete on every process within the context, so that methods other than
    forward can be called. A layer is gathered when it is called, so all processes must call the same number of layers.
    Does nothing if the learner is not sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a second to import: `shard` does
    if fsdp is None or not isinstance(learner, fsdp.FSDPModule):
        yield
        return
    learner.unshard()
    try:
        yield
    finally:
        learner.reshard()


class Fsdp(Plain):
    """The engine of a sharded learner. Gradients are summed over processes after every micro-batch, because no process
    can store all of them."""

    def __init__(self, learner: Learner, group: ProcessGroup):
        super().__init__(learner, group)
        assert isinstance(learner, nn.Module)
        self._named_parameters = dict(learner.named_parameters())
        self._used_names: set[str] = set()
        self._has_loss = True
        self._last_states: list[Tensor] = []
        names = {id(parameter): name for name, parameter in self._named_parameters.items()}
        for unit in (*_layers(learner), learner):
            unit.register_forward_pre_hook(_GradientWatch(unit, names, self._note_use))
        for stack in _stacks(learner):
            for last in list(stack.applied_layers())[-1:]:
                last.register_forward_hook(lambda layer, inputs, x_TH: self._last_states.append(x_TH))

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self._used_names.clear()

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        part = super().__call__(batch, step, counts, precision)
        # Layers are summed in the order of the backward pass, which must pass through all of them in every process,
        # even in one whose batch has no targets.
        reached = [0.0 * end.flatten()[:1].sum() for end in self._last_states if end.requires_grad]
        self._has_loss = part.loss is not None
        loss = part.loss if part.loss is not None else torch.zeros((), device=batch.inputs.tokens.device)
        return ForwardLoss(torch.stack([loss, *reached]).sum(), part.terms)

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        yield
        self._last_states.clear()
        if not last:
            return
        # A parameter that no process uses has no gradient, as in one process: even a zero gradient may move it.
        trainable = (name for name, parameter in self._named_parameters.items() if parameter.requires_grad)
        for name, count in self.group.sum({name: 1.0 for name in trainable if name not in self._used_names}).items():
            if count == self.group.size:
                self._named_parameters[name].grad = None

    def _note_use(self, name: str) -> None:
        if self._has_loss:
            self._used_names.add(name)


class _GradientWatch:
    """A hook before a unit's first forward pass that calls `note` when one of its parameters, which it removes from
    `names` (by id), gets a gradient."""

    def __init__(self, unit: nn.Module, names: dict[int, str], note: Callable[[str], None]):
        self._parameters = [
            (module, attribute, names.pop(id(parameter)))
            for module in unit.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if id(parameter) in names
        ]
        self._note_use = note

    def __call__(self, unit: nn.Module, inputs: object) -> None:
        for module, attribute, name in self._parameters:
            parameter = getattr(module, attribute)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._note_use(name))
        self._parameters = []


def _stacks(learner: nn.Module) -> list[Stack]:
    return [module for module in learner.modules() if isinstance(module, Stack)]


def _layers(learner: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys(layer for stack in _stacks(learner) for layer in stack.layers))


def engine_for(learner: Learner, parallel: Parallel, group: ProcessGroup) -> Engine:
    """Returns the engine for a learner, which has the same weights in all processes; with fsdp the
    learner is already sharded."""
    if group.size == 1:
        return Plain(learner)
    return Ddp(learner, group) if parallel == "ddp" else Fsdp(learner, group)
