"""Learned keys and values in front of every text, in the attention of each layer.

A prefix of P is what a model keeps of P tokens that it has read before: it stands at the positions 0 to P - 1, a text
begins at position P, and all that a text sees, it sees behind the prefix. No layer works on the prefix itself.

Shape letters: P rows of a prefix, T tokens, S keys with the prefix in front of each document, A heads, D width of a
head, W = A*D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmtool.nn.layout import behind
from lmtool.types import Segments, send


@dataclass(frozen=True)
class LayerPrefix:
    """The prefix of one layer. keys_PW, values_PW. index_S: the rows of prefix and tokens, one behind the other, that
    the attention reads."""

    keys_PW: Tensor
    values_PW: Tensor
    index_S: Tensor

    def before(self, k_TAD: Tensor, v_TAD: Tensor) -> tuple[Tensor, Tensor]:
        """(S, A, D) keys and values: of each document the prefix and its own."""
        keys_PAD, values_PAD = self.heads(k_TAD)
        keys_SAD = torch.cat([keys_PAD, k_TAD]).index_select(0, self.index_S)
        return keys_SAD, torch.cat([values_PAD, v_TAD]).index_select(0, self.index_S)

    def heads(self, like_TAD: Tensor) -> tuple[Tensor, Tensor]:
        """(P, A, D) keys and values, in the type of `like_TAD`."""
        keys_PAD, values_PAD = (
            rows.to(like_TAD.dtype).unflatten(-1, like_TAD.shape[1:]) for rows in (self.keys_PW, self.values_PW)
        )
        return keys_PAD, values_PAD


class KeyPrefix(nn.Module):
    """The prefixes of `depth` layers (Li and Liang 2021, 4.2). `weight`: (P, depth * 2 * W), in each row the key of a
    layer, then its value, one layer behind the other."""

    def __init__(self, count: int, depth: int, width: int):
        super().__init__()
        self.depth = depth
        self.weight = nn.Parameter(torch.zeros(count, depth * 2 * width))

    def __len__(self) -> int:
        return len(self.weight)

    def rows(self) -> Tensor:
        """(P, depth * 2 * W) keys and values."""
        return self.weight

    def layers(self, segments: Segments) -> list[LayerPrefix]:
        """The prefix of each layer, for documents that lie so."""
        index_S = in_front(segments, len(self))
        parts = self.rows().chunk(2 * self.depth, -1)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [LayerPrefix(keys_PW, values_PW, index_S) for keys_PW, values_PW in pairs]


def in_front(segments: Segments, count: int) -> Tensor:
    """(S,) for each place of the documents laid end to end, `count` rows in front of each that has tokens: the row
    that stands there, among those rows and the tokens behind them."""
    lengths = torch.tensor(behind(segments, count).lengths, dtype=torch.int64)
    firsts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    steps_S = torch.arange(len(firsts)) - firsts
    # The token at step `count` of a document is its first one, which `count` rows precede in the joined tensor too.
    own_S = steps_S + torch.tensor(segments.starts, dtype=torch.int64).repeat_interleave(lengths)
    return send(torch.where(steps_S < count, steps_S, own_S), segments.device)
