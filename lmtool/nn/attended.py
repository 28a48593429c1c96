"""What an attention computes with, for a tap: its weights, its scores, and how its own vectors relate to each other.

Computed beside the attention itself, whose kernels give none of it; with gradient, and before any dropout.

Shape letters: T query tokens, S key tokens, A heads, D width of a head, R rows of a tile, L queries and K keys of a
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lmtool.nn.layout import Layout
from lmtool.nn.positions import Position
from lmtool.nn.tiled import TileScores, attention_weights, score_terms, tiled_scores


class Attended(NamedTuple):
    """Queries, keys and values of an attention, rotated where positions do that. Virtual tokens are among them, and
    keys and values of a prefix. layout: which sees which. bias: adds to the scores. scale: 1/sqrt(D) where None."""

    q_TAD: Tensor
    k_SAD: Tensor
    v_SAD: Tensor
    layout: Layout
    bias: Position | None = None
    scale: float | None = None

    def weights(self) -> list[Tensor]:
        """(A, L, K) of each document, fp32 or more: softmax(q k^T scale + bias)."""
        return attention_weights(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def scores(self) -> Iterator[TileScores]:
        """q k^T scale + bias, before the softmax, a tile after the other."""
        return tiled_scores(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def terms(self) -> Iterator[dict[str, Tensor]]:
        """What the scores of each tile are the sum of, by name; nothing without a bias."""
        if self.bias is None or not self.bias.scores:
            return iter(())
        return score_terms(self.q_TAD, self.k_SAD, self.layout, self.bias, self.scale)

    def related(self, x_TAD: Tensor) -> Iterator[TileScores]:
        """x x^T / sqrt(D) of vectors of a self-attention's tokens, where they see each other."""
        return tiled_scores(x_TAD, x_TAD, self.layout)
