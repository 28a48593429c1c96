"""The activations that attention saves for the backward pass, in bytes per token, and the number formats of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lmtool.nn.attention import MultiHead

# The bytes of an fp32 value: weights, the residual stream and the inputs of norms are fp32 in every number format.
VALUE_BYTES = 4


@dataclass(frozen=True)
class Formats:
    """The settings of a run that decide how many bytes an element needs.

    Attributes:
        half: Whether matrix products run in bf16 or fp16.
        cuda: Whether the run is on a GPU, where attention runs in the same type as matrix products, with a kernel for
            texts of different lengths if possible.
        recomputes: Whether layers save only their input and are computed again in the backward (gradient
            checkpointing).
    """

    half: bool = False
    cuda: bool = False
    recomputes: bool = False

    @property
    def product(self) -> int:
        """The bytes of an input element of a matrix product."""
        return 2 if self.half else VALUE_BYTES

    @property
    def attention(self) -> int:
        """The bytes of an input element of attention, which is fp32 on a CPU (see `nn.tiled`)."""
        return self.product if self.cuda else VALUE_BYTES


@dataclass(frozen=True)
class AttentionContext:
    """What the queries of a stack attend to.

    Attributes:
        keys: The maximum number of tokens that a query attends to.
        cross_keys: The number of the encoder's tokens that a query of cross-attention attends to.
        scored: Whether positions add to the attention scores of all layers.
        copies: The number of copies of each key and value, if blocks gather the keys they attend to
            (`nn.block_sparse`); otherwise 0.
        memory: The number of cached states before a text, per token of the text.
        query_stream: The fraction of the tokens that also have a query in a second stream (XLNet).
    """

    keys: float
    cross_keys: float = 0.0
    scored: bool = False
    copies: float = 0.0
    memory: float = 0.0
    query_stream: float = 0.0


def attentions_of(layer: nn.Module) -> Iterator[tuple[str, MultiHead]]:
    """Yields the attention modules of a layer with the last part of their names."""
    for name, part in layer.named_modules():
        if isinstance(part, MultiHead):
            yield name.rpartition(".")[2], part


def attention_bytes(
    attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext, last: bool
) -> float:
    """Returns the bytes that an attention saves per token, without its scores: its input if a projection is trained,
    the queries, keys, values and results of the heads, and the input of the output projection. last: whether it is in
    the last layer, in which only the query stream has queries, if there is one."""
    head_width, width = attention.num_heads * attention.head_size, attention.out_proj.out_features
    saves_input = any(keeps_input(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    low_rank = sum(map(update_values, attention.modules()))
    content, queries = _query_fractions(context, last)
    per_query, per_key, _ = _saved_for_positions(attention, cross, context)
    per_query += 1.0 if _is_keyed(attention, formats, cross, context) else 2.0  # the result, and the queries
    # Each stream has its own copies of keys, values and position rows.
    states = per_query * queries + (2.0 + per_key) * (1 + context.memory) * (content + (context.query_stream > 0))
    if context.copies:
        states += 2 * (context.copies - 1)
    inputs = 1 + context.query_stream
    if context.memory:  # one more copy of the input, to which the memory is joined
        inputs += 1 + context.memory
    total = (
        saves_input * width * inputs * formats.product
        + states * head_width * formats.attention
        + low_rank * formats.product
    )
    if keeps_input(attention.out_proj):
        total += queries * head_width * formats.product
    # The input of a cross-attention's keys and values, the encoder's last state, is saved once more.
    return total + VALUE_BYTES * attention.num_heads + cross * saves_input * width * formats.product


def score_bytes(attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext, last: bool) -> float:
    """Returns the bytes of the attention scores that are saved per token. On a CPU dropout needs the attention weights
    and its mask, and tiled attention also the result of dropout. Positions that add to the scores need the scores in
    the backward pass. last: see `attention_bytes`."""
    if _is_keyed(attention, formats, cross, context):
        element = VALUE_BYTES + 1
    elif not formats.cuda and attention.dropout.rate > 0:
        element = 2 * VALUE_BYTES + 1
    else:
        element = _is_scored(attention, cross, context) * formats.attention
    keys, queries = context.cross_keys if cross else context.keys, _query_fractions(context, last)[1]
    products = _saved_for_positions(attention, cross, context)[2]
    return (element * keys + formats.attention * products) * attention.num_heads * queries


def update_values(module: nn.Module) -> int:
    """Counts the values that a linear layer's low-rank update saves per token: the output of LoRA's matrix A, and with
    DoRA the inputs of its magnitudes."""
    module_parameters = dict(module.named_parameters(recurse=False))
    return sum(len(module_parameters[name]) for name in ("lora_a", "lora_magnitude") if name in module_parameters)


def keeps_input(linear: nn.Module) -> bool:
    """Whether the backward pass needs the input of a linear layer: if its matrix or a low-rank update is trained."""
    return any(parameter.requires_grad and parameter.ndim > 1 for parameter in linear.parameters())


def _query_fractions(context: AttentionContext, last: bool) -> tuple[float, float]:
    """The number of queries of the ordinary (content) stream and of both streams, per token."""
    content = 0.0 if last and context.query_stream else 1.0
    return content, content + context.query_stream


def _is_scored(attention: MultiHead, cross: bool, context: AttentionContext) -> bool:
    """Whether positions add to the scores, with terms that all layers share or from a projected table."""
    return not cross and (context.scored or bool(attention.table_maps))


def _is_keyed(attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext) -> bool:
    """Whether attention with dropout is `fused_attention`, which saves queries, keys, values and weights."""
    tiled = cross or _is_scored(attention, cross, context) or context.copies > 0
    return not (formats.cuda or tiled) and attention.dropout.rate > 0


def _saved_for_positions(attention: MultiHead, cross: bool, context: AttentionContext) -> tuple[float, float, float]:
    """Cross-attention has no relative positions."""
    return (0.0, 0.0, 0.0) if cross else attention.saved_for_positions(context.keys)
