"""Runs of text cut into windows: the planner of every objective that reads one text an example.

The text of a split is a *stream*: its documents laid end to end, each followed by a separator where one is asked for.
Windows of a stream are cut within documents (`separate`) or through them (`joined`).

Shape letters: D documents, E windows, N windows of a batch, T their tokens.
"""

from __future__ import annotations

import numpy as np

from lmtool.data.assembly import ragged_ranges

# One window: its first place in the stream, and how many of them it holds.
WINDOW = np.dtype([("start", "i8"), ("length", "i4")])


class Stream:
    """Documents of a token store as one run of ids, of which nothing is copied.

    separator: the id that follows each document, or None. Documents without tokens are left out.
    """

    def __init__(self, tokens: np.ndarray, document_offsets: np.ndarray, separator: int | None):
        offsets = np.asarray(document_offsets, dtype=np.int64)
        full = offsets[1:] > offsets[:-1]
        if not full.all():
            offsets = offsets[np.append(True, full)]
        self.tokens, self.separator = tokens, separator
        # Without a separator a place in the stream is one in the store, and nothing is held beside its file.
        self.offsets, self.borders = offsets, offsets if separator is None else offsets + np.arange(len(offsets))

    def __len__(self) -> int:
        return int(self.borders[-1])

    def read(self, starts_N: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """(T,) int64: the ids of N runs, laid end to end."""
        places = ragged_ranges(starts_N, lengths_N)
        document = np.searchsorted(self.borders, places, side="right") - 1
        first, within = self.offsets[document], places - self.borders[document]
        ended = within == self.offsets[document + 1] - first
        ids = np.asarray(self.tokens[first + np.where(ended, 0, within)], dtype=np.int64)
        return ids if self.separator is None else np.where(ended, self.separator, ids)


def windows(stream: Stream, size: int, joined: bool, overlap: int = 0) -> np.ndarray:
    """(E,) records of `WINDOW`: consecutive windows of at most `size` places, each sharing `overlap` with the next.

    joined: cut through documents, so that only the last window is shorter; else within each document. A further window
    that would hold nothing but the overlap is left out; so is a single token, where windows share any.
    """
    borders = np.array([0, len(stream)]) if joined else stream.borders
    stride = size - overlap
    lengths = np.diff(borders)
    counts = np.where(lengths > min(overlap, 1), np.maximum(-(-(lengths - overlap) // stride), 1), 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * stride
    rows = np.empty(len(owner), dtype=WINDOW)
    rows["start"] = borders[owner] + offset
    rows["length"] = np.minimum(size, lengths[owner] - offset)
    return rows
