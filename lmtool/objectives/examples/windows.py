"""Runs of text cut into windows: the planner of every objective that reads one text an example.

The text of a split is a *stream*: its documents laid end to end, each followed by a separator where one is asked for.
Windows of a stream are cut within documents (`separate`) or through them (`joined`).

Shape letters: D documents, E windows, N windows of a batch, T their tokens.
"""

from __future__ import annotations

import numpy as np

from lmtool import streams
from lmtool.data.assembly import ragged_ranges

# One window: its first place in the stream, and how many of them it holds.
WINDOW = np.dtype([("start", "i8"), ("length", "i4")])
# short: whether a length was drawn for it, up to which it reaches unless its text ends before.
DRAWN_WINDOW = np.dtype([*WINDOW.descr, ("short", "i1")])
# Draws of a window: whether it is short, and its length.
_DRAWS = 2


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


def drawn_windows(stream: Stream, size: int, joined: bool, short: float, seed: int, epoch: int) -> np.ndarray:
    """(E,) records of `DRAWN_WINDOW`: consecutive windows as of `windows`, but each aims at a length of its own with
    probability `short`, uniform over 2 to `size`, as BERT's script draws them for its pairs (short_seq_prob of
    create_pretraining_data.py). A pure function of its arguments."""
    borders = np.array([0, len(stream)]) if joined else stream.borders
    lengths = np.diff(borders)
    mean = (1 - short) * size + short * (size + 2) / 2
    counts = np.ceil(1.1 * lengths / mean).astype(np.int64) + 4
    documents, cut = np.arange(len(lengths)), [np.empty(0, dtype=DRAWN_WINDOW)]
    while len(documents):
        # Of each document more windows than it will have; of those that have still more, twice as many.
        owner = np.repeat(documents, counts)
        last = np.cumsum(counts)
        number = np.arange(len(owner)) - np.repeat(last - counts, counts)
        drawn, length = (streams.uniform_at(seed, "sample", epoch, owner, number * _DRAWS + which) for which in (0, 1))
        rows = np.empty(len(owner), dtype=DRAWN_WINDOW)
        rows["short"] = drawn < short
        aim = np.where(rows["short"] == 1, 2 + (length * (size - 1)).astype(np.int64), size)
        ends = np.cumsum(aim)
        start = ends - aim - np.repeat(ends[last - counts] - aim[last - counts], counts)
        rows["start"], rows["length"] = borders[owner] + start, np.minimum(aim, lengths[owner] - start)
        whole = (start + aim)[last - 1] >= lengths[documents]
        cut.append(rows[np.repeat(whole, counts) & (start < lengths[owner])])
        documents, counts = documents[~whole], 2 * counts[~whole]
    windows_of_all = np.concatenate(cut)
    return windows_of_all[np.argsort(windows_of_all["start"], kind="stable")]
