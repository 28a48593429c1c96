"""The cost model: FLOPs, memory and disk of a run. Arithmetic over plain numbers.

A multiply and an add count as two FLOPs, and a training step as three forwards (the backward counts two). Every part of
a learner multiplies each of its positions with its matrices; attention adds, for each layer, the scores and the
weighted sums over the attended tokens; packed documents attend within themselves only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from lmtool.costs.activations import VALUE_BYTES, SavedActivations
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone, OneStack
from lmtool.models.characters import WordCharacters
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import AdaptiveLMHead, BackboneLMHead, EnhancedMaskedLMHead, LMHead
from lmtool.models.heads.sampled import SampledLMHead, WordPairsHead
from lmtool.nn.attention import MultiHead
from lmtool.nn.positions import Position
from lmtool.nn.prefix import VirtualTokens
from lmtool.reporting.costs import RunPlan

# Other memory of a process: Python, torch, the tokenizer and the loader (390 to 415 MB measured on Linux); on CUDA the
# context, library workspaces, and unusable fragments of the allocator.
RESERVE = {False: 400_000_000, True: 1_500_000_000}
# A row of metrics.jsonl, and the rest of the run's folder without checkpoints.
ROW_BYTES, FOLDER_BYTES = 250, 200_000


@dataclass(frozen=True)
class Work:
    """The work of a part of a learner. share: fraction of a batch's tokens that it processes. values: matrix elements;
    matrices used twice count twice. attention: layers times the total width of their heads; context: mean attended
    tokens per token. passes: 3 with gradients, 2 if the matrices are frozen, 1 without gradients."""

    share: float
    values: float
    attention: float = 0.0
    context: float = 0.0
    passes: float = 3

    @property
    def flops(self) -> float:
        """FLOPs per token of the batch."""
        return self.passes * self.share * (2 * self.values + 4 * self.attention * self.context)


@dataclass(frozen=True)
class Sizes:
    """Values that a run holds. parameters: by part. learning: trainable ones. optimizer: its state. in_layers, layer:
    of all layers, and of the largest one. teachers: of frozen models that run alongside. copied_bytes: copies of
    weights made by a forward. saved: in a checkpoint (None: all parameters). carried: state carried from batch to
    batch."""

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
    """One forward. tokens: their number. activations: per token. head_bytes: of the vocabulary loss."""

    tokens: float
    activations: SavedActivations = field(default_factory=SavedActivations)
    head_bytes: int = 0
    cuda: bool = False

    @property
    def activation_bytes(self) -> float:
        """Saved for its backward."""
        return self.tokens * (self.activations.activations + self.activations.scores + self.activations.working)


def memory_of(sizes: Sizes, forward: Forward, devices: int = 1, sharded: bool = False) -> dict[str, int]:
    """Bytes of one device by part, at the peak of a step, without empty parts.

    sharded: every device holds its fraction of weights, gradients and optimizer state (fsdp), and temporarily two full
    layers, the active one and the prefetched one, and all parameters outside of layers, with the gradients of one of
    each.
    """
    share = devices if sharded else 1
    # The loss follows the last layer, and recomputation precedes it: only the larger of both is in memory.
    working = forward.tokens * forward.activations.working
    outside = sizes.total - sizes.in_layers
    parts = {
        "weights": VALUE_BYTES * sizes.total / share,
        "gradients": VALUE_BYTES * sizes.learning / share,
        "optimizer": VALUE_BYTES * sizes.optimizer / share,
        "gathered weights": VALUE_BYTES * (3 * sizes.layer + 2 * outside) if share > 1 else 0,
        "weight copies": sizes.copied_bytes,
        "carried state": 2 * VALUE_BYTES * sizes.carried,  # including that before a step
        "activations": forward.tokens * forward.activations.activations + working,
        "attention scores": forward.tokens * forward.activations.scores,
        "logits": max(0, forward.head_bytes - working),
        "teachers": VALUE_BYTES * sizes.teachers,
        "framework": RESERVE[forward.cuda],
    }
    return {name: round(size) for name, size in parts.items() if size}


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step. works: of every part. tokens: mean real tokens in a step over all devices. forward: of one
    device. sharded: see `memory_of`."""

    works: Sequence[Work]
    tokens: float
    sizes: Sizes
    forward: Forward
    devices: int = 1
    sharded: bool = False

    def plan(self) -> RunPlan:
        """The plan of a run with one step and one checkpoint, without times."""
        sizes = self.sizes
        saved = sizes.total if sizes.saved is None else sizes.saved
        return RunPlan(
            parameters=dict(sizes.parameters),
            trainable_parameters=sizes.learning,
            flops_per_token=sum(work.flops for work in self.works),
            tokens_per_step=self.tokens,
            steps=1,
            memory_bytes=memory_of(sizes, self.forward, self.devices, self.sharded),
            checkpoint_bytes=VALUE_BYTES * (saved + sizes.optimizer + sizes.carried),
            checkpoints=1,
            devices=self.devices,
        )


# The work of a learner, computed from its modules: that of the architecture, as papers count it, with every layer on
# every token. Savings of a last layer that computes few tokens are not subtracted.


_TABLES = (nn.Embedding, Position)


def works_of(
    learner: BaseLearner, fractions: Mapping[str, float], predicted: float, length: float, outputs: float = 0.5
) -> Iterator[Work]:
    """The work of every part of a learner.

    fractions: by part name, the fraction of the tokens that it processes; predicted: that of a vocabulary head without
    an entry, where every other part runs once per example. length: mean tokens of an example, both sides. outputs: the
    decoder's fraction of an encoder-decoder's tokens.
    """
    yield from _body(learner.backbone, length, outputs, 1.0, _passes(learner.backbone))
    if learner.query_stream:
        yield _asking(cast(OneStack, learner.backbone), predicted, length)
    parts = {f"heads.{name}": head for name, head in learner.heads.items()}
    if learner.objective is not None:
        parts |= {f"objective.{name}": module for name, module in learner.objective.items()}
    for name, part in parts.items():
        if isinstance(part, Backbone):
            yield from _body(part, length, outputs, fractions.get(name, 1.0), 3)
        else:
            if isinstance(part, EnhancedMaskedLMHead):
                backbone = parts.get("objective.generator", learner.backbone)
                yield _decoding(cast(OneStack, backbone), length)
            share = fractions.get(name, predicted if isinstance(part, LMHead) else 1 / length)
            yield Work(share, _matrices([part]) + _vocabulary(part, learner.backbone))


def _decoding(backbone: OneStack, length: float) -> Work:
    """The enhanced mask decoder: the last layer a second time."""
    layers = list(backbone.depth())
    last = layers[-1:]
    return Work(1.0, _matrices(last), _attention(last), backbone.seen(len(layers) - 1, length))


def _asking(backbone: OneStack, share: float, length: float) -> Work:
    """A query stream: all layers at the predicted tokens, with queries only."""
    layers = list(backbone.depth())
    projections = _matrices(part for layer in layers for part in _key_value_maps(cast(nn.Module, layer.self_attn)))
    return Work(share, _matrices(layers) - projections, _attention(layers), backbone.seen(0, length))


def _passes(backbone: Backbone) -> float:
    """The work of a step over a backbone in forwards: 1, plus 1 for the gradients of states if anything is trained,
    plus the trained fraction of its matrices for their gradients."""
    parts = [part for part in backbone.modules() if not isinstance(part, _TABLES)]
    matrices = [parameter for part in parts for parameter in part.parameters(recurse=False) if parameter.ndim > 1]
    learn = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)
    learns = any(parameter.requires_grad for parameter in backbone.parameters())
    return 1 + learns + learn / max(1, sum(parameter.numel() for parameter in matrices))


def _body(backbone: Backbone, length: float, outputs: float, share: float, passes: float) -> Iterator[Work]:
    """A backbone's layers, once per token, including virtual ones; shared layers as often as they are applied. Prefix
    rows are attended to, without other work."""
    if isinstance(backbone, EncoderDecoder):
        embedding = _matrices([backbone.embed])
        inputs, encoder, decoder = 1 - outputs, backbone.encoder.layers, backbone.decoder.layers
        crossed = [cast(MultiHead, layer.cross_attn) for layer in decoder]
        # Keys and values are computed from the inputs.
        keys = _matrices(part for cross in crossed for part in _key_value_maps(cross))
        seen, read = inputs * length + backbone.embed.virtual_count, outputs * length
        contexts = seen + backbone.encoder.ahead, read / 2 + backbone.decoder.ahead, seen + backbone.decoder.crossed
        inputs = share * seen / length
        yield Work(inputs, embedding + _matrices(encoder) + keys, _attention(encoder), contexts[0], passes)
        yield Work(share * outputs, embedding + _matrices(decoder) - keys, _attention(decoder), contexts[1], passes)
        yield Work(share * outputs, 0, sum(_width(cross) for cross in crossed), contexts[2], passes)
        return
    total_length = length + backbone.embed.virtual_count
    if not isinstance(backbone, OneStack):
        # A family with its own forward counts as a whole, each of its modules once.
        yield Work(share * total_length / length, _matrices([backbone]), passes=passes)
        return
    layers = list(backbone.depth())
    widths = [_attention([layer]) for layer in layers]
    weighted = [width * backbone.seen(number, total_length) for number, width in enumerate(widths)]
    mean = sum(weighted) / max(1, sum(widths)) + backbone.ahead
    yield Work(share * total_length / length, _matrices([backbone.embed, *layers]), sum(widths), mean, passes)


def _matrices(modules: Iterable[nn.Module]) -> int:
    """Elements of the matrices that a token's vector is multiplied with; tables are looked up, and virtual tokens, or
    position keys and queries, are computed once per batch."""
    parts = [part for module in modules for part in module.modules()]
    once = {inner for part in parts if isinstance(part, VirtualTokens) for inner in part.modules()}
    readers = [part for part in parts if isinstance(part, WordCharacters)]
    once |= {inner for reader in readers for inner in reader.modules()}
    once |= {getattr(part, name) for part in parts if isinstance(part, MultiHead) for name in part.table_maps}
    return sum(reader.products for reader in readers) + sum(
        values.numel()
        for part in parts
        if part not in once and not isinstance(part, _TABLES)
        for values in part.parameters(recurse=False)
        if values.ndim > 1
    )


def _key_value_maps(attention: nn.Module) -> Iterator[nn.Module]:
    """The projections of keys and values, as far as the attention has them (additive attention has no values)."""
    return (part for name, part in attention.named_children() if name in ("k_proj", "v_proj"))


def _attention(layers: Iterable[nn.Module]) -> int:
    """The summed widths of all layers' attention."""
    return sum(_width(cast(MultiHead, layer.self_attn)) for layer in layers if hasattr(layer, "self_attn"))


def _width(attention: MultiHead) -> int:
    """The total width of the heads."""
    return attention.q_proj.weight.shape[0]


def _vocabulary(head: nn.Module, backbone: Backbone) -> int:
    """Elements of the table with which a head predicts tokens, plus its own map; for word pairs one row. A head with
    sampled softmax excludes the words left out."""
    if isinstance(head, WordPairsHead):
        return head.output.token.embedding_dim
    if isinstance(head, SampledLMHead):
        return (head.computed - len(head.output_table)) * head.output_table.shape[1]
    if not isinstance(head, LMHead) or (isinstance(head, BackboneLMHead) and head.output is not None):
        return 0
    table = backbone.embed.token.weight
    return round(head.rows_read * table.shape[1]) if isinstance(head, AdaptiveLMHead) else table.numel()
