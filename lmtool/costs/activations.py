"""What a forward keeps for its backward, counted on the parts of a learner: bytes of each token.

Elements follow what autograd saves of each operation: a linear map its input where its matrix learns, a norm its input,
attention its queries, keys, values and result, an activation its input, dropout a byte. Parts below the first that
learns keep nothing. Tests hold the sum against what torch saves.

Shape letters: H hidden width, F width inside a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lmtool.costs.attentions import (
    Sees,
    attention_bytes,
    attentions_of,
    keeps_input,
    score_bytes,
    update_values,
)
from lmtool.costs.formats import VALUE_BYTES, Formats
from lmtool.heads.lm import LMHead
from lmtool.heads.sampled import SampledLMHead
from lmtool.heads.word_pairs import WordPairsHead
from lmtool.models.base import Backbone, OneStack
from lmtool.models.characters import WordCharacters
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.additive_attention import AttendingGru
from lmtool.nn.attention import MultiHead
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import StackInput
from lmtool.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from lmtool.nn.recurrent import Lstm
from lmtool.nn.recurrent_layers import BidirectionalGru
from lmtool.nn.windows import WindowLayer

# Rows of logits that the loss over a vocabulary has at once, of which two chunks are alive, and those of its softmax.
_LOGIT_ROWS = {"cpu": (512, 32), "cuda": (1024, 1024)}


@dataclass(frozen=True)
class Kept:
    """Bytes that each token of a batch keeps. activations: of all layers. scores: of attention that no fused kernel
    computes. working: of the layer at work, where no other keeps any: layers are recomputed, or nothing learns."""

    activations: float = 0.0
    scores: float = 0.0
    working: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.activations + other.activations, self.scores + other.scores, max(self.working, other.working))


def kept_of(
    learner: nn.Module,
    formats: Formats,
    length: float,
    outputs: float = 0.5,
    read: float = 1.0,
    memory: float = 0.0,
) -> Kept:
    """What a token of a batch keeps in all backbones of a learner, heads left out. length: mean tokens of an example,
    both sides, without virtual ones. outputs: of an encoder-decoder the share of its decoder. read: share of the tokens
    that the last layer of the learner's own backbone works on behind its attention; a query stream stands at these.
    memory: states of earlier text in front of an example."""
    total = Kept()
    for backbone in backbones_of(learner):
        share = read if backbone is getattr(learner, "backbone", backbone) else 1.0
        asked = share if getattr(getattr(learner, "config", None), "query_stream", False) else 0.0
        total = total + _of_backbone(backbone, formats, length, outputs, share, memory / length, asked)
    return total


def backbones_of(learner: nn.Module) -> list[Backbone]:
    """Every backbone in a learner: its own, and that of a generator."""
    return [module for module in learner.modules() if isinstance(module, Backbone)]


def layers_of(backbone: Backbone) -> list[nn.Module]:
    """Its layers in the order they are applied, of both stacks; a family with a forward of its own is one."""
    if isinstance(backbone, EncoderDecoder):
        return [*backbone.encoder.layers, *backbone.decoder.layers]
    return list(backbone.depth()) if isinstance(backbone, OneStack) else [backbone]


def lengthening(learner: nn.Module, length: float) -> float:
    """Tokens in the layers for each of a batch, with the virtual ones. length: mean tokens of an example."""
    return max((1 + backbone.embed.virtual_count / length for backbone in backbones_of(learner)), default=1.0)


def _of_backbone(
    backbone: Backbone, formats: Formats, length: float, outputs: float, read: float, memory: float, asked: float
) -> Kept:
    """memory, asked: as `Sees` has them."""
    virtual = backbone.embed.virtual_count
    if isinstance(backbone, EncoderDecoder):
        inputs = (1 - outputs) * length + virtual
        encoder, decoder = list(backbone.encoder.layers), list(backbone.decoder.layers)
        learns = _learns(backbone.embed)
        first = _of_layers(backbone.embed, encoder, formats, Sees(inputs), learns, 1.0)
        learns = learns or any(_learns(layer) for layer in encoder)
        second = _of_layers(backbone.decoder.embed, decoder, formats, Sees(outputs * length, inputs), learns, 1.0)
        return _times(first, inputs / length) + _times(second, outputs)
    whole = length + virtual
    blocks = backbone.blocks if isinstance(backbone, OneStack) else None
    sees = Sees(whole + memory * length, memory=memory, asked=asked)
    if blocks is not None and whole > blocks.longest_dense:
        sees = Sees(blocks.seen(whole), copies=blocks.seen(whole) / blocks.size)
    own = _of_layers(backbone.embed, layers_of(backbone), formats, sees, _learns(backbone.embed), read)
    return _times(own, whole / length)


def _of_layers(
    embed: StackInput, layers: Iterable[nn.Module], formats: Formats, sees: Sees, learns: bool, read: float
) -> Kept:
    """Of a stack, a token of it. learns: whether anything before its layers does."""
    parts, sees = list(layers), replace(sees, scored=embed.position.scores)
    width = _width(parts[0]) if parts else 0
    activations = float(learns * width * (VALUE_BYTES * (embed.norm is not None) + (embed.dropout.rate > 0)))
    # Words that come again are computed once: this is the most.
    activations += learns * VALUE_BYTES * (embed.kept_values if isinstance(embed, WordCharacters) else 0)
    scores = working = frozen = 0.0
    for number, layer in enumerate(parts):
        learns, last = learns or _learns(layer), number == len(parts) - 1
        own = _of_layer(layer, formats, sees, last, read if last else 1 + sees.asked)
        if not learns:
            frozen = max(frozen, own)
            continue
        own_scores = sum(
            score_bytes(part, formats, name == "cross_attn", sees, last) for name, part in attentions_of(layer)
        )
        if formats.recomputes:
            activations += (1 + sees.asked) * _width(layer) * VALUE_BYTES
            working = max(working, own + own_scores)
        else:
            activations, scores = activations + own, scores + own_scores
    return Kept(activations, scores, working if learns else frozen)


def _of_layer(layer: nn.Module, formats: Formats, sees: Sees, last: bool, read: float) -> float:
    """Bytes of a token in a layer whose part behind the attention works on a share of the tokens."""
    ahead = sum(_of_lstm(part, formats) for part in layer.modules() if isinstance(part, Lstm))
    if isinstance(layer, BidirectionalGru | AttendingGru):
        ahead += VALUE_BYTES * layer.kept_values(sees.cross_keys)
    ahead += sum(
        attention_bytes(part, formats, name == "cross_attn", sees, last) for name, part in attentions_of(layer)
    )
    width = _width(layer)
    norms = sum(_of_norm(part, width) for name, part in layer.named_children() if "norm" in name)
    masks = width * sum(isinstance(part, Dropout) and part.rate > 0 for part in layer.children())
    behind = norms + masks
    if isinstance(layer, WindowLayer):
        behind += formats.product * layer.reach * layer.hidden_size + VALUE_BYTES * layer.size
    for part in layer.modules():
        if isinstance(part, FeedForward):
            behind += _of_feed_forward(part, formats)
        elif "down" in dict(part.named_children()):  # an adapter between the sublayers
            bottleneck: Any = part
            behind += formats.product * (width + 2 * bottleneck.down.out_features)
    return ahead + read * behind


def _of_lstm(part: Lstm, formats: Formats) -> float:
    """Its inputs, the gates, the memory before and behind its activation, and what it gives."""
    kept = VALUE_BYTES * (6 * part.cell_size + 2 * part.given_size)
    return formats.product * part.weight_ih.shape[1] + kept


def _of_norm(norm: nn.Module, width: int) -> float:
    """LayerNorm keeps its input; one in parts (T5's) also what it has normalised."""
    return width * VALUE_BYTES * (1 if isinstance(norm, nn.LayerNorm) else 2)


def _of_feed_forward(part: FeedForward, formats: Formats) -> float:
    width, inner = part.fc_in.in_features, part.fc_in.out_features
    dropped = part.dropout.rate > 0
    # Relu keeps its result, which is what the second map reads unless it is dropped from.
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
    """What the loss over a vocabulary works with at its largest: two chunks of logits, and the gradient of the table in
    the making. rows: places that predict in one forward. 0 without such a head. Of pairs of words their vectors, and
    the gradients of these."""
    pairs = next((module for module in learner.modules() if isinstance(module, WordPairsHead)), None)
    if pairs is not None:
        return round(2 * rows * (1 + pairs.words) * pairs.output.token.embedding_dim * VALUE_BYTES)
    if not any(isinstance(module, LMHead) for module in learner.modules()) or rows <= 0:
        return 0
    backbone: Any = learner.get_submodule("backbone")
    sampled = next((module for module in learner.modules() if isinstance(module, SampledLMHead)), None)
    count, width = backbone.embed.token.weight.shape if sampled is None else sampled.own_table.shape
    chunk, softmax = _LOGIT_ROWS["cuda" if formats.cuda else "cpu"]
    logits = min(rows, 2 * chunk) * formats.product + min(rows, softmax) * 2 * VALUE_BYTES * formats.half
    computed = count if sampled is None else sampled.computed
    return round(computed * logits + count * width * (VALUE_BYTES + formats.half * 2 * formats.product))


def copied_bytes(learner: nn.Module, formats: Formats) -> int:
    """Copies of weights that a forward keeps: of all matrices in the type of the products, and of the projections of
    attention that are joined into one. Nothing where no backbone learns."""
    copied = 0
    for backbone in backbones_of(learner):
        if not _learns(backbone):
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
    widths += [sum(part.given_size for part in layer.modules() if isinstance(part, Lstm))]
    widths += [layer.hidden_size] if isinstance(layer, WindowLayer) else []
    return max(widths)


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _times(kept: Kept, share: float) -> Kept:
    return Kept(share * kept.activations, share * kept.scores, share * kept.working)
