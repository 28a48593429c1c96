"""Engines: they run a learner's forward and sum gradients over the processes of a group.

The loop asks an engine and never knows which: `Plain` is one process, `Ddp` torch's own DistributedDataParallel, where
each process holds all weights, `sharded.Fsdp` its FSDP2, where each holds its rows of them. What processes add up are
sums: each term's loss was divided by its count over all of them, so that nothing is divided again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

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
    """What one forward adds to the loss of its step. loss: a scalar; None where it adds nothing. terms: by name, what
    it adds to the term's mean."""

    loss: Tensor | None
    terms: dict[str, Tensor]


class Engine(Protocol):
    """learner: what it runs. group: the processes that run it together."""

    learner: Learner
    group: ProcessGroup

    def begin(self, step: int) -> None:
        """Called before the forwards of each optimizer step, with the step's number from 1."""

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        """What a micro-batch on the device adds to the loss. counts: how much each term predicts in the whole step, in
        all processes."""

    def adding_up(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and the backward of one micro-batch: gradients cross processes in the step's last."""


class Plain:
    """The engine of one process."""

    def __init__(self, learner: Learner, group: ProcessGroup = ALONE):
        self.learner, self.group = learner, group

    def begin(self, step: int) -> None:
        self.learner.on_step(step)

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        return part_of_loss(self.learner, batch, step, counts, precision)

    def adding_up(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


class Ddp(Plain):
    """torch's DistributedDataParallel around what is descended. It is wrapped again when other parameters learn than
    in the step before, as in gradual unfreezing."""

    def __init__(self, learner: Learner, group: ProcessGroup):
        super().__init__(learner, group)
        assert isinstance(learner, nn.Module)
        self._parameters = list(learner.parameters())
        self._learning: list[bool] = []
        self._wrapped: DistributedDataParallel | None = None

    def begin(self, step: int) -> None:
        super().begin(step)
        learning = [parameter.requires_grad for parameter in self._parameters]
        if learning != self._learning:
            self._learning = learning
            self._wrap()

    def _wrap(self) -> None:
        if self._wrapped is not None:
            self._wrapped._remove_autograd_hooks()
            self._wrapped = None
        if not any(self._learning):
            return
        anchor = next(parameter for parameter in self._parameters if parameter.requires_grad)
        with warnings.catch_warnings():
            # Torch from 2.13 on would have this spelled in another way, which those before do not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self._wrapped = DistributedDataParallel(
                _Descended(self.learner, anchor),
                find_unused_parameters=True,  # they have no gradient then, as in one process
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                init_sync=False,  # the processes compared their weights, see consistency.py
            )
        # Not a function of its own: DDP refuses annotations that are strings.
        self._wrapped.register_comm_hook(None, lambda state, bucket: _summed(bucket.buffer()))

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        if self._wrapped is None:
            return super().__call__(batch, step, counts, precision)
        part: ForwardLoss = self._wrapped(batch, step, counts, precision)
        return part

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        with nullcontext() if last or self._wrapped is None else self._wrapped.no_sync():
            yield


class _Descended(nn.Module):
    """A learner with the loss as its output: DDP looks there for the parameters that a backward will reach. anchor: one
    that learns; a loss that depends on none would leave the other processes waiting."""

    def __init__(self, learner: Learner, anchor: nn.Parameter):
        super().__init__()
        self.learner = learner
        self._anchor = [anchor]  # no parameter of this module

    def forward(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        part = part_of_loss(self.learner, batch, step, counts, precision)
        if part.loss is not None and part.loss.requires_grad:
            return part
        nothing = 0.0 * self._anchor[0].flatten()[:1].sum()
        return ForwardLoss(nothing if part.loss is None else part.loss + nothing, part.terms)


def part_of_loss(
    learner: Learner, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision
) -> ForwardLoss:
    """A term's loss is its sum over all micro-batches, divided once by its count over all of them in all processes, so
    that neither cut changes anything. A term that predicts nothing in the step counts nothing."""
    with precision.autocast():
        output = learner(batch, step)
    means = {name: total.float() / counts[name] for name, total in output.sums.items() if counts[name]}
    if not means:
        return ForwardLoss(None, {})
    loss = torch.stack([output.weights[name] * mean for name, mean in means.items()]).sum()
    return ForwardLoss(loss, {name: mean.detach() for name, mean in means.items()})


def _summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Those of all processes, added up in place."""
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


# Weights, gradients and the optimizer's state cut over the processes of a group: torch's FSDP2 (`fully_shard`; Zhao
# et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; Rajbhandari et al. 2020, "ZeRO",
# stage 3).
#
# Each layer is a unit, and what stands outside the layers is one: a process holds its rows of every tensor, and all
# of a unit while it computes with it. Weights travel in fp32 and are cast under autocast, as in one process.


def shard(learner: nn.Module, device: torch.device, group: ProcessGroup) -> None:
    """Cut every parameter of a learner along its first dimension over the processes, in place. The parameters are other
    objects from then on. It may be on the host: a layer at a time goes to the device. UserError where a parameter has
    no rows, and where torch is older than this."""
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
                f"parallel=fsdp cuts parameters by their rows; {name} is a single number",
                "set parallel=ddp, or make it a vector of one",
            )
    mesh = init_device_mesh(device.type, (group.size,))
    for module in (*_layers(learner), learner):
        unit = fully_shard(module, mesh=mesh)
        # Each term's loss was divided by its count over all processes: gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # What one process does not use, another may: all take part in its sum.
        unit.set_reduce_scatter_unused_params(True)


@contextmanager
def outside_layers(learner: nn.Module) -> Iterator[None]:
    """While it lasts, what stands outside the layers is complete on every process, for who calls parts of a learner and
    not its forward. Layers are completed as they are called, so that every process must call as many. A learner that
    is not cut stays as it is."""
    cut: Any = learner
    if not hasattr(cut, "unshard"):
        yield
        return
    cut.unshard()
    try:
        yield
    finally:
        cut.reshard()


class Fsdp(Plain):
    """The engine of a learner that is cut. Gradients cross processes behind every micro-batch: none has room for all of
    them."""

    def __init__(self, learner: Learner, group: ProcessGroup):
        super().__init__(learner, group)
        assert isinstance(learner, nn.Module)
        self._named = dict(learner.named_parameters())
        self._used: set[str] = set()
        self._counts = True
        self._ends: list[Tensor] = []
        names = {id(parameter): name for name, parameter in self._named.items()}
        for unit in (*_layers(learner), learner):
            unit.register_forward_pre_hook(_Watched(unit, names, self._note))
        for stack in _stacks(learner):
            for last in list(stack.depth())[-1:]:
                last.register_forward_hook(lambda layer, given, x_TH: self._ends.append(x_TH))

    def begin(self, step: int) -> None:
        super().begin(step)
        self._used.clear()

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> ForwardLoss:
        part = super().__call__(batch, step, counts, precision)
        # Layers add up one by one, in the order of the backward: it passes through all of them in every process, though
        # what stands behind them may predict nothing there.
        reached = [0.0 * end.flatten()[:1].sum() for end in self._ends if end.requires_grad]
        self._counts = part.loss is not None
        loss = part.loss if part.loss is not None else torch.zeros((), device=batch.inputs.tokens.device)
        return ForwardLoss(torch.stack([loss, *reached]).sum(), part.terms)

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        yield
        self._ends.clear()
        if not last:
            return
        # What no process uses has no gradient, as in one process: a zero would move it.
        learning = (name for name, parameter in self._named.items() if parameter.requires_grad)
        for name, count in self.group.sum({name: 1.0 for name in learning if name not in self._used}).items():
            if count == self.group.size:
                self._named[name].grad = None

    def _note(self, name: str) -> None:
        if self._counts:
            self._used.add(name)


class _Watched:
    """Before the first forward of a unit, asks its complete parameters to say when they get a gradient. names: of those
    that no unit has yet, by what they are cut; the unit's are taken from them."""

    def __init__(self, unit: nn.Module, names: dict[int, str], note: Callable[[str], None]):
        self._places = [
            (module, attribute, names.pop(id(parameter)))
            for module in unit.modules()
            for attribute, parameter in module.named_parameters(recurse=False)
            if id(parameter) in names
        ]
        self._note = note

    def __call__(self, unit: nn.Module, given: object) -> None:
        for module, attribute, name in self._places:
            parameter = getattr(module, attribute)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._note(name))
        self._places = []


def _stacks(learner: nn.Module) -> list[Stack]:
    return [module for module in learner.modules() if isinstance(module, Stack)]


def _layers(learner: nn.Module) -> list[nn.Module]:
    """Each layer of each stack, once."""
    return list(dict.fromkeys(layer for stack in _stacks(learner) for layer in stack.layers))


# Which engine trains a learner.


def engine_for(learner: Learner, parallel: Parallel, group: ProcessGroup) -> Engine:
    """The engine that trains a learner in the processes of a group, which must hold the same weights; with fsdp the
    learner is cut over them already."""
    if group.size == 1:
        return Plain(learner)
    return Ddp(learner, group) if parallel == "ddp" else Fsdp(learner, group)
