"""Which blocks of a text see which: BigBird's pattern (Zaheer et al. 2020, "Big Bird: Transformers for Longer
Sequences", section 2 and appendix D, the internal construction, ITC), and the mask that is made of it.

The first and the last block see all and are seen by all; every other block sees itself and its neighbours, and
`random` blocks that each head has drawn once and for all. They are drawn as the published code draws them: among the
first 2 random + 5 blocks, so that a block has the same ones however long its text is, and none that it sees anyway.

Shape letters: A heads, N blocks of a text, X random blocks, R rows of a tile, L queries and K keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPattern:
    """size: tokens of a block. random: blocks that each of the others draws. heads: each draws its own. seed: of the
    layer."""

    size: int
    random: int
    heads: int
    seed: int

    @property
    def drawn_among(self) -> int:
        """So many blocks at the start of a text are those that may be drawn. One of no more blocks than that is
        dense: each of its tokens sees all."""
        return 2 * self.random + 5

    @property
    def longest_dense(self) -> int:
        """Tokens of the longest text that is dense."""
        return self.drawn_among * self.size

    def blocks(self, length: int) -> int:
        """Of a text of this many tokens, the last one filled up."""
        return -(-length // self.size)

    def seen(self, length: float) -> float:
        """Tokens that one of a text of this length sees, mean, where all blocks are full."""
        blocks, inner = length / self.size, 5 + self.random
        if length <= self.longest_dense:
            return length
        return self.size * (2 * blocks + 2 * (inner - 1) + (blocks - 4) * inner) / blocks

    def drawn(self, blocks: int) -> np.ndarray:
        """(N, A, X) the random blocks of each block, -1 for the first one's and the last one's."""
        # A table of twice the blocks serves the texts of half as many.
        table_NAX = _table(self, 1 << max(5, (blocks - 1).bit_length()))[:blocks].copy()
        table_NAX[-1] = -1
        return table_NAX

    def sees(self, blocks: int) -> np.ndarray:
        """(A, N, N) bool: whether a block sees another, of a text of so many blocks."""
        numbers = np.arange(blocks)
        sees_ANN = np.broadcast_to(np.abs(numbers[:, None] - numbers) <= 1, (self.heads, blocks, blocks)).copy()
        sees_ANN[:, [0, -1]] = sees_ANN[:, :, [0, -1]] = True
        if blocks <= self.drawn_among:
            sees_ANN[:] = True
        else:
            drawn_NAX = self.drawn(blocks)[1:-1]
            sees_ANN[np.arange(self.heads)[:, None], numbers[1:-1, None, None], drawn_NAX] = True
        return sees_ANN

    def drawing(self, length: int) -> list[tuple[str, str]]:
        """Of a text of so many tokens titled lines: one for each block, in which a sign stands for each that it may
        see."""
        blocks = self.blocks(length)
        if blocks <= self.drawn_among:
            return [("blocks", f"{blocks} of {self.size} tokens, dense")]
        signs = np.where(self.sees(blocks)[0], "+", ".")
        signs[[0, -1]] = signs[:, [0, -1]] = "#"
        signs[np.arange(1, blocks - 1)[:, None], self.drawn(blocks)[1:-1, 0]] = "*"
        seen = "what they see in the first head of the first layer: # global, + window, * drawn, . nothing"
        lines = [(f"block {number}", "".join(row)) for number, row in enumerate(signs, 1)]
        return [("blocks", f"{blocks} of {self.size} tokens; {seen}"), *lines]


@lru_cache(maxsize=128)
def _table(pattern: BlockPattern, blocks: int) -> np.ndarray:
    """(N, A, X) as in `drawn`. The generator is numpy's old one, whose numbers never change: one permutation a block
    and head, of which the first allowed ones are taken."""
    generator, among = np.random.RandomState(pattern.seed), pattern.drawn_among
    table_NAX = np.full((blocks, pattern.heads, pattern.random), -1)
    for block in range(1, blocks):
        seen = {0, among - 1, block - 1, block, block + 1}
        # The second block and the last but one of those that may be drawn do not see each other.
        seen |= {1: {among - 2}, among - 2: {1}}.get(block, set())
        for head in range(pattern.heads):
            allowed = [number for number in generator.permutation(among) if number not in seen]
            table_NAX[block, head] = allowed[: pattern.random]
    return table_NAX


@dataclass(frozen=True)
class Blocks:
    """A token sees the tokens of the blocks that its own sees, and the first `ahead` keys: those of a prefix. lengths:
    of the documents, whose blocks are counted from their first token behind the prefix."""

    pattern: BlockPattern
    lengths: tuple[int, ...]
    ahead: int = 0
    window: ClassVar[None] = None

    def allow(self, query_RL1: Tensor, key_R1K: Tensor, documents_R: Tensor) -> Tensor | None:
        """(R, A, L, K): the heads see different ones. What a whole text is compared with: attention itself computes no
        more than what is seen, see `block_sparse`."""
        rows = len(documents_R)
        allow = []
        for row, number in enumerate(documents_R.tolist()):
            blocks = self.pattern.blocks(self.lengths[number])
            query_L, key_K = (
                # Padding stands behind the last block, or is in it.
                ((positions.expand(rows, -1, -1)[row].flatten() - self.ahead) // self.pattern.size).clamp(0, blocks - 1)
                for positions in (query_RL1, key_R1K)
            )
            allow.append(torch.from_numpy(self.pattern.sees(blocks))[:, query_L[:, None], key_K])
        return torch.stack(allow) | (key_R1K < self.ahead)[:, None]
