"""One layer of a decoder that reads an encoder: self-attention, cross-attention, feed-forward; its norms behind the
sublayers or before them.

Where a context reads some tokens alone, what comes behind the cross-attention is done for those alone, as in `blocks`.
Behind self-attention and feed-forward part are slots for adapters, see `adapters`.

Shape letters: T tokens of the decoder, M of them that are read, H hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtool.nn.adapters import AdapterSlot
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
        self.attn_adapter = AdapterSlot()
        self.ffn_adapter = AdapterSlot()


class PostNormCrossLayer(_CrossLayer):
    """Sublayer, add, normalise (Vaswani et al. 2017; BART)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        attended = self.dropout1(self.self_attn(x_TH, context), context.draws)
        x_TH = self.norm1(x_TH + self.attn_adapter(attended, x_TH, self.norm1))
        attended = self.cross_attn(x_TH, context, context.read_M)
        x_TH, draws = only(x_TH, context.read_M), context.read_draws
        x_TH = self.norm2(x_TH + self.dropout2(attended, draws))
        fed_TH = self.dropout3(self.ffn(x_TH, draws), draws)
        return self.norm3(x_TH + self.ffn_adapter(fed_TH, x_TH, self.norm3))


class PreNormCrossLayer(_CrossLayer):
    """Normalise, sublayer, add (T5)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        attended = self.dropout1(self.self_attn(self.norm1(x_TH), context), context.draws)
        x_TH = x_TH + self.attn_adapter(attended, x_TH)
        attended = self.cross_attn(self.norm2(x_TH), context, context.read_M)
        x_TH, draws = only(x_TH, context.read_M), context.read_draws
        x_TH = x_TH + self.dropout2(attended, draws)
        normed_TH = self.norm3(x_TH)
        fed_TH = self.dropout3(self.ffn(normed_TH, draws), draws)
        return x_TH + self.ffn_adapter(fed_TH, x_TH, read_MH=normed_TH)
