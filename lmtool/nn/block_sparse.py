"""Block-sparse attention: only the blocks that `Blocks` allows are computed, so the cost grows linearly with the number
of blocks (Zaheer et al. 2020, appendix D).

Each document is padded to complete blocks, in this module only; nothing attends to the padding. A block of one head is
a unit; a tile has rows of query units and the gathered key units they attend to. A dense document is one row. In a
longer document, the first and the last block, which attend to everything, form one row, whose keys are the whole
document; every other block is a row of its own.

Shape letters: T query tokens, S key tokens, A heads, D head width, R rows of a tile, B tokens of a block, N blocks of
all documents, concatenated, U = N*A units, X random blocks, P prefix keys. In `block_plan`, D counts documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.nn.dropout import DropoutRng
from lmtool.nn.layout import Layout, MaskedRows, TileIndex
from lmtool.nn.tiled import attend_rows, gather, scatter, widen
from lmtool.types import Segments, send

RandomPlan = Literal["uniform", "transformers"]


@dataclass(frozen=True)
class BlockPattern:
    """size: tokens per block. random: the number of random blocks that an inner block attends to. heads: the number of
    heads, each of which has its own random blocks. seed: the layer's seed. plan: which blocks may be random ones.
    uniform: all blocks of the text that are not visible anyway, as published. transformers: the first ones, up to
    `most_dense`, as in transformers for texts of most lengths."""

    size: int
    random: int
    heads: int
    seed: int
    plan: RandomPlan = "uniform"

    @property
    def most_dense(self) -> int:
        """Number of blocks up to which a text is dense: every token attends to every other."""
        return 2 * self.random + 5

    @property
    def longest_dense(self) -> int:
        """Length in tokens of the longest dense text."""
        return self.most_dense * self.size

    def blocks(self, length: int) -> int:
        """Returns the number of blocks of a text of this length, the last one padded."""
        return -(-length // self.size)

    def attended_tokens(self, length: float) -> float:
        """Returns the mean number of tokens that a token attends to in a text of this length, if all blocks are
        full."""
        if length <= self.longest_dense:
            return length
        blocks, inner = length / self.size, 5 + self.random
        # In blocks: the first and the last see all, their neighbors one less than the inner ones, which see `inner`.
        return self.size * (2 * blocks + 2 * (inner - 1) + (blocks - 4) * inner) / blocks

    def random_blocks(self, blocks: int) -> np.ndarray:
        """Returns (N, A, X): the random blocks of each block in a text of this many blocks, more than `most_dense`; -1
        for the first and the last one."""
        if self.plan == "uniform":
            return _uniform_table(self, blocks)
        # Table sizes are powers of two, so that texts of similar length share one.
        table_NAX = _transformers_table(self, 1 << max(5, (blocks - 1).bit_length()))[:blocks].copy()
        table_NAX[-1] = -1
        return table_NAX

    def connections(self, blocks: int) -> np.ndarray:
        """Returns (A, N, N) bool: whether a block attends to another in a text of this many blocks."""
        numbers = np.arange(blocks)
        connected_ANN = np.broadcast_to(np.abs(numbers[:, None] - numbers) <= 1, (self.heads, blocks, blocks)).copy()
        connected_ANN[:, [0, -1]] = connected_ANN[:, :, [0, -1]] = True
        if blocks <= self.most_dense:
            connected_ANN[:] = True
        else:
            random_NAX = self.random_blocks(blocks)[1:-1]
            connected_ANN[np.arange(self.heads)[:, None], numbers[1:-1, None, None], random_NAX] = True
        return connected_ANN

    def diagram(self, length: int) -> list[tuple[str, str]]:
        """Returns titled lines for a text of this length: one per block, with a sign for each block it attends to."""
        blocks = self.blocks(length)
        if blocks <= self.most_dense:
            return [("blocks", f"{blocks} of {self.size} tokens, dense")]
        signs = np.where(self.connections(blocks)[0], "+", ".")
        signs[[0, -1]] = signs[:, [0, -1]] = "#"
        signs[np.arange(1, blocks - 1)[:, None], self.random_blocks(blocks)[1:-1, 0]] = "*"
        caption = "what they see in the first head of the first layer: # global, + window, * drawn, . nothing"
        lines = [(f"block {number}", "".join(row)) for number, row in enumerate(signs, 1)]
        return [("blocks", f"{blocks} of {self.size} tokens; {caption}"), *lines]


@lru_cache(maxsize=128)
def _uniform_table(pattern: BlockPattern, blocks: int) -> np.ndarray:
    """Returns (N, A, X) by Floyd's sampling (Bentley and Floyd 1987); numpy's legacy numbers never change."""
    generator = np.random.RandomState([pattern.seed, blocks])
    numbers = np.arange(1, blocks - 1)
    # Of the blocks from 1 to N-2, the window of a block is not allowed; at the ends it has one block less.
    first_N = np.maximum(numbers - 1, 1)
    window_N = np.minimum(numbers + 1, blocks - 2) - first_N + 1
    table_NAX = np.full((blocks, pattern.heads, pattern.random), -1)
    chosen_NAX = table_NAX[1:-1]
    for count in range(pattern.random):
        last_N1 = (blocks - 2 - window_N - pattern.random + count)[:, None]
        drawn_NA = (generator.random_sample(chosen_NAX.shape[:2]) * (last_N1 + 1)).astype(np.int64)
        again_NA = (chosen_NAX[..., :count] == drawn_NA[..., None]).any(-1)
        chosen_NAX[..., count] = np.where(again_NA, last_N1, drawn_NA)
    chosen_NAX += 1
    chosen_NAX += window_N[:, None, None] * (chosen_NAX >= first_N[:, None, None])
    table_NAX.flags.writeable = False  # it is cached
    return table_NAX


@lru_cache(maxsize=128)
def _transformers_table(pattern: BlockPattern, blocks: int) -> np.ndarray:
    """Returns (N, A, X) as transformers: the first allowed of one permutation per block and head."""
    generator, among = np.random.RandomState(pattern.seed), pattern.most_dense
    table_NAX = np.full((blocks, pattern.heads, pattern.random), -1)
    for block in range(1, blocks):
        visible_blocks = {0, among - 1, block - 1, block, block + 1}
        # The second and the last-but-one candidate block never attend to each other.
        visible_blocks |= {1: {among - 2}, among - 2: {1}}.get(block, set())
        for head in range(pattern.heads):
            allowed = [number for number in generator.permutation(among) if number not in visible_blocks]
            table_NAX[block, head] = allowed[: pattern.random]
    return table_NAX


@dataclass(frozen=True)
class Blocks:
    """A token attends to the blocks that its block is connected to, and to the first `ahead` keys, those of a prefix.
    lengths: of the documents, whose blocks are counted from their first token after the prefix."""

    pattern: BlockPattern
    lengths: tuple[int, ...]
    ahead: int = 0
    window: ClassVar[None] = None

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        """Returns (R, A, L, K), because the heads differ. Only for comparison: attention itself computes just the
        visible blocks."""
        rows = len(documents_R)
        allow = []
        for row, number in enumerate(documents_R.tolist()):
            blocks = self.pattern.blocks(self.lengths[number])
            query_L, key_K = (
                # Padding counts as part of the last block.
                ((positions.expand(rows, -1, -1)[row].flatten() - self.ahead) // self.pattern.size).clamp(0, blocks - 1)
                for positions in (query_RL1, key_R1K)
            )
            allow.append(torch.from_numpy(self.pattern.connections(blocks))[:, query_L[:, None], key_K])
        return torch.stack(allow) | (key_R1K < self.ahead)[:, None]


def block_attention(
    q_TAD: Tensor,
    k_SAD: Tensor,
    v_SAD: Tensor,
    layout: Layout,
    scale: float | None,
    rate: float,
    rng: DropoutRng | None,
) -> Tensor:
    """Returns the result of `attend` for a `Blocks` mask, (T, A, D). layout: the self-attention of documents. rate:
    fraction of the weights dropped by `rng`."""
    heads, dtype = q_TAD.shape[1], q_TAD.dtype
    plan = layout.plans.get(heads)
    if plan is None:
        plan = layout.plans[heads] = block_plan(layout)
    with torch.autocast(q_TAD.device.type, enabled=False):
        q_TAD, k_SAD, v_SAD = widen(q_TAD, k_SAD, v_SAD)
        queries = gather(_units(q_TAD, plan.queries, plan.size), plan.units).split([t.queries for t in plan.tiles])
        keys, values = (_units(x_SAD, plan.keys, plan.size) for x_SAD in (k_SAD, v_SAD))
        outs = []
        for tile, unit in zip(plan.tiles, queries, strict=True):
            q_RALD = unit.view(len(tile.query_RL), heads, -1, q_TAD.shape[2])
            k_RAKD, v_RAKD = tile.seen_keys(keys, k_SAD), tile.seen_keys(values, v_SAD)
            out = attend_rows(q_RALD, k_RAKD, v_RAKD, tile, scale, rate, rng)
            outs.append(out.reshape(unit.shape))
        out_UBD = scatter(torch.cat(outs), plan.units, len(plan.units.tokens_P)) if outs else q_TAD
        out_NBAD = out_UBD.view(-1, heads, plan.size, q_TAD.shape[2]).transpose(1, 2)
        return scatter(out_NBAD.reshape(-1, *q_TAD.shape[1:]), plan.queries, len(q_TAD)).to(dtype)


def _units(x_TAD: Tensor, index: TileIndex, size: int) -> Tensor:
    x_NBAD = gather(x_TAD, index).view(-1, size, *x_TAD.shape[1:])
    return x_NBAD.transpose(1, 2).reshape(-1, size * x_TAD.shape[2])


@dataclass(frozen=True)
class BlockTile(MaskedRows):
    """Rows with equally many visible blocks. queries: number of query units. keys: visible units, one run per row and
    head. prefix: flat indices of the prefix keys, one run per row; None if there are none."""

    queries: int
    keys: Tensor
    prefix: Tensor | None

    def seen_keys(self, units_UX: Tensor, x_SAD: Tensor) -> Tensor:
        """Returns (R, A, K, D): keys or values, those of a prefix first. x_SAD: the keys or values of the tokens."""
        # Several rows may read a unit, so its gradients are summed.
        keys = units_UX.index_select(0, self.keys).view(len(self.query_RL), x_SAD.shape[1], -1, x_SAD.shape[2])
        if self.prefix is None:
            return keys
        ahead = x_SAD.index_select(0, self.prefix).view(len(self.query_RL), -1, *x_SAD.shape[1:])
        return torch.cat([ahead.transpose(1, 2), keys], 2)


@dataclass(frozen=True)
class BlockPlan:
    """size: the number of tokens in a block. queries, keys: index of the tokens in the blocks. units: index of the
    query units in the tiles."""

    size: int
    queries: TileIndex
    keys: TileIndex
    units: TileIndex
    tiles: tuple[BlockTile, ...]


class _Rows(NamedTuple):
    """Blocks of a tile: query blocks, key blocks shared by all heads, and random key blocks of each head."""

    query_RN: np.ndarray
    key_RN: np.ndarray
    random_RAN: np.ndarray


def block_plan(layout: Layout) -> BlockPlan:
    """Returns the plan of a layout, on its device."""
    mask = layout.mask
    assert isinstance(mask, Blocks)
    size, heads = mask.pattern.size, mask.pattern.heads
    blocks_D = np.array([mask.pattern.blocks(length) for length in layout.query.lengths], np.int64)
    token_NB, real_NB = _fill_blocks(layout.query, blocks_D, size)
    queries = keys = _tile_index(token_NB, real_NB, layout.query)
    if layout.key is not layout.query:
        # The documents after their prefixes.
        starts = tuple(start + mask.ahead for start in layout.key.starts)
        keyed_segments = Segments(starts, layout.query.lengths, layout.device)
        keys = _tile_index(_fill_blocks(keyed_segments, blocks_D, size)[0], real_NB, keyed_segments)
    first_N = np.repeat(np.array(layout.key.starts, np.int64), blocks_D)
    tiles, query_units = [], [np.empty(0, np.int64)]
    for rows in _tiles(mask, blocks_D):
        tiles.append(_tile(rows, token_NB, real_NB, first_N, mask, layout.device))
        query_units.append((rows.query_RN[:, None] * heads + np.arange(heads)[:, None]).ravel())
    order_U = torch.from_numpy(np.concatenate(query_units))
    units = TileIndex.of(order_U, torch.ones(len(order_U), dtype=torch.bool), len(order_U), layout.device)
    return BlockPlan(size, queries, keys, units, tuple(tiles))


def _tile(
    rows: _Rows, token_NB: np.ndarray, real_NB: np.ndarray, first_N: np.ndarray, mask: Blocks, device: torch.device
) -> BlockTile:
    count, heads, random_blocks = rows.random_RAN.shape
    key_RAN = np.concatenate([np.repeat(rows.key_RN[:, None], heads, 1), rows.random_RAN], 2)
    # A random block is never the last one, which is the only one with padding.
    visible = (
        np.ones((count, mask.ahead), bool),
        real_NB[rows.key_RN],
        np.ones((count, random_blocks * mask.pattern.size), bool),
    )
    real_RK = torch.from_numpy(np.concatenate([part.reshape(count, -1) for part in visible], 1))
    prefix_RP = first_N[rows.query_RN[:, :1]] + np.arange(mask.ahead)
    return BlockTile(
        query_RL=send(torch.from_numpy(token_NB[rows.query_RN].reshape(count, -1)), device),
        allow=None if real_RK.all() else send(real_RK[:, None, None], device),
        causal=False,
        queries=rows.query_RN.size * heads,
        keys=send(torch.from_numpy((key_RAN * heads + np.arange(heads)[:, None]).ravel()), device),
        prefix=send(torch.from_numpy(prefix_RP.ravel()), device) if mask.ahead else None,
    )


def _fill_blocks(segments: Segments, blocks_D: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (N, B): the token in each slot, the last one repeated as padding; and which slots are real."""
    slots_D = blocks_D * size
    steps = np.arange(slots_D.sum()) - np.repeat(np.cumsum(slots_D) - slots_D, slots_D)
    start, length = (np.repeat(np.array(values, np.int64), slots_D) for values in (segments.starts, segments.lengths))
    return (start + np.minimum(steps, length - 1)).reshape(-1, size), (steps < length).reshape(-1, size)


def _tile_index(token_NB: np.ndarray, real_NB: np.ndarray, segments: Segments) -> TileIndex:
    tokens = sum(segments.lengths) if segments.contiguous else None
    return TileIndex.of(
        torch.from_numpy(token_NB).flatten(), torch.from_numpy(real_NB).flatten(), tokens, segments.device
    )


def _tiles(mask: Blocks, blocks_D: np.ndarray) -> Iterator[_Rows]:
    """Yields the rows of every tile. Blocks are numbered across all documents; each is in one query row."""
    first_D, pattern = np.cumsum(blocks_D) - blocks_D, mask.pattern
    for blocks in sorted(set(blocks_D.tolist()) - {0}):
        first_R1 = first_D[blocks_D == blocks][:, None]
        queries = np.arange(blocks) if blocks <= pattern.most_dense else np.array([0, blocks - 1])
        none = np.empty((len(first_R1), pattern.heads, 0), np.int64)
        yield _Rows(first_R1 + queries, first_R1 + np.arange(blocks), none)
    long_D = np.flatnonzero(blocks_D > pattern.most_dense)
    if not len(long_D):
        return
    random_DNAX = [pattern.random_blocks(blocks) for blocks in blocks_D[long_D].tolist()]
    # Each block and its neighbors; a neighbor of the second and of the last-but-one block is global, so they have one
    # block less.
    edges = [np.array([[1, 2], [blocks - 2, blocks - 3]]) for blocks in blocks_D[long_D]]
    inner = [np.arange(2, blocks - 2)[:, None] + np.array([0, -1, 1]) for blocks in blocks_D[long_D]]
    for windows in (edges, inner):
        window_RW, counts = np.concatenate(windows), [len(window) for window in windows]
        first_R1, last_R1 = (np.repeat(values[long_D], counts)[:, None] for values in (first_D, blocks_D - 1))
        seen_RN = np.concatenate([np.zeros_like(last_R1), last_R1, window_RW], 1)
        random_RAN = np.concatenate(
            [random_NAX[window[:, 0]] for random_NAX, window in zip(random_DNAX, windows, strict=True)]
        )
        yield _Rows(first_R1 + window_RW[:, :1], first_R1 + seen_RN, first_R1[:, None] + random_RAN)
