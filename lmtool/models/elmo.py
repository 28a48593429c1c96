r"""ELMo: Peters, Neumann, Iyyer, Gardner, Clark, Lee, Zettlemoyer, "Deep Contextualized Word Representations", 2018.

      the bytes of a word
               |
       symbol embeddings
               |
      convolutions of several widths
               |
       maximum, relu
               |
           highways
               |
           projection
          /          \
     forward        backward
         |             |
       LSTM 1        LSTM 1       cell and projected values are clipped
         |             |
     +---+---+     +---+---+
     | LSTM 2 |    | LSTM 2 |
     +->add<-+     +->add<-+      residual connection, except in the first layer
         |             |
          \           /
          concatenation

The forward states depend on a word and the words before it, the backward states on a word and the words after it. Each
direction predicts its next word (objective=bilm). Original code: github.com/allenai/bilm-tf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lmtool.models.base import Encoder, SpellingVocabulary
from lmtool.models.characters import Highway, VocabularyBytes, WordCharacters
from lmtool.models.pretransformer_configs import ElmoConfig
from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context
from lmtool.nn.dropout import Dropout, DropoutRng, select_rng
from lmtool.nn.initialization import Draw, initialize_each, normal, uniform
from lmtool.nn.recurrent import LstmCell, steps_of
from lmtool.nn.stack import Tap, enter
from lmtool.types import Packed


class BidirectionalLayer(nn.Module):
    """An LSTM in each direction, each for one half of the states. residual: whether the layer has a residual
    connection."""

    def __init__(self, config: ElmoConfig, residual: bool):
        super().__init__()
        self.width, self.residual = config.hidden_size // 2, residual

        def lstm() -> LstmCell:
            return LstmCell(
                self.width,
                config.cell_size,
                projection_size=self.width,
                cell_clip=config.cell_clip,
                projection_clip=config.projection_clip,
            )

        self.forward_lstm, self.backward_lstm = lstm(), lstm()
        self.dropout = Dropout(config.dropout if residual else 0.0)  # the first layer follows the embedding's dropout

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        x_TH = self.dropout(x_TH, context.rng)
        texts = context.packed.segments
        forward_TP, _ = self.forward_lstm(x_TH[:, : self.width], steps_of(texts))
        backward_TP, _ = self.backward_lstm(x_TH[:, self.width :], steps_of(texts, reverse=True))
        out_TH = torch.cat([forward_TP, backward_TP], 1)
        return only(out_TH + x_TH if self.residual else out_TH, context.read_M)


class Elmo(Encoder):
    """The bidirectional language model without its softmax. It reads words, not tokens: all tokens of a word get the
    states of the word."""

    config: ElmoConfig

    def __init__(self, config: ElmoConfig):
        embed: Any = WordCharacters(
            config.vocab_size,
            config.word_length,
            config.character_size,
            config.filters,
            config.highways,
            width=config.hidden_size // 2,
            dropout=config.dropout,
        )
        super().__init__(
            config, embed, [BidirectionalLayer(config, residual=number > 0) for number in range(config.num_layers)]
        )
        self.dropout = Dropout(config.dropout)

    @property
    def reader(self) -> WordCharacters:
        """The module that computes word vectors."""
        return cast(WordCharacters, self.embed)

    def spell(self, vocabulary: SpellingVocabulary) -> None:
        self.reader.spell(VocabularyBytes.of(vocabulary, self.reader.longest))

    def read(
        self, packed: Packed, rng: DropoutRng | None, cache: Cache | None, read_M: Tensor | None, tap: Tap | None
    ) -> Tensor:
        words = self.reader.words(packed)  # on the host, with the vocabulary
        vectors_WH = self.reader.vectors(packed, words)
        words = words.to(packed.tokens.device)
        state = enter(self.embed, vectors_WH, words.packed, select_rng(rng, words.first_W))
        state = replace(state, batch_T=words.word_T)
        return self.run(state, state.read(read_M), tap=tap)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initializes like the original code: the scale of weights depends on their shape, highways are nearly closed,
        and forget gates are open."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if prefix == "heads.lm.":
                return normal(self.reader.project.out_features**-0.5)
            if module is not self:  # another head
                return self.initial_draw()
            if isinstance(part, nn.Conv1d):
                return uniform(0.05)
            if isinstance(part, nn.Linear):
                return normal(part.in_features**-0.5)
            return uniform(1.0) if isinstance(part, nn.Embedding) else _glorot_uniform

        initialize_each(module, seed, draw_of, prefix)
        with torch.no_grad():
            for part in module.modules():
                if isinstance(part, Highway):
                    part.gate.bias.fill_(-2.0)
                elif isinstance(part, LstmCell):
                    part.open_forget_gates()


def _glorot_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """Glorot and Bengio 2010. As in TensorFlow, the gates of an LSTM count as one matrix."""
    uniform((6 / (tensor.shape[0] + tensor.shape[1])) ** 0.5)(tensor, generator)
