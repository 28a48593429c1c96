"""Transformer-XL: Dai, Yang, Yang, Carbonell, Le, Salakhutdinov, "Transformer-XL: Attentive Language Models beyond a
Fixed-Length Context", ACL 2019. Sizes: https://github.com/kimiyoung/transformer-xl.

       token * sqrt(H)
             |
          dropout                  states of the last segment, without gradient
             |                                      |
    +--------+--------+                             |
    |    self_attn <--|------ memory, then x -------+   attends to earlier tokens, with relative positions
    |        |        |
    +-----> add ------+
             |
           norm1
             |                 x num_layers
    +--------+--------+
    |  fc_in relu fc_out
    |        |        |
    +-----> add ------+
             |
           norm2
             |
          dropout
             |
          hidden
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lmtool.models.base import Decoder, VocabularyHead, positions_of
from lmtool.models.decoder_configs import TransformerXlConfig
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.cache import Cache, Carried, State
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Mask, Recent
from lmtool.nn.positions import Position
from lmtool.nn.relative import Distances, RelativeAttention, prepend_memory
from lmtool.nn.stack import StackState, Tap, TapPoint, Taps, enter
from lmtool.types import Packed


class TransformerXl(Decoder):
    """The decoder without its head, which is tied to the token embedding. `relative`: the relative positions, shared by
    all layers.

    The carried state is the `memory` (N, Y, F, H): the last F input states of each of the Y layers, for N lanes. A
    memory that is not full yet is padded with zeros on the left, which no token attends to.
    """

    config: TransformerXlConfig

    def __init__(self, config: TransformerXlConfig):
        width = config.hidden_size
        layers = [
            PostNormLayer(
                RelativeAttention(width, config.num_heads, config.attention_dropout),
                FeedForward(width, config.feedforward_size, "relu", dropout=config.dropout),
                torch.nn.LayerNorm(width, config.norm_epsilon),
                torch.nn.LayerNorm(width, config.norm_epsilon),
                config.dropout,
            )
            for _ in range(config.num_layers)
        ]
        position = positions_of(config, causal=True)
        embed = Embeddings(config.vocab_size, width, position, config.dropout).scaled(math.sqrt(width))
        super().__init__(config, embed, layers)
        self.dropout = Dropout(config.dropout)
        self.relative = Distances(width, config.num_heads, config.clamp_distance)
        self.vocabulary_head = VocabularyHead(cutoffs=config.clusters)

    @property
    def memory_length(self) -> int:
        """F, the length of the memory, which differs between training and evaluation."""
        return self.config.memory_length if self.training else self.config.evaluation_memory

    def set_memory_length(self, tokens: int) -> None:
        self.config = self.config.model_copy(update={"evaluation_memory_length": tokens})

    def initial_state(self, lanes: int) -> State:
        shape = lanes, self.config.num_layers, self.memory_length, self.config.hidden_size
        return {"memory": torch.zeros(shape, device=self.embed.token.weight.device)}

    def mask(self, number: int, packed: Packed) -> Mask:
        # In evaluation with same_length, each token attends to the last F tokens.
        limits_distance = self.config.same_length and self.memory_length and not self.training and not packed.prefixes
        return Recent(self.memory_length) if limits_distance else super().mask(number, packed)

    def position(self, number: int, state: StackState) -> Position:
        return self.relative

    def attended_tokens(self, number: int, length: float) -> float:
        """A key and a value count as 1, the key of a distance as 1/2. The last term is the cost of the memory's keys
        and values, which are computed for every segment."""
        memory = self.config.memory_length
        return 1.5 * (length / 2 + memory) + self.hidden_size * memory / max(length, 1)

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """Returns hidden states as every decoder. carried: the memory of earlier segments; it receives that for the
        next."""
        if carried is None or not self.memory_length:
            if carried is not None:
                carried.after = carried.before
            return self.read(packed, rng, cache, read_M, tap)
        (read_length,) = set(carried.read)  # all lanes have read the same number of tokens
        filled = min(read_length, self.memory_length)
        memory_NYFH = carried.before["memory"]
        state = enter(self.embed, self.embed.tokens(packed.tokens), packed, rng, None, filled)
        if filled:
            state = replace(state, memories=memory_NYFH[:, :, self.memory_length - filled :].unbind(1))
        recorder = MemoryRecorder(memory_NYFH, packed.lengths)
        hidden = self.run(state, state.read(read_M), tap=recorder if tap is None else Taps(recorder, tap))
        carried.after = {"memory": torch.stack(recorder.after, 1)}
        return hidden


class MemoryRecorder(Tap):
    """Records the input states of every layer. after: the new memory of each layer, (N, F, H), which is the last F
    states of the old memory and the segment together."""

    def __init__(self, memory_NYFH: Tensor, lengths: tuple[int, ...]):
        self._memories, self._lengths = memory_NYFH.unbind(1), lengths
        self.after: list[Tensor] = []

    def wants(self, point: TapPoint) -> bool:
        return point.layer < len(self._memories)

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        memory_NFH = self._memories[point.layer]
        memory_length = memory_NFH.shape[1]
        joint = prepend_memory(memory_NFH, x_TH.detach().to(memory_NFH.dtype), self._lengths)
        texts = joint.split([memory_length + length for length in self._lengths])
        self.after.append(torch.stack([text[-memory_length:] for text in texts]))
        return x_TH
