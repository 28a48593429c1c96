"""The best answers of windows, from the scores of their tokens.

Shape letters: T tokens, N windows, L tokens of the longest, A tokens of an answer at most, K answers that are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmtool.types import Packed


def padded(values_T: Tensor, packed: Packed, fill: float) -> Tensor:
    """(N, L) the values of each document in a row, `fill` behind them."""
    table_NL = values_T.new_full((len(packed.lengths), max(packed.lengths, default=0)), fill)
    return table_NL.index_put((packed.documents, packed.positions), values_T)


def best_spans(
    starts_NL: Tensor, ends_NL: Tensor, allowed_NL: Tensor, longest: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) scores of the best spans, falling, and their first and last tokens; -inf where there are no more.

    A span's score is that of its start and of its end (Devlin et al. 2019, section 4.2). Every span of allowed ends and
    `longest` tokens at most is looked at, not only those of the best starts and ends.
    """
    off = -torch.inf
    starts_NL = starts_NL.float().masked_fill(~allowed_NL, off)
    ends_NL = ends_NL.float().masked_fill(~allowed_NL, off)
    length = starts_NL.shape[1]
    reach = min(longest, length)
    ends_NLA = torch.nn.functional.pad(ends_NL, (0, reach - 1), value=off).unfold(1, reach, 1)
    scores = (starts_NL[:, :, None] + ends_NLA).flatten(1)
    best_NK, flat_NK = scores.topk(min(count, scores.shape[1]), dim=1)
    first_NK = flat_NK // reach
    return best_NK, first_NK, first_NK + flat_NK % reach
