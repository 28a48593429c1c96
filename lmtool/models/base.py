"""The interface of backbones.

Shape letters: T tokens, M selected tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, Self, cast, runtime_checkable

import numpy as np
from torch import Tensor, nn

from lmtool.config.registry import build
from lmtool.models.configs import ModelConfig, StudiedConfig, TransformerConfig
from lmtool.nn.blocks import PostNormLayer, PreNormLayer
from lmtool.nn.cache import Cache, CarriedState, State
from lmtool.nn.configs import BlockPart
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import Embeddings, reserved_positions
from lmtool.nn.feedforward import Activation
from lmtool.nn.initialization import Draw, initialize, materialize, normal
from lmtool.nn.positions import Position, PositionSizes
from lmtool.nn.stack import Stack, Tap, enter
from lmtool.types import Batch, Packed


class SpellingVocabulary(Protocol):
    """A tokenizer for a model that reads the bytes of vocabulary entries. spellings: returns these bytes. starts_word:
    (V,) bool, whether an entry starts a word."""

    roles: dict[str, int]

    @property
    def vocab_size(self) -> int: ...

    @property
    def starts_word(self) -> np.ndarray: ...

    def spellings(self, ids: Iterable[int]) -> list[bytes]: ...


@dataclass(frozen=True)
class VocabularyHead:
    """How a family's language model computes token logits from its hidden states.

    Attributes:
        tied: Use the token embedding as output layer.
        scale: Factor by which hidden states are multiplied before the output layer.
        constants: Add a fixed constant to each token's logit (BART's `final_logits_bias`).
        bias: Add a learned bias (XLNet).
        cutoffs: First ids of the clusters of an adaptive softmax; empty for a plain one.
    """

    tied: bool = True
    scale: float = 1.0
    constants: bool = False
    bias: bool = False
    cutoffs: tuple[int, ...] = ()


class Backbone(nn.Module):
    """A family's model without heads.

    `forward(inputs, rng=None, ..., read_M=None, tap=None)` returns the hidden states (T, H). read_M: the flat indices
    of the tokens whose states are needed, so that the last layer can skip the others; it then returns (M, H). rng: the
    generator of dropout; None in evaluation. tap: observes or replaces the states between layers. `embed` contains the
    token embedding.
    """

    config: ModelConfig
    hidden_size: int
    embed: Embeddings
    concatenated_layers: int = 1
    """The number of layers whose states are concatenated as the input of the heads of tasks. A tuning method may change
    it."""
    vocabulary_head: VocabularyHead = VocabularyHead()
    head_activation: Activation = "gelu"
    """Activation of the masked language model head."""
    pooler_activation: Literal["tanh", "relu", "gelu", "gelu_tanh"] = "tanh"
    """Activation of the pooler."""
    pooler_norm: bool = False
    """Whether the pooler ends with a norm."""
    pooler_on_tokens: bool = False
    """Whether the pooler is also applied before heads that read tokens."""
    head_biases: bool = True
    """Whether linear layers and norms in the pooler and in the masked language model head have biases. The output layer
    of the masked language model head always has one."""
    decodes_masks: bool = False
    """Whether the family has an enhanced mask decoder: its forward pass then accepts `absolute` positions."""

    @classmethod
    def build(cls, config: ModelConfig, seed: int) -> Self:
        """Returns a model with initial weights on the default device."""
        model = materialize(lambda: cls(config))
        model.initialize(model, seed, "backbone.")
        return model

    def read_inputs(
        self, inputs: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Returns the hidden states of the inputs, for an encoder-decoder those of its encoder. Arguments as in
        `forward`."""
        states: Tensor = self(inputs, rng, read_M=read_M, tap=tap)
        return states

    @property
    def memory_length(self) -> int | None:
        """The number of states of earlier segments that each layer caches now; None for models without a memory."""
        return None

    @property
    def feature_size(self) -> int:
        """The width of the vectors that the heads of tasks read."""
        return self.hidden_size * self.concatenated_layers

    @property
    def state_widths(self) -> tuple[int, ...]:
        """The widths of the states after the embedding and after each layer of the stack that reads a text."""
        return (self.hidden_size,) * (1 + self.config.num_layers)

    @property
    def longest_text(self) -> int:
        """The maximum length of a text in tokens, not counting virtual tokens."""
        return self.config.max_positions - reserved_positions(self.embed)

    @property
    def head_norm_epsilon(self) -> float:
        """The epsilon of the norms in heads."""
        return self.config.norm_epsilon if isinstance(self.config, TransformerConfig) else 1e-12

    def spell(self, vocabulary: SpellingVocabulary) -> None:
        """Sets the vocabulary. Called once. Only families that read the bytes of its entries use it."""

    def diagram(self, length: int) -> list[tuple[str, str]]:
        """Returns a diagram of the tokens that each token attends to in a text of this length, as pairs (title, line);
        empty by default."""
        return []

    def initial_draw(self) -> Draw:
        """Returns the initial distribution of the matrices of this family and of its heads."""
        return normal(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Sets the initial weights of `module`, which is this model or a head on it. prefix: the beginning of the names
        of its tensors in a checkpoint; the random numbers depend on these names."""
        initialize(module, seed, self.initial_draw(), prefix)


class OneStack(Stack, Backbone):
    """A backbone that consists of one stack of layers over an embedding."""

    embed: Embeddings

    def __init__(
        self,
        config: ModelConfig,
        embed: Embeddings,
        layers: Iterable[nn.Module],
        causal: bool,
        final_norm: nn.Module | None = None,
    ):
        super().__init__(layers, causal, final_norm, embed=embed)
        self.config = config
        self.hidden_size = config.hidden_size
        if isinstance(config, StudiedConfig):
            self.leave_out(config.without or ())

    def leave_out(self, parts: Collection[BlockPart]) -> None:
        """Removes parts of all layers; norms also from the embedding and the end of the stack."""
        for layer in self.layers:
            cast(PreNormLayer | PostNormLayer, layer).leave_out(parts)
        if "norm" in parts:
            self.embed.norm, self.final_norm = None, None

    @property
    def longest_text(self) -> int:
        return self.config.max_positions - reserved_positions(self.embed, self.ahead)

    def read(
        self, packed: Packed, rng: DropoutRng | None, cache: Cache | None, read_M: Tensor | None, tap: Tap | None
    ) -> Tensor:
        """Embeds the tokens, applies the layers, and returns the final states."""
        state = enter(self.embed, self.embed.tokens(packed.tokens), packed, rng, cache, self.ahead)
        return self.run(state, state.read(read_M), tap=tap)


class Encoder(OneStack):
    """Base class of encoders: every token attends to its whole document."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, causal=False, final_norm=final_norm)

    def forward(
        self, packed: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Returns hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`."""
        return self.read(packed, rng, None, read_M, tap)


class Decoder(OneStack):
    """Base class of decoders: a token attends to itself and to earlier tokens."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, causal=True, final_norm=final_norm)

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Returns hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`. cache: the keys and
        values of earlier tokens; the forward pass appends those of the given tokens."""
        return self.read(packed, rng, cache, read_M, tap)

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """Returns an empty cache for this many texts of at most `capacity` tokens each, not counting virtual tokens."""
        return self.cache_for(self.embed, documents, capacity)


@runtime_checkable
class StatefulBackbone(Protocol):
    """A backbone that carries state between segments of joined text.

    The forward pass takes the argument `carried` (nn/cache.py), reads the state before each document of the batch from
    `carried.before`, and sets `carried.after`. Without `carried`, a document starts with the initial state, and no
    state is stored. The carried state is independent of a cache of earlier tokens, as used in generation.
    """

    def initial_state(self, lanes: int) -> State:
        """Returns the initial state of this many lanes: tensors (lanes, ...) by name, on the backbone's device. Later
        states have the same shapes."""


@runtime_checkable
class AdjustableMemory(Protocol):
    """A backbone whose state is a memory of adjustable length."""

    def set_memory_length(self, tokens: int) -> None:
        """Sets how many tokens before a segment the memory holds in evaluation."""


def read_streams(
    backbone: Backbone, carried: CarriedState | None, batch: Batch, rng: DropoutRng | None, read_M: Tensor | None
) -> Tensor:
    """Returns the states of a backbone for a batch: (T, H), or (M, H) of the tokens `read_M`. If the documents of the
    batch are segments of lanes, the backbone starts from the stored state of these lanes, and their new state is
    stored."""
    if carried is None or batch.lanes is None or not isinstance(backbone, StatefulBackbone):
        states: Tensor = backbone(batch.inputs, rng, read_M=read_M)
        return states
    lane_states = carried.begin(batch.lanes, backbone.initial_state)
    states = backbone(batch.inputs, rng, read_M=read_M, carried=lane_states)
    carried.keep(batch.lanes, lane_states, backbone.initial_state)
    return states


def positions_of(config: TransformerConfig, causal: bool, width: int | None = None, offset: int = 0) -> Position:
    """Returns the position encoding of one stack, as configured.

    causal: whether tokens attend only to themselves and earlier tokens. width: the width of the token vectors; None for
    hidden_size. offset: the number of unused rows before position 0 in a learned table.
    """
    sizes = PositionSizes(
        max_positions=config.max_positions,
        hidden_size=config.hidden_size if width is None else width,
        num_heads=config.num_heads,
        head_size=config.width_of_head,
        causal=causal,
        offset=offset,
    )
    return build(config.positions, sizes)
