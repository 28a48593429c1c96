"""One layer of a transformer, its norms behind the sublayers or before them. Takes its parts as arguments.

`read_M` are the flat indices of the tokens whose result is wanted: what comes behind the attention, three quarters of
a layer's work, is done for those alone. In a stack that is its last layer.

Shape letters: T tokens, M of them that are read, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lmtool.nn.attention import SelfAttention, only
from lmtool.nn.cache import LayerCache
from lmtool.nn.dropout import Draws, Dropout, draws_at, draws_of
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.layout import Layout
from lmtool.nn.positions import Position


def each(
    layers: Iterable[nn.Module], draws: Draws | None, read_M: Tensor | None = None
) -> Iterator[tuple[int, nn.Module, Draws | None, Tensor | None]]:
    """(number, layer, its draws, the tokens it gives) of a stack: all of them, and its last layer those that are
    read. A layer that is applied again draws anew."""
    *before, last = layers
    yield from ((number, layer, draws_at(draws, number), None) for number, layer in enumerate(before))
    yield len(before), last, draws_at(draws, len(before)), read_M


class _Layer(nn.Module):
    def __init__(self, self_attn: SelfAttention, ffn: FeedForward, norm1: nn.Module, norm2: nn.Module, dropout: float):
        super().__init__()
        self.self_attn = self_attn
        self.norm1 = norm1
        self.ffn = ffn
        self.norm2 = norm2
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)


class PostNormLayer(_Layer):
    """Sublayer, add, normalise (Vaswani et al. 2017; BERT)."""

    def forward(
        self,
        x_TH: Tensor,
        layout: Layout,
        draws: Draws | None = None,
        position: Position | None = None,
        cache: LayerCache | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """(T, H) to (T, H), or with `read_M` to (M, H)."""
        attended = self.self_attn(x_TH, layout, draws, position, cache, read_M)
        x_TH, draws = only(x_TH, read_M), draws_of(draws, read_M)
        x_TH = self.norm1(x_TH + self.dropout1(attended, draws))
        return self.norm2(x_TH + self.dropout2(self.ffn(x_TH, draws), draws))


class PreNormLayer(_Layer):
    """Normalise, sublayer, add (GPT-2): the residual stream itself is never normalised."""

    def forward(
        self,
        x_TH: Tensor,
        layout: Layout,
        draws: Draws | None = None,
        position: Position | None = None,
        cache: LayerCache | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """(T, H) to (T, H), or with `read_M` to (M, H)."""
        attended = self.self_attn(self.norm1(x_TH), layout, draws, position, cache, read_M)
        x_TH, draws = only(x_TH, read_M), draws_of(draws, read_M)
        x_TH = x_TH + self.dropout1(attended, draws)
        return x_TH + self.dropout2(self.ffn(self.norm2(x_TH), draws), draws)
