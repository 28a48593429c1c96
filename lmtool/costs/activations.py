"""What a forward keeps for its backward, counted on the parts of a learner: bytes of each token.

Elements follow what autograd saves of each operation: a linear map its input where its matrix learns, a norm its input,
attention its queries, keys, values and result, an activation its input, dropout a byte. Parts below the first that
learns keep nothing. Tests hold the sum against what torch saves.

Shape letters: H hidden width, F width inside a feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lmtool.models.base import Backbone, OneStack
from lmtool.models.characters import WordCharacters
from lmtool.models.disentangled import DisentangledAttention
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import LMHead
from lmtool.models.heads.sampled import SampledLMHead, WordPairsHead
from lmtool.models.two_streams import TwoStreamAttention
from lmtool.nn.additive_attention import AttendingGru
from lmtool.nn.attention import MultiHead
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import StackInput
from lmtool.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from lmtool.nn.recurrent import BidirectionalGru, Lstm
from lmtool.nn.relative import RelativeAttention
from lmtool.nn.windows import WindowLayer

# A value in fp32: of weights, of the residual stream, of what norms read.
VALUE_BYTES = 4


@dataclass(frozen=True)
class Formats:
    """How a run computes. half: bf16 or fp16 products. cuda: on such a device, where attention runs in the type of the
    products, by a variable-length kernel where it can. recomputes: whether layers keep their input alone."""

    half: bool = False
    cuda: bool = False
    recomputes: bool = False

    @property
    def product(self) -> int:
        """Bytes of an element that a product reads."""
        return 2 if self.half else VALUE_BYTES

    @property
    def attention(self) -> int:
        """Of one that attention reads: on a CPU it is fp32, see `nn.tiled`."""
        return self.product if self.cuda else VALUE_BYTES


# What attention keeps for its backward, counted on its parts.
#
# Shape letters: W width of all heads together, A heads, K keys that a query sees.


@dataclass(frozen=True)
class Sees:
    """What the tokens of a stack see, and who asks. keys: tokens that a query sees at most. cross_keys: those of the
    encoder. scored: positions of all layers add to the scores. copies: of each key and value, where those that a block
    sees are gathered (`nn.block_sparse`). memory: states in front of a text, for each of its tokens. asked: share of
    the tokens that a query stream stands at besides."""

    keys: float
    cross_keys: float = 0.0
    scored: bool = False
    copies: float = 0.0
    memory: float = 0.0
    asked: float = 0.0


def attentions_of(layer: nn.Module) -> Iterator[tuple[str, MultiHead]]:
    """Those in a layer, by the last part of their names."""
    for name, part in layer.named_modules():
        if isinstance(part, MultiHead):
            yield name.rpartition(".")[2], part


def attention_bytes(attention: MultiHead, formats: Formats, cross: bool, sees: Sees, last: bool) -> float:
    """Its input where a projection learns, the states of the heads, and what the last map reads. last: of the layers,
    in which a query stream alone asks."""
    joined, width = attention.q_proj.weight.shape[0], attention.q_proj.in_features
    learns = any(keeps_input(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    low = sum(map(update_values, attention.modules()))
    content, queries = _streams(sees, last)
    asking, rows = _beside_keys(attention, _keyed(attention, formats, cross, sees))
    # Each stream has its copies of keys, values and rows of places.
    states = asking * queries + (2.0 + rows) * (1 + sees.memory) * (content + (sees.asked > 0))
    if sees.copies:
        states += 2 * (sees.copies - 1)
    read = 1 + sees.asked + (1 + sees.memory if sees.memory else 0.0)  # behind a memory one copy more, with it
    kept = learns * width * read * formats.product + states * joined * formats.attention + low * formats.product
    if keeps_input(attention.out_proj):
        kept += queries * joined * formats.product
    # What a cross-attention reads is kept once more, as the encoder's last state.
    return kept + VALUE_BYTES * attention.num_heads + cross * learns * width * formats.product


def score_bytes(attention: MultiHead, formats: Formats, cross: bool, sees: Sees, last: bool) -> float:
    """Of a token's scores, where they are kept: on a CPU dropout needs the weights and its choices, in pieces also what
    comes out; positions that add to the scores need them on the way back."""
    if _keyed(attention, formats, cross, sees):
        element = VALUE_BYTES + 1
    elif not formats.cuda and attention.dropout.rate > 0:
        element = 2 * VALUE_BYTES + 1
    else:
        element = _scored(attention, cross, sees) * formats.attention * (1 + 2 * _terms(attention))
    return element * (sees.cross_keys if cross else sees.keys) * attention.num_heads * _streams(sees, last)[1]


def update_values(module: nn.Module) -> int:
    """Values of a token that a low-rank update of a map keeps: what A gives, and with DoRA what its lengths scale."""
    own = dict(module.named_parameters(recurse=False))
    return sum(len(own[name]) for name in ("lora_a", "lora_magnitude") if name in own)


def keeps_input(linear: nn.Module) -> bool:
    """Whether a map's input is read on the way back: where its matrix learns, or one of low rank beside it."""
    return any(parameter.requires_grad and parameter.ndim > 1 for parameter in linear.parameters())


def _streams(sees: Sees, last: bool) -> tuple[float, float]:
    """The share of the tokens that ask as content, and that of all queries."""
    content = 0.0 if last and sees.asked else 1.0
    return content, content + sees.asked


def _scored(attention: MultiHead, cross: bool, sees: Sees) -> bool:
    """Whether places add to the scores: those of all layers, or a table that an attention maps by itself."""
    return not cross and (sees.scored or bool(attention.table_maps))


def _keyed(attention: MultiHead, formats: Formats, cross: bool, sees: Sees) -> bool:
    """Whether it is one function with its dropout (`nn.keyed`), which keeps queries, keys, values and weights."""
    pieces = cross or _scored(attention, cross, sees) or sees.copies > 0
    return not (formats.cuda or pieces) and attention.dropout.rate > 0


def _beside_keys(attention: MultiHead, keyed: bool) -> tuple[float, float]:
    """What is kept as wide as the heads: of a query, its result or another form of it too; and of a key, rows of
    distances, which there are to one side or to both."""
    if isinstance(attention, TwoStreamAttention):
        return 3.0, 2.0
    if isinstance(attention, RelativeAttention):
        return 2.0, 1.0
    return (1.0 if keyed else 2.0 + 2 * _terms(attention)), 0.0


def _terms(attention: MultiHead) -> int:
    """Terms of its scores that are products with a table of places, of which a query sees one before each key and one
    behind it, so that each keeps twice what the scores do."""
    return len(attention.terms) if isinstance(attention, DisentangledAttention) else 0


# Rows of logits that the loss over a vocabulary has at once, of which two chunks are alive, and those of its softmax.
_LOGIT_ROWS = {"cpu": (512, 32), "cuda": (1024, 1024)}


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that each token of a batch keeps. activations: of all layers. scores: of attention that no fused kernel
    computes. working: of the layer at work, where no other keeps any: layers are recomputed, or nothing learns."""

    activations: float = 0.0
    scores: float = 0.0
    working: float = 0.0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(
            self.activations + other.activations, self.scores + other.scores, max(self.working, other.working)
        )


def kept_of(
    learner: nn.Module,
    formats: Formats,
    length: float,
    outputs: float = 0.5,
    read: float = 1.0,
    memory: float = 0.0,
) -> SavedActivations:
    """What a token of a batch keeps in all backbones of a learner, heads left out. length: mean tokens of an example,
    both sides, without virtual ones. outputs: of an encoder-decoder the share of its decoder. read: share of the tokens
    that the last layer of the learner's own backbone works on behind its attention; a query stream stands at these.
    memory: states of earlier text in front of an example."""
    total = SavedActivations()
    for backbone in backbones_of(learner):
        share = read if backbone is learner.backbone else 1.0
        asked = share if learner.query_stream else 0.0
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
) -> SavedActivations:
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
) -> SavedActivations:
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
    return SavedActivations(activations, scores, working if learns else frozen)


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


def _times(kept: SavedActivations, share: float) -> SavedActivations:
    return SavedActivations(share * kept.activations, share * kept.scores, share * kept.working)
