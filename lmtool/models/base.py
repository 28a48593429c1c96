"""What every backbone offers to the rooms above it.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from torch import nn

from lmtool.models.configs import ModelConfig
from lmtool.nn.cache import Cache
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, initialize


class Backbone(nn.Module):
    """A family's stack without heads. `forward(packed, draws=None)` gives the hidden states (T, H) of the last
    layer."""

    config: ModelConfig
    hidden_size: int
    embed: Embeddings
    layers: nn.ModuleList

    def initial_draw(self) -> Draw:
        """How the matrices of this family, and of heads on it, are drawn at the start."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are drawn")

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initial weights of this model or of a head on it. prefix: of the tensors' names in a checkpoint."""
        initialize(module, seed, self.initial_draw(), prefix)


class Decoder(Backbone):
    """A backbone that reads left to right: `forward(packed, draws=None, cache=None)`."""

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """An empty cache for this many texts of at most `capacity` tokens."""
        self.embed.position.check(capacity)
        return Cache(self.config.num_layers, documents, capacity)
