"""One layer of a decoder that reads an encoder: self-attention, cross-attention, feed-forward; its norms behind the
sublayers or before them.

Where a context reads some tokens alone, what comes behind the cross-attention is done for those alone, as in `blocks`.

Shape letters: T tokens of the decoder, M of them that are read, H hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtool.nn.attention import SelfAttention, only
from lmtool.nn.context import Context
from lmtool.nn.cross_attention import CrossAttention
from lmtool.nn.dropout import Dropout
from lmtool.nn.feedforward import FeedForward


class _CrossLayer(nn.Module):
    """norms: of the self-attention, the cross-attention and the feed-forward part."""

    def __init__(
        self,
        self_attn: SelfAttention,
        cross_attn: CrossAttention,
        ffn: FeedForward,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        dropout: float,
    ):
        super().__init__()
        self.self_attn = self_attn
        self.norm1 = norms[0]
        self.cross_attn = cross_attn
        self.norm2 = norms[1]
        self.ffn = ffn
        self.norm3 = norms[2]
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)
        self.dropout3 = Dropout(dropout)


class PostNormCrossLayer(_CrossLayer):
    """Sublayer, add, normalise (Vaswani et al. 2017; BART)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        x_TH = self.norm1(x_TH + self.dropout1(self.self_attn(x_TH, context), context.draws))
        attended = self.cross_attn(x_TH, context, context.read_M)
        x_TH, draws = only(x_TH, context.read_M), context.read_draws
        x_TH = self.norm2(x_TH + self.dropout2(attended, draws))
        return self.norm3(x_TH + self.dropout3(self.ffn(x_TH, draws), draws))


class PreNormCrossLayer(_CrossLayer):
    """Normalise, sublayer, add (T5)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        x_TH = x_TH + self.dropout1(self.self_attn(self.norm1(x_TH), context), context.draws)
        attended = self.cross_attn(self.norm2(x_TH), context, context.read_M)
        x_TH, draws = only(x_TH, context.read_M), context.read_draws
        x_TH = x_TH + self.dropout2(attended, draws)
        return x_TH + self.dropout3(self.ffn(self.norm3(x_TH), draws), draws)
