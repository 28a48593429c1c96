"""Where a text is split into what is seen as a whole and what is predicted. A pure function."""

from __future__ import annotations

import numpy as np

from lmtool import streams


def prefix_lengths(lengths_N: np.ndarray, examples_N: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """(N,) tokens before the split: 1 to length - 1, each equally likely."""
    uniform = streams.uniform(seed, "corrupt", epoch, np.asarray(examples_N), 1)[:, 0]
    return 1 + (uniform * (np.asarray(lengths_N, dtype=np.int64) - 1)).astype(np.int64)
