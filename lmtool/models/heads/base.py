"""What every head that predicts has: a tap, for who watches a model from outside.

Shape letters: M targets, C classes, H hidden width, V rows of the table, W its width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TokenLogits:
    """Logits over a vocabulary, which are not multiplied out: `F.linear(hidden_MW, table_VW, bias_V)`."""

    hidden_MW: Tensor
    table_VW: Tensor
    bias_V: Tensor | None = None

    def of(self, first: int = 0, last: int | None = None) -> Tensor:
        """(rows, V) those of the targets from `first` to before `last`."""
        return F.linear(self.hidden_MW[first:last], self.table_VW, self.bias_V)


class HeadTap:
    """Sees what a head predicts in a forward. only: nothing else is wanted of the forward: a head that computes its
    loss without holding its logits leaves it at 0."""

    only: bool = False

    def __call__(self, head: PredictingHead, logits: Tensor | TokenLogits) -> None:
        """logits: (M, C) or (M,), or those over a vocabulary."""


class PredictingHead(nn.Module):
    """The base of the heads that predict. tap: none as it is built."""

    tap: HeadTap | None

    def __init__(self) -> None:
        super().__init__()
        self.tap = None

    def seen(self, logits: Tensor) -> Tensor:
        """The logits, shown to the tap."""
        if self.tap is not None:
            self.tap(self, logits)
        return logits
