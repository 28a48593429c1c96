"""Which tokens attend to which: documents as segments of flat tensors, a mask, and a plan of tiles.

Packed documents, padded rows and partly filled cache buffers are all described by starts and lengths. The plan is made
once per batch and shared by all layers: documents whose lengths fall into the same class of 16 form the rows of one
tile. Width 16 was within 20% of the fastest everywhere on a CPU; padding to the batch's longest document was 2.3 to 6.3
times slower.

Shape letters: T query tokens, S key tokens, N documents, R rows of a tile, L queries and K keys of a row, P slots in
all tiles together, M of them real tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from lmtool.types import Packed, Segments, send

TILE_WIDTH = 16


WindowSize = tuple[int, int]
"""(left, right): the numbers of keys before and after a query that it attends to; -1 for all."""


class Mask(Protocol):
    """Says which keys a query attends to. Positions count the keys of the document.

    window: the mask as a window around each query, for the variable-length kernels; None if a window does not describe
    it completely.
    """

    @property
    def window(self) -> WindowSize | None: ...

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        """Returns (R, L, K) bool, (R, A, L, K) if the heads differ, or None if everything is visible. The mask does not
        deal with padding."""


@dataclass(frozen=True)
class Full:
    """Every token attends to its whole document."""

    window: ClassVar[WindowSize] = (-1, -1)

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Causal:
    """A token attends to itself and earlier tokens."""

    window: ClassVar[WindowSize] = (-1, 0)

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        return key_R1K <= query_RL1


@dataclass(frozen=True)
class Window:
    """A token attends to tokens at most `reach` positions away on either side, to itself, and to the first `ahead`
    keys, those of a prefix (Beltagy et al. 2020, "Longformer", 3.1)."""

    reach: int
    ahead: int = 0

    @property
    def window(self) -> WindowSize | None:
        return None if self.ahead else (self.reach, self.reach)

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        return ((query_RL1 - key_R1K).abs() <= self.reach) | (key_R1K < self.ahead)


@dataclass(frozen=True)
class Recent:
    """A token attends to itself and earlier tokens, `count` tokens in all."""

    count: int

    @property
    def window(self) -> WindowSize:
        return (self.count - 1, 0)

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        return (key_R1K <= query_RL1) & (key_R1K > query_RL1 - self.count)


@dataclass(frozen=True)
class PrefixLM:
    """Causal, except that every token of document n attends to its first `prefixes[n]` tokens."""

    prefixes: tuple[int, ...]
    window: ClassVar[None] = None

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        prefix_R = torch.tensor(self.prefixes)[documents_R]
        return (key_R1K <= query_RL1) | (key_R1K < prefix_R[:, None, None])


@dataclass(frozen=True)
class First:
    """Every query attends to the first `lengths[n]` keys of document n: rows of equal length, with padding at the
    end."""

    lengths: tuple[int, ...]
    window: ClassVar[None] = None

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        return key_R1K < torch.tensor(self.lengths)[documents_R][:, None, None]


def with_prefix(segments: Segments, ahead: int) -> Segments:
    """Returns the documents concatenated, with `ahead` extra keys before each that has tokens; unchanged for 0."""
    if not ahead:
        return segments
    return Segments.packed(tuple(length + ahead if length else 0 for length in segments.lengths), segments.device)


def causal_mask(packed: Packed) -> Causal | PrefixLM:
    """Returns the mask of a causal stack, with the prefixes of its documents."""
    return PrefixLM(packed.prefixes) if packed.prefixes else Causal()


@dataclass(frozen=True)
class MaskedRows:
    """Rows of queries and the keys they attend to.

    query_RL: flat indices of the queries. allow: (R or 1, A or 1, L or 1, K) bool, None if all keys are visible.
    causal: whether `allow` is the plain lower triangle, which the fused kernel has built in.
    """

    query_RL: Tensor
    allow: Tensor | None
    causal: bool

    @cached_property
    def barrier(self) -> Tensor | None:
        """`allow` as a term added to scores: 0 or -inf. Computed once for all layers; adding it takes a quarter less
        time than masking, scores, softmax and backward included."""
        return None if self.allow is None else torch.where(self.allow, 0.0, -torch.inf)


@dataclass(frozen=True)
class Tile(MaskedRows):
    """Documents of similar length, one per row; shorter ones repeat their last token.

    key_RK: flat indices of the keys. query_positions_RL, key_positions_RK: positions among the keys of the document;
    one row for all if they start at the same position (padding continues the count).
    """

    key_RK: Tensor
    query_positions_RL: Tensor
    key_positions_RK: Tensor


@dataclass(frozen=True)
class TileIndex:
    """How tokens map to the slots of all tiles, concatenated.

    tokens_P: the token in each slot. real_M, tokens_M: the slots that hold real tokens, and those tokens, ordered by
    token. padding: the other slots. complete: whether `tokens_M` is 0, 1, 2, ... without gaps. identity: whether
    `tokens_P` is 0, 1, 2, ... as well, so that nothing has to move.
    """

    tokens_P: Tensor
    real_M: Tensor
    tokens_M: Tensor
    padding: Tensor
    complete: bool
    identity: bool

    @classmethod
    def of(cls, tokens_P: Tensor, real_P: Tensor, tokens: int | None, device: torch.device) -> TileIndex:
        """Builds the index on the host and sends it to a device. real_P: whether a slot holds a real token. tokens: the
        number of tokens, if they are contiguous."""
        real_M = real_P.nonzero().flatten()
        tokens_M, order_M = tokens_P[real_M].sort()
        is_complete = len(tokens_M) == tokens
        identity = is_complete and torch.equal(tokens_P, tokens_M)
        padding = (~real_P).nonzero().flatten()
        tokens_P, real_M, tokens_M, padding = (
            send(index, device) for index in (tokens_P, real_M[order_M], tokens_M, padding)
        )
        return cls(tokens_P, real_M, tokens_M, padding, is_complete, identity)

    @classmethod
    def unchanged(cls, tokens: int, device: torch.device) -> TileIndex:
        """Returns the index of a single tile whose slots are the tokens in order, without padding."""
        all_T = torch.arange(tokens, device=device)
        return cls(all_T, all_T, all_T, all_T[:0], True, True)


@dataclass(frozen=True)
class Layout:
    """How the queries of a batch relate to its keys.

    query, key: segments of the same N documents on both sides; in cross-attention their lengths differ. query_start:
    (N,) position of each document's first query among its keys: 0 in training, the length of the cache in decoding.
    """

    query: Segments
    key: Segments
    mask: Mask
    query_start: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self.query.lengths) != len(self.key.lengths):
            raise ValueError(f"{len(self.query.lengths)} documents of queries, {len(self.key.lengths)} of keys")
        if not self.query_start:
            object.__setattr__(self, "query_start", (0,) * len(self.query.lengths))

    @classmethod
    def of(cls, packed: Packed, mask: Mask, ahead: int = 0) -> Layout:
        """Returns the layout of self-attention within each document of a packed batch. ahead: prefix keys before each
        document."""
        keys = with_prefix(packed.segments, ahead)
        return cls(packed.segments, keys, mask, (ahead,) * len(packed.lengths))

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.query.device

    @cached_property
    def packed(self) -> bool:
        """Whether both sides are contiguous."""
        return self.query.contiguous and self.key.contiguous

    @cached_property
    def ends_together(self) -> bool:
        """Whether the last query of every document is at its last key, from which the variable-length kernels count a
        mask's window. Documents without queries are ignored."""
        ends = zip(self.query_start, self.query.lengths, self.key.lengths, strict=True)
        return all(start + queries == keys or not queries for start, queries, keys in ends)

    @cached_property
    def paired(self) -> bool:
        """Whether every document has tokens on both sides or on neither."""
        return all(
            bool(queries) == bool(keys) for queries, keys in zip(self.query.lengths, self.key.lengths, strict=True)
        )

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The plan: every document is one row of one tile."""
        parts = zip(self.classes, self._query_rows, self._key_rows, strict=True)
        return tuple(self._tile(*part) for part in parts)

    @cached_property
    def plans(self) -> dict[int, Any]:
        """Further plans shared by all layers, by number of heads (`kernels`, `block_sparse`)."""
        return {}

    @cached_property
    def query_index(self) -> TileIndex:
        return self._tile_index(self.query, self._query_rows)

    @cached_property
    def key_index(self) -> TileIndex:
        return self.query_index if self.key is self.query else self._tile_index(self.key, self._key_rows)

    @cached_property
    def query_positions(self) -> Tensor:
        """(T,) position of each query among the keys of its document; queries are contiguous."""
        starts, lengths = torch.tensor(self.query_start), torch.tensor(self.query.lengths)
        first_T = torch.repeat_interleave(torch.tensor(Segments.packed(self.query.lengths).starts) - starts, lengths)
        return send(torch.arange(len(first_T)) - first_T, self.device)

    @cached_property
    def classes(self) -> tuple[list[int], ...]:
        """The documents by length class, which form the rows of a tile. Documents without queries or keys are in no
        class; their outputs are zero."""
        classes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (queries, keys) in enumerate(zip(self.query.lengths, self.key.lengths, strict=True)):
            if queries and keys:
                classes[-(-queries // TILE_WIDTH), -(-keys // TILE_WIDTH)].append(number)
        return tuple(classes.values())

    @cached_property
    def _query_rows(self) -> tuple[_TokenRows, ...]:
        return tuple(_rows(self.query, numbers) for numbers in self.classes)

    @cached_property
    def _key_rows(self) -> tuple[_TokenRows, ...]:
        if self.key is self.query:
            return self._query_rows
        return tuple(_rows(self.key, numbers) for numbers in self.classes)

    def _tile(self, numbers: list[int], queries: _TokenRows, keys: _TokenRows) -> Tile:
        starts_R = torch.tensor([self.query_start[number] for number in numbers])
        positions_RL = queries.positions_RL + starts_R[:, None]
        key_steps_RK, num_keys = keys.positions_RL, keys.index_RL.shape[1]
        # Causal self-attention needs no mask for the padding of its rows: it comes after every real query.
        causal = isinstance(self.mask, Causal) and not starts_R.any() and torch.equal(queries.lengths_R, keys.lengths_R)
        allow: Tensor | None
        if causal:
            allow = torch.ones(1, 1, num_keys, num_keys, dtype=torch.bool).tril()
        else:
            allow = self.mask.allow(positions_RL[:, :, None], key_steps_RK[:, None, :], torch.tensor(numbers))
            allow = allow if allow is None or allow.dim() == 4 else allow[:, None]
            if keys.ragged:
                real_R11K = (torch.arange(num_keys) < keys.lengths_R[:, None])[:, None, None]
                allow = real_R11K if allow is None else allow & real_R11K
                # A padding query that attends to nothing would yield NaN. Nothing reads the result, so it may attend to
                # everything.
                allow = allow | ~allow.any(-1, keepdim=True)
        if allow is not None:
            allow = None if allow.all() else send(allow, self.device)
        # One row of positions applies to all texts if they start at the same position, which saves work on position
        # scores.
        key_positions_RK = torch.arange(num_keys)[None]
        if (starts_R == starts_R[0]).all():
            positions_RL = torch.arange(queries.index_RL.shape[1])[None] + starts_R[0]
        return Tile(
            send(queries.index_RL, self.device),
            allow,
            causal,
            send(keys.index_RL, self.device),
            send(positions_RL, self.device),
            send(key_positions_RK, self.device),
        )

    def _tile_index(self, segments: Segments, rows: tuple[_TokenRows, ...]) -> TileIndex:
        empty = torch.zeros(0, dtype=torch.int64)
        tokens_P = torch.cat([empty, *(token_rows.index_RL.flatten() for token_rows in rows)])
        real_P = torch.cat(
            [
                empty.bool(),
                *((torch.arange(part.index_RL.shape[1]) < part.lengths_R[:, None]).flatten() for part in rows),
            ]
        )
        return TileIndex.of(tokens_P, real_P, sum(segments.lengths) if segments.contiguous else None, self.device)


@dataclass(frozen=True)
class NextTokens(Layout):
    """One new token of each document, whose keys are a row of a cache. The rows follow each other and are equally long,
    so they form one tile. Decoding plans at each token; this plan takes a fraction of the general one's time."""

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        documents, keys = len(self.query.lengths), self.key.lengths[0]
        starts_N1, key_positions_1K = torch.tensor(self.query_start)[:, None], torch.arange(keys)[None]
        allow = self.mask.allow(starts_N1[..., None], key_positions_1K[:, None], torch.arange(documents))
        allow = allow if allow is None or allow.dim() == 4 else allow[:, None]
        return (
            Tile(
                self.query_index.tokens_P[:, None],
                None if allow is None or allow.all() else send(allow, self.device),
                False,
                self.key_index.tokens_P.view(documents, keys),
                send(starts_N1 if len(set(self.query_start)) > 1 else starts_N1[:1], self.device),
                send(key_positions_1K, self.device),
            ),
        )

    @cached_property
    def classes(self) -> tuple[list[int], ...]:
        return (list(range(len(self.query.lengths))),)

    @cached_property
    def query_index(self) -> TileIndex:
        return TileIndex.unchanged(len(self.query.lengths), self.device)

    @cached_property
    def key_index(self) -> TileIndex:
        return TileIndex.unchanged(sum(self.key.lengths), self.device)


class _TokenRows(NamedTuple):
    """Documents as rows, on the host; shorter rows repeat their last token. ragged: whether the lengths differ."""

    index_RL: Tensor
    positions_RL: Tensor
    lengths_R: Tensor
    ragged: bool


def _rows(segments: Segments, numbers: list[int]) -> _TokenRows:
    lengths = [segments.lengths[number] for number in numbers]
    lengths_R = torch.tensor(lengths)
    starts_R = torch.tensor([segments.starts[number] for number in numbers])
    steps_RL = torch.minimum(torch.arange(max(lengths)), lengths_R[:, None] - 1)
    return _TokenRows(starts_R[:, None] + steps_RL, steps_RL, lengths_R, min(lengths) != max(lengths))
