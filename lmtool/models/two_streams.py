"""Relative attention with segments, in one stream or two (Yang et al. 2019, "XLNet", 2.3 to 2.5; scores by distance
after Dai et al. 2019, "Transformer-XL", 3.3):

    score_ij = ((q_i + u) k_j + (q_i + v) r_(i-j) + (q_i + w) s_ij) / sqrt(D)

q are queries and k are keys. r_(i-j) is a projection, different in each layer, of sinusoids of the distance i - j. s_ij
is one of two learned vectors: one for tokens of the same segment, the other for tokens of different segments. u, v and
w are learned biases.

The content stream encodes every token. The query stream has a state for each predicted token, which contains the
position of the token but not the token itself, and attends to the content stream. The masks depend on ranks, the order
in which tokens are predicted: i attends to j if rank_j <= rank_i in the content stream, and if rank_j < rank_i in the
query stream.

Shape letters: T tokens, M predicted tokens, S both streams concatenated, Q queries, Z keys, R rows of a tile, L queries
and K keys of a row, A heads, D head width, P distances, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from lmtool.models.configs import TransformerConfig
from lmtool.nn.attention import SelfAttention, attend
from lmtool.nn.context import Context
from lmtool.nn.layout import Full, Layout
from lmtool.nn.positions import Position, sinusoids
from lmtool.nn.relative import prepend_memory, relative_shift
from lmtool.types import Packed, Segments, send

# Rank of keys that every query may attend to.
_LOWEST_RANK = torch.iinfo(torch.int64).min


class StreamTile(NamedTuple):
    """The masks and indices of one tile. same_R1LK: whether query and key are in the same segment; None if there are no
    segments. barrier_R1LK: the term added to scores, 0 or -inf; None if all keys are visible. index_R1LK: the row of
    each distance, counted from the largest distance in the tile; None if the positions of queries and of keys are
    consecutive."""

    same_R1LK: Tensor | None
    barrier_R1LK: Tensor | None
    index_R1LK: Tensor | None


class StreamAttention:
    """Which keys the queries of a stream attend to, at which distances and in which segments.

    layout: the documents of queries and keys. positions_Q: the position of each query among the keys of its document;
    None if the positions are consecutive and start at the same number in all documents. segments, ranks: pairs of the
    values of queries and of keys; None if there are no segments or ranks. strict: whether a query attends only to lower
    ranks, not to its own. A query without visible keys attends to all keys; the caller sets its result to zero.
    """

    def __init__(
        self,
        layout: Layout,
        positions_Q: Tensor | None,
        segments: tuple[Tensor, Tensor] | None,
        ranks: tuple[Tensor, Tensor] | None,
        strict: bool = False,
    ):
        self.layout, self.positions_Q, self.strict = layout, positions_Q, strict
        self._segments, self._ranks = segments, ranks
        self._tiles: dict[int, tuple[Tensor, StreamTile]] = {}

    def tile(self, query_RL: Tensor, key_RK: Tensor, key_positions_RK: Tensor) -> StreamTile:
        """Returns the masks and indices of a tile. They are computed once for all layers."""
        if id(query_RL) not in self._tiles:
            index_R1LK = None
            if self.positions_Q is not None:
                offsets_RLK = key_positions_RK[:, None] - self.positions_Q[query_RL][:, :, None]
                index_R1LK = (offsets_RLK + key_RK.shape[1] - 1)[:, None]
            same_R1LK = self._pairwise(self._segments, query_RL, key_RK, torch.eq)
            tile = StreamTile(same_R1LK, self._barrier(query_RL, key_RK), index_R1LK)
            self._tiles[id(query_RL)] = query_RL, tile  # a reference to the tensor keeps its id unique
        return self._tiles[id(query_RL)][1]

    @staticmethod
    def _pairwise(
        pair: tuple[Tensor, Tensor] | None, query_RL: Tensor, key_RK: Tensor, compare: Callable[..., Tensor]
    ) -> Tensor | None:
        if pair is None:
            return None
        queries, keys = pair
        return compare(keys[key_RK][:, None, None, :], queries[query_RL][:, None, :, None])

    def _barrier(self, query_RL: Tensor, key_RK: Tensor) -> Tensor | None:
        visible = self._pairwise(self._ranks, query_RL, key_RK, torch.lt if self.strict else torch.le)
        if visible is None:
            return None
        return torch.where(visible | ~visible.any(-1, keepdim=True), 0.0, -torch.inf)


class SignedDistances(Position):
    """The position encoding of a model with one stream: sinusoids of the signed distance from key to query, without
    parameters. The original code applies dropout to the sinusoids in training; lmtool does not."""

    scores: ClassVar[bool] = True

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self._rows: tuple[tuple[object, ...], Tensor] | None = None
        self._streams: tuple[Packed, Layout, Streams] | None = None

    def rows(self, keys: int, queries: int, like: Tensor) -> Tensor:
        """Returns (P, H): the sinusoids of the distances from keys - 1 down to -queries, in the type of `like` or a
        wider one."""
        key = keys, queries, like.device, torch.promote_types(like.dtype, torch.float32)
        # All layers of a forward use the same rows.
        if self._rows is None or self._rows[0] != key:
            distances_P = torch.arange(keys - 1, -queries - 1, -1, device=like.device)
            self._rows = key, sinusoids(distances_P, self.hidden_size).to(key[3])
        return self._rows[1]

    def streams(self, context: Context) -> Streams:
        """Returns the content stream of a context."""
        cached_streams = self._streams
        if cached_streams is None or cached_streams[0] is not context.packed or cached_streams[1] is not context.layout:
            cached_streams = (
                context.packed,
                context.layout,
                Streams(self, content_stream(context.packed, context.layout)),
            )
            self._streams = cached_streams
        return cached_streams[2]


class Streams(Position):
    """The streams of a forward pass: the content stream and, if tokens are predicted, the query stream. blind_M:
    whether each predicted token has no visible key."""

    scores: ClassVar[bool] = True

    def __init__(
        self,
        distances: SignedDistances,
        content: StreamAttention,
        query: StreamAttention | None = None,
        blind_M: Tensor | None = None,
    ):
        super().__init__()
        self.distances, self.content, self.query, self.blind_M = distances, content, query, blind_M

    def rows(self, like: Tensor) -> Tensor:
        """Returns (P, H): the sinusoids of all distances in the batch."""
        layout = self.content.layout
        return self.distances.rows(max(layout.key.lengths, default=1), max(layout.query.lengths, default=1), like)


def content_stream(packed: Packed, layout: Layout) -> StreamAttention:
    """Returns the content stream, in which every token is a query. The keys of a prefix or a memory have segment 0 and
    are visible to all queries."""
    starts = set(layout.query_start)
    pairs = {name: (column, _key_values(column, packed, layout, earlier)) for name, column, earlier in _columns(packed)}
    positions_Q = None if len(starts) <= 1 else layout.query_positions
    return StreamAttention(layout, positions_Q, pairs.get("segment"), pairs.get("rank"))


def query_stream(packed: Packed, content: Layout, query_M: Tensor) -> tuple[StreamAttention, Tensor]:
    """Returns the query stream and (M,) bool, whether each of its tokens has no visible key. query_M: flat indices of
    the predicted tokens, increasing, on the host. content: the layout of the content stream. Raises ValueError if the
    batch has no ranks."""
    if "rank" not in packed.columns:
        raise ValueError("a query stream needs the column rank")
    device = packed.tokens.device
    documents_M = torch.repeat_interleave(torch.arange(len(packed.lengths)), torch.tensor(packed.lengths))[query_M]
    counts = torch.bincount(documents_M, minlength=len(packed.lengths)).tolist()
    layout = Layout(Segments.packed(tuple(counts), device), content.key, Full())
    query_M, documents_M = send(query_M, device), send(documents_M, device)
    pairs = {
        name: (column[query_M], _key_values(column, packed, content, earlier))
        for name, column, earlier in _columns(packed)
    }
    ranks_M, ranks_Z = pairs["rank"]
    documents_Z = torch.repeat_interleave(torch.arange(len(content.key.lengths)), torch.tensor(content.key.lengths))
    lowest_N = ranks_Z.new_zeros(len(packed.lengths))
    lowest_N = lowest_N.scatter_reduce(0, send(documents_Z, device), ranks_Z, "amin", include_self=False)
    positions_M = content.query_positions[query_M]
    stream = StreamAttention(layout, positions_M, pairs.get("segment"), pairs["rank"], strict=True)
    return stream, ranks_M <= lowest_N[documents_M]


def _columns(packed: Packed) -> list[tuple[str, Tensor, int]]:
    """Returns the columns that attention reads, as (name, column, value of the keys of a prefix or a memory). If the
    batch has no segments, all tokens are in segment 0."""
    segments_T = packed.columns.get("segment")
    columns = [("segment", torch.zeros_like(packed.tokens) if segments_T is None else segments_T, 0)]
    return columns + ([("rank", packed.columns["rank"], _LOWEST_RANK)] if "rank" in packed.columns else [])


def _key_values(column_T: Tensor, packed: Packed, layout: Layout, earlier: int) -> Tensor:
    """Returns (Z,): the value of a column for every key. earlier: the value of the keys of a prefix or a memory."""
    if layout.key is layout.query:
        return column_T
    starts_N = torch.tensor(layout.key.starts) + torch.tensor(layout.query_start)
    index_T = send(starts_N, column_T.device)[packed.documents] + packed.positions
    return column_T.new_full((sum(layout.key.lengths),), earlier).index_copy(0, index_T, column_T)


class RelativeScores(Position):
    """The terms that distances and segments add to the scores of one layer, and the mask by ranks.

    rows_PAD: the projected distances. distance_A1D, segment_A1D: v - u and w - u, scaled. They are added to queries
    that already contain u. segments_A2D: the vectors for equal and for different segments.
    """

    scores: ClassVar[bool] = True

    def __init__(
        self,
        stream: StreamAttention,
        rows_PAD: Tensor,
        distance_A1D: Tensor,
        segment_A1D: Tensor,
        segments_A2D: Tensor,
        tile: StreamTile | None = None,
    ):
        super().__init__()
        self._stream, self._rows_PAD, self._tile = stream, rows_PAD, tile
        self._distance_A1D, self._segment_A1D, self._segments_A2D = distance_A1D, segment_A1D, segments_A2D

    def of_tokens(self, query_RL: Tensor, key_RK: Tensor, key_positions_RK: Tensor) -> RelativeScores:
        tile = self._stream.tile(query_RL, key_RK, key_positions_RK)
        biases = self._distance_A1D, self._segment_A1D, self._segments_A2D
        return RelativeScores(self._stream, self._rows_PAD, *biases, tile)

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        assert self._tile is not None
        same_R1LK, barrier_R1LK, index_R1LK = self._tile
        queries, keys = q_RALD.shape[-2], k_RAKD.shape[-2]
        # The largest distance in this tile is from its last query to its first key.
        first = max(self._stream.layout.key.lengths) - keys
        count = queries + keys if index_R1LK is None else 2 * keys - 1
        rows_PAD = self._rows_PAD[first : first + count].to(q_RALD.dtype)
        products_RALP = (q_RALD + self._distance_A1D.to(q_RALD.dtype)) @ rows_PAD.permute(1, 2, 0)
        if index_R1LK is None:
            scores = relative_shift(products_RALP, keys)
        else:
            scores = products_RALP.gather(-1, index_R1LK.expand(*products_RALP.shape[:-1], keys))
        if same_R1LK is not None:
            segment_query = q_RALD + self._segment_A1D.to(q_RALD.dtype)
            same_RAL2 = segment_query @ self._segments_A2D.to(q_RALD.dtype).transpose(-1, -2)
            scores = scores + torch.where(same_R1LK, same_RAL2[..., :1], same_RAL2[..., 1:])
        return scores if barrier_R1LK is None else scores + barrier_R1LK.to(scores.dtype)


class TwoStreamAttention(SelfAttention):
    """Self-attention over contents, distances and segments, in one stream or two. No projection has a bias.

    content_bias, place_bias, segment_bias: u, v and w, (A, D). segments: (2, A, D), for equal and for different
    segments.
    """

    table_maps: ClassVar[tuple[str, ...]] = ("pos_proj",)

    def __init__(self, config: TransformerConfig):
        width, heads = config.hidden_size, config.num_heads
        super().__init__(width, heads, config.attention_dropout, bias=False)
        self.pos_proj = nn.Linear(width, width, bias=False)
        shape = heads, self.head_size
        self.content_bias = nn.Parameter(torch.zeros(shape))
        self.place_bias = nn.Parameter(torch.zeros(shape))
        self.segment_bias = nn.Parameter(torch.zeros(shape))
        self.segments = nn.Parameter(torch.zeros(2, *shape))

    def saved_for_positions(self, keys: float) -> tuple[float, float, float]:
        return 1.0, 2.0, 0.0  # queries with the bias of places; a row for each distance, in both directions

    def forward(
        self, x_SH: Tensor, context: Context, read_M: Tensor | None = None, norm: nn.Module | None = None
    ) -> Tensor:
        """Computes self-attention. If tokens are predicted, x_SH is the content stream followed by the query stream,
        and with `read_M` only the query stream is returned."""
        position = context.position
        streams = position if isinstance(position, Streams) else cast(SignedDistances, position).streams(context)
        rows_PAD = self.heads(self.pos_proj(streams.rows(x_SH)))
        if streams.query is not None:
            return self._two_streams(
                x_SH if norm is None else norm(x_SH), context, streams, rows_PAD, read_M is not None
            )
        q_TAD, k_ZAD, v_ZAD = self.project_and_rotate(x_SH, None, streams.distances, norm)
        if context.prefix is not None:
            k_ZAD, v_ZAD = context.prefix.prepend_to(k_ZAD, v_ZAD)
        bias = self.relative_scores(streams.content, rows_PAD)
        q_TAD = q_TAD + self.content_bias.to(q_TAD.dtype)
        return self.attend_and_project(q_TAD, k_ZAD, v_ZAD, streams.content.layout, bias, context, read_M)

    def _two_streams(
        self, x_SH: Tensor, context: Context, streams: Streams, rows_PAD: Tensor, query_only: bool
    ) -> Tensor:
        """Returns both streams, (S, H); with `query_only` (in the last layer) only the query stream, (M, H)."""
        assert streams.query is not None and streams.blind_M is not None
        tokens = len(context.packed.tokens)
        x_ZH, x_MH = x_SH[:tokens], x_SH[tokens:]
        if context.memory_NFH is not None:
            x_ZH = prepend_memory(context.memory_NFH.to(x_ZH.dtype), x_ZH, context.packed.lengths)
        k_ZAD, v_ZAD = self.heads(self.k_proj(x_ZH)), self.heads(self.v_proj(x_ZH))
        q_SAD = self.heads(self.q_proj(x_MH if query_only else x_SH))
        q_SAD = q_SAD + self.content_bias.to(q_SAD.dtype)
        q_TAD, q_MAD = q_SAD[: len(q_SAD) - len(x_MH)], q_SAD[len(q_SAD) - len(x_MH) :]
        outs = [] if query_only else [self._attend(q_TAD, k_ZAD, v_ZAD, streams.content, rows_PAD, context, 0)]
        out_MAD = self._attend(q_MAD, k_ZAD, v_ZAD, streams.query, rows_PAD, context, tokens)
        outs.append(out_MAD.masked_fill(streams.blind_M[:, None, None], 0.0))
        return self.out_proj(torch.cat(outs).flatten(-2))

    def _attend(
        self,
        q_QAD: Tensor,
        k_ZAD: Tensor,
        v_ZAD: Tensor,
        stream: StreamAttention,
        rows_PAD: Tensor,
        context: Context,
        first: int,
    ) -> Tensor:
        """Returns (Q, A, D). first: the index of the stream's first token in both, by which dropout is drawn."""
        rng = self.dropout.rng(context.rng)
        if rng is not None:
            rng = rng.rows(torch.arange(first, first + len(q_QAD), device=q_QAD.device))
        bias = self.relative_scores(stream, rows_PAD)
        return attend(q_QAD, k_ZAD, v_ZAD, stream.layout, bias, self.scale, self.dropout.rate, rng)

    def relative_scores(self, stream: StreamAttention, rows_PAD: Tensor) -> RelativeScores:
        """Returns the terms added to the scores of a stream."""
        scale = 1 / math.sqrt(self.head_size)
        distance_AD = (self.place_bias - self.content_bias) * scale
        segment_AD = (self.segment_bias - self.content_bias) * scale
        segments_A2D = self.segments.transpose(0, 1)
        return RelativeScores(stream, rows_PAD, distance_AD[:, None], segment_AD[:, None], segments_A2D)
