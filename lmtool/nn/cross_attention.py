"""Attention of a decoder to the encoder's text.

Shape letters: T tokens of the decoder, S tokens of the encoder, M tokens that are read, H hidden width, A heads, D
width of a head.
"""

from __future__ import annotations

from torch import Tensor

from lmtool.nn.attention import MultiHead
from lmtool.nn.context import Context, EncoderState
from lmtool.nn.prefix import LayerPrefix


class CrossAttention(MultiHead):
    """Queries from the decoder, keys and values from the encoder (Vaswani et al. 2017, 3.2.3). It has no positions:
    those of the two texts do not compare."""

    kind = "cross_attn"

    def keys_values(self, encoded: EncoderState, prefix: LayerPrefix | None = None) -> tuple[Tensor, Tensor]:
        """(S, A, D) keys and values of the encoder's hidden states, behind those of a prefix where there is one."""
        if self in encoded.kept:
            return encoded.kept[self]
        keys_values = self.heads(self.k_proj(encoded.hidden_SH)), self.heads(self.v_proj(encoded.hidden_SH))
        if prefix is not None:
            keys_values = prefix.before(*keys_values)
        if encoded.keep:
            encoded.kept[self] = keys_values
        return keys_values

    def forward(self, x_TH: Tensor, context: Context, read_M: Tensor | None = None) -> Tensor:
        """(T, H) to (T, H). read_M: flat indices of the tokens whose result is wanted, (M, H) then. ValueError where
        the context has no encoder."""
        if context.encoded is None or context.cross_layout is None:
            raise ValueError("cross-attention reads an encoder; the context has none")
        k_SAD, v_SAD = self.keys_values(context.encoded, context.cross_prefix)
        q_TAD = self.heads(self.q_proj(x_TH))
        return self.attended(q_TAD, k_SAD, v_SAD, context.cross_layout, None, context, read_M)
