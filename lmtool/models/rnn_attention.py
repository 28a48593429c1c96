"""The recurrent encoder-decoder with attention: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly
Learning to Align and Translate", ICLR 2015.

          token                                       token of the outputs, shifted
             |                                                |
          dropout                                          dropout
             |                                                |
    +--------+--------+                          +------------+------------+
    |  GRU ->  <- GRU |   x num_layers           |   cross_attn  -> GRU ---|--> to the next token
    |     dropout     |                          |       ^           |     |
    +--------+--------+                          |       |   max of two maps of state, token, context
             |                                   |       |        dropout  |
             +-----------------------------------|-------+           |     |
                                                 +-------------------+-----+
                                                                     |
                                                                  hidden

One token table serves both sides, since both read one vocabulary; the output layer has a table of its own. The output
reads the state of its own step (section 3.1, equation 4).
"""

from __future__ import annotations

import torch
from torch import nn

from lmtool.models.base import VocabularyHead, new
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder
from lmtool.models.recurrent_configs import RnnAttentionConfig
from lmtool.nn.additive_attention import AttendingGru
from lmtool.nn.cache import Cache
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.initialization import Draw, generator_for, initialize_each, normal, orthogonal_blocks, zero
from lmtool.nn.positions import Position
from lmtool.nn.recurrent import BidirectionalGru, StateCache
from lmtool.nn.stack import Stack

_OF_ATTENTION = 0.001


class RecurrentDecoder(DecoderStack):
    """The decoder, whose cache has states."""

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        return Cache(len(self.layers), documents, capacity + embed.virtual_count, StateCache)


class RnnAttention(EncoderDecoder):
    """Both stacks over one token table."""

    config: RnnAttentionConfig
    vocabulary_head = VocabularyHead(tied=False)

    def __init__(self, config: RnnAttentionConfig):
        width, both = config.embedding_size, 2 * config.hidden_size
        encoder = [
            BidirectionalGru(both if number else width, config.hidden_size, config.dropout)
            for number in range(config.num_layers)
        ]
        decoder = AttendingGru(
            width, config.hidden_size, both, config.attention_size, config.output_size, config.dropout
        )
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, Position(), config.dropout),
            Stack(encoder),
            RecurrentDecoder([decoder], StackInput(Position(), config.dropout)),
        )
        self.hidden_size = config.output_size

    @property
    def state_widths(self) -> tuple[int, ...]:
        """Of the encoder, which has a state in each direction."""
        return self.config.embedding_size, *[2 * self.config.hidden_size] * self.config.num_layers

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """As published (appendix B.1): orthogonal maps of the states, smaller ones in the attention, whose scores are
        all zero at the start."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if name.endswith("cross_attn.score"):
                return zero
            if name.endswith("state_gates"):
                return orthogonal_blocks
            return normal(_OF_ATTENTION) if "cross_attn" in name else self.initial_draw()

        initialize_each(module, seed, draw_of, prefix)
        for name, parameter in module.named_parameters():
            if ".weight_hh_" in name and not parameter.is_meta:
                with torch.no_grad():
                    orthogonal_blocks(parameter, generator_for(seed, prefix + name))


def build(config: RnnAttentionConfig, seed: int) -> RnnAttention:
    """A new encoder-decoder on the default device."""
    return new(RnnAttention, config, seed)
