"""One optimizer step: gradients over its micro-batches, then clip and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from lmtool import streams
from lmtool.nn.dropout import seed_generators
from lmtool.training.group import ALONE, Group
from lmtool.training.optimizers import gradient_norm
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress
from lmtool.types import Batch, Learner, Step


@dataclass
class Outcome:
    """What one step gave, on the device. loss: what was descended. terms: each term's mean, before its weight."""

    loss: Tensor
    terms: dict[str, Tensor]

    def row(self, progress: Progress, learning_rate: float, rate: float, norm: Tensor) -> dict[str, Any]:
        """The step's row in metrics.jsonl; reading it waits for the device. A single term is the loss itself."""
        terms = {f"loss_{name}": float(term) for name, term in self.terms.items()} if len(self.terms) > 1 else {}
        return {
            "step": progress.step, "split": "train", "loss": float(self.loss), **terms,
            "learning_rate": learning_rate, "grad_norm": float(norm), "epoch": progress.epoch,
            "tokens": progress.tokens, "tokens_per_second": rate,
        }  # fmt: skip


def gradients(
    learner: Learner,
    data: Step,
    step: int,
    seed: int,
    device: torch.device,
    precision: Precision,
    scaler: GradScaler | None = None,
    group: Group = ALONE,
) -> Outcome:
    """Add up the gradients of one step over its micro-batches.

    A term's loss is its sum over all micro-batches, divided once by its count over all of them in all processes of the
    group, so that neither cut changes anything. A term that predicts nothing in this step counts nothing.
    """
    learner.on_step(step)
    counts = group.sum(total_counts(learner, data.batches))
    loss = torch.zeros((), device=device)
    terms: dict[str, Tensor] = {}

    def descend(part: Tensor) -> None:
        nonlocal loss
        if part.requires_grad:
            (part if scaler is None else scaler.scale(part)).backward()
        loss = loss + part.detach()

    for micro, batch in enumerate(data.batches):
        # What a learner draws by torch's own means comes from these: seeded here, they need no state to be saved. The
        # processes of a group draw apart.
        seed_generators(device, streams.key(seed, "dropout", step, micro, *([group.rank] if group.rank else [])))
        with precision.autocast():
            output = learner(batch.to(device), step)
        means = {name: total.float() / counts[name] for name, total in output.sums.items() if counts[name]}
        if means:
            descend(torch.stack([output.weights[name] * mean for name, mean in means.items()]).sum())
        for name, mean in means.items():
            terms[name] = terms[name] + mean.detach() if name in terms else mean.detach()
    for name, penalty in learner.penalties().items():
        descend(penalty)
        terms[name] = penalty.detach()
    return Outcome(loss, terms)


def total_counts(learner: Learner, batches: Sequence[Batch]) -> dict[str, float]:
    """How much each term predicts in the step, as far as it is this process's."""
    totals: dict[str, float] = {}
    for batch in batches:
        for name, count in learner.counts(batch).items():
            totals[name] = totals.get(name, 0.0) + count
    return totals


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    parameters: Sequence[nn.Parameter],
    clip_norm: float | None,
) -> Tensor:
    """Clip, step, and forget the gradients. Their norm before clipping is returned, on the device."""
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
