"""What runs a learner's forward and adds gradients up over the processes of a group.

The loop asks an engine and never knows which: `Plain` is one process, `Ddp` torch's own DistributedDataParallel, where
each process holds all weights, `sharded.Fsdp` its FSDP2, where each holds its rows of them. What processes add up are
sums: each term's loss was divided by its count over all of them, so that nothing is divided again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmtool.training.group import ALONE, Group
from lmtool.training.precision import Precision
from lmtool.types import Batch, Learner


@dataclass(frozen=True)
class Part:
    """What one forward adds to the loss of its step. loss: a scalar; None where it adds nothing. terms: by name, what
    it adds to the term's mean."""

    loss: Tensor | None
    terms: dict[str, Tensor]


class Engine(Protocol):
    """learner: what it runs. group: the processes that run it together."""

    learner: Learner
    group: Group

    def begin(self, step: int) -> None:
        """Called before the forwards of each optimizer step, with the step's number from 1."""

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> Part:
        """What a micro-batch on the device adds to the loss. counts: how much each term predicts in the whole step, in
        all processes."""

    def adding_up(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and the backward of one micro-batch: gradients cross processes in the step's last."""


class Plain:
    """The engine of one process."""

    def __init__(self, learner: Learner, group: Group = ALONE):
        self.learner, self.group = learner, group

    def begin(self, step: int) -> None:
        self.learner.on_step(step)

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> Part:
        return part_of_loss(self.learner, batch, step, counts, precision)

    def adding_up(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


class Ddp(Plain):
    """torch's DistributedDataParallel around what is descended. It is wrapped again when other parameters learn than
    in the step before, as in gradual unfreezing."""

    def __init__(self, learner: Learner, group: Group):
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

    def __call__(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> Part:
        if self._wrapped is None:
            return super().__call__(batch, step, counts, precision)
        part: Part = self._wrapped(batch, step, counts, precision)
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

    def forward(self, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> Part:
        part = part_of_loss(self.learner, batch, step, counts, precision)
        if part.loss is not None and part.loss.requires_grad:
            return part
        nothing = 0.0 * self._anchor[0].flatten()[:1].sum()
        return Part(nothing if part.loss is None else part.loss + nothing, part.terms)


def part_of_loss(learner: Learner, batch: Batch, step: int, counts: Mapping[str, float], precision: Precision) -> Part:
    """A term's loss is its sum over all micro-batches, divided once by its count over all of them in all processes, so
    that neither cut changes anything. A term that predicts nothing in the step counts nothing."""
    with precision.autocast():
        output = learner(batch, step)
    means = {name: total.float() / counts[name] for name, total in output.sums.items() if counts[name]}
    if not means:
        return Part(None, {})
    loss = torch.stack([output.weights[name] * mean for name, mean in means.items()]).sum()
    return Part(loss, {name: mean.detach() for name, mean in means.items()})


def _summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Those of all processes, added up in place."""
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
