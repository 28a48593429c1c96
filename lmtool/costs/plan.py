"""The cost model: FLOPs, memory and disk of a run. Arithmetic over plain numbers.

FLOPs count a multiply and an add as two and a training step as three forwards (the backward costs two). Every part of a
learner multiplies each of its places with the values of its matrices, and attention adds, for each layer, the scores
and the sums over what a token sees; packed documents cost their own length only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmtool.reporting.plan import RunPlan

# A value in fp32.
VALUE_BYTES = 4


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
class ModelShape:
    """The sizes that what a forward keeps depends on. inner_size: width inside a layer. lengthening: tokens in the
    layers for each of a batch, with the virtual ones."""

    num_layers: int
    hidden_size: int
    inner_size: int
    vocab_size: int
    lengthening: float = 1.0


def activation_bytes(
    shape: ModelShape, tokens: float, predicted_fraction: float, half: bool, recomputes: bool = False
) -> int:
    """Bytes that a forward of `tokens` keeps for its backward. recomputes: of each layer its input alone, and in the
    backward one layer at a time.

    Elements of a layer as in Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1) without the
    attention's scores, which the fused kernels do not keep: 8 d + 2 f and two dropout masks of a byte; and the
    predicted places' logits with their fp32 gradient.
    """
    element = 2 if half else 4
    layer = element * (8 * shape.hidden_size + 2 * shape.inner_size) + 2 * shape.hidden_size
    logits = predicted_fraction * shape.vocab_size * (element + 4)
    layers = layer + shape.num_layers * element * shape.hidden_size if recomputes else shape.num_layers * layer
    body = layers + 4 * shape.hidden_size
    return round(tokens * (shape.lengthening * body + logits))


def plan(
    shapes: Sequence[ModelShape],
    works: Sequence[Work],
    *,
    steps: int,
    tokens_per_step: float,
    predicted_fraction: float,
    parameters: Mapping[str, int],
    trainable_parameters: int,
    optimizer_values: int,
    saved_values: int | None = None,
    micro_batch_tokens: float | None = None,
    half: bool = False,
    recomputes: bool = False,
    body_trains: bool = True,
    checkpoints: int = 1,
    flops_per_second: float | None = None,
    teacher_values: int = 0,
) -> RunPlan:
    """The plan of a run.

    shapes: of every stack whose activations are kept. works: of every part. steps: optimizer steps. tokens_per_step:
    real tokens in a step, mean. predicted_fraction: share of tokens at which the vocabulary is computed (0 for a task).
    parameters: by part. optimizer_values: numbers the optimizer keeps between steps. saved_values: parameters in a
    checkpoint (None: all). micro_batch_tokens: tokens in one forward (None: the whole step). half: bf16 or fp16
    products. recomputes: layers are computed again in the backward. body_trains: False where only a head learns, so
    that nothing of the body is kept for a backward. checkpoints: how many are kept on disk. flops_per_second: measured
    or given rate (None: no time). teacher_values: parameters of models that are read beside it, and never learn.
    """
    total = sum(parameters.values())
    kept = sum(
        activation_bytes(
            shape,
            # What limits a forward counts virtual tokens, a step does not.
            min((micro_batch_tokens or math.inf) / shape.lengthening, tokens_per_step),
            predicted_fraction,
            half,
            recomputes,
        )
        for shape in shapes
    )
    return RunPlan(
        parameters=dict(parameters),
        trainable_parameters=trainable_parameters,
        flops_per_token=sum(work.flops for work in works),
        tokens_per_step=tokens_per_step,
        steps=steps,
        memory_bytes={
            "weights and gradients": VALUE_BYTES * (total + trainable_parameters),
            "optimizer": VALUE_BYTES * optimizer_values,
            "activations": kept if body_trains else 0,
            **({"teachers": VALUE_BYTES * teacher_values} if teacher_values else {}),
        },
        checkpoint_bytes=VALUE_BYTES * ((total if saved_values is None else saved_values) + optimizer_values),
        checkpoints=checkpoints,
        flops_per_second=flops_per_second,
    )
