"""One layer of a transformer, its norms behind the sublayers or before them. Takes its parts as arguments.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtool.nn.attention import SelfAttention
from lmtool.nn.cache import LayerCache
from lmtool.nn.dropout import Draws, Dropout
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Layout
from lmtool.nn.positions import Position


class _Layer(nn.Module):
    def __init__(self, self_attn: SelfAttention, ffn: FeedForward, norm1: nn.Module, norm2: nn.Module, dropout: float):
        super().__init__()
        self.self_attn = self_attn
        self.norm1 = norm1
        self.ffn = ffn
        self.norm2 = norm2
        self.dropout = Dropout(dropout)


class PostNormLayer(_Layer):
    """Sublayer, add, normalise (Vaswani et al. 2017; BERT)."""

    def forward(
        self,
        x_TH: Tensor,
        layout: Layout,
        draws: Draws | None = None,
        position: Position | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(T, H) to (T, H)."""
        x_TH = self.norm1(x_TH + self.dropout(self.self_attn(x_TH, layout, draws, position, cache), draws))
        return self.norm2(x_TH + self.dropout(self.ffn(x_TH, draws), draws))


class PreNormLayer(_Layer):
    """Normalise, sublayer, add (GPT-2): the residual stream itself is never normalised."""

    def forward(
        self,
        x_TH: Tensor,
        layout: Layout,
        draws: Draws | None = None,
        position: Position | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(T, H) to (T, H)."""
        x_TH = x_TH + self.dropout(self.self_attn(self.norm1(x_TH), layout, draws, position, cache), draws)
        return x_TH + self.dropout(self.ffn(self.norm2(x_TH), draws), draws)
