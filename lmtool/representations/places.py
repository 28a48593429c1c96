"""What positions do to attention, by themselves: the score of every place for every other one, all words being equal.

Shape letters: L places, H width of the token vectors, A heads, D width of a head.
"""

from __future__ import annotations

import numpy as np
import torch

from lmtool.nn.positions import Position


@torch.no_grad()
def place_scores(position: Position, length: int, hidden_size: int, num_heads: int) -> np.ndarray | None:
    """(1, L, L), or (A, L, L) where heads differ: row i, what a query at place i gives a key at place j. Of positions
    that are added to the vectors, the cosine of both vectors; of turned queries and keys, the mean cosine of their
    turns; of numbers added to the scores, these, for queries of ones. None for no positions."""
    places_L = torch.arange(length)
    vectors_LH = position.embed(torch.zeros(length, hidden_size), places_L)
    if bool(vectors_LH.any()):
        units_LH = torch.nn.functional.normalize(vectors_LH, dim=-1)
        return (units_LH @ units_LH.T)[None].numpy()
    head = hidden_size // num_heads
    turns = position.turns(places_L, torch.float32)
    if turns is not None:
        ones_LAD = torch.ones(length, 1, head) / head**0.5
        q_LAD, k_LAD = position.rotate(ones_LAD, ones_LAD, turns)
        return torch.einsum("iad,jad->aij", q_LAD, k_LAD).numpy()
    if position.scores:
        ones_RALD = torch.ones(1, num_heads, length, head) / head**0.5
        scores = position.score(ones_RALD, ones_RALD, places_L[None], places_L[None])
        scores_ALL = scores.expand(1, num_heads, length, length)[0].float().numpy()
        return scores_ALL[:1] if (scores_ALL == scores_ALL[:1]).all() else scores_ALL
    return None
