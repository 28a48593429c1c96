"""The plan: what a run costs before anything is spent. Arithmetic over plain numbers.

FLOPs count a multiply and an add as two and a training step as three forwards (the backward costs two). Every part of a
learner multiplies each of its places with the values of its matrices, and attention adds, for each layer, the scores
and the sums over what a token sees; packed documents cost their own length only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmtool.reporting.text import count, duration, flops, size

# A value in fp32.
VALUE_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What a part of a learner does. share: of a batch's tokens, the places it runs at. values: of the matrices that a
    place is multiplied with, one that is used twice counted twice. attention: layers times the width of their heads;
    context: tokens that one sees, mean. passes: 3 with gradients, 1 without.
    """

    share: float
    values: float
    attention: float = 0.0
    context: float = 0.0
    passes: int = 3

    @property
    def flops(self) -> float:
        """Of one token of the batch."""
        return self.passes * self.share * (2 * self.values + 4 * self.attention * self.context)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that what a forward keeps depends on."""

    num_layers: int
    hidden_size: int
    feedforward_size: int
    vocab_size: int


@dataclass(frozen=True)
class Plan:
    """What a run will take. FLOPs are of training (forward and backward); memory and time are estimates."""

    parameters: dict[str, int]
    trainable_parameters: int
    flops_per_token: float
    tokens_per_step: float
    steps: int
    memory_bytes: dict[str, int]
    checkpoint_bytes: int
    checkpoints: int
    flops_per_second: float | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def tokens(self) -> float:
        return self.tokens_per_step * self.steps

    @property
    def flops(self) -> float:
        return self.flops_per_step * self.steps

    @property
    def disk_bytes(self) -> int:
        return self.checkpoint_bytes * self.checkpoints

    @property
    def seconds(self) -> float | None:
        """Estimated seconds of training; None where no rate was given."""
        return self.flops / self.flops_per_second if self.flops_per_second else None


def activation_bytes(shape: ModelShape, tokens: float, predicted_fraction: float, half: bool) -> int:
    """Bytes that a forward of `tokens` keeps for its backward.

    Elements of a layer as in Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1) without the
    attention's scores, which the fused kernels do not keep: 8 d + 2 f and two dropout masks of a byte; and the
    predicted places' logits with their fp32 gradient.
    """
    element = 2 if half else 4
    layer = element * (8 * shape.hidden_size + 2 * shape.feedforward_size) + 2 * shape.hidden_size
    logits = predicted_fraction * shape.vocab_size * (element + 4)
    return round(tokens * (shape.num_layers * layer + 4 * shape.hidden_size + logits))


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
    micro_batch_tokens: float | None = None,
    half: bool = False,
    body_trains: bool = True,
    checkpoints: int = 1,
    flops_per_second: float | None = None,
) -> Plan:
    """The plan of a run.

    shapes: of every stack whose activations are kept. works: of every part. steps: optimizer steps. tokens_per_step:
    real tokens in a step, mean. predicted_fraction: share of tokens at which the vocabulary is computed (0 for a
    task). parameters: by part. optimizer_values: numbers the optimizer keeps between steps. micro_batch_tokens: tokens
    in one forward (None: the whole step). half: bf16 or fp16 products. body_trains: False where only a head learns, so
    that nothing of the body is kept for a backward. checkpoints: how many are kept on disk. flops_per_second: measured
    or given rate (None: no time).
    """
    total = sum(parameters.values())
    forward_tokens = min(micro_batch_tokens or tokens_per_step, tokens_per_step)
    kept = sum(activation_bytes(shape, forward_tokens, predicted_fraction, half) for shape in shapes)
    return Plan(
        parameters=dict(parameters),
        trainable_parameters=trainable_parameters,
        flops_per_token=sum(work.flops for work in works),
        tokens_per_step=tokens_per_step,
        steps=steps,
        memory_bytes={
            "weights and gradients": VALUE_BYTES * (total + trainable_parameters),
            "optimizer": VALUE_BYTES * optimizer_values,
            "activations": kept if body_trains else 0,
        },
        checkpoint_bytes=VALUE_BYTES * (total + optimizer_values),
        checkpoints=checkpoints,
        flops_per_second=flops_per_second,
    )


def plan_rows(one: Plan) -> list[tuple[str, str]]:
    """The plan as (what, how much) rows, for a table or a screen."""
    # Exact, so that they can be held against the published counts.
    parts = " · ".join(f"{part} {number:,}" for part, number in one.parameters.items())
    memory = sum(one.memory_bytes.values())
    memory_parts = " · ".join(f"{part} {size(number)}" for part, number in one.memory_bytes.items())
    rows = [
        ("parameters", f"{one.total_parameters:,} ({one.trainable_parameters:,} learn): {parts}"),
        ("steps", f"{count(one.steps)} of {count(round(one.tokens_per_step))} tokens"),
        ("tokens", count(round(one.tokens))),
        (
            "FLOPs",
            f"{flops(one.flops_per_token)} a token, {flops(one.flops_per_step)} a step, {flops(one.flops)} in all",
        ),
        ("memory", f"about {size(memory)}: {memory_parts}"),
        ("disk", f"{size(one.disk_bytes)}: {one.checkpoints} × {size(one.checkpoint_bytes)} a checkpoint"),
    ]
    if one.seconds is not None and one.flops_per_second is not None:
        rows.append(("time", f"about {duration(one.seconds)} at {flops(one.flops_per_second)}/s"))
    else:
        rows.append(("time", "unknown: no rate was measured"))
    return rows + [("note", note) for note in one.notes]
