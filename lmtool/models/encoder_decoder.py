"""Base class of encoder-decoders: two stacks with a shared token embedding.

Shape letters: T tokens of the decoder, M selected tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.models.bert import post_norm_layer
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig, TwoTransformersConfig
from lmtool.nn.attention import CrossAttention, SelfAttention
from lmtool.nn.blocks import PostNormCrossLayer, PostNormLayer
from lmtool.nn.cache import Cache
from lmtool.nn.context import EncoderState
from lmtool.nn.dropout import DropoutRng
from lmtool.nn.embeddings import Embeddings, StackInput, reserved_positions
from lmtool.nn.feedforward import Activation, FeedForward
from lmtool.nn.stack import Stack, StackState, Tap, enter
from lmtool.types import Packed, send


class DecoderStack(Stack):
    """The stack of the decoder. embed: what the decoder adds to token embeddings, such as its positions."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        embed: StackInput,
        final_norm: nn.Module | None = None,
        dropout: float = 0.0,
    ):
        super().__init__(layers, causal=True, final_norm=final_norm, dropout=dropout, side="outputs")
        self.embed = embed


class EncoderDecoder(Backbone):
    """Base class of encoder-decoders. `forward(inputs, rng, outputs)` returns the hidden states (T, H) of the decoder,
    which reads `outputs` (already shifted) and attends to all of `inputs`. `embed`: the shared token embedding, and
    the vectors that the encoder adds to it."""

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig, embed: Embeddings, encoder: Stack, decoder: DecoderStack):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.embed, self.encoder, self.decoder = embed, encoder, decoder

    def forward(
        self,
        inputs: Packed,
        rng: DropoutRng | None = None,
        outputs: Packed | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Returns hidden states (T, H) of the decoder, or (M, H) of the outputs with the flat indices `read_M`. rng:
        the dropout generator of the inputs; the outputs use `rng.for_outputs()`. tap: observes both stacks."""
        if outputs is None:
            raise ValueError("an encoder-decoder needs inputs and outputs, but the outputs are missing")
        encoded = self.encode(inputs, rng, tap)
        return self.decode(encoded, outputs, None if rng is None else rng.for_outputs(), read_M=read_M, tap=tap)

    def encode(self, inputs: Packed, rng: DropoutRng | None = None, tap: Tap | None = None) -> EncoderState:
        """Encodes the inputs for the decoder."""
        state = self._enter_inputs(inputs, rng)
        return EncoderState(self.encoder.run(state, tap=tap), state.packed.segments, rng=state.rng)

    def read_inputs(
        self, inputs: Packed, rng: DropoutRng | None = None, read_M: Tensor | None = None, tap: Tap | None = None
    ) -> Tensor:
        state = self._enter_inputs(inputs, rng)
        return self.encoder.run(state, state.read(read_M), tap=tap)

    def _enter_inputs(self, inputs: Packed, rng: DropoutRng | None) -> StackState:
        return enter(self.embed, self.embed.tokens(inputs.tokens), inputs, rng, ahead=self.encoder.ahead)

    def decode(
        self,
        encoded: EncoderState,
        outputs: Packed,
        rng: DropoutRng | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Returns hidden states (T, H) of the outputs, or (M, H) of those with the flat indices `read_M`. rng: the
        dropout generator of the outputs. cache: the keys and values of earlier outputs; those of the given outputs are
        appended. With a cache, `encoded` caches the keys and values of the inputs."""
        encoded.keep = encoded.keep or cache is not None  # a decoder with a cache is called again
        vectors_TE = self.embed.tokens(outputs.tokens)
        state = enter(self.decoder.embed, vectors_TE, outputs, rng, cache, self.decoder.ahead)
        return self.decoder.run(state, state.read(read_M), encoded, tap)

    def new_cache(self, documents: int, capacity: int) -> Cache:
        """Returns an empty cache for this many outputs of at most `capacity` tokens each, not counting the
        virtual tokens of a tuning method."""
        return self.decoder.cache_for(self.decoder.embed, documents, capacity)

    @property
    def longest_answer(self) -> int:
        """The maximum number of output tokens, not counting the virtual tokens of a tuning method."""
        return self.config.max_positions - reserved_positions(self.decoder.embed, self.decoder.ahead)

    @property
    def longest_text(self) -> int:
        return self.config.max_positions - reserved_positions(self.embed, self.encoder.ahead)


def shift_right(packed: Packed, start: int) -> Packed:
    """Returns the decoder's input for predicting `packed`: in each document, the token `start`, then all tokens except
    the last one."""
    tokens_T = packed.tokens.roll(1)
    first_indices = [first for first, length in zip(packed.starts, packed.lengths, strict=True) if length]
    tokens_T.index_fill_(0, send(torch.tensor(first_indices, dtype=torch.int64), tokens_T.device), start)
    return Packed(tokens_T, packed.lengths)


def post_norm_layers(
    config: TwoTransformersConfig, activation: Activation, activation_dropout: float
) -> tuple[list[PostNormLayer], list[PostNormCrossLayer]]:
    """Returns the layers of encoder and decoder, with biases and with norms after the sublayers."""
    width = config.hidden_size

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(width, config.norm_epsilon)

    encoder = [post_norm_layer(config, activation, activation_dropout) for _ in range(config.num_layers)]
    decoder = [
        PostNormCrossLayer(
            SelfAttention(width, config.num_heads, config.attention_dropout),
            CrossAttention(width, config.num_heads, config.attention_dropout),
            FeedForward(width, config.feedforward_size, activation, dropout=activation_dropout),
            (norm(), norm(), norm()),
            config.dropout,
        )
        for _ in range(config.layers_of_decoder)
    ]
    return encoder, decoder
