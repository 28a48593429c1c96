"""Windows of text: coverage with and without separators, overlaps, and sampled lengths."""

from __future__ import annotations

import numpy as np
import pytest

from lmtool.objectives.examples.windows import Stream, sampled_windows, windows

TOKENS = np.arange(100, 130, dtype=np.uint16)
OFFSETS = np.array([0, 7, 7, 8, 20, 30])  # the second document is empty


def texts(stream, rows):
    ids, lengths = stream.read(rows["start"], rows["length"]), rows["length"]
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def test_separate_windows_cover_each_document():
    stream = Stream(TOKENS, OFFSETS, None)
    pieces = texts(stream, windows(stream, 5, joined=False))
    assert [len(piece) for piece in pieces] == [5, 2, 1, 5, 5, 2, 5, 5]
    assert sum(pieces, []) == TOKENS.tolist()


def test_joined_windows_cover_the_text_with_separators():
    stream = Stream(TOKENS, OFFSETS, 3)
    pieces = texts(stream, windows(stream, 8, joined=True))
    assert [len(piece) for piece in pieces] == [8, 8, 8, 8, 2]
    run = [*range(100, 107), 3, 107, 3, *range(108, 120), 3, *range(120, 130), 3]
    assert sum(pieces, []) == run


@pytest.mark.parametrize("joined", [True, False])
def test_overlapping_windows_predict_every_token_once(joined):
    stream = Stream(TOKENS, OFFSETS, 3)
    predicted = [window[1:] for window in texts(stream, windows(stream, 6, joined, overlap=1))]
    assert all(predicted)
    if joined:
        assert sum(predicted, []) == texts(stream, windows(stream, 99, True))[0][1:]
    else:
        whole = texts(stream, windows(stream, 99, False))
        assert sum(predicted, []) == sum((window[1:] for window in whole), [])


def test_stream_reads_any_windows():
    stream = Stream(TOKENS, OFFSETS, 3)
    run = stream.read(np.array([0]), np.array([len(stream)]))
    starts, lengths = np.array([5, 0, 11]), np.array([6, 0, 20])
    expected = np.concatenate([run[start : start + length] for start, length in zip(starts, lengths, strict=True)])
    assert np.array_equal(stream.read(starts, lengths), expected)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("short", [0.1, 1.0])
def test_sampled_windows_cover_the_text_with_target_lengths(joined, short):
    tokens, boundaries = np.arange(60_000, dtype=np.uint32), np.array([0, 7, 7, 40_000, 40_001, 60_000])
    stream = Stream(tokens, boundaries, None)
    rows = sampled_windows(stream, 32, joined, short, 3, 0)
    assert stream.read(rows["start"], rows["length"]).tolist() == tokens.tolist()
    inside = ~np.isin(rows["start"] + rows["length"], [60_000] if joined else boundaries)
    lengths, drawn = rows["length"][inside], rows["short"][inside] == 1
    assert (lengths[~drawn] == 32).all() and lengths[drawn].min() == 2 and lengths[drawn].max() == 32
    assert drawn.mean() == pytest.approx(short, abs=4 * (short * (1 - short) / len(rows)) ** 0.5)
    assert lengths[drawn].mean() == pytest.approx(17, abs=4 * 9 / drawn.sum() ** 0.5)
    again, other = (sampled_windows(stream, 32, joined, short, 3, epoch) for epoch in (0, 1))
    assert (rows == again).all() and rows["length"][:100].tolist() != other["length"][:100].tolist()
