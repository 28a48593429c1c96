"""One layer of a transformer, its norms behind the sublayers or before them. Takes its parts as arguments.

Where a context reads some tokens alone, what comes behind the attention, three quarters of a layer's work, is done for
those alone. In a stack that is its last layer. Behind each sublayer is a slot, which is empty until an adapter is put
there, see `adapters`.

Shape letters: T tokens, M of them that are read, H hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtool.nn.adapters import AdapterSlot
from lmtool.nn.attention import SelfAttention, only
from lmtool.nn.context import Context
from lmtool.nn.dropout import Draws, Dropout
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.regions import region


class _Layer(nn.Module):
    def __init__(self, self_attn: SelfAttention, ffn: FeedForward, norm1: nn.Module, norm2: nn.Module, dropout: float):
        super().__init__()
        self.self_attn = self_attn
        self.norm1 = norm1
        self.ffn = ffn
        self.norm2 = norm2
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)
        self.attn_adapter = AdapterSlot()
        self.ffn_adapter = AdapterSlot()


class PostNormLayer(_Layer):
    """Sublayer, add, normalise (Vaswani et al. 2017; BERT)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        attended = self.self_attn(x_TH, context, context.read_M)
        return self.behind(only(x_TH, context.read_M), attended, draws=context.read_draws)

    @region(1, 2)
    def behind(self, x_TH: Tensor, attended_TH: Tensor, draws: Draws | None = None) -> Tensor:
        """What comes behind the attention, (T, H)."""
        x_TH = self.norm1(x_TH + self.attn_adapter(self.dropout1(attended_TH, draws), x_TH, self.norm1))
        fed_TH = self.dropout2(self.ffn(x_TH, draws), draws)
        return self.norm2(x_TH + self.ffn_adapter(fed_TH, x_TH, self.norm2))


class PreNormLayer(_Layer):
    """Normalise, sublayer, add (GPT-2): the residual stream itself is never normalised."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, H), or (M, H) of the tokens that the context reads."""
        attended = self.self_attn(x_TH, context, context.read_M, self.norm1)
        return self.behind(only(x_TH, context.read_M), attended, draws=context.read_draws)

    @region(1, 2)
    def behind(self, x_TH: Tensor, attended_TH: Tensor, draws: Draws | None = None) -> Tensor:
        """What comes behind the attention, (T, H)."""
        x_TH = x_TH + self.attn_adapter(self.dropout1(attended_TH, draws), x_TH)
        normed_TH = self.norm2(x_TH)
        fed_TH = self.dropout2(self.ffn(normed_TH, draws), draws)
        return x_TH + self.ffn_adapter(fed_TH, x_TH, read_MH=normed_TH)
