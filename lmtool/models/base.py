"""What every backbone offers to the rooms above it.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from lmtool.config.tables import build
from lmtool.models.configs import ModelConfig
from lmtool.nn.cache import Cache
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import Activation
from lmtool.nn.initialization import Draw, initialize
from lmtool.nn.positions import Position, PositionSizes


@dataclass(frozen=True)
class VocabularyHead:
    """How a family's language model reads tokens off its hidden states.

    tied: by the token table; otherwise by a table of the head's own. scale: of the hidden states before the table.
    constants: whether a constant that does not learn is added to each token's logit (BART's `final_logits_bias`).
    """

    tied: bool = True
    scale: float = 1.0
    constants: bool = False


class Backbone(nn.Module):
    """A family's stack without heads. `forward(packed, draws=None, read_M=None)` gives the hidden states (T, H) of the
    last layer, or (M, H) of the tokens with the flat indices `read_M`: the last layer need not work on others."""

    config: ModelConfig
    hidden_size: int
    embed: Embeddings
    layers: nn.ModuleList
    vocabulary_head: VocabularyHead = VocabularyHead()
    head_activation: Activation = "gelu"
    """Of a masked language model's head."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Of the map between the first token's hidden state and a classifier."""

    def initial_draw(self) -> Draw:
        """How the matrices of this family, and of heads on it, are drawn at the start."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are drawn")

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initial weights of this model or of a head on it. prefix: of the tensors' names in a checkpoint."""
        initialize(module, seed, self.initial_draw(), prefix)


class Decoder(Backbone):
    """A backbone that reads left to right: `forward(packed, draws=None, cache=None, read_M=None)`."""

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """An empty cache for this many texts of at most `capacity` tokens."""
        self.embed.position.check(capacity)
        return Cache(self.config.num_layers, documents, capacity)


def positions_of(
    config: ModelConfig, causal: bool, width: int | None = None, head_size: int | None = None, offset: int = 0
) -> Position:
    """The positions a configuration asks for, for one stack.

    causal: whether tokens see only what is before them. width: of the token vectors, where not hidden_size.
    head_size: where not hidden_size / num_heads. offset: rows of a learned table before that of position 0.
    """
    sizes = PositionSizes(
        max_positions=config.max_positions,
        hidden_size=config.hidden_size if width is None else width,
        num_heads=config.num_heads,
        head_size=config.hidden_size // config.num_heads if head_size is None else head_size,
        causal=causal,
        offset=offset,
    )
    return build(config.positions, sizes)
