"""Where a token stands, as an object with three hooks. A model calls all of them; a kind answers where it acts.

Shape letters: T tokens, H hidden width, A heads, D width of a head, R rows, L queries, K keys.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from lmtool.errors import UserError


class Position(nn.Module):
    """No positions at all: the base of every kind. Positions count within the document, from 0."""

    rotates: ClassVar[bool] = False
    """Whether `rotate` does anything."""
    scores: ClassVar[bool] = False
    """Whether `score` adds to the attention scores; the fused kernels cannot, so they are passed by then."""

    def check(self, longest: int) -> None:
        """Refuse documents longer than the kind can number. longest: tokens."""

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        """Add to the token vectors (learned, sinusoidal)."""
        return x_TH

    def rotate(
        self, q_TAD: Tensor, k_TAD: Tensor, query_positions_T: Tensor, key_positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn queries and keys (rotary), before the keys reach a cache."""
        return q_TAD, k_TAD

    def score(self, q_RALD: Tensor, k_RAKD: Tensor, query_positions_RL: Tensor, key_positions_RK: Tensor) -> Tensor:
        """What is added to the scores (T5 buckets, ALiBi); broadcasts to (R, A, L, K)."""
        return q_RALD.new_zeros(())


class Learned(Position):
    """A table of one vector a position (Gehring et al. 2017; BERT, GPT-2). `weight`: (max_positions, H)."""

    def __init__(self, max_positions: int, hidden_size: int):
        super().__init__()
        table = nn.Embedding(max_positions, hidden_size)
        self.weight = table.weight

    def check(self, longest: int) -> None:
        if longest > self.weight.shape[0]:
            raise UserError(
                f"model.max_positions={self.weight.shape[0]}, but a sequence has {longest} tokens",
                f"set max_length={self.weight.shape[0]} or less, or model.max_positions={longest} for a new model",
            )

    def embed(self, x_TH: Tensor, positions_T: Tensor) -> Tensor:
        return x_TH + nn.functional.embedding(positions_T, self.weight)
