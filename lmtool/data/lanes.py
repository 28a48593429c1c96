"""Running text cut into lanes: how a model reads it that carries state from one batch to the next.

The text of a split, its documents laid end to end, is cut into as many contiguous lanes as a step has examples. Step t
reads segment t of every lane, so that what a model keeps of a lane's segment is of the text right before the next one
(Mikolov et al. 2010 and every recurrent language model since; Dai et al. 2019, "Transformer-XL", section 3.2). The
order is the text's own, in every epoch; each epoch begins all lanes anew.

Shape letters: L lanes, S segments of the longest lane, E segments of all lanes.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from lmtool.data.plan import Examples

# One segment: its first place in the text, how many it holds, its lane, and how many of the lane's come before it.
SEGMENT = np.dtype([("start", "i8"), ("length", "i4"), ("lane", "i4"), ("before", "i8")])


class LanedExamples(Examples, Protocol):
    """Examples whose plan is that of `segments`, and whose batches say which lanes they are of (`Batch.lanes`).

    lanes: how many there are.
    """

    lanes: int


@runtime_checkable
class CutInLanes(Protocol):
    """Examples of running text, for a model that carries state. A loader reads them in lanes; whoever wants some of
    them in another order reads them as they are, without state."""

    def in_lanes(self, lanes: int) -> LanedExamples:
        """The same text in this many lanes, or as many as it has places."""


def segments(places: int, lanes: int, size: int) -> np.ndarray:
    """(E,) records of `SEGMENT`, step by step and in a step lane by lane: `places` of a text in `lanes` contiguous
    parts, whose sizes differ by one at most, each in segments of `size`. Nothing is left out: the last step may have
    fewer lanes, and shorter segments."""
    borders = np.arange(lanes + 1, dtype=np.int64) * places // lanes
    starts_L, sizes_L = borders[:-1], np.diff(borders)
    before_S1 = np.arange(0, max(int(sizes_L.max(initial=0)), 1), size, dtype=np.int64)[:, None]
    lengths_SL = np.minimum(sizes_L - before_S1, size)
    rows_SL = np.empty(lengths_SL.shape, dtype=SEGMENT)
    rows_SL["start"], rows_SL["length"] = starts_L + before_S1, lengths_SL
    rows_SL["lane"], rows_SL["before"] = np.arange(lanes), before_S1
    return rows_SL[lengths_SL > 0]
