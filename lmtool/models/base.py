"""What every backbone offers to the rooms above it.

Shape letters: T tokens, M of them that are read, H hidden width.
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
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import Embeddings, positions_taken
from lmtool.nn.feedforward import Activation
from lmtool.nn.initialization import Draw, initialize, materialize
from lmtool.nn.positions import Position, PositionSizes
from lmtool.nn.stack import Stack, Tap, enter
from lmtool.types import Batch, Packed

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)
AnyBackbone = TypeVar("AnyBackbone", bound="Backbone")


class SpelledVocabulary(Protocol):
    """A tokenizer as a model sees it that reads what the ids spell. starts_word: (V,) whether an entry begins a
    word."""

    roles: dict[str, int]

    @property
    def vocab_size(self) -> int: ...

    @property
    def starts_word(self) -> np.ndarray: ...

    def spelled(self, ids: Iterable[int]) -> list[bytes]: ...


@dataclass(frozen=True)
class VocabularyHead:
    """How a family's language model reads tokens off its hidden states.

    tied: by the token table; otherwise by a table of the head's own. scale: of the hidden states before the table.
    constants: whether a constant that does not learn is added to each token's logit (BART's `final_logits_bias`). bias:
    whether one that learns is (XLNet). cutoffs: first ids of the clusters of an adaptive softmax; none for a plain one.
    """

    tied: bool = True
    scale: float = 1.0
    constants: bool = False
    bias: bool = False
    cutoffs: tuple[int, ...] = ()


class Backbone(nn.Module):
    """A family's model without heads.

    `forward(inputs, draws=None, ..., read_M=None, tap=None)` gives hidden states (T, H), or (M, H) of the tokens with
    the flat indices `read_M`: the last layer need not work on others. draws: dropout's, None in evaluation. tap: sees
    or replaces the states between the layers. `embed` has the token table.
    """

    config: ModelConfig
    hidden_size: int
    embed: Embeddings
    states_read: int = 1
    """How many layers' states the heads of tasks read side by side; a tuning method may ask for more."""
    vocabulary_head: VocabularyHead = VocabularyHead()
    head_activation: Activation = "gelu"
    """Of a masked language model's head."""
    pooler_activation: Literal["tanh", "relu", "gelu", "gelu_tanh"] = "tanh"
    """Of the map between the first token's hidden state and a classifier."""
    pooler_norm: bool = False
    """Whether a norm stands behind that map."""
    pooler_on_tokens: bool = False
    """Whether that map and its norm stand between each token's hidden state and a head over tokens, too."""
    head_biases: bool = True
    """Whether maps and norms of the masked language model's head and of the pooler have biases; the output has one."""
    decodes_masks: bool = False
    """Whether it has an enhanced mask decoder: its forward takes vectors of `absolute` positions then."""

    @property
    def memory_length(self) -> int | None:
        """States of each layer that are kept of the segments before, as it runs now; None where it keeps none."""
        return None

    @property
    def feature_size(self) -> int:
        """Width of the vectors that the heads of tasks read."""
        return self.hidden_size * self.states_read

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Of the stack that reads a text, how wide the states are behind the embedding and behind each layer."""
        return (self.hidden_size,) * (1 + self.config.num_layers)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text it reads, beside virtual ones."""
        return self.config.max_positions - positions_taken(self.embed)

    @property
    def head_norm_epsilon(self) -> float:
        """Added to the variance in the norms of heads."""
        return self.config.norm_epsilon if isinstance(self.config, TransformerConfig) else 1e-12

    def spell(self, vocabulary: SpelledVocabulary) -> None:
        """Called once, with the vocabulary whose ids it will read: a family that reads what they spell keeps that."""

    def drawing(self, length: int) -> list[tuple[str, str]]:
        """What sees what in a text of so many tokens, in titled lines; none where that goes without saying."""
        return []

    def initial_draw(self) -> Draw:
        """How the matrices of this family, and of heads on it, are drawn at the start."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are drawn")

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initial weights of this model or of a head on it. prefix: of the tensors' names in a checkpoint."""
        initialize(module, seed, self.initial_draw(), prefix)


class OneStack(Stack, Backbone):
    """A backbone of one stack."""

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
        return self.config.max_positions - positions_taken(self.embed, self.ahead)

    def read(
        self, packed: Packed, draws: Draws | None, cache: Cache | None, read_M: Tensor | None, tap: Tap | None
    ) -> Tensor:
        """Enter, run, leave."""
        entered = enter(self.embed, self.embed.tokens(packed.tokens), packed, draws, cache, self.ahead)
        return self.run(entered, entered.read(read_M), tap=tap)


class Encoder(OneStack):
    """Every token sees its whole document."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, False, final_norm)

    def forward(
        self, packed: Packed, draws: Draws | None = None, read_M: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        """Hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`."""
        return self.read(packed, draws, None, read_M, tap)


class Decoder(OneStack):
    """A token sees itself and what is before it."""

    def __init__(
        self, config: ModelConfig, embed: Embeddings, layers: Iterable[nn.Module], final_norm: nn.Module | None = None
    ):
        super().__init__(config, embed, layers, True, final_norm)

    def forward(
        self,
        packed: Packed,
        draws: Draws | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Hidden states (T, H), or (M, H) of the tokens with the flat indices `read_M`. cache: the tokens before these;
        these are added to it."""
        return self.read(packed, draws, cache, read_M, tap)

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """An empty cache for this many texts of at most `capacity` tokens, and their virtual ones."""
        return self.cache_for(self.embed, documents, capacity)


@runtime_checkable
class CarriesState(Protocol):
    """A backbone that carries state from one segment of a running text to the next.

    Its forward takes `carried` (nn/cache.py): it reads `before`, the state in front of each document of the batch,
    and sets `after`. Without it a document begins with the initial state, and nothing is left behind. What is kept of
    the tokens before these in a cache is another matter: generation begins with its prompt.
    """

    def initial_state(self, lanes: int) -> State:
        """The state of this many lanes that begin: by name (lanes, ...), on the backbone's device; the shapes of later
        states are the same."""


@runtime_checkable
class Remembers(Protocol):
    """A backbone whose state is a memory, of any length."""

    def remember(self, tokens: int) -> None:
        """See this many tokens before a segment, in evaluation from now on."""


def through_lanes(
    backbone: Backbone, carried: CarriedState | None, batch: Batch, draws: Draws | None, read_M: Tensor | None
) -> Tensor:
    """A backbone's states of a batch, (T, H) or (M, H) of `read_M`. Where the batch is of lanes, it begins with their
    state, and what it leaves is held for their next segments."""
    if carried is None or batch.lanes is None or not isinstance(backbone, CarriesState):
        states: Tensor = backbone(batch.inputs, draws, read_M=read_M)
        return states
    state = carried.begin(batch.lanes, backbone.initial_state)
    states = backbone(batch.inputs, draws, read_M=read_M, carried=state)
    carried.keep(batch.lanes, state, backbone.initial_state)
    return states


def new(family: Callable[[AnyConfig], AnyBackbone], config: AnyConfig, seed: int) -> AnyBackbone:
    """A family's model on the default device, with its initial weights."""
    model = materialize(lambda: family(config))
    model.initialize(model, seed, "backbone.")
    return model


def positions_of(config: TransformerConfig, causal: bool, width: int | None = None, offset: int = 0) -> Position:
    """The positions a configuration asks for, for one stack.

    causal: whether tokens see only what is before them. width: of the token vectors, where not hidden_size. offset:
    rows of a learned table before that of position 0.
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
