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
from lmtool.nn.blocks import CrossLayer
from lmtool.nn.initialization import generator_for
from lmtool.nn.prefix import KeyPrefix, VirtualTokens
from lmtool.nn.stack import Stack
from lmtool.random_streams import Permutation
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.tuning.base import TuningMethod, freeze, initialize_like_torch, new_module, stacks
from lmtool.tuning.configs.base import TuningConfig
from lmtool.tuning.configs.methods import PrefixConfig, PTuningConfig, SoftPromptConfig
from lmtool.types import ParameterGroup

# Soft prompts (Lester et al. 2021): trainable vectors in the input, which act as virtual tokens.
# Shape letters: P virtual tokens, E width of the token vectors.


PROMPT_PREFIX = "backbone.embed.virtual."
"""Prefix of the checkpoint names of virtual tokens."""
POPULATION = 5000
"""Initial values are sampled from this many vocabulary entries, the first ones, as in the published code. T5's
vocabulary is sorted by frequency. Vocabularies that lmtool trains are almost sorted, because frequent pieces are merged
first."""
# Vocabulary entries that stand for no text: [unused7], <extra_id_0>, <0x0A>.
_PLACEHOLDER = re.compile(r"[\[<].+[\]>]")


class PromptTuning(TuningMethod):
    """Trains the vectors of virtual tokens, and the heads. The backbone is frozen."""

    config: SoftPromptConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        embed, after = learner.backbone.embed, tokens_before_prompt(learner.backbone)
        width = embed.token.weight.shape[1]
        embed.virtual = new_module(learner, VirtualTokens, self.config.length, width, after)
        with torch.no_grad():
            if not embed.virtual.weight.is_meta:
                embed.virtual.weight.copy_(self._initial_vectors(learner, seed))

    def _initial_vectors(self, learner: BaseLearner, seed: int) -> Tensor:
        """Zero without a tokenizer, because the learner is then built only to load trained weights."""
        backbone, count = learner.backbone, self.config.length
        width, tokenizer = backbone.embed.token.weight.shape[1], learner.tokenizer
        if self.config.init == "random":
            return torch.empty(count, width).uniform_(
                -0.5, 0.5, generator=generator_for(seed, f"{PROMPT_PREFIX}weight")
            )
        if tokenizer is None:
            return torch.zeros(count, width)
        labels = label_vectors(learner)[:count] if self.config.init == "class_labels" else []
        ids = sample_vocabulary_ids(tokenizer, backbone.embed.token.num_embeddings, count - len(labels), seed)
        device = backbone.embed.token.weight.device
        return torch.cat([*labels, backbone.embed.tokens(torch.from_numpy(ids).to(device))])

    def parameter_groups(self, learner: BaseLearner) -> list[ParameterGroup]:
        """Returns a group for the prompt, whose learning rate is scaled by the size of the token vectors, and the
        groups of the heads, whose learning rate is scaled by `head_scale`."""
        groups, scale = decayed_groups(learner), token_vector_rms(learner.backbone)
        prompt = [pair for group in groups for pair in group.parameters if pair[0].startswith(PROMPT_PREFIX)]
        for group in groups:
            group.parameters = [pair for pair in group.parameters if not pair[0].startswith(PROMPT_PREFIX)]
            group.learning_rate_scale = self.config.head_scale
        return [ParameterGroup("prompt", prompt, scale), *(group for group in groups if group.parameters)]


def tokens_before_prompt(backbone: Backbone) -> int:
    """Returns how many tokens of a text precede the virtual tokens: 1 in an encoder, otherwise 0. In an encoder, the
    state of the first token represents the text, so this token stays at the position that it had in pretraining."""
    return 1 if backbone.config.architecture == "encoder" else 0


def token_vector_rms(backbone: Backbone) -> float:
    """Returns the root mean square of the token vectors, at most 1, as a factor of the prompt's learning rate.

    The published learning rate is for T5, whose root mean square is above 1. BERT's is about twenty times smaller: with
    the published rate, the first step would erase the initial values of the prompt.
    """
    weight = backbone.embed.token.weight.detach()
    if weight.is_meta:
        return 1.0
    size = float(weight.norm()) / math.sqrt(weight.numel()) * backbone.embed.scale
    return min(1.0, float(f"{size:.3g}"))  # rounded to be equal on every device


def sample_vocabulary_ids(tokenizer: Tokenizer, rows: int, count: int, seed: int) -> np.ndarray:
    """Samples vocabulary entries as initial values of virtual tokens: (count,) int64 ids from the first `POPULATION`
    entries that stand for text. No id occurs twice before every id has occurred once. rows: rows of the token
    embedding, which may be fewer than the vocabulary's entries."""
    ids = range(min(tokenizer.vocab_size, rows))
    pieces = zip(ids, tokenizer.pieces(ids), strict=True)
    text_ids = [
        token_id
        for token_id, piece in pieces
        if piece and token_id not in tokenizer.special_ids and not _PLACEHOLDER.fullmatch(piece)
    ]
    frequent = np.array(text_ids[:POPULATION], dtype=np.int64)
    order = Permutation(len(frequent), seed, "init", 0)(np.arange(len(frequent)))
    return frequent[order[np.arange(count) % len(frequent)]]


def label_vectors(learner: BaseLearner) -> Sequence[Tensor]:
    """Returns the mean of the token vectors of each label's text, (1, E) per label (Lester et al. 2021, section 3.2).
    Underscores in labels count as spaces. A label without tokens is skipped. Raises UserError if the task has no
    labels."""
    labels = learner.config.class_names if isinstance(learner.config, LearnedConfig) else None
    if not labels:
        raise UserError(
            "tuning.init=class_labels initializes the prompt from labels, but the task has no labels",
            "set tuning.init=vocabulary",
        )
    embed = learner.backbone.embed
    device = embed.token.weight.device
    tokens = [torch.from_numpy(np.asarray(learner.tokenizer.encode(label.replace("_", " ")))) for label in labels]
    return [embed.tokens(ids.to(device, torch.int64)).mean(0, keepdim=True) for ids in tokens if len(ids)]


# Prefix tuning (Li and Liang 2021): trainable keys and values before every text, in every attention.
# Shape letters: P rows of a prefix, W width of all heads, L layers of a stack.


class MappedPrefix(KeyPrefix):
    """A prefix that an MLP computes (section 4.3): `weight`, (P, E), is mapped through a hidden tanh layer to the keys
    and values of all layers, (P, L * 2 * W). count: P. depth: L. width: W, of all key or value heads together.
    embedding_size: E."""

    def __init__(self, count: int, depth: int, width: int, embedding_size: int, inner_size: int):
        nn.Module.__init__(self)
        self.depth = depth
        self.weight = nn.Parameter(torch.zeros(count, embedding_size))
        self.inner = nn.Linear(embedding_size, inner_size)
        self.output = nn.Linear(inner_size, depth * 2 * width)

    def rows(self) -> Tensor:
        # In full precision, so that folding, which happens without autocast, does not change the prefix.
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.output(torch.tanh(self.inner(self.weight)))


class PrefixTuning(TuningMethod):
    """Trains the heads and, for every stack, a prefix for self-attention and, in the decoder of an encoder-decoder, one
    for cross-attention. The backbone is frozen."""

    config: PrefixConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        add_prefixes(learner, seed, self.config.length, self.config.inner_size if self.config.reparametrize else None)

    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces the MLPs by the prefixes that they compute."""
        fold_prefixes(learner)
        return self.config.model_copy(update={"reparametrize": False})


class PrefixSlot(NamedTuple):
    """An attribute of a stack that holds a prefix. name: the checkpoint name of the prefix. attribute: `prefix` for
    self-attention, `cross_prefix` for cross-attention."""

    name: str
    stack: Stack
    attribute: Literal["prefix", "cross_prefix"]


def prefix_slots(learner: BaseLearner) -> Iterator[PrefixSlot]:
    """Yields the slot for the self-attention of every stack, and the slot for its cross-attention if there is one."""
    for name, stack in stacks(learner.backbone):
        yield PrefixSlot(f"{name}.prefix", stack, "prefix")
        if any(isinstance(layer, CrossLayer) for layer in stack.layers):
            yield PrefixSlot(f"{name}.cross_prefix", stack, "cross_prefix")


def add_prefixes(learner: BaseLearner, seed: int, length: int, inner_size: int | None) -> None:
    """Adds a prefix of `length` tokens to every attention of a learner. inner_size: width of the hidden layer of the
    MLPs that compute the prefixes; None means that the prefixes themselves are trained."""
    config = cast(TransformerConfig, learner.backbone.config)
    width, hidden_size = config.key_value_heads * config.width_of_head, learner.backbone.hidden_size
    for slot in prefix_slots(learner):
        depth = len(list(slot.stack.applied_layers()))
        prefix = (
            new_module(learner, KeyPrefix, length, depth, width)
            if inner_size is None
            else new_module(learner, MappedPrefix, length, depth, width, hidden_size, inner_size)
        )
        initialize_like_torch(prefix, seed, f"{slot.name}.")
        setattr(slot.stack, slot.attribute, prefix)


@torch.no_grad()
def fold_prefixes(learner: BaseLearner) -> None:
    """Replaces the MLPs by the prefixes that they compute. Outputs do not change."""
    for slot in prefix_slots(learner):
        mapped: KeyPrefix = getattr(slot.stack, slot.attribute)
        rows = mapped.rows()
        folded = new_module(learner, KeyPrefix, len(rows), mapped.depth, rows.shape[1] // (2 * mapped.depth))
        folded.weight.copy_(rows)
        setattr(slot.stack, slot.attribute, folded)
    learner.added_names = frozenset(f"{slot.name}.weight" for slot in prefix_slots(learner))


# P-tuning: virtual tokens with a trainable encoder (Liu et al. 2021), or prompts in every layer (Liu et al. 2022).


class EncodedTokens(VirtualTokens):
    """Virtual tokens that an encoder computes from `weight`, (P, E). count: P. width: E. after: number of tokens of a
    text that precede the virtual tokens. lstm: whether the encoder has two bidirectional LSTM layers with E / 2 states
    in each direction, and two linear maps with a ReLU between them; otherwise, three linear maps with ReLUs between
    them."""

    def __init__(self, count: int, width: int, after: int, lstm: bool):
        super().__init__(count, width, after)
        half = width // 2
        # An odd width loses one state to rounding.
        input_width = 2 * half if lstm else width
        self.lstm = nn.LSTM(width, half, num_layers=2, bidirectional=True) if lstm else None
        self.maps = nn.ModuleList(
            nn.Linear(input_width if number == 0 else width, width) for number in range(2 if lstm else 3)
        )

    def vectors(self) -> Tensor:
        # In full precision, as in `MappedPrefix.rows`.
        with torch.autocast(self.weight.device.type, enabled=False):
            x_PE = self.weight if self.lstm is None else self.lstm(self.weight)[0]
            for number, linear in enumerate(self.maps):
                x_PE = linear(torch.relu(x_PE) if number else x_PE)
            return x_PE


class PTuning(TuningMethod):
    """Trains the heads, and either virtual tokens with their encoder or, with `deep`, a prefix in every layer."""

    config: PTuningConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config, embed = self.config, learner.backbone.embed
        if config.deep:
            add_prefixes(learner, seed, config.length, None)
            return
        width, after = embed.token.weight.shape[1], tokens_before_prompt(learner.backbone)
        embed.virtual = new_module(learner, EncodedTokens, config.length, width, after, config.encoder == "lstm")
        initialize_like_torch(embed.virtual, seed, PROMPT_PREFIX)

    @torch.no_grad()
    def fold(self, learner: BaseLearner) -> TuningConfig:
        """Replaces the encoder by the virtual tokens that it computes. Returns the configuration of soft prompts."""
        embed = learner.backbone.embed
        if self.config.deep or embed.virtual is None:
            return self.config
        vectors_PE, after = embed.virtual.vectors(), embed.virtual.after
        folded = new_module(learner, VirtualTokens, *vectors_PE.shape, after)
        folded.weight.copy_(vectors_PE)
        embed.virtual = folded
        learner.added_names = frozenset({f"{PROMPT_PREFIX}weight"})
        return SoftPromptConfig(length=len(vectors_PE))
