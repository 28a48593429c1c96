"""Convolutions over packed texts: a layer of filters that read a window of tokens around each, within its text.

Shape letters: T tokens, M of them that are read, S places of the widest window, H hidden width, F filters
of all widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.nn.context import Context
from lmtool.nn.regions import region
from lmtool.types import Packed


def windows_of(x_TH: Tensor, packed: Packed, left: int, right: int, read_M: Tensor | None = None) -> Tensor:
    """(M, S, H): the states from `left` places before each token to `right` places behind it; zeros outside its text.
    read_M: flat indices of the tokens; None: all."""
    position_M, document_M, tokens = packed.positions, packed.documents, len(x_TH)
    length_M = packed.segments.cu_lengths.diff().long()[document_M]
    if read_M is not None:
        position_M, length_M = position_M[read_M], length_M[read_M]
    place_MS = position_M[:, None] + torch.arange(-left, right + 1, device=x_TH.device)
    inside_MS = (place_MS >= 0) & (place_MS < length_M[:, None])
    padded = F.pad(x_TH, (0, 0, left, right))
    shifted = [
        padded[offset : offset + tokens] if read_M is None else padded.index_select(0, read_M + offset)
        for offset in range(left + right + 1)
    ]
    return torch.stack(shifted, 1) * inside_MS[:, :, None].to(x_TH.dtype)


class WindowLayer(nn.Module):
    """relu(W [x_-l ... x_r] + b) of a window around each token, for filters of several widths side by side.

    widths: places that a filter reads, its own among them; of an even width one more behind it than before it. size: F,
    as many of each width as can be, the later ones one more. reach: S.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int], size: int):
        super().__init__()
        self.widths, kinds = tuple(widths), len(widths)
        self.left, self.right = (max(widths) - 1) // 2, max(widths) // 2
        self.reach, self.hidden_size, self.size = max(widths), hidden_size, size
        boundaries = [size * number // kinds for number in range(kinds + 1)]
        self.filters = nn.ModuleList(
            nn.Linear(width * hidden_size, last - first)
            for width, first, last in zip(widths, boundaries[:-1], boundaries[1:], strict=True)
        )

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """(T, H) to (T, F), or (M, F) of the tokens that the context reads."""
        return self.filtered(windows_of(x_TH, context.packed, self.left, self.right, context.read_M))

    @region(1)
    def filtered(self, windows_MSH: Tensor) -> Tensor:
        """(M, S, H) to (M, F)."""
        parts = []
        for width, linear in zip(self.widths, self.filters, strict=True):
            first = self.left - (width - 1) // 2
            parts.append(linear(windows_MSH[:, first : first + width].flatten(1)))
        return torch.cat(parts, -1).relu()
