"""What every encoder-decoder is: two stacks over one token table.

Shape letters: T tokens of the decoder, S tokens of the encoder, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer, each
from lmtool.nn.cache import Cache
from lmtool.nn.cross_attention import CrossAttention, EncoderState
from lmtool.nn.decoder_blocks import PostNormCrossLayer
from lmtool.nn.dropout import Draws, Dropout, draws_of
from lmtool.nn.embeddings import Embeddings, Places
from lmtool.nn.feedforward import Activation, FeedForward
from lmtool.nn.layout import Causal, Full, Layout
from lmtool.types import Packed, send


class Stack(nn.Module):
    """Layers, and where a family has them a norm behind the last one and dropout behind that."""

    def __init__(self, layers: Sequence[nn.Module], final_norm: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.dropout = Dropout(dropout)

    def finish(self, x_TH: Tensor, draws: Draws | None) -> Tensor:
        """(T, H) of the last layer to (T, H) of the stack."""
        return self.dropout(x_TH if self.final_norm is None else self.final_norm(x_TH), draws)


class DecoderStack(Stack):
    """A stack with what it adds to its token vectors; the encoder's stands in the model's `embed`."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        embed: Places,
        final_norm: nn.Module | None = None,
        dropout: float = 0.0,
    ):
        super().__init__(layers, final_norm, dropout)
        self.embed = embed


class EncoderDecoder(Backbone):
    """`forward(inputs, draws, outputs, read_M)` gives the hidden states (T, H) of the decoder, which reads `outputs`
    (shifted already) and sees all of `inputs`. `embed`: the token table of both stacks, and what the encoder
    adds to it."""

    config: EncoderDecoderConfig
    encoder: Stack
    decoder: DecoderStack

    def assemble(self, embed: Embeddings, encoder: Stack, decoder: DecoderStack) -> None:
        """Enter the parts."""
        self.embed, self.encoder, self.decoder = embed, encoder, decoder

    def forward(
        self,
        inputs: Packed,
        draws: Draws | None = None,
        outputs: Packed | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, H) of the decoder. draws: of the inputs; those of the outputs are its `for_outputs`.
        read_M: flat indices of the outputs whose states are wanted, (M, H) then."""
        if outputs is None:
            raise ValueError("an encoder-decoder reads inputs and outputs; no outputs are given")
        state = self.encode(inputs, draws)
        return self.decode(state, outputs, None if draws is None else draws.for_outputs(), read_M=read_M)

    def encode(self, inputs: Packed, draws: Draws | None = None) -> EncoderState:
        """What the decoder reads of the inputs."""
        layout = Layout.of(inputs, Full())
        x_SH = self.embed.finish(self.embed.tokens(inputs.tokens), inputs, draws)
        for _, layer, own, _ in each(self.encoder.layers, draws):
            x_SH = layer(x_SH, layout, own, self.embed.position)
        return EncoderState(self.encoder.finish(x_SH, draws), inputs.segments)

    def decode(
        self,
        state: EncoderState,
        outputs: Packed,
        draws: Draws | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, H) of the outputs. draws: of the outputs. cache: the tokens before these; these are added
        to it, and `state` keeps the keys and values of the inputs. read_M: as of `forward`."""
        places = self.decoder.embed
        layout = Layout.of(outputs, Causal()) if cache is None else cache.layout(outputs, Causal())
        positions_T = None if cache is None else layout.query_positions
        cross_layout = state.layout(outputs)
        state.keep = state.keep or cache is not None
        x_TH = places.finish(self.embed.tokens(outputs.tokens), outputs, draws, positions_T)
        for number, layer, own, read in each(self.decoder.layers, draws, read_M):
            kept = None if cache is None else cache.layers[number]
            x_TH = layer(x_TH, layout, state, cross_layout, own, places.position, kept, read)
        return self.decoder.finish(x_TH, draws_of(draws, read_M))

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """An empty cache for this many outputs of at most `capacity` tokens."""
        self.decoder.embed.position.check(capacity)
        return Cache(self.config.layers_of_decoder, documents, capacity)


def shifted(packed: Packed, start: int) -> Packed:
    """What a decoder reads to predict `packed`: each document behind the token `start`, without its last one."""
    tokens_T = packed.tokens.roll(1)
    firsts = [at for at, length in zip(packed.starts, packed.lengths, strict=True) if length]
    tokens_T.index_fill_(0, send(torch.tensor(firsts, dtype=torch.int64), tokens_T.device), start)
    return Packed(tokens_T, packed.lengths)


def post_norm_layers(
    config: EncoderDecoderConfig, activation: Activation, activation_dropout: float
) -> tuple[list[PostNormLayer], list[PostNormCrossLayer]]:
    """The layers of both stacks of a family with biases everywhere and norms behind the sublayers."""
    width = config.hidden_size
    attention = (width, config.num_heads, config.attention_dropout)

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(width, config.norm_epsilon)

    def ffn() -> FeedForward:
        return FeedForward(width, config.feedforward_size, activation, dropout=activation_dropout)

    encoder = [
        PostNormLayer(SelfAttention(*attention), ffn(), norm(), norm(), config.dropout)
        for _ in range(config.num_layers)
    ]
    decoder = [
        PostNormCrossLayer(
            SelfAttention(*attention), CrossAttention(*attention), ffn(), (norm(), norm(), norm()), config.dropout
        )
        for _ in range(config.layers_of_decoder)
    ]
    return encoder, decoder
