"""The activations that a forward pass saves for its backward pass, in bytes per token, computed from a learner's
modules.

The sum counts what autograd saves for each operation: the input of a linear map if its matrix is trained, the input of
a norm, the queries, keys, values and result of attention, the input of an activation function, and one byte per element
for the mask of dropout. Modules below the first trainable one save nothing. Tests compare the sum with the tensors that
torch really saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

from torch import nn

from lmtool.costs.attention import (
    VALUE_BYTES,
    AttentionContext,
    Formats,
    attention_bytes,
    attentions_of,
    keeps_input,
    score_bytes,
    update_values,
)
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone, OneStack
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import EnhancedMaskedLMHead, LMHead
from lmtool.models.heads.sampled import CooccurrenceHead, SampledLMHead, WordPairsHead
from lmtool.nn.attention import MultiHead
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import StackInput
from lmtool.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward

# The loss over a vocabulary is computed in chunks of rows. For each kind of device: the rows of a chunk of logits, two
# of which are in memory at once, and the rows of a chunk of the softmax.
_LOGIT_ROWS = {"cpu": (512, 32), "cuda": (1024, 1024)}


@runtime_checkable
class ReportsActivations(Protocol):
    """A module that is neither attention nor feed-forward, and counts what it saves itself."""

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        """Counts the values per token that are saved for the backward pass: the inputs of matrix products in the number
        format of the run, and fp32 values. keys: the mean number of encoder tokens that a decoder's token attends to.
        read: the fraction of the tokens that the layer returns."""


@dataclass(frozen=True)
class SavedActivations:
    """The saved bytes per token. activations: those of all layers, without scores. scores: those of attention scores,
    which only attention without a fused kernel saves. working: those of the one layer that is being computed, if layers
    are recomputed or not trained."""

    activations: float = 0.0
    scores: float = 0.0
    working: float = 0.0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(
            self.activations + other.activations, self.scores + other.scores, max(self.working, other.working)
        )


def saved_activations(
    learner: BaseLearner,
    formats: Formats,
    length: float,
    decoder_fraction: float = 0.5,
    read: float = 1.0,
    memory: float = 0.0,
) -> SavedActivations:
    """Computes the saved bytes per token of a batch in all backbones of a learner, without heads.

    Args:
        length: The mean number of tokens per example, of both sides of an encoder-decoder, without virtual tokens.
        decoder_fraction: The decoder's fraction of an encoder-decoder's tokens.
        read: The fraction of the tokens whose last states the heads read. After its attention, the last layer of the
            learner's own backbone processes only these tokens, and a query stream has only these tokens.
        memory: The number of cached states of earlier text before an example.
    """
    total = SavedActivations()
    for backbone in backbones_of(learner):
        fraction = read if backbone is learner.backbone else 1.0
        query_stream = fraction if learner.config.query_stream else 0.0
        decodes_masks = backbone is decoding_backbone(learner)
        total = total + _backbone_bytes(
            backbone, formats, length, decoder_fraction, fraction, memory / length, query_stream, decodes_masks
        )
    return total


def backbones_of(learner: nn.Module) -> list[Backbone]:
    """Returns every backbone in a learner: its own, and that of a generator."""
    return [module for module in learner.modules() if isinstance(module, Backbone)]


def decoding_backbone(learner: nn.Module) -> Backbone | None:
    """Returns the backbone whose last layer is replaced by an enhanced mask decoder (DeBERTa): the generator if there
    is one. None without such a decoder."""
    if not any(isinstance(module, EnhancedMaskedLMHead) for module in learner.modules()):
        return None
    return backbones_of(learner)[-1]


def layers_of(backbone: Backbone) -> list[nn.Module]:
    """Returns a backbone's layers in the order of application, of both stacks of an encoder-decoder. A family that is
    not a stack of layers counts as a single layer."""
    if isinstance(backbone, EncoderDecoder):
        return [*backbone.encoder.layers, *backbone.decoder.layers]
    return list(backbone.applied_layers()) if isinstance(backbone, OneStack) else [backbone]


def lengthening(learner: nn.Module, length: float) -> float:
    """Returns how many tokens the layers process per token of a batch: more than 1 if virtual tokens are added. length:
    the mean number of tokens per example."""
    return max((1 + backbone.embed.virtual_count / length for backbone in backbones_of(learner)), default=1.0)


def _backbone_bytes(
    backbone: Backbone,
    formats: Formats,
    length: float,
    decoder_fraction: float,
    read: float,
    memory: float,
    query_stream: float,
    decodes_masks: bool,
) -> SavedActivations:
    """decodes_masks: whether an enhanced mask decoder takes the place of the last layer. For the others see
    `saved_activations`."""
    virtual, width = backbone.embed.virtual_count, backbone.hidden_size
    if isinstance(backbone, EncoderDecoder):
        inputs = (1 - decoder_fraction) * length + virtual
        encoder, decoder = list(backbone.encoder.layers), list(backbone.decoder.layers)
        trains = _has_trainable(backbone.embed)
        encoder_bytes = _stack_bytes(backbone.embed, width, encoder, formats, AttentionContext(inputs), trains, 1.0)
        trains = trains or any(_has_trainable(layer) for layer in encoder)
        context = AttentionContext(decoder_fraction * length, inputs)
        decoder_bytes = _stack_bytes(backbone.decoder.embed, width, decoder, formats, context, trains, 1.0)
        return _scale(encoder_bytes, inputs / length) + _scale(decoder_bytes, decoder_fraction)
    total_length = length + virtual
    blocks = backbone.blocks if isinstance(backbone, OneStack) else None
    context = AttentionContext(total_length + memory * length, memory=memory, query_stream=query_stream)
    if blocks is not None and total_length > blocks.longest_dense:
        context = AttentionContext(
            blocks.attended_tokens(total_length), copies=blocks.attended_tokens(total_length) / blocks.size
        )
    trains, layers = _has_trainable(backbone.embed), layers_of(backbone)
    if decodes_masks:  # the enhanced mask decoder applies the last layer twice
        layers.append(layers[-1])
    stack_bytes = _stack_bytes(backbone.embed, width, layers, formats, context, trains, read)
    return _scale(stack_bytes, total_length / length)


def _stack_bytes(
    embed: StackInput,
    width: int,
    layers: Iterable[nn.Module],
    formats: Formats,
    context: AttentionContext,
    trains: bool,
    read: float,
) -> SavedActivations:
    """trains: whether any module below the layers is trained."""
    parts, context = list(layers), replace(context, scored=embed.position.scores)
    activations = float(trains * width * (VALUE_BYTES * (embed.norm is not None) + (embed.dropout.rate > 0)))
    activations += trains * _reported_bytes(embed, formats, context.keys, 1.0)
    scores = working = frozen = 0.0
    for number, layer in enumerate(parts):
        trains, last = trains or _has_trainable(layer), number == len(parts) - 1
        layer_read = read if last else 1 + context.query_stream
        layer_bytes = _layer_bytes(layer, width, formats, context, last, layer_read)
        if not trains:
            frozen = max(frozen, layer_bytes)
            continue
        layer_scores = sum(
            score_bytes(part, formats, name == "cross_attn", context, last) for name, part in attentions_of(layer)
        )
        if formats.recomputes:
            activations += (1 + context.query_stream) * width * VALUE_BYTES
            working = max(working, layer_bytes + layer_scores)
        else:
            activations, scores = activations + layer_bytes, scores + layer_scores
    return SavedActivations(activations, scores, working if trains else frozen)


def _layer_bytes(
    layer: nn.Module, width: int, formats: Formats, context: AttentionContext, last: bool, read: float
) -> float:
    """Without its scores. After its attention the layer processes only the fraction `read` of the tokens."""
    before_attention = _reported_bytes(layer, formats, context.cross_keys, read) + sum(
        attention_bytes(part, formats, name == "cross_attn", context, last) for name, part in attentions_of(layer)
    )
    norms = sum(_norm_bytes(part, width) for name, part in layer.named_children() if "norm" in name)
    masks = width * sum(isinstance(part, Dropout) and part.rate > 0 for part in layer.children())
    after_attention = norms + masks
    for part in layer.modules():
        if isinstance(part, FeedForward):
            after_attention += _feed_forward_bytes(part, formats)
        elif "down" in dict(part.named_children()):  # an adapter between the sublayers
            bottleneck = cast(nn.Linear, part.get_submodule("down"))
            after_attention += formats.product * (width + 2 * bottleneck.out_features)
    return before_attention + read * after_attention


def _reported_bytes(module: nn.Module, formats: Formats, keys: float, read: float) -> float:
    reports = [part.saved_activations(keys, read) for part in module.modules() if isinstance(part, ReportsActivations)]
    return sum(formats.product * inputs + VALUE_BYTES * values for inputs, values in reports)


def _norm_bytes(norm: nn.Module, width: int) -> float:
    """LayerNorm saves its input; a norm of several operations (T5) also saves its result; a model without norms
    neither."""
    if isinstance(norm, nn.Identity):
        return 0.0
    return width * VALUE_BYTES * (1 if isinstance(norm, nn.LayerNorm) else 2)


def _feed_forward_bytes(part: FeedForward, formats: Formats) -> float:
    width, inner = part.fc_in.in_features, part.fc_in.out_features
    dropped = part.dropout.rate > 0
    # ReLU saves its result, which without dropout is the same tensor as the input of the second linear map.
    relu = part.activation is ACTIVATIONS["relu"]
    if isinstance(part, GatedFeedForward):
        values = 3.0 + (keeps_input(part.fc_out) or dropped)
    elif relu:
        values = 1.0 + (dropped and keeps_input(part.fc_out))
    else:
        values = 1.0 + keeps_input(part.fc_out)
    low_rank = sum(map(update_values, part.modules()))
    return formats.product * (keeps_input(part.fc_in) * width + values * inner + low_rank) + dropped * inner


def head_bytes(learner: nn.Module, formats: Formats, rows: float) -> int:
    """Computes the peak bytes of the loss over a vocabulary in one forward pass that predicts at `rows` positions:
    those of two chunks of logits and of the gradient of the embedding table; for skip-gram and GloVe, those of the
    vectors of the word pairs and of their gradients. 0 for learners without such a loss."""
    kinds = (WordPairsHead, CooccurrenceHead)
    pairs = next((module for module in learner.modules() if isinstance(module, kinds)), None)
    if pairs is not None:
        return round(2 * rows * (1 + pairs.words) * pairs.output.token.embedding_dim * VALUE_BYTES)
    if not any(isinstance(module, LMHead) for module in learner.modules()) or rows <= 0:
        return 0
    backbone = cast(Backbone, learner.get_submodule("backbone"))
    sampled = next((module for module in learner.modules() if isinstance(module, SampledLMHead)), None)
    count, width = backbone.embed.token.weight.shape if sampled is None else sampled.output_table.shape
    chunk, softmax = _LOGIT_ROWS["cuda" if formats.cuda else "cpu"]
    logits = min(rows, 2 * chunk) * formats.product + min(rows, softmax) * 2 * VALUE_BYTES * formats.half
    computed = count if sampled is None else sampled.logits_per_target
    return round(computed * logits + count * width * (VALUE_BYTES + formats.half * 2 * formats.product))


def copied_bytes(learner: nn.Module, formats: Formats) -> int:
    """Computes the bytes of the copies of weights that a forward pass keeps: of all matrices in bf16 or fp16, and
    in fp32 of attention projections that are joined to one matrix. 0 if no backbone is trained."""
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


def _has_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _scale(saved: SavedActivations, factor: float) -> SavedActivations:
    return SavedActivations(factor * saved.activations, factor * saved.scores, factor * saved.working)
