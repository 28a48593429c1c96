"""The plan: what a run costs before anything is spent. Arithmetic over plain numbers.

FLOPs count a multiply and an add as two and a training step as three forwards (the backward costs two). For a token,
with L layers of width d and feed-forward width f, mean document length S, vocabulary V and predicted fraction p:

    body       6 L (4 d^2 + 2 d f)
    attention  12 L d S        halved where it is causal; packed documents cost their own length only
    head       6 (V d + d^2) p  masked LM: dense and decoder at the predicted places; 6 V d p for a causal LM

A token of an encoder-decoder runs through one of its stacks and half of the cross-attention (keys and values on one
side, queries and outputs on the other): 6 d^2 instead of 4 d^2. L is that of one stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lmtool.reporting.text import count, duration, flops, size

# fp32 AdamW: weight, gradient and two moments, four bytes each.
TRAINED_BYTES = 16
FROZEN_BYTES = 4
# On disk a checkpoint has the weights and the two moments.
CHECKPOINT_BYTES = 12


@dataclass(frozen=True)
class ModelShape:
    """The sizes the costs depend on. `max_positions` and `segments` are rows of learned tables (0: no table)."""

    num_layers: int
    hidden_size: int
    feedforward_size: int
    num_heads: int
    vocab_size: int
    architecture: Literal["encoder", "decoder", "encoder_decoder"]
    max_positions: int = 0
    segments: int = 0

    def __post_init__(self) -> None:
        if self.architecture not in ("encoder", "decoder", "encoder_decoder"):
            raise ValueError(f"architecture {self.architecture!r}: the plan knows encoder, decoder and encoder_decoder")


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


def parameter_counts(shape: ModelShape, masked_lm_head: bool = False, outputs: int = 0) -> dict[str, int]:
    """Parameters by part as published (BERT, GPT-2): biases everywhere, a norm after the embedding of an encoder
    and after the last layer of a decoder, the head's decoder tied to the embedding.

    `masked_lm_head`: BERT's dense, norm and output bias. `outputs`: classes or values of a pooled head.
    """
    if shape.architecture == "encoder_decoder":
        raise ValueError("the parameters of an encoder-decoder are counted on the built model")
    hidden, inner = shape.hidden_size, shape.feedforward_size
    embedding = (shape.vocab_size + shape.max_positions + shape.segments) * hidden
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    head = hidden * hidden + 3 * hidden + shape.vocab_size if masked_lm_head else 0
    if outputs:
        head += hidden * outputs + outputs + (hidden * hidden + hidden if shape.architecture == "encoder" else 0)
    body = shape.num_layers * layer
    if shape.architecture == "encoder":
        counts = {"embedding": embedding + 2 * hidden, "layers": body, "heads": head}
    else:
        counts = {"embedding": embedding, "layers": body, "final norm": 2 * hidden, "heads": head}
    return {part: number for part, number in counts.items() if number}


def flops_per_token(shape: ModelShape, length: float, predicted_fraction: float, body_trains: bool = True) -> float:
    """Training FLOPs of one real token.

    length: mean document length in tokens. predicted_fraction: share of tokens at which the vocabulary is computed
    (0 for a task). body_trains: False where only a head learns, so that the body runs forward alone.
    """
    hidden, inner = shape.hidden_size, shape.feedforward_size
    causal = shape.architecture == "decoder"
    squares = 6 if shape.architecture == "encoder_decoder" else 4
    body = 2 * shape.num_layers * (squares * hidden * hidden + 2 * hidden * inner)
    attention = 4 * shape.num_layers * hidden * length * (0.5 if causal else 1.0)
    dense = hidden * hidden if shape.architecture == "encoder" else 0
    head = 2 * (shape.vocab_size * hidden + dense) * predicted_fraction
    return (3 if body_trains else 1) * (body + attention) + 3 * head


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
    shape: ModelShape,
    *,
    steps: int,
    tokens_per_step: float,
    length: float,
    predicted_fraction: float = 0.0,
    micro_batch_tokens: float | None = None,
    half: bool = False,
    body_trains: bool = True,
    checkpoints: int = 1,
    flops_per_second: float | None = None,
    parameters: Mapping[str, int] | None = None,
    trainable_parameters: int | None = None,
) -> Plan:
    """The plan of a run.

    steps: optimizer steps. tokens_per_step: real tokens in a step, mean. length: mean document length, tokens.
    micro_batch_tokens: tokens in one forward (None: the whole step). half: bf16 or fp16 products. checkpoints: how
    many are kept on disk. flops_per_second: measured or given rate (None: no time). parameters: counted on the built
    model where there is one; otherwise from the shape.
    """
    parts = dict(parameters) if parameters is not None else parameter_counts(shape, predicted_fraction > 0)
    total = sum(parts.values())
    trained = total if trainable_parameters is None else trainable_parameters
    state = TRAINED_BYTES * trained + FROZEN_BYTES * (total - trained)
    forward_tokens = min(micro_batch_tokens or tokens_per_step, tokens_per_step)
    activations = activation_bytes(shape, forward_tokens, predicted_fraction, half) if body_trains else 0
    return Plan(
        parameters=parts,
        trainable_parameters=trained,
        flops_per_token=flops_per_token(shape, length, predicted_fraction, body_trains),
        tokens_per_step=tokens_per_step,
        steps=steps,
        memory_bytes={"weights and optimizer": state, "activations": activations},
        checkpoint_bytes=CHECKPOINT_BYTES * trained + FROZEN_BYTES * (total - trained),
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
