"""Activations that a forward saves for its backward, in bytes per token, computed from a learner's modules.

Elements are those that autograd saves for each operation: the input of a linear map if its matrix is trained, the input
of a norm, the queries, keys, values and result of attention, the input of an activation, and a byte for dropout.
Modules below the first trainable one save nothing. Tests compare the sum with torch's saved tensors.

Shape letters: H hidden width, F width inside a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone, OneStack
from lmtool.models.characters import WordCharacters
from lmtool.models.cnn import WindowLayer
from lmtool.models.disentangled import DisentangledAttention
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.models.heads.sampled import SampledLMHead, WordPairsHead
from lmtool.models.rnn_attention import AttendingGru
from lmtool.models.two_streams import TwoStreamAttention
from lmtool.nn.attention import MultiHead
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import StackInput
from lmtool.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from lmtool.nn.recurrent import BidirectionalGru, LstmCell
from lmtool.nn.relative import RelativeAttention

# Bytes of an fp32 value: weights, the residual stream, the inputs of norms.
VALUE_BYTES = 4


@dataclass(frozen=True)
class Formats:
    """The number formats of a run. half: bf16 or fp16 products. cuda: on a CUDA device, where attention runs in the
    products' type, with a variable-length kernel if possible. recomputes: whether layers save only their input."""

    half: bool = False
    cuda: bool = False
    recomputes: bool = False

    @property
    def product(self) -> int:
        """Bytes of a product's input element."""
        return 2 if self.half else VALUE_BYTES

    @property
    def attention(self) -> int:
        """Bytes of an attention input element: fp32 on a CPU, see `nn.tiled`."""
        return self.product if self.cuda else VALUE_BYTES


# Activations of attention.
#
# Shape letters: W width of all heads together, A heads, K keys that a query sees.


@dataclass(frozen=True)
class AttentionContext:
    """The keys of a stack's attention.

    Attributes:
        keys: Maximum number of tokens that a query attends to.
        cross_keys: The same for cross-attention to the encoder.
        scored: Whether the positions of all layers add to the scores.
        copies: Of each key and value, if a block gathers its keys (`nn.block_sparse`).
        memory: Cached states before a text, per token of the text.
        query_stream: Fraction of the tokens that have a query of a second stream.
    """

    keys: float
    cross_keys: float = 0.0
    scored: bool = False
    copies: float = 0.0
    memory: float = 0.0
    query_stream: float = 0.0


def attentions_of(layer: nn.Module) -> Iterator[tuple[str, MultiHead]]:
    """The attentions of a layer, by the last part of their names."""
    for name, part in layer.named_modules():
        if isinstance(part, MultiHead):
            yield name.rpartition(".")[2], part


def attention_bytes(
    attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext, last: bool
) -> float:
    """Bytes per token: the input if a projection is trained, the states of the heads, and the input of the output
    projection. last: whether it is the last layer, in which only a query stream has queries."""
    joined, width = attention.q_proj.weight.shape[0], attention.q_proj.in_features
    learns = any(keeps_input(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    low = sum(map(update_values, attention.modules()))
    content, queries = _streams(context, last)
    asking, rows = _values_per_head(attention, _keyed(attention, formats, cross, context))
    # Each stream has its own copies of keys, values and position rows.
    states = asking * queries + (2.0 + rows) * (1 + context.memory) * (content + (context.query_stream > 0))
    if context.copies:
        states += 2 * (context.copies - 1)
    read = 1 + context.query_stream
    if context.memory:  # one more copy, which includes the memory
        read += 1 + context.memory
    total = learns * width * read * formats.product + states * joined * formats.attention + low * formats.product
    if keeps_input(attention.out_proj):
        total += queries * joined * formats.product
    # The encoder's last state, the input of a cross-attention, is saved once more.
    return total + VALUE_BYTES * attention.num_heads + cross * learns * width * formats.product


def score_bytes(attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext, last: bool) -> float:
    """The saved scores of a token: on a CPU, dropout needs the weights and its mask, tiled attention also its output;
    positions that add to the scores need them in the backward pass."""
    if _keyed(attention, formats, cross, context):
        element = VALUE_BYTES + 1
    elif not formats.cuda and attention.dropout.rate > 0:
        element = 2 * VALUE_BYTES + 1
    else:
        element = _scored(attention, cross, context) * formats.attention * (1 + 2 * _terms(attention))
    return element * (context.cross_keys if cross else context.keys) * attention.num_heads * _streams(context, last)[1]


def update_values(module: nn.Module) -> int:
    """Saved values per token of a linear layer's low-rank update: the output of A, and with DoRA the inputs of its
    magnitudes."""
    module_parameters = dict(module.named_parameters(recurse=False))
    return sum(len(module_parameters[name]) for name in ("lora_a", "lora_magnitude") if name in module_parameters)


def keeps_input(linear: nn.Module) -> bool:
    """Whether the backward pass needs a linear layer's input: if its matrix is trained, or a low-rank update of it."""
    return any(parameter.requires_grad and parameter.ndim > 1 for parameter in linear.parameters())


def _streams(context: AttentionContext, last: bool) -> tuple[float, float]:
    """The fraction of tokens with content queries, and that of all queries."""
    content = 0.0 if last and context.query_stream else 1.0
    return content, content + context.query_stream


def _scored(attention: MultiHead, cross: bool, context: AttentionContext) -> bool:
    """Whether positions add to the scores: those of all layers, or a table projected by the attention."""
    return not cross and (context.scored or bool(attention.table_maps))


def _keyed(attention: MultiHead, formats: Formats, cross: bool, context: AttentionContext) -> bool:
    """Whether attention and dropout are one function (`nn.keyed`), which saves queries, keys, values and weights."""
    pieces = cross or _scored(attention, cross, context) or context.copies > 0
    return not (formats.cuda or pieces) and attention.dropout.rate > 0


def _values_per_head(attention: MultiHead, keyed: bool) -> tuple[float, float]:
    """Saved tensors of the heads' width: per query, including the result; and per key, in addition to keys and values,
    rows of distances in one or both directions."""
    if isinstance(attention, TwoStreamAttention):
        return 3.0, 2.0
    if isinstance(attention, RelativeAttention):
        return 2.0, 1.0
    return (1.0 if keyed else 2.0 + 2 * _terms(attention)), 0.0


def _terms(attention: MultiHead) -> int:
    """Number of score terms that are products with a position table. Each saves twice as much as the scores: a query
    uses one row per key before it and one per key after it."""
    return len(attention.terms) if isinstance(attention, DisentangledAttention) else 0


# Rows of logits per chunk of the vocabulary loss; two chunks are alive at once, and those of the softmax.
_LOGIT_ROWS = {"cpu": (512, 32), "cuda": (1024, 1024)}


@dataclass(frozen=True)
class SavedActivations:
    """Saved bytes per token. activations: of all layers. scores: of attention without a fused kernel. working: of a
    single layer at work, if layers are recomputed or nothing is trained."""

    activations: float = 0.0
    scores: float = 0.0
    working: float = 0.0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(
            self.activations + other.activations, self.scores + other.scores, max(self.working, other.working)
        )


def saved_activations(
    learner: BaseLearner, formats: Formats, length: float, outputs: float = 0.5, read: float = 1.0, memory: float = 0.0
) -> SavedActivations:
    """Saved bytes per token of a batch in all backbones of a learner, without heads.

    Args:
        learner: The learner.
        formats: The number formats.
        length: Mean tokens of an example, both sides, without virtual ones.
        outputs: The decoder's fraction of an encoder-decoder's tokens.
        read: Fraction of the tokens that the last layer of the learner's own backbone processes after its attention; a
            query stream has these positions.
        memory: Cached states of earlier text before an example.
    """
    total = SavedActivations()
    for backbone in backbones_of(learner):
        share = read if backbone is learner.backbone else 1.0
        query_stream = share if learner.query_stream else 0.0
        total = total + _of_backbone(backbone, formats, length, outputs, share, memory / length, query_stream)
    return total


def backbones_of(learner: nn.Module) -> list[Backbone]:
    """Every backbone in a learner: its own, and that of a generator."""
    return [module for module in learner.modules() if isinstance(module, Backbone)]


def layers_of(backbone: Backbone) -> list[nn.Module]:
    """Its layers in the order of application, of both stacks; a family with its own forward counts as one."""
    if isinstance(backbone, EncoderDecoder):
        return [*backbone.encoder.layers, *backbone.decoder.layers]
    return list(backbone.depth()) if isinstance(backbone, OneStack) else [backbone]


def lengthening(learner: nn.Module, length: float) -> float:
    """Tokens in the layers per token of a batch, including virtual ones. length: mean tokens of an example."""
    return max((1 + backbone.embed.virtual_count / length for backbone in backbones_of(learner)), default=1.0)


def _of_backbone(
    backbone: Backbone, formats: Formats, length: float, outputs: float, read: float, memory: float, query_stream: float
) -> SavedActivations:
    """Saved bytes per token of a backbone. memory, query_stream: see `AttentionContext`."""
    virtual = backbone.embed.virtual_count
    if isinstance(backbone, EncoderDecoder):
        inputs = (1 - outputs) * length + virtual
        encoder, decoder = list(backbone.encoder.layers), list(backbone.decoder.layers)
        learns = _has_trainable(backbone.embed)
        first = _of_layers(backbone.embed, encoder, formats, AttentionContext(inputs), learns, 1.0)
        learns = learns or any(_has_trainable(layer) for layer in encoder)
        second = _of_layers(
            backbone.decoder.embed, decoder, formats, AttentionContext(outputs * length, inputs), learns, 1.0
        )
        return _times(first, inputs / length) + _times(second, outputs)
    total_length = length + virtual
    blocks = backbone.blocks if isinstance(backbone, OneStack) else None
    context = AttentionContext(total_length + memory * length, memory=memory, query_stream=query_stream)
    if blocks is not None and total_length > blocks.longest_dense:
        context = AttentionContext(blocks.seen(total_length), copies=blocks.seen(total_length) / blocks.size)
    learns = _has_trainable(backbone.embed)
    return _times(
        _of_layers(backbone.embed, layers_of(backbone), formats, context, learns, read), total_length / length
    )


def _of_layers(
    embed: StackInput,
    layers: Iterable[nn.Module],
    formats: Formats,
    context: AttentionContext,
    learns: bool,
    read: float,
) -> SavedActivations:
    """Bytes per token of a stack. learns: whether any module before its layers is trained."""
    parts, context = list(layers), replace(context, scored=embed.position.scores)
    width = _width(parts[0]) if parts else 0
    activations = float(learns * width * (VALUE_BYTES * (embed.norm is not None) + (embed.dropout.rate > 0)))
    # An upper bound: repeated words are computed once.
    activations += learns * VALUE_BYTES * (embed.saved_activations if isinstance(embed, WordCharacters) else 0)
    scores = working = frozen = 0.0
    for number, layer in enumerate(parts):
        learns, last = learns or _has_trainable(layer), number == len(parts) - 1
        layer_bytes = _of_layer(layer, formats, context, last, read if last else 1 + context.query_stream)
        if not learns:
            frozen = max(frozen, layer_bytes)
            continue
        layer_scores = sum(
            score_bytes(part, formats, name == "cross_attn", context, last) for name, part in attentions_of(layer)
        )
        if formats.recomputes:
            activations += (1 + context.query_stream) * _width(layer) * VALUE_BYTES
            working = max(working, layer_bytes + layer_scores)
        else:
            activations, scores = activations + layer_bytes, scores + layer_scores
    return SavedActivations(activations, scores, working if learns else frozen)


def _of_layer(layer: nn.Module, formats: Formats, context: AttentionContext, last: bool, read: float) -> float:
    """Bytes per token of a layer whose part after the attention processes a fraction of the tokens."""
    before_attention = sum(_of_lstm(part, formats) for part in layer.modules() if isinstance(part, LstmCell))
    if isinstance(layer, BidirectionalGru | AttendingGru):
        before_attention += VALUE_BYTES * layer.saved_activations(context.cross_keys)
    before_attention += sum(
        attention_bytes(part, formats, name == "cross_attn", context, last) for name, part in attentions_of(layer)
    )
    width = _width(layer)
    norms = sum(_of_norm(part, width) for name, part in layer.named_children() if "norm" in name)
    masks = width * sum(isinstance(part, Dropout) and part.rate > 0 for part in layer.children())
    after_attention = norms + masks
    if isinstance(layer, WindowLayer):
        after_attention += formats.product * layer.reach * layer.hidden_size + VALUE_BYTES * layer.size
    for part in layer.modules():
        if isinstance(part, FeedForward):
            after_attention += _of_feed_forward(part, formats)
        elif "down" in dict(part.named_children()):  # an adapter between the sublayers
            bottleneck = cast(nn.Linear, part.get_submodule("down"))
            after_attention += formats.product * (width + 2 * bottleneck.out_features)
    return before_attention + read * after_attention


def _of_lstm(part: LstmCell, formats: Formats) -> float:
    """Its inputs, the gates, the cell state before and after its activation, and the output."""
    retained = VALUE_BYTES * (6 * part.cell_size + 2 * part.output_size)
    return formats.product * part.weight_ih.shape[1] + retained


def _of_norm(norm: nn.Module, width: int) -> float:
    """LayerNorm saves its input; a norm of several operations (T5's) also the normalized input."""
    return width * VALUE_BYTES * (1 if isinstance(norm, nn.LayerNorm) else 2)


def _of_feed_forward(part: FeedForward, formats: Formats) -> float:
    width, inner = part.fc_in.in_features, part.fc_in.out_features
    dropped = part.dropout.rate > 0
    # ReLU saves its result, which is the second map's input unless it is dropped out.
    relu = part.activation is ACTIVATIONS["relu"]
    if isinstance(part, GatedFeedForward):
        values = 3.0 + (keeps_input(part.fc_out) or dropped)
    elif relu:
        values = 1.0 + (dropped and keeps_input(part.fc_out))
    else:
        values = 1.0 + keeps_input(part.fc_out)
    low = sum(map(update_values, part.modules()))
    return formats.product * (keeps_input(part.fc_in) * width + values * inner + low) + dropped * inner


def head_bytes(learner: nn.Module, formats: Formats, rows: float) -> int:
    """Peak working bytes of the vocabulary loss: two chunks of logits, and the table's gradient. rows: predicting
    positions in one forward. 0 without such a head. For word pairs, their vectors and the gradients of these."""
    pairs = next((module for module in learner.modules() if isinstance(module, WordPairsHead)), None)
    if pairs is not None:
        return round(2 * rows * (1 + pairs.words) * pairs.output.token.embedding_dim * VALUE_BYTES)
    if not any(isinstance(module, LMHead) for module in learner.modules()) or rows <= 0:
        return 0
    backbone = cast(Backbone, learner.get_submodule("backbone"))
    sampled = next((module for module in learner.modules() if isinstance(module, SampledLMHead)), None)
    count, width = backbone.embed.token.weight.shape if sampled is None else sampled.output_table.shape
    chunk, softmax = _LOGIT_ROWS["cuda" if formats.cuda else "cpu"]
    logits = min(rows, 2 * chunk) * formats.product + min(rows, softmax) * 2 * VALUE_BYTES * formats.half
    computed = count if sampled is None else sampled.computed
    return round(computed * logits + count * width * (VALUE_BYTES + formats.half * 2 * formats.product))


def copied_bytes(learner: nn.Module, formats: Formats) -> int:
    """Copies of weights that a forward keeps: of all matrices in the products' type, and of joined attention
    projections. Zero if no backbone is trained."""
    copied = 0
    for backbone in backbones_of(learner):
        if not _has_trainable(backbone):
            continue
        if formats.half:
            copied += formats.product * sum(
                part.weight.numel() for part in backbone.modules() if isinstance(part, nn.Linear)
            )
            continue
        for part in backbone.modules():
            if isinstance(part, MultiHead) and type(part.q_proj) is type(part.k_proj) is nn.Linear:
                copied += VALUE_BYTES * (part.q_proj.weight.numel() + 2 * part.k_proj.weight.numel())
    return copied


def _width(layer: nn.Module) -> int:
    """H of a layer."""
    widths = [part.q_proj.in_features for _, part in attentions_of(layer)]
    widths += [sum(part.output_size for part in layer.modules() if isinstance(part, LstmCell))]
    widths += [layer.hidden_size] if isinstance(layer, WindowLayer) else []
    return max(widths)


def _has_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _times(activations: SavedActivations, share: float) -> SavedActivations:
    return SavedActivations(share * activations.activations, share * activations.scores, share * activations.working)
