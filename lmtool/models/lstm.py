"""The LSTM language model that is pretrained and then finetuned: Dai and Le, "Semi-supervised Sequence Learning",
NeurIPS 2015.

          token
             |
          dropout
             |
    +--------+--------+
    |      LSTM  -----|--> to the next token of the same text
    |        |        |                                         x num_layers
    |     dropout     |
    +--------+--------+
             |
          hidden

The output layer is a table of its own. A classifier reads the last token's state (section 2). Their cells are those of
torch.nn.LSTM, with one bias.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from lmtool.models.base import Decoder, VocabularyHead, new
from lmtool.models.recurrent_configs import LstmConfig
from lmtool.nn import recurrent
from lmtool.nn.cache import Cache
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.initialization import Draw, normal_by_inputs
from lmtool.nn.positions import Position
from lmtool.nn.recurrent_layers import RecurrentLayer, StateCache


class Lstm(Decoder):
    """The decoder, without its head."""

    vocabulary_head = VocabularyHead(tied=False)

    def __init__(self, config: LstmConfig):
        widths = [config.embedding_size] + [config.hidden_size] * config.num_layers
        super().__init__(
            config,
            Embeddings(config.vocab_size, config.embedding_size, Position(), config.dropout),
            [RecurrentLayer(recurrent.Lstm(read, width), config.dropout) for read, width in pairwise(widths)],
        )

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        """A state of each layer in the place of its keys and values."""
        return Cache(len(self.layers), documents, capacity + embed.virtual_count, StateCache)

    def initial_draw(self) -> Draw:
        return normal_by_inputs(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """With forget gates that are open at the start."""
        super().initialize(module, seed, prefix)
        for cell in module.modules():
            if isinstance(cell, recurrent.Lstm) and not cell.bias.is_meta:
                cell.open_forget_gates()


def build(config: LstmConfig, seed: int) -> Lstm:
    """A new decoder on the default device."""
    return new(Lstm, config, seed)
