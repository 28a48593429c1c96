"""ELMo: Peters, Neumann, Iyyer, Gardner, Clark, Lee, Zettlemoyer, "Deep Contextualized Word Representations", 2018.

      the bytes of a word
               |
       vectors of symbols
               |
      convolutions of several widths
               |
       largest value, relu
               |
           highways
               |
           projection
          /          \\
     forward        backward
         |             |
       LSTM 1        LSTM 1       cell and projected values are clipped
         |             |
     +---+---+     +---+---+
     | LSTM 2 |    | LSTM 2 |
     +->add<-+     +->add<-+      every layer but the first adds what it read
         |             |
          \\           /
          side by side

A word's state in one direction has seen the word and those before it, in the other the word and those behind it: each
predicts the next one on its way (objective=bilm). As published (github.com/allenai/bilm-tf).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtool.models.base import Encoder, SpelledVocabulary, new
from lmtool.models.characters import Highway, Spellings, WordCharacters
from lmtool.models.recurrent_configs import ElmoConfig
from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context
from lmtool.nn.dropout import Draws, Dropout, draws_of
from lmtool.nn.initialization import Draw, initialize_each, normal, uniform
from lmtool.nn.recurrent import Lstm, steps_of
from lmtool.nn.stack import Tap, enter
from lmtool.types import Packed


class BidirectionalLayer(nn.Module):
    """An LSTM in each direction, over its half of the states. adds: whether it gives the sum of what it computes and
    what it read."""

    def __init__(self, config: ElmoConfig, adds: bool):
        super().__init__()
        self.width, self.adds = config.hidden_size // 2, adds

        def lstm() -> Lstm:
            return Lstm(self.width, config.cell_size, self.width, config.cell_clip, config.projection_clip)

        self.forward_lstm, self.backward_lstm = lstm(), lstm()
        self.dropout = Dropout(config.dropout if adds else 0.0)  # the embedding's stands before the first

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        x_TH = self.dropout(x_TH, context.draws)
        texts = context.packed.segments
        forward_TP, _ = self.forward_lstm(x_TH[:, : self.width], steps_of(texts))
        backward_TP, _ = self.backward_lstm(x_TH[:, self.width :], steps_of(texts, True))
        out_TH = torch.cat([forward_TP, backward_TP], 1)
        return only(out_TH + x_TH if self.adds else out_TH, context.read_M)


class Elmo(Encoder):
    """The bidirectional language model, without its softmax. Words are read in the place of tokens: a token that
    continues a word has the states of that word."""

    config: ElmoConfig

    def __init__(self, config: ElmoConfig):
        embed: Any = WordCharacters(
            config.vocab_size, config.word_length, config.character_size, config.filters, config.highways,
            config.hidden_size // 2, config.dropout,
        )  # fmt: skip
        super().__init__(config, embed, [BidirectionalLayer(config, number > 0) for number in range(config.num_layers)])
        self.dropout = Dropout(config.dropout)

    @property
    def reader(self) -> WordCharacters:
        """What makes vectors of words."""
        return cast(WordCharacters, self.embed)

    def spell(self, vocabulary: SpelledVocabulary) -> None:
        self.reader.spell(Spellings.of(vocabulary, self.reader.longest))

    def read(
        self, packed: Packed, draws: Draws | None, cache: Cache | None, read_M: Tensor | None, tap: Tap | None
    ) -> Tensor:
        words = self.reader.words(packed)
        vectors_WH = self.reader.vectors(packed, words)
        entered = enter(self.embed, vectors_WH, words.packed, draws_of(draws, words.first_W))
        entered = replace(entered, batch_T=words.word_T)
        return self.run(entered, entered.read(read_M), tap=tap)

    def initial_draw(self) -> Draw:
        """Of heads."""
        return normal(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """As published: each part by its width; highways begin nearly closed, and forget gates open."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if module is not self:  # a head; that of its language model goes by the width of its states
                return normal(self.reader.project.out_features**-0.5) if prefix == "heads.lm." else self.initial_draw()
            if isinstance(part, nn.Conv1d):
                return uniform(0.05)
            if isinstance(part, nn.Linear):
                return normal(part.in_features**-0.5)
            return uniform(1.0) if isinstance(part, nn.Embedding) else _by_size

        initialize_each(module, seed, draw_of, prefix)
        with torch.no_grad():
            for part in module.modules():
                if isinstance(part, Highway):
                    part.gate.bias.fill_(-2.0)
                elif isinstance(part, Lstm):
                    part.open_forget_gates()


def _by_size(tensor: Tensor, generator: torch.Generator) -> None:
    """Glorot and Bengio 2010, of an LSTM's gates together, as TensorFlow takes them."""
    uniform((6 / (tensor.shape[0] + tensor.shape[1])) ** 0.5)(tensor, generator)


def build(config: ElmoConfig, seed: int) -> Elmo:
    """A new model on the default device."""
    return new(Elmo, config, seed)
