"""XLNet: Yang, Dai, Yang, Carbonell, Salakhutdinov, Le, "XLNet: Generalized Autoregressive Pretraining for Language
Understanding", NeurIPS 2019. Sizes: https://github.com/zihangdai/xlnet.

       content: token                       query: one learned vector (of predicted tokens, in pretraining)
             |                                    |
          dropout                              dropout
             |                                    |
    +--------+--------+   keys, values   +--------+--------+
    |    self_attn    | ---------------> |    self_attn    |   the same weights (two_streams.py)
    |     dropout     |                  |     dropout     |
    |       add       |                  |       add       |
    |      norm1      |                  |      norm1      |   x num_layers
    |  fc_in, gelu,   |                  |  fc_in, gelu,   |
    | dropout, fc_out |                  | dropout, fc_out |
    |       add       |                  |       add       |
    |      norm2      |                  |      norm2      |
    +--------+--------+                  +--------+--------+
             |                                    |
          dropout                              dropout
             |                                    |
           hidden                       hidden of the predicted tokens

If tokens are predicted, the last layer computes only the query stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models.base import Encoder, VocabularyHead, positions_of
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_configs import XlnetConfig
from lmtool.models.family import HFClass, HFFormat, multiple_choice, question_answering, token_classifier
from lmtool.models.keymap import EMPTY, KeyMap, Tied
from lmtool.models.published import expect
from lmtool.models.transformer_xl import MemoryRecorder
from lmtool.models.two_streams import SignedDistances, Streams, TwoStreamAttention, content_stream, query_stream
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.cache import Carried, State
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Full
from lmtool.nn.positions import Position
from lmtool.nn.stack import StackState, Tap, TapPoint, Taps, enter
from lmtool.types import Packed, send


class Xlnet(Encoder):
    """The model without heads. `query`: (1, H), the initial state of the query stream."""

    config: XlnetConfig
    vocabulary_head = VocabularyHead(bias=True)

    def __init__(self, config: XlnetConfig):
        width, dropout = config.hidden_size, config.dropout
        layers = [
            PostNormLayer(
                TwoStreamAttention(config),
                FeedForward(width, config.feedforward_size, "gelu", dropout=dropout),
                nn.LayerNorm(width, config.norm_epsilon),
                nn.LayerNorm(width, config.norm_epsilon),
                dropout,
            )
            for _ in range(config.num_layers)
        ]
        position = positions_of(config, causal=False)
        super().__init__(config, Embeddings(config.vocab_size, width, position, dropout), layers)
        self.dropout = Dropout(dropout)
        self.distances = SignedDistances(width)
        self.query = nn.Embedding(1, width)

    @property
    def memory_length(self) -> int:
        """F, the length of the memory in tokens."""
        return self.config.memory_length

    def set_memory_length(self, tokens: int) -> None:
        if not self.memory_length:
            message = f"memory_length={tokens}: the model was trained without a memory (model.memory_length=0)"
            raise UserError(message, "omit memory_length=")
        self.config = self.config.model_copy(update={"memory_length": tokens})

    def initial_state(self, lanes: int) -> State:
        """Returns `memory` (N, Y, F, H): the input states of each of the Y layers for the last F reused tokens."""
        shape = lanes, self.config.num_layers, self.memory_length, self.config.hidden_size
        return {"memory": torch.zeros(shape, device=self.embed.token.weight.device)}

    def attended_tokens(self, number: int, length: float) -> float:
        """A distance has a key but no value, so it counts as half a token; there are twice as many distances as tokens.
        The memory counts as in Transformer-XL."""
        memory = self.memory_length
        return 2 * length + 1.5 * memory + self.hidden_size * memory / max(length, 1)

    def position(self, number: int, state: StackState) -> Position:
        return state.position if isinstance(state.position, Streams) else self.distances

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
        query_M: Tensor | None = None,
        carried: Carried | None = None,
        reuse: int = 0,
    ) -> Tensor:
        """Returns (T, H), or (M, H) of `read_M`; with `query_M`, (M, H) of the query stream.

        packed: the column "rank" defines what the query stream attends to. query_M: flat indices of predicted tokens,
        increasing, on the host; None for no query stream. carried: the memory before the texts; it receives the memory
        for the next texts. reuse: the number of tokens of each text, its first ones, whose states enter the new memory.
        """
        if query_M is None:
            return super().forward(packed, rng, read_M, tap)
        if self.embed.virtual is not None or self.ahead:
            raise ValueError("a query stream cannot have virtual tokens or a prefix")
        read_lengths = set() if carried is None else set(carried.read)
        filled = min(max(read_lengths, default=0), self.memory_length)
        state = enter(self.embed, self.embed.tokens(packed.tokens), packed, rng, None, filled)
        recorder: ReuseRecorder | None = None
        if carried is not None:
            memory_NYFH = carried.before["memory"]
            if filled:
                state = replace(state, memories=memory_NYFH[:, :, self.memory_length - filled :].unbind(1))
            recorder = ReuseRecorder(memory_NYFH, packed.lengths, reuse)
            tap = recorder if tap is None else Taps(recorder, tap)
        content = content_stream(packed, state.layout(Full()))
        query, blind_M = query_stream(packed, content.layout, query_M)
        device, tokens, queries = packed.tokens.device, len(packed.tokens), len(query_M)
        content_T = torch.arange(tokens, device=device)
        index_M = torch.arange(tokens, tokens + queries, device=device)  # the query stream follows the content stream
        if rng is not None:
            # The query stream's dropout is independent of the content stream's.
            stream_S = (torch.arange(tokens + queries, device=device) >= tokens).long()
            rng = rng.insert_virtual(torch.cat([content_T, send(query_M, device)]), stream_S)
        query_MH = self.query.weight.expand(queries, -1).to(state.x_TH.dtype)
        query_MH = self.embed.dropout(query_MH, None if rng is None else rng.rows(index_M))
        two_streams = replace(
            state,
            x_TH=torch.cat([state.x_TH, query_MH]),
            position=Streams(self.distances, content, query, blind_M),
            rng=rng,
            batch_T=content_T,  # taps see the content stream
        )
        hidden_MH = self.run(two_streams, index_M, tap=tap)
        if carried is not None and recorder is not None:
            carried.after = {"memory": torch.stack(recorder.after, 1)}
        return hidden_MH


class ReuseRecorder(MemoryRecorder):
    """Records the input states of every layer for the first `reuse` tokens of each text. The next text continues after
    these tokens."""

    def __init__(self, memory_NYFH: Tensor, lengths: tuple[int, ...], reuse: int):
        super().__init__(memory_NYFH, tuple(min(reuse, length) for length in lengths))
        self._text_lengths = lengths

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        texts = zip(x_TH.split(self._text_lengths), self._lengths, strict=True)
        super().__call__(point, torch.cat([text_LH[:reused] for text_LH, reused in texts]))
        return x_TH


_LAYER, _HF = "backbone.layers.*.", "transformer.layer.*."
_ATTENTION, _MAPS = _LAYER + "self_attn.", _HF + "rel_attn."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "transformer.word_embedding"),
        ("backbone.query.weight", "transformer.mask_emb"),
        (_ATTENTION + "q_proj.weight", _MAPS + "q"),
        (_ATTENTION + "k_proj.weight", _MAPS + "k"),
        (_ATTENTION + "v_proj.weight", _MAPS + "v"),
        (_ATTENTION + "pos_proj.weight", _MAPS + "r"),
        (_ATTENTION + "out_proj.weight", _MAPS + "o"),
        (_ATTENTION + "content_bias", _MAPS + "r_w_bias"),
        (_ATTENTION + "place_bias", _MAPS + "r_r_bias"),
        (_ATTENTION + "segment_bias", _MAPS + "r_s_bias"),
        (_ATTENTION + "segments", _MAPS + "seg_embed"),
        (_LAYER + "norm1", _MAPS + "layer_norm"),
        (_LAYER + "ffn.fc_in", _HF + "ff.layer_1"),
        (_LAYER + "ffn.fc_out", _HF + "ff.layer_2"),
        (_LAYER + "norm2", _HF + "ff.layer_norm"),
        ("heads.lm.output.weight", "lm_loss.weight"),
        ("heads.lm", "lm_loss"),
        ("heads.pooler.dense", "sequence_summary.summary"),
        ("heads.classifier.output", "logits_proj"),
    )
)
TIED = Tied("transformer.word_embedding.weight", "lm_loss.weight", "lm_loss.")


class _XlnetFormat(HFFormat):
    """The format with projections stored as (H, A, D), which is the transpose of torch's weights."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        assert isinstance(config, XlnetConfig)
        return super().to_hf(
            {name: _unfold(name, tensor, config.num_heads) for name, tensor in tensors.items()}, config
        )

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        return {name: _fold(name, tensor) for name, tensor in super().from_hf(tensors, config).items()}

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        return {**super().to_hf_config(config), "d_head": config.width_of_head}

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        expect(data, self.model, d_head=(section["hidden_size"] // section["num_heads"],))
        return {**section, "attention_dropout": section["dropout"]}


_INTO_HEADS = tuple(f".self_attn.{name}_proj.weight" for name in ("q", "k", "v", "pos"))
_OUT, _QUERY = ".self_attn.out_proj.weight", "backbone.query.weight"


def _unfold(name: str, tensor: Tensor, heads: int) -> Tensor:
    if name.endswith((*_INTO_HEADS, _OUT)):
        return (tensor if name.endswith(_OUT) else tensor.T).unflatten(1, (heads, -1)).contiguous()
    return tensor[None] if name == _QUERY else tensor


def _fold(name: str, tensor: Tensor) -> Tensor:
    if name.endswith((*_INTO_HEADS, _OUT)):
        flat = tensor.flatten(1)
        return (flat if name.endswith(_OUT) else flat.T).contiguous()
    return tensor[0] if name == _QUERY else tensor


HF_FORMAT = _XlnetFormat(
    model="xlnet",
    title="XLNet",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("XLNetForTokenClassification"),
        HFClass("XLNetForSequenceClassification", ("pooler", "classifier")),
        question_answering("XLNetForQuestionAnsweringSimple"),
        multiple_choice("XLNetForMultipleChoice", "logits_proj"),
        HFClass("XLNetLMHeadModel", ("lm",), predicts=True),
        HFClass("XLNetModel", prefix=""),
    ),
    unsupported={"XLNetForQuestionAnswering": "it searches for the end of an answer behind each of the best starts"},
    prefix="transformer.",
    outside_prefixes=("lm_loss.", "sequence_summary.", "logits_proj.", "classifier.", "qa_outputs."),
    fields={
        "vocab_size": ("vocab_size", 32000),
        "n_layer": ("num_layers", 24),
        "d_model": ("hidden_size", 1024),
        "n_head": ("num_heads", 16),
        "d_inner": ("feedforward_size", 4096),
        "dropout": ("dropout", 0.1),
        "initializer_range": ("initializer_std", 0.02),
        "layer_norm_eps": ("norm_epsilon", 1e-12),
    },
    required_values={
        "ff_activation": "gelu",
        "attn_type": "bi",
        "clamp_len": -1,
        "same_length": False,
        "bi_data": False,
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
    },
    supported_values={"untie_r": (True,)},
    positions=None,
)
