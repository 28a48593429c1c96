"""Disentangled attention (He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 3.1):

    score_ij = (q_i k_j + q_i kr_d(i,j) + k_j qr_d(i,j)) / sqrt(3 D),   d(i,j) = clip(i - j + S, 0, 2 S - 1)

q and k are projections of contents; kr and qr are projections of relative positions, which all layers take from one
table. Equation 4 of the paper has d(j, i) in the last term; the original code, with which the weights were trained, and
lmtool have d(i, j) in both.

Shape letters: T tokens, H hidden width, R rows, A heads, D head width, L queries and K keys of a row, S distances in
each direction, P rows of a table, W = A*D.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lmtool.models.base import positions_of
from lmtool.models.bert import BertLike
from lmtool.models.encoder_configs import DisentangledConfig
from lmtool.nn.attention import SelfAttention, only
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.context import Context
from lmtool.nn.dropout import DropoutRng, rng_at
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.positions import Position
from lmtool.nn.stack import StackState, Tap, enter
from lmtool.types import Packed


class RelativeTable(Position):
    """The table of relative positions. `weight`: (2 S, H). span: S. norm: applied to the rows, or None. The original
    code applies dropout to the table in training; lmtool does not."""

    scores: ClassVar[bool] = True

    def __init__(self, span: int, hidden_size: int, norm: nn.Module | None = None):
        super().__init__()
        self.span = span
        self.weight = nn.Embedding(2 * span, hidden_size).weight
        self.norm = norm

    def rows(self) -> Tensor:
        """Returns (2 S, H): the table, after the norm."""
        return self.weight if self.norm is None else self.norm(self.weight)

    def bucket(self, distances: Tensor) -> Tensor:
        """Returns the signed bucket number of each distance (query minus key); here the distance itself."""
        return distances

    def index(self, distances: Tensor) -> Tensor:
        """Returns the table row of each distance."""
        return (self.bucket(distances) + self.span).clamp(0, 2 * self.span - 1)


class BucketedTable(RelativeTable):
    """A table with a row for each bucket of distances (He et al. 2023, original code). Distances up to `span` / 2 have
    one row each; larger distances share buckets of increasing width. span: the number of buckets in each direction."""

    def __init__(self, span: int, hidden_size: int, norm: nn.Module, max_distance: int):
        super().__init__(span, hidden_size, norm)
        self.max_distance = max_distance

    def bucket(self, distances: Tensor) -> Tensor:
        middle = self.span // 2
        far = distances.abs().clamp(min=middle)
        # As in the original code, in fp32 and in this order: in fp64 some distances would get another bucket.
        octaves = torch.log(far / middle) / torch.log(torch.tensor((self.max_distance - 1) / middle))
        spaced = (torch.ceil(octaves * (middle - 1)) + middle).long()
        return torch.where(distances.abs() <= middle, distances, spaced * distances.sign())


class DisentangledScores(Position):
    """The terms that relative positions add to the scores of one layer. keys_PAD, queries_PAD: the table projected to
    keys and to queries; None omits the term."""

    scores: ClassVar[bool] = True

    def __init__(self, relative: RelativeTable, keys_PAD: Tensor | None, queries_PAD: Tensor | None, scale: float):
        super().__init__()
        self._index, self._rows, self._scale = relative.index, 2 * relative.span, scale
        self._keys_PAD, self._queries_PAD = keys_PAD, queries_PAD

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        terms = self.terms(q_RALD, k_RAKD, query_positions_RL, key_positions_RK)
        return sum(terms.values(), q_RALD.new_zeros(()))

    def terms(
        self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor
    ) -> dict[str, Tensor]:
        distances_RLK = query_positions_RL[:, :, None] - key_positions_RK[:, None, :]
        keys = k_RAKD.shape[-2]
        selection = None
        if 2 * keys - 1 < self._rows:  # a short text needs only some rows
            selection = self._index(torch.arange(1 - keys, keys, device=q_RALD.device))
            index_RLK = distances_RLK + (keys - 1)
        else:
            index_RLK = self._index(distances_RLK)
        shape = (*q_RALD.shape[:-1], keys)
        terms = {}
        if self._keys_PAD is not None:
            products = q_RALD @ _table(self._keys_PAD, selection, q_RALD)
            terms["content to position"] = products.gather(-1, index_RLK[:, None].expand(shape))
        if self._queries_PAD is not None:
            products = (k_RAKD * self._scale) @ _table(self._queries_PAD, selection, q_RALD)
            index_RKL = index_RLK.transpose(1, 2)[:, None].expand(shape[0], shape[1], keys, shape[2])
            terms["position to content"] = products.gather(-1, index_RKL).transpose(-1, -2)
        return terms


def _table(rows_PAD: Tensor, selection: Tensor | None, like: Tensor) -> Tensor:
    """Returns (A, D, P): the rows `selection` (None: all) of a projected table, transposed, in the type of `like`."""
    rows_PAD = rows_PAD if selection is None else rows_PAD.index_select(0, selection)
    return rows_PAD.permute(1, 2, 0).to(like.dtype)


class DisentangledAttention(SelfAttention):
    """Self-attention with separate scores for contents and relative positions. terms: the score terms besides content
    to content: "c2p", "p2c". table_rows: 2 S."""

    def __init__(self, config: DisentangledConfig, table_rows: int):
        scale = 1 / math.sqrt((1 + config.scaled_terms) * config.width_of_head)
        super().__init__(config.hidden_size, config.num_heads, config.attention_dropout, scale=scale)
        self.terms, self.table_rows = config.scores, table_rows

    def saved_for_positions(self, keys: float) -> tuple[float, float, float]:
        # Each term saves its part of the table for each row of a tile, and the products before they are gathered.
        rows = min(2 * keys - 1, self.table_rows)
        return len(self.terms) * rows / keys, float("p2c" in self.terms), len(self.terms) * rows

    def keys_of(self, rows_PH: Tensor) -> Tensor:
        """Returns (P, W): the keys of relative positions. rows_PH: rows of the table."""
        return self.k_proj(rows_PH)

    def queries_of(self, rows_PH: Tensor) -> Tensor:
        """Returns (P, W): the queries of relative positions. rows_PH: rows of the table."""
        return self.q_proj(rows_PH)

    def forward(
        self, x_TH: Tensor, context: Context, read_M: Tensor | None = None, norm: nn.Module | None = None
    ) -> Tensor:
        if context.queries_TH is None:
            return super().forward(x_TH, context, read_M, norm)
        q_TAD = self.heads(self.q_proj(context.queries_TH))
        k_TAD, v_TAD = self.heads(self.k_proj(x_TH)), self.heads(self.v_proj(x_TH))
        return self.attend_and_project(
            q_TAD, k_TAD, v_TAD, context.layout, self.bias(context.position), context, read_M
        )

    def bias(self, position: Position) -> Position | None:
        if not self.terms:
            return None
        relative = cast(RelativeTable, position)
        rows_PH = relative.rows()
        keys_PAD = self.heads(self.keys_of(rows_PH)) if "c2p" in self.terms else None
        queries_PAD = self.heads(self.queries_of(rows_PH)) if "p2c" in self.terms else None
        return DisentangledScores(relative, keys_PAD, queries_PAD, cast(float, self.scale))


class DisentangledLayer(PostNormLayer):
    """BERT's layer, except that the queries may come from other states than the keys and values."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        attention_out = self.self_attn(x_TH, context, context.read_M)
        query_TH = x_TH if context.queries_TH is None else context.queries_TH
        return self.after_attention(only(query_TH, context.read_M), attention_out, rng=context.read_rng)


class Disentangled(BertLike):
    """An encoder with disentangled attention. `relative`: the shared table of relative positions."""

    config: DisentangledConfig
    decodes_masks = True
    pooler_activation = "gelu"

    def __init__(self, config: DisentangledConfig, relative: RelativeTable, attention: type[DisentangledAttention]):
        width = config.hidden_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, config.norm_epsilon)

        def layer() -> DisentangledLayer:
            attend = attention(config, 2 * relative.span)
            feed_forward = FeedForward(width, config.feedforward_size, "gelu")
            return DisentangledLayer(attend, feed_forward, norm(), norm(), config.dropout)

        layers = [layer() for _ in range(config.num_layers)]
        position = positions_of(config, causal=False)
        super().__init__(config, Embeddings(config.vocab_size, width, position, config.dropout, norm=norm()), layers)
        self.relative = relative

    def attended_tokens(self, number: int, length: float) -> float:
        """A relative position has a key but no value, so it counts as half a token."""
        rows = min(2 * length - 1, 2 * self.relative.span)
        return length + len(set(self.config.scores)) * rows / 2

    def position(self, number: int, state: StackState) -> Position:
        return self.relative

    def forward(
        self,
        packed: Packed,
        rng: DropoutRng | None = None,
        read_M: Tensor | None = None,
        tap: Tap | None = None,
        absolute: nn.Module | None = None,
    ) -> Tensor:
        """absolute: maps positions (T,) to vectors; if set, the enhanced mask decoder takes the place of the last
        layer."""
        if absolute is None:
            return super().forward(packed, rng, read_M, tap)
        state = enter(self.embed, self.embed.tokens(packed.tokens), packed, rng, None, self.ahead)
        return self.run(state, state.read(read_M), tap=tap, last=partial(self._decode, absolute))

    def _decode(self, absolute: nn.Module, x_TH: Tensor, context: Context) -> Tensor:
        """The last layer is applied twice, with keys and values from x_TH. The first queries are x_TH plus absolute
        positions, the second the result of the first (3.2; original code, masked_language_model.py)."""
        layer = self.layers[-1]
        query_TH = x_TH + absolute(context.positions_T)
        decoded_TH = layer(x_TH, replace(context, queries_TH=query_TH, read_M=None, watch=None))
        return layer(x_TH, replace(context, queries_TH=decoded_TH, rng=rng_at(context.rng, 1)))
