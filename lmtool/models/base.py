"""The interface of backbones.

Shape letters: T tokens, M selected tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor, nn

from lmtool.config.tables import build
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.nn.cache import Cache, CarriedState, State
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import Embeddings, reserved_positions
from lmtool.nn.feedforward import Activation
from lmtool.nn.initialization import Draw, initialize, materialize
from lmtool.nn.positions import Position, PositionSizes
from lmtool.nn.stack import Stack, Tap, enter
from lmtool.types import Batch, Packed

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)
AnyBackbone = TypeVar("AnyBackbone", bound="Backbone")


class SpellingVocabulary(Protocol):
    """A tokenizer for models that read the bytes of its entries. starts_word: (V,) whether an entry starts a word."""

    roles: dict[str, int]

    @property
    def vocab_size(self) -> int: ...

    @property
    def starts_word(self) -> np.ndarray: ...

    def spelled(self, ids: Iterable[int]) -> list[bytes]: ...


@dataclass(frozen=True)
class VocabularyHead:
    """How a family's language model computes token logits from its hidden states.

    Attributes:
        tied: Use the token embedding as output layer.
        scale: Factor of the hidden states before the output layer.
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

    `forward(inputs, rng=None, ..., read_M=None, tap=None)` returns hidden states (T, H), or (M, H) of the tokens with
    the flat indices `read_M`, so that the last layer can skip the others. rng: dropout's generator, None in evaluation.
    tap: observes or replaces the states between layers. `embed` contains the token embedding.
    """

    config: ModelConfig
    hidden_size: int
    embed: Embeddings
    states_read: int = 1
    """Number of layers whose states are concatenated for task heads; a tuning method may change it."""
    vocabulary_head: VocabularyHead = VocabularyHead()
    head_activation: Activation = "gelu"
    """Activation of the masked language model head."""
    pooler_activation: Literal["tanh", "relu", "gelu", "gelu_tanh"] = "tanh"
    """Activation of the pooler."""
    pooler_norm: bool = False
    """Whether the pooler ends with a norm."""
    pooler_on_tokens: bool = False
    """Whether the pooler is also applied before heads over tokens."""
    head_biases: bool = True
    """Whether linear layers and norms of pooler and masked language model head have biases, except the output layer."""
    decodes_masks: bool = False
    """Whether it has an enhanced mask decoder, so that its forward accepts `absolute` positions."""

    @property
    def memory_length(self) -> int | None:
        """Current number of cached states per layer of earlier segments; None without a memory."""
        return None

    @property
    def feature_size(self) -> int:
        """Width of the vectors that task heads read."""
        return self.hidden_size * self.states_read

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Widths of the states after the embedding and after each layer, in the stack that reads a text."""
        return (self.hidden_size,) * (1 + self.config.num_layers)

    @property
    def longest_text(self) -> int:
        """Maximum text length in tokens, virtual ones not counted."""
        return self.config.max_positions - reserved_positions(self.embed)

    @property
    def head_norm_epsilon(self) -> float:
        """Epsilon of the norms in heads."""
        return self.config.norm_epsilon if isinstance(self.config, TransformerConfig) else 1e-12

    def spell(self, vocabulary: SpellingVocabulary) -> None:
        """Set the vocabulary, for families that read the bytes of its entries. Called once."""

    def diagram(self, length: int) -> list[tuple[str, str]]:
        """Titled lines that show which tokens attend to which in a text of this length; empty if it is obvious."""
        return []

    def initial_draw(self) -> Draw:
        """Initial distribution of this family's matrices, and of those in its heads."""
        raise TypeError(f"{type(self).__name__} does not define its initial weights")

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Set the initial weights of this model or of a head on it. prefix: of the tensor names in a checkpoint."""
        initialize(module, seed, self.initial_draw(), prefix)


class OneStack(Stack, Backbone):
    """A backbone with one stack."""

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

    @property
    def longest_text(self) -> int:
        return self.config.max_positions - reserved_positions(self.embed, self.ahead)

    def read(
        self, packed: Packed, rng: DropoutRng | None, cache: Cache | None, read_M: Tensor | None, tap: Tap | None
    ) -> Tensor:
        """Enter, run, leave."""
        state = enter(self.embed, self.embed.tokens(packed.tokens), packed, rng, cache, self.ahead)
        return self.run(state, state.read(read_M), tap=tap)


class Encoder(OneStack):
    """Every token attends to its whole document."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, False, final_norm)

    def forward(
        self, packed: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`."""
        return self.read(packed, rng, None, read_M, tap)


class Decoder(OneStack):
    """A token attends to itself and earlier tokens."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, True, final_norm)

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`. cache: of earlier tokens; these
        are appended."""
        return self.read(packed, rng, cache, read_M, tap)

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """An empty cache for this many texts of at most `capacity` tokens, virtual ones not counted."""
        return self.cache_for(self.embed, documents, capacity)


@runtime_checkable
class StatefulBackbone(Protocol):
    """A backbone that carries state between segments of joined text.

    Its forward takes `carried` (nn/cache.py), reads `before`, the state before each document of the batch, and sets
    `after`. Without `carried` a document starts with the initial state, and no state is kept. A cache of earlier tokens
    is separate: generation starts with its prompt.
    """

    def initial_state(self, lanes: int) -> State:
        """The state of this many new lanes, by name (lanes, ...), on the backbone's device; later states have the same
        shapes."""


@runtime_checkable
class Remembers(Protocol):
    """A backbone whose state is a memory of adjustable length."""

    def remember(self, tokens: int) -> None:
        """Set the number of tokens remembered before a segment in evaluation."""


def read_streams(
    backbone: Backbone, carried: CarriedState | None, batch: Batch, rng: DropoutRng | None, read_M: Tensor | None
) -> Tensor:
    """A backbone's states for a batch, (T, H) or (M, H) of `read_M`. If the batch consists of lanes, it starts from
    their stored state and stores the new one."""
    if carried is None or batch.lanes is None or not isinstance(backbone, StatefulBackbone):
        states: Tensor = backbone(batch.inputs, rng, read_M=read_M)
        return states
    state = carried.begin(batch.lanes, backbone.initial_state)
    states = backbone(batch.inputs, rng, read_M=read_M, carried=state)
    carried.keep(batch.lanes, state, backbone.initial_state)
    return states


def new(family: Callable[[AnyConfig], AnyBackbone], config: AnyConfig, seed: int) -> AnyBackbone:
    """A family's model with initial weights on the default device."""
    model = materialize(lambda: family(config))
    model.initialize(model, seed, "backbone.")
    return model


def positions_of(config: TransformerConfig, causal: bool, width: int | None = None, offset: int = 0) -> Position:
    """The positions of one stack, as configured.

    causal: whether tokens attend only to earlier ones. width: of the token vectors, if not hidden_size. offset: rows of
    a learned table before position 0.
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
