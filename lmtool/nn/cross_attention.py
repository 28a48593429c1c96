"""Attention of a decoder to the encoder's text, and what it keeps while a text is generated.

Shape letters: T tokens of the decoder, S tokens of the encoder, H hidden width, A heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lmtool.nn.attention import MultiHead, attend, only
from lmtool.nn.dropout import Draws
from lmtool.nn.layout import Full, Layout
from lmtool.types import Packed, Segments


@dataclass
class EncoderState:
    """What a decoder reads of its encoder.

    hidden_SH: the last hidden states of the inputs. segments: its documents. keep: keep each layer's keys and values
    for the next call, as generation wants; without gradients only.
    """

    hidden_SH: Tensor
    segments: Segments
    keep: bool = False
    _kept: dict[CrossAttention, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def layout(self, outputs: Packed) -> Layout:
        """How the tokens of the decoder stand to those of the encoder: each sees its whole input."""
        return Layout(outputs.segments, self.segments, Full())

    def keys_values(self, attention: CrossAttention) -> tuple[Tensor, Tensor]:
        """(S, A, D) keys and values of a layer."""
        if not self.keep:
            return attention.keys_values(self.hidden_SH)
        if attention not in self._kept:
            self._kept[attention] = attention.keys_values(self.hidden_SH)
        return self._kept[attention]


class CrossAttention(MultiHead):
    """Queries from the decoder, keys and values from the encoder (Vaswani et al. 2017, 3.2.3). It has no positions:
    those of the two texts do not compare."""

    def keys_values(self, hidden_SH: Tensor) -> tuple[Tensor, Tensor]:
        """(S, A, D) keys and values of the encoder's hidden states."""
        return self.heads(self.k_proj(hidden_SH)), self.heads(self.v_proj(hidden_SH))

    def forward(
        self,
        x_TH: Tensor,
        state: EncoderState,
        layout: Layout,
        draws: Draws | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """(T, H) to (T, H). layout: `state.layout(outputs)`. read_M: flat indices of the tokens whose result is
        wanted, (M, H) then."""
        k_SAD, v_SAD = state.keys_values(self)
        q_TAD = self.heads(self.q_proj(x_TH))
        own = self.dropout.draws(draws)
        out_TAD = attend(q_TAD, k_SAD, v_SAD, layout, None, self.scale, self.dropout.rate, own)
        return self.out_proj(only(out_TAD.flatten(-2), read_M))
