"""The recurrent encoder-decoder with attention: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly
Learning to Align and Translate", ICLR 2015.

          token                                       token of the outputs, shifted
             |                                                |
          dropout                                          dropout
             |                                                |
    +--------+--------+                          +------------+------------+
    |  GRU ->  <- GRU |   x num_layers           |   cross_attn  -> GRU ---|--> to the next token
    |     dropout     |                          |       ^           |     |
    +--------+--------+                          |       |   maxout over state, token, context
             |                                   |       |        dropout  |
             +-----------------------------------|-------+           |     |
                                                 +-------------------+-----+
                                                                     |
                                                                  hidden

Encoder and decoder share the token embedding; the output layer is untied. The output depends on the state of the same
step (section 3.1, equation 4).

Shape letters: T tokens of the decoder, M selected tokens, N documents, R documents at a step, S tokens of the encoder,
K encoder tokens of a document, E width of the token vectors, C state width, V value width, A attention width, G width
of the three gates together, O output width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lmtool.models.base import VocabularyHead
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder
from lmtool.models.pretransformer_configs import RnnAttentionConfig
from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context, EncoderState
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.initialization import Draw, generator_for, initialize_each, normal, orthogonal_blocks, zero
from lmtool.nn.layout import First
from lmtool.nn.positions import Position
from lmtool.nn.recurrent import BidirectionalGru, Lockstep, Reset, StateCache, end_values, next_gru_state, steps_of
from lmtool.nn.stack import Stack
from lmtool.types import send


class EncoderMemory(NamedTuple):
    """The encoded inputs of a batch's documents, sorted for lockstep decoding. keys_NKA: the keys. values_NKV: the
    values, zero after the last token of an input. barrier_NK: the term added to scores to exclude padding."""

    keys_NKA: Tensor
    values_NKV: Tensor
    barrier_NK: Tensor


class AdditiveAttention(nn.Module):
    """Attention with score = v tanh(W state + U key)."""

    def __init__(self, state_size: int, value_size: int, width: int):
        super().__init__()
        self.q_proj = nn.Linear(state_size, width, bias=False)
        self.k_proj = nn.Linear(value_size, width)
        self.score = nn.Linear(width, 1, bias=False)

    def memory(self, encoded: EncoderState, steps: Lockstep) -> EncoderMemory:
        """Returns the keys and values for the documents of a batch. If `encoded.keep` is set, the keys are cached for
        the next call."""
        values_SV, segments = encoded.hidden_SH, encoded.segments
        keys_SA = encoded.cached[self][0] if self in encoded.cached else self.k_proj(values_SV)
        if encoded.keep:
            encoded.cached[self] = keys_SA, values_SV
        lengths = encoded.mask.lengths if isinstance(encoded.mask, First) else segments.lengths
        lengths_N, starts_N = torch.tensor(lengths), torch.tensor(segments.starts)
        index_K = torch.arange(max(lengths, default=0))
        index_NK = starts_N[:, None] + torch.minimum(index_K, (lengths_N - 1).clamp(min=0)[:, None])
        mask_NK = index_K < lengths_N[:, None]
        # An empty input at the end has no valid index. Any index is right, because its values are multiplied by zero.
        index_NK = send(index_NK.clamp(max=max(len(values_SV) - 1, 0)), values_SV.device)
        mask_NK = send(mask_NK, values_SV.device)
        order_N = steps.order_N.div(encoded.outputs, rounding_mode="floor")
        index_NK, mask_NK = index_NK.index_select(0, order_N), mask_NK.index_select(0, order_N)
        values_NKV = values_SV[index_NK] * mask_NK[..., None]
        barrier_NK = torch.zeros_like(mask_NK, dtype=torch.float32).masked_fill(~mask_NK, -1e30)
        return EncoderMemory(keys_SA[index_NK], values_NKV, barrier_NK)

    def forward(self, state_RC: Tensor, memory: EncoderMemory) -> Tensor:
        """Returns (R, V): the context vectors of the first R documents."""
        rows = len(state_RC)
        sums_RKA = memory.keys_NKA[:rows] + self.q_proj(state_RC)[:, None]
        scores_RK = self.score(sums_RKA.tanh())[..., 0] + memory.barrier_NK[:rows]
        values_RKV = memory.values_NKV[:rows]
        weights_RK = scores_RK.softmax(-1).to(values_RKV.dtype)
        return torch.bmm(weights_RK[:, None], values_RKV)[:, 0]


class AttendingGru(nn.Module):
    """A GRU layer that reads, at each step, a token and the attention's context vector for the previous state. The
    output is a maxout layer over state, token and context (Goodfellow et al. 2013), with dropout.

    The gates are those of torch.nn.GRU, in its order: reset, update (which keeps the state; in the paper, 1 - update
    does), new. reset: where the reset gate is applied; in the paper, before the product with the state. The first state
    is computed from the encoder's backward state at the first token, which is the second half of the encoder's output
    for this token.
    """

    def __init__(
        self,
        input_size: int,
        state_size: int,
        value_size: int,
        attention_size: int,
        output_size: int,
        dropout: float,
        reset: Reset,
    ):
        super().__init__()
        self.reset = reset
        self.cross_attn = AdditiveAttention(state_size, value_size, attention_size)
        self.first_state = nn.Linear(value_size // 2, state_size)
        self.token_gates = nn.Linear(input_size, 3 * state_size)
        self.context_gates = nn.Linear(value_size, 3 * state_size, bias=False)
        self.state_gates = nn.Linear(state_size, 3 * state_size)
        self.output = nn.Linear(state_size + input_size + value_size, 2 * output_size)
        self.dropout = Dropout(dropout)

    def saved_activations(self, keys: float, read: float) -> tuple[float, float]:
        state, value = self.state_gates.in_features, self.context_gates.in_features
        inputs = self.output.in_features + self.output.out_features + self.token_gates.in_features
        attention = self.cross_attn.q_proj.out_features
        return 0.0, inputs + attention + 8 * state + 2 * value + keys * (attention + 2)

    def forward(self, x_TE: Tensor, context: Context) -> Tensor:
        """Maps (T, E) to (T, O), or (M, O) of the selected tokens. Raises ValueError if the context has no encoder
        states."""
        if context.encoded is None:
            raise ValueError("the attention needs encoder states; the context has none")
        steps = steps_of(context.packed.segments)
        cached: StateCache | None = context.cache
        memory = self.cross_attn.memory(context.encoded, steps)
        if cached is None or cached.state is None:
            state_NC = self._first_states(context.encoded, steps)
        else:
            state_NC = cached.state[0].index_select(0, steps.order_N)
        states, contexts, initial_NC = [], [], state_NC
        for gates_RG in self.token_gates(x_TE).index_select(0, steps.tokens_T).split(steps.sizes):
            state_RC = state_NC[: len(gates_RG)]
            context_RV = self.cross_attn(state_RC, memory)
            read_RG, map_of_state = gates_RG + self.context_gates(context_RV), self.state_gates
            state_NC = next_gru_state(read_RG, state_RC, map_of_state.weight, map_of_state.bias, self.reset)
            states.append(state_NC)
            contexts.append(context_RV)
        if cached is not None:
            before_NC = torch.empty_like(initial_NC).index_copy(0, steps.order_N, initial_NC)
            cached.keep((end_values(torch.cat(states) if states else before_NC[:0], steps, before_NC),))
        if not states:
            return x_TE.new_zeros(0, self.output.out_features // 2)
        features = (torch.cat(states)[steps.position_T], x_TE, torch.cat(contexts)[steps.position_T])
        maps_MO2 = self.output(torch.cat([only(part, context.read_M) for part in features], -1)).unflatten(-1, (-1, 2))
        return self.dropout(maps_MO2.amax(-1), context.read_rng)

    def _first_states(self, encoded: EncoderState, steps: Lockstep) -> Tensor:
        starts_N = torch.tensor(encoded.segments.starts).clamp(max=max(len(encoded.hidden_SH) - 1, 0))
        order_N = steps.order_N.div(encoded.outputs, rounding_mode="floor")
        first_N = send(starts_N, encoded.hidden_SH.device).index_select(0, order_N)
        backward_NV = encoded.hidden_SH.index_select(0, first_N).chunk(2, -1)[1]
        return self.first_state(backward_NV).tanh()


_ATTENTION_STD = 0.001


class RecurrentDecoder(DecoderStack):
    """The decoder, whose cache contains recurrent states."""

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        return Cache(len(self.layers), documents, capacity + embed.virtual_count, StateCache)


class RnnAttention(EncoderDecoder):
    """Encoder and decoder without the head."""

    config: RnnAttentionConfig
    vocabulary_head = VocabularyHead(tied=False)

    def __init__(self, config: RnnAttentionConfig):
        width, encoder_width = config.embedding_size, 2 * config.hidden_size
        encoder = [
            BidirectionalGru(encoder_width if number else width, config.hidden_size, config.dropout, config.reset)
            for number in range(config.num_layers)
        ]
        decoder = AttendingGru(
            width, config.hidden_size, encoder_width, config.attention_size, config.output_size, config.dropout,
            config.reset,
        )  # fmt: skip
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, Position(), config.dropout),
            Stack(encoder),
            RecurrentDecoder([decoder], StackInput(Position(), config.dropout)),
        )
        self.hidden_size = config.output_size

    @property
    def state_widths(self) -> tuple[int, ...]:
        """The widths of the encoder's states, with both directions concatenated."""
        return self.config.embedding_size, *[2 * self.config.hidden_size] * self.config.num_layers

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initializes as in appendix B.1: recurrent matrices are orthogonal; the weights in the attention have a
        smaller standard deviation, and its scores are initially zero."""

        def draw_of(name: str, part: nn.Module) -> Draw:
            if name.endswith("cross_attn.score"):
                return zero
            if name.endswith("state_gates"):
                return orthogonal_blocks
            return normal(_ATTENTION_STD) if "cross_attn" in name else self.initial_draw()

        initialize_each(module, seed, draw_of, prefix)
        for name, parameter in module.named_parameters():
            if ".weight_hh_" in name and not parameter.is_meta:
                with torch.no_grad():
                    orthogonal_blocks(parameter, generator_for(seed, prefix + name))
