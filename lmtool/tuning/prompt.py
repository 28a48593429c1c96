"""Soft prompts, prefix tuning and P-tuning: trainable vectors before every text."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner, decayed_groups
from lmtool.learners.configs import LearnedConfig
from lmtool.models.base import Backbone
from lmtool.models.configs import TransformerConfig
from lmtool.nn.initialization import generator_for
from lmtool.nn.prefix import KeyPrefix, VirtualTokens
from lmtool.nn.stack import Stack
from lmtool.random_streams import Permutation
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.base import TuningMethod, draw_as_torch, freeze, new_module, stacks
from lmtool.tuning.configs import PrefixConfig, PTuningConfig, SoftPromptConfig, TuningConfig
from lmtool.types import ParameterGroup

# Soft prompts (Lester et al. 2021): trainable virtual tokens of the input.
# Shape letters: P virtual tokens, E width of the token vectors.


NAME = "backbone.embed.virtual."
POPULATION = 5000
"""The published code samples from this many first entries of T5's vocabulary, which is sorted by frequency; trained
vocabularies are nearly so, by the order of their merges."""
# Entries without text: [unused7], <extra_id_0>, <0x0A>.
_PLACEHOLDER = re.compile(r"[\[<].+[\]>]")


class PromptTuning(TuningMethod):
    """Trains virtual tokens, and the heads."""

    config: SoftPromptConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        embed, after = learner.backbone.embed, tokens_before(learner.backbone)
        width = embed.token.weight.shape[1]
        embed.virtual = new_module(learner, VirtualTokens, self.config.length, width, after)
        with torch.no_grad():
            if not embed.virtual.weight.is_meta:
                embed.virtual.weight.copy_(self._initial(learner, seed))

    def _initial(self, learner: BaseLearner, seed: int) -> Tensor:
        """(P, E); zeros without a tokenizer, when only weights are loaded."""
        backbone, count = learner.backbone, self.config.length
        width, tokenizer = backbone.embed.token.weight.shape[1], learner.tokenizer
        if self.config.init == "random":
            return torch.empty(count, width).uniform_(-0.5, 0.5, generator=generator_for(seed, f"{NAME}weight"))
        if tokenizer is None:
            return torch.zeros(count, width)
        labels = label_vectors(learner)[:count] if self.config.init == "class_labels" else []
        drawn = sample_vocabulary_ids(tokenizer, backbone.embed.token.num_embeddings, count - len(labels), seed)
        device = backbone.embed.token.weight.device
        return torch.cat([*labels, backbone.embed.tokens(torch.from_numpy(drawn).to(device))])

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """The prompt's learning rate is scaled by the size of the token vectors, the heads' rate by `head_scale`."""
        groups, rate = decayed_groups(learner), vector_size(learner.backbone)
        prompt = [pair for group in groups for pair in group.parameters if pair[0].startswith(NAME)]
        for group in groups:
            group.parameters = [pair for pair in group.parameters if not pair[0].startswith(NAME)]
            group.learning_rate_scale = self.config.head_scale
        return [ParameterGroup("prompt", prompt, rate), *(group for group in groups if group.parameters)]


def tokens_before(backbone: Backbone) -> int:
    """Tokens of a text before its virtual ones: 0, but 1 for an encoder. Its first token's state represents the text,
    and depends on its pretrained position."""
    return 1 if backbone.config.architecture == "encoder" else 0


def vector_size(backbone: Backbone) -> float:
    """The root mean square of the token vectors, at most 1. The published rate is for T5, whose vectors exceed that;
    BERT's are twenty times smaller, and the first step would erase a prompt's initial values."""
    weight = backbone.embed.token.weight.detach()
    if weight.is_meta:
        return 1.0
    size = float(weight.norm()) / math.sqrt(weight.numel()) * backbone.embed.scale
    return min(1.0, float(f"{size:.3g}"))  # rounded to be equal on every device


def sample_vocabulary_ids(tokenizer: Tokenizer, rows: int, count: int, seed: int) -> np.ndarray:
    """(count,) ids of entries with a text among the first `POPULATION`, sampled without replacement while they last.
    rows: of the token table."""
    ids = range(min(tokenizer.vocab_size, rows))
    pieces = zip(ids, tokenizer.pieces(ids), strict=True)
    texts = [
        number
        for number, piece in pieces
        if piece and number not in tokenizer.special_ids and not _PLACEHOLDER.fullmatch(piece)
    ]
    frequent = np.array(texts[:POPULATION], dtype=np.int64)
    order = Permutation(len(frequent), seed, "init", 0)(np.arange(len(frequent)))
    return frequent[order[np.arange(count) % len(frequent)]]


def label_vectors(learner: BaseLearner) -> Sequence[Tensor]:
    """(1, E) for each label of the task: the mean vector of its tokens (Lester et al. 2021, 3.2). UserError if the
    labels are unknown."""
    labels = learner.config.class_names if isinstance(learner.config, LearnedConfig) else None
    if not labels:
        raise UserError("tuning.init=class_labels needs labels, and the task has none", "set tuning.init=vocabulary")
    embed = learner.backbone.embed
    device = embed.token.weight.device
    tokens = [torch.from_numpy(np.asarray(learner.tokenizer.encode(label.replace("_", " ")))) for label in labels]
    return [embed.tokens(ids.to(device, torch.int64)).mean(0, keepdim=True) for ids in tokens if len(ids)]


# Prefix tuning (Li and Liang 2021): trainable keys and values before every text, in every attention.
# Shape letters: P rows of a prefix, W width of all heads, L layers of a stack.


class MappedPrefix(KeyPrefix):
    """A computed prefix (4.3): `weight`, (P, E), through a layer with tanh to (P, L * 2 * W)."""

    def __init__(self, count: int, depth: int, width: int, embedding_size: int, inner_size: int):
        nn.Module.__init__(self)
        self.depth = depth
        self.weight = nn.Parameter(torch.zeros(count, embedding_size))
        self.inner = nn.Linear(embedding_size, inner_size)
        self.output = nn.Linear(inner_size, depth * 2 * width)

    def rows(self) -> Tensor:
        # In full precision, like the folded result.
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.output(torch.tanh(self.inner(self.weight)))


class PrefixTuning(TuningMethod):
    """Trains a prefix for every stack, another for its cross-attention, and the heads."""

    config: PrefixConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        add_prefixes(learner, seed, self.config.length, self.config.inner_size if self.config.reparametrize else None)

    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces the maps by their results."""
        fold_prefixes(learner)
        return self.config.model_copy(update={"reparametrize": False})


class PrefixSlot(NamedTuple):
    """A module that takes a prefix, and its parameters' name in a checkpoint."""

    name: str
    stack: Stack
    attribute: Literal["prefix", "cross_prefix"]


def prefix_slots(learner: BaseLearner) -> Iterator[PrefixSlot]:
    """The self-attention of every stack, and its cross-attention if any."""
    for name, stack in stacks(learner.backbone):
        yield PrefixSlot(f"{name}.prefix", stack, "prefix")
        if any(hasattr(layer, "cross_attn") for layer in stack.layers):
            yield PrefixSlot(f"{name}.cross_prefix", stack, "cross_prefix")


def add_prefixes(learner: BaseLearner, seed: int, length: int, inner_size: int | None) -> None:
    """Adds a prefix of this length to every attention. inner_size: width of its map; None: without a map."""
    config = cast(TransformerConfig, learner.backbone.config)
    width, hidden_size = config.key_value_heads * config.width_of_head, learner.backbone.hidden_size
    for position in prefix_slots(learner):
        depth = len(list(position.stack.depth()))
        prefix = (
            new_module(learner, KeyPrefix, length, depth, width)
            if inner_size is None
            else new_module(learner, MappedPrefix, length, depth, width, hidden_size, inner_size)
        )
        draw_as_torch(prefix, seed, f"{position.name}.")
        setattr(position.stack, position.attribute, prefix)


@torch.no_grad()
def fold_prefixes(learner: BaseLearner) -> None:
    """Replaces the maps by their results; outputs do not change."""
    for position in prefix_slots(learner):
        mapped: KeyPrefix = getattr(position.stack, position.attribute)
        rows = mapped.rows()
        folded = new_module(learner, KeyPrefix, len(rows), mapped.depth, rows.shape[1] // (2 * mapped.depth))
        folded.weight.copy_(rows)
        setattr(position.stack, position.attribute, folded)
    learner.added = frozenset(f"{position.name}.weight" for position in prefix_slots(learner))


# P-tuning: virtual tokens with a trainable encoder (Liu et al. 2021), or prompts in every layer (Liu et al. 2022).
# Shape letters: P virtual tokens, E width of the token vectors.


class EncodedTokens(VirtualTokens):
    """Computed virtual tokens: `weight` through an encoder of the same width.

    lstm: two bidirectional layers, half the width each, and two maps with a ReLU between them. mlp: three maps with
    ReLUs between them.
    """

    def __init__(self, count: int, width: int, after: int, lstm: bool):
        super().__init__(count, width, after)
        half, first = width // 2, 2 * (width // 2) if lstm else width
        self.lstm = nn.LSTM(width, half, num_layers=2, bidirectional=True) if lstm else None
        self.maps = nn.ModuleList(nn.Linear(first if number == 0 else width, width) for number in range(3 - lstm))

    def vectors(self) -> Tensor:
        # In full precision, like the folded result.
        with torch.autocast(self.weight.device.type, enabled=False):
            x_PE = self.weight if self.lstm is None else self.lstm(self.weight)[0]
            for number, part in enumerate(self.maps):
                x_PE = part(torch.relu(x_PE) if number else x_PE)
            return x_PE


class PTuning(TuningMethod):
    """Trains the prompts and their encoder, and the heads."""

    config: PTuningConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config, embed = self.config, learner.backbone.embed
        if config.deep:
            add_prefixes(learner, seed, config.length, None)
            return
        width, after = embed.token.weight.shape[1], tokens_before(learner.backbone)
        embed.virtual = new_module(learner, EncodedTokens, config.length, width, after, config.encoder == "lstm")
        draw_as_torch(embed.virtual, seed, NAME)

    @torch.no_grad()
    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces the encoder by its result: soft prompts."""
        embed = learner.backbone.embed
        if self.config.deep or embed.virtual is None:
            return self.config
        vectors_PE, after = embed.virtual.vectors(), embed.virtual.after
        folded = new_module(learner, VirtualTokens, *vectors_PE.shape, after)
        folded.weight.copy_(vectors_PE)
        embed.virtual = folded
        learner.added = frozenset({f"{NAME}weight"})
        return SoftPromptConfig(length=len(vectors_PE))
