"""The cost model: FLOPs, memory and disk of a run. Arithmetic over plain numbers.

FLOPs count a multiply and an add as two and a training step as three forwards (the backward costs two). Every part of a
learner multiplies each of its places with the values of its matrices, and attention adds, for each layer, the scores
and the sums over what a token sees; packed documents cost their own length only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmtool.costs.activations import Kept
from lmtool.costs.formats import VALUE_BYTES
from lmtool.reporting.plan import RunPlan

# What a process has beside what is counted: Python, torch, the tokenizer and the loader (390 to 415 MB measured on
# Linux); on CUDA the context, the libraries' workspaces, and what the allocator cannot hand out again.
RESERVE = {False: 400_000_000, True: 1_500_000_000}
# A row of metrics.jsonl, and what else the run's folder holds beside checkpoints.
ROW_BYTES, FOLDER_BYTES = 250, 200_000


@dataclass(frozen=True)
class Work:
    """What a part of a learner does. share: of a batch's tokens, the places it runs at. values: of the matrices that a
    place is multiplied with, one that is used twice counted twice. attention: layers times the width of their heads;
    context: tokens that one sees, mean. passes: 3 with gradients, 2 where the matrices are frozen, 1 without any.
    """

    share: float
    values: float
    attention: float = 0.0
    context: float = 0.0
    passes: float = 3

    @property
    def flops(self) -> float:
        """Of one token of the batch."""
        return self.passes * self.share * (2 * self.values + 4 * self.attention * self.context)


@dataclass(frozen=True)
class Sizes:
    """Values that a run holds. parameters: by part. learning: those that learn. optimizer: what it keeps of these.
    in_layers, layer: of all layers, and of the largest one. teachers: of models that are read beside it and never
    learn. copied_bytes: copies of weights that a forward makes. saved: in a checkpoint (None: all parameters).
    carried: state that is carried from batch to batch."""

    parameters: Mapping[str, int]
    learning: int
    optimizer: int
    in_layers: int = 0
    layer: int = 0
    teachers: int = 0
    copied_bytes: int = 0
    saved: int | None = None
    carried: int = 0

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


@dataclass(frozen=True)
class Forward:
    """What one forward keeps. tokens: in it. kept: of each. head_bytes: of the loss over a vocabulary. cuda: where."""

    tokens: float
    kept: Kept = field(default_factory=Kept)
    head_bytes: int = 0
    cuda: bool = False

    @property
    def kept_bytes(self) -> float:
        """For its backward."""
        return self.tokens * (self.kept.activations + self.kept.scores + self.kept.working)


def memory_of(sizes: Sizes, forward: Forward, devices: int = 1, sharded: bool = False) -> dict[str, int]:
    """Bytes of one device by part, at the fullest moment of a step; parts of nothing are left out.

    sharded: every device holds its share of weights, gradients and optimizer state (fsdp), and has at a time the whole
    of two layers, one at work and one on its way, and of all that is in no layer, with the gradients of one of each.
    """
    share = devices if sharded else 1
    # The loss is behind the last layer, and one that works again is before it: only the larger of both is there.
    working = forward.tokens * forward.kept.working
    outside = sizes.total - sizes.in_layers
    parts = {
        "weights": VALUE_BYTES * sizes.total / share,
        "gradients": VALUE_BYTES * sizes.learning / share,
        "optimizer": VALUE_BYTES * sizes.optimizer / share,
        "gathered weights": VALUE_BYTES * (3 * sizes.layer + 2 * outside) if share > 1 else 0,
        "weight copies": sizes.copied_bytes,
        "carried state": 2 * VALUE_BYTES * sizes.carried,  # that of before a step too
        "activations": forward.tokens * forward.kept.activations + working,
        "attention scores": forward.tokens * forward.kept.scores,
        "logits": max(0, forward.head_bytes - working),
        "teachers": VALUE_BYTES * sizes.teachers,
        "framework": RESERVE[forward.cuda],
    }
    return {name: round(size) for name, size in parts.items() if size}


def plan(
    works: Sequence[Work],
    *,
    steps: int,
    tokens_per_step: float,
    sizes: Sizes,
    forward: Forward,
    devices: int = 1,
    sharded: bool = False,
    checkpoints: int = 1,
    step_seconds: tuple[float, float] | None = None,
    rate: str = "",
) -> RunPlan:
    """The plan of a run.

    works: of every part. steps: optimizer steps. tokens_per_step: real tokens in a step of all devices, mean. forward:
    of one device. checkpoints: how many are kept on disk. step_seconds: at least and at
    most (None: no time). rate: how it was found, in words.
    """
    return RunPlan(
        parameters=dict(sizes.parameters),
        trainable_parameters=sizes.learning,
        flops_per_token=sum(work.flops for work in works),
        tokens_per_step=tokens_per_step,
        steps=steps,
        memory_bytes=memory_of(sizes, forward, devices, sharded),
        checkpoint_bytes=VALUE_BYTES
        * ((sizes.total if sizes.saved is None else sizes.saved) + sizes.optimizer + sizes.carried),
        checkpoints=checkpoints,
        step_seconds=step_seconds,
        rate=rate,
        devices=devices,
    )
