"""What the two sides of an encoder-decoder's examples hold besides what their format puts around it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lmtool.data.assembly import Template
from lmtool.types import Packed


def within(template: Template, packed: Packed, ids: Tensor) -> np.ndarray:
    """The ids of one side without the special tokens that its format puts before and behind the text."""
    before, behind = (len(piece) for piece in template.pieces)
    positions = packed.positions.numpy()
    lengths = np.repeat(packed.lengths, packed.lengths)
    return ids.numpy()[(positions >= before) & (positions < lengths - behind)]
