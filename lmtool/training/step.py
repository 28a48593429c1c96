"""One optimizer step: gradients of its micro-batches, clipping and the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lmtool import random_streams
from lmtool.nn.dropout import seed_generators
from lmtool.nn.embeddings import Embeddings
from lmtool.runs.run_folder import RunFolder
from lmtool.training.engine import Engine
from lmtool.training.group import ProcessGroup, sum_by_name
from lmtool.training.optimizers import gradient_norm
from lmtool.training.precision import Precision
from lmtool.training.progress import Listener, Progress
from lmtool.training.sharding import full_tensor
from lmtool.types import Step, send


@contextmanager
def sparse_row_gradients(learner: nn.Module, optimizer: Optimizer, sparse: bool) -> Iterator[None]:
    """Uses sparse gradients, by row, for a learner's token embeddings; the optimizer still gets dense ones. sparse: if
    False, nothing is done (on CUDA, and with several processes, which sum dense gradients)."""
    tables = [part for part in learner.modules() if isinstance(part, Embeddings)] if sparse else []
    for table in tables:
        # A separate leaf, because autograd adds a sparse gradient to a dense one in new memory.
        table.sparse_leaf = table.token.weight.detach().requires_grad_()
        table.sparse_leaf.register_post_accumulate_grad_hook(partial(_merge_gradient, table.token.weight))
    buffers = _Buffers()
    hooks = (optimizer.register_step_pre_hook(buffers.fill), optimizer.register_step_post_hook(buffers.clear))
    try:
        yield
    finally:
        for table in tables:
            table.sparse_leaf = None
        for hook in hooks:
            hook.remove()


def _merge_gradient(weight: Tensor, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if weight.grad is None:
        weight.grad = gradient
    elif weight.grad.is_sparse:
        weight.grad = weight.grad + gradient
    else:
        gradient = gradient.coalesce()
        weight.grad.index_add_(0, gradient.indices()[0], gradient.values())


class _Buffers:
    """A dense gradient, all zeros between steps, for each parameter with sparse gradients. Shape letter: U distinct
    rows."""

    def __init__(self) -> None:
        self._dense: dict[nn.Parameter, Tensor] = {}
        self._filled: list[tuple[nn.Parameter, Tensor]] = []

    def fill(self, optimizer: Optimizer, *_: object) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            if gradient is None or not gradient.is_sparse:
                continue
            if parameter not in self._dense:
                self._dense[parameter] = torch.zeros_like(parameter)
            gradient = gradient.coalesce()
            (rows_U,) = gradient.indices()
            parameter.grad = self._dense[parameter].index_copy_(0, rows_U, gradient.values())
            self._filled.append((parameter, rows_U))

    def clear(self, *_: object) -> None:
        for parameter, rows_U in self._filled:
            self._dense[parameter].index_fill_(0, rows_U, 0.0)
            parameter.grad = None
        self._filled.clear()


_TOKEN_COUNT = "tokens of the step"


@dataclass
class Outcome:
    """The result of a step over all processes, on the device. loss: the total loss. terms: the mean of each term before
    its weight; NaN if no process computed it. tokens: number of tokens read, on the host."""

    loss: Tensor
    terms: dict[str, Tensor]
    tokens: int

    def row(self, progress: Progress, learning_rate: float, rate: float, norm: Tensor) -> dict[str, object]:
        """Returns the step's row in metrics.jsonl; waits for the device. A single term equals the loss and is
        omitted."""
        terms = {f"loss_{name}": float(term) for name, term in self.terms.items()}
        terms = {name: term for name, term in terms.items() if not math.isnan(term)}
        return {
            "step": progress.step, "split": "train", "loss": float(self.loss), **(terms if len(terms) > 1 else {}),
            "learning_rate": learning_rate, "grad_norm": float(norm), "epoch": progress.epoch,
            "tokens": progress.tokens, "tokens_per_second": rate,
        }  # fmt: skip


class RowWriter:
    """Writes rows of metrics.jsonl and passes them to a listener. Tokens per second are those since the last step's
    row."""

    def __init__(self, run: RunFolder, listener: Listener, progress: Progress):
        self.run, self.listener, self.progress = run, listener, progress
        self._tokens, self._seconds = progress.tokens, progress.seconds

    def write_step(self, outcome: Outcome, data: Step, learning_rate: float, norm: Tensor) -> None:
        progress = self.progress
        rate = (progress.tokens - self._tokens) / max(progress.seconds - self._seconds, 1e-9)
        self._tokens, self._seconds = progress.tokens, progress.seconds
        row = outcome.row(progress, learning_rate, rate, norm) | phase_of(data)
        self.run.append(row)
        self.listener.on_step(row)

    def write_evaluation(self, row: dict[str, Any]) -> None:
        self.run.append(row)
        self.listener.on_evaluation(row)


def phase_of(data: Step) -> dict[str, int]:
    """Returns the phase of a step as a field of its row; empty without phases."""
    return {} if data.phase is None else {"phase": data.phase}


def gradients(
    engine: Engine,
    data: Step,
    step: int,
    seed: int,
    precision: Precision,
    scaler: GradScaler | None = None,
) -> Outcome:
    """Sums the gradients of a step over its micro-batches and over the processes of the engine's group."""
    engine.start_step(step)
    group, learner, device = engine.group, engine.learner, precision.device
    targets = sum_by_name([learner.counts(batch) for batch in data.batches])
    counts = group.sum({**targets, _TOKEN_COUNT: sum(batch.tokens for batch in data.batches)})
    loss = torch.zeros((), device=device)
    terms: dict[str, Tensor] = {}

    def backward(summand: Tensor) -> None:
        if summand.requires_grad:
            (summand if scaler is None else scaler.scale(summand)).backward()

    micro_batches = [*data.batches, *data.idle]
    for micro, batch in enumerate(micro_batches):
        # torch's generators are seeded per micro-batch and rank, so that no state needs to be saved.
        seed_generators(device, random_streams.key(seed, "dropout", step, micro, *([group.rank] if group.rank else [])))
        with engine.gradient_sync(last=micro == len(micro_batches) - 1):
            part = engine(batch.to(device), step, counts, precision)
            if part.loss is None:
                continue
            if micro >= len(data.batches):  # idle, because other processes have more micro-batches
                backward(0.0 * part.loss)
                continue
            backward(part.loss)
        loss = loss + part.loss.detach()
        for name, mean in part.terms.items():
            terms[name] = terms[name] + mean if name in terms else mean
    if group.size > 1:
        loss, terms = sum_over_processes(
            loss, terms, [name for name in counts if name != _TOKEN_COUNT and counts[name]], group
        )
    for name, penalty in learner.penalties().items():  # independent of the batch, and equal in all processes
        backward(penalty)
        terms[name] = full_tensor(penalty.detach())
        loss = loss + terms[name]
    return Outcome(loss, terms, int(counts[_TOKEN_COUNT]))


def sum_over_processes(
    loss: Tensor, terms: Mapping[str, Tensor], names: Sequence[str], group: ProcessGroup
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the terms of a step over all processes, on the device. names: the names of the terms that
    any process may have; a term that no process has is NaN."""
    local = [terms.get(name) for name in names]
    zero = torch.zeros_like(loss)
    present = [float(term is not None) for term in local]
    values = torch.stack([loss, *(zero if term is None else term for term in local)])
    values = group.add_up(torch.cat([values, send(torch.tensor(present), values.device)]))
    means, counts = values[1 : 1 + len(names)], values[1 + len(names) :]
    means = torch.where(counts > 0, means, torch.nan)
    return values[0], dict(zip(names, means.unbind(), strict=True))


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    parameters: Sequence[nn.Parameter],
    clip_norm: float | None,
) -> Tensor:
    """Clips the gradients, takes a step, and removes the gradients. Returns the norm before clipping, on the device."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = gradient_norm(parameters, clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
