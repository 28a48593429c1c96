"""Transformer layers with post-norm or pre-norm sublayers, assembled from parts passed as arguments.

If the context selects some tokens, everything after the attention, three quarters of a layer's work, is computed for
those only; in a stack this happens in the last layer. After each sublayer is an adapter slot, empty by default, see
`nn/feedforward.py`.

Shape letters: T tokens, M selected tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from lmtool.nn.attention import CrossAttention, SelfAttention, only
from lmtool.nn.configs import BlockPart
from lmtool.nn.context import Context
from lmtool.nn.dropout import Dropout, DropoutRng
from lmtool.nn.feedforward import AdapterSlot, FeedForward
from lmtool.nn.regions import region


class _Layer(nn.Module):
    ffn: FeedForward | None

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
        self.residual = True

    def add(self, x_TH: Tensor, out_TH: Tensor) -> Tensor:
        """Returns the residual sum, (T, H); without residual connections, the sublayer's output."""
        return x_TH + out_TH if self.residual else out_TH

    def leave_out(self, parts: Collection[BlockPart]) -> None:
        self.residual = "residual" not in parts
        if "norm" in parts:
            self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        if "scaling" in parts:
            self.self_attn.scale = 1.0
        if "projections" in parts:
            self.self_attn.leave_out_projections()
        if "feed_forward" in parts:
            self.ffn = None
            del self.norm2, self.dropout2, self.ffn_adapter


class PostNormLayer(_Layer):
    """Sublayer, add, normalize (Vaswani et al. 2017; BERT)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """Maps (T, H) to (T, H), or (M, H) of the selected tokens."""
        attention_out = self.self_attn(x_TH, context, context.read_M)
        return self.after_attention(only(x_TH, context.read_M), attention_out, rng=context.read_rng)

    @region(1, 2)
    def after_attention(self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the rest of the layer, (T, H)."""
        x_TH = self.norm1(self.add(x_TH, self.attn_adapter(self.dropout1(attention_TH, rng), x_TH, self.norm1)))
        if self.ffn is None:
            return x_TH
        fed_TH = self.dropout2(self.ffn(x_TH, rng), rng)
        return self.norm2(self.add(x_TH, self.ffn_adapter(fed_TH, x_TH, self.norm2)))


class PreNormLayer(_Layer):
    """Normalize, sublayer, add (GPT-2): the residual stream itself is never normalized."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """Maps (T, H) to (T, H), or (M, H) of the selected tokens."""
        attention_out = self.self_attn(x_TH, context, context.read_M, self.norm1)
        return self.after_attention(only(x_TH, context.read_M), attention_out, rng=context.read_rng)

    @region(1, 2)
    def after_attention(self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the rest of the layer, (T, H)."""
        x_TH = self.add(x_TH, self.attn_adapter(self.dropout1(attention_TH, rng), x_TH))
        if self.ffn is None:
            return x_TH
        normed_TH = self.norm2(x_TH)
        fed_TH = self.dropout2(self.ffn(normed_TH, rng), rng)
        return self.add(x_TH, self.ffn_adapter(fed_TH, x_TH, read_MH=normed_TH))


# Layers of a decoder with an encoder: self-attention, cross-attention, feed-forward, in post-norm or pre-norm form.
#
# If the context selects some tokens, everything after the cross-attention is computed for those only, as in the layers
# above. Adapter slots follow self-attention and feed-forward, see `nn/feedforward.py`.


class CrossLayer(nn.Module):
    """A decoder layer that reads an encoder.

    norms: the norms of the self-attention, the cross-attention and the feed-forward part.
    """

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


class PostNormCrossLayer(CrossLayer):
    """Sublayer, add, normalize (Vaswani et al. 2017; BART)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """Maps (T, H) to (T, H), or (M, H) of the selected tokens."""
        x_TH = self.after_self_attention(x_TH, self.self_attn(x_TH, context), rng=context.rng)
        attention_out = self.cross_attn(x_TH, context, context.read_M)
        return self.after_attention(only(x_TH, context.read_M), attention_out, rng=context.read_rng)

    @region(1, 2)
    def after_self_attention(self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Computes the part between self-attention and cross-attention, (T, H)."""
        return self.norm1(x_TH + self.attn_adapter(self.dropout1(attention_TH, rng), x_TH, self.norm1))

    @region(1, 2)
    def after_attention(self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the part after cross-attention, (T, H)."""
        x_TH = self.norm2(x_TH + self.dropout2(attention_TH, rng))
        fed_TH = self.dropout3(self.ffn(x_TH, rng), rng)
        return self.norm3(x_TH + self.ffn_adapter(fed_TH, x_TH, self.norm3))


class PreNormCrossLayer(CrossLayer):
    """Normalize, sublayer, add (T5)."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """Maps (T, H) to (T, H), or (M, H) of the selected tokens."""
        attention_out = self.self_attn(x_TH, context, norm=self.norm1)
        x_TH, normed_TH = self.after_self_attention(x_TH, attention_out, rng=context.rng)
        attention_out = self.cross_attn(normed_TH, context, context.read_M)
        return self.after_attention(only(x_TH, context.read_M), attention_out, rng=context.read_rng)

    @region(1, 2)
    def after_self_attention(
        self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the part between self-attention and cross-attention. Returns (T, H): the residual stream, and the
        input of cross-attention."""
        x_TH = x_TH + self.attn_adapter(self.dropout1(attention_TH, rng), x_TH)
        return x_TH, self.norm2(x_TH)

    @region(1, 2)
    def after_attention(self, x_TH: Tensor, attention_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Returns the part after cross-attention, (T, H)."""
        x_TH = x_TH + self.dropout2(attention_TH, rng)
        normed_TH = self.norm3(x_TH)
        fed_TH = self.dropout3(self.ffn(normed_TH, rng), rng)
        return x_TH + self.ffn_adapter(fed_TH, x_TH, read_MH=normed_TH)
