"""Windows of long texts: windows cover every token, and each token is in the core of one window."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from lmtool.tasks.kinds.texts import windows


@pytest.mark.parametrize("room, overlap", [(1, 0), (4, 0), (4, 1), (5, 3), (7, 6), (40, 12)])
def test_windows_cover_every_token_once_in_core(room, overlap):
    lengths = np.arange(0, 41)
    cut = windows(lengths, room, overlap)
    for text, length in enumerate(lengths):
        own = cut.text == text
        held, owned = np.zeros(length, dtype=int), np.zeros(length, dtype=int)
        for start, end, core_start, core_end in zip(
            cut.start[own], cut.end[own], cut.core_start[own], cut.core_end[own], strict=True
        ):
            assert start <= core_start <= core_end <= end <= length and end - start <= room
            held[start:end] += 1
            owned[core_start:core_end] += 1
        assert held.all() if length else own.sum() == 1
        assert (owned == 1).all()
        assert cut.part[own].tolist() == list(range(own.sum()))
    assert len(cut) == len(cut.lengths)


def test_adjacent_windows_split_overlap_in_middle():
    cut = windows(np.array([11, 3]), np.array([6, 4]), 2)
    assert cut.start.tolist() == [0, 4, 8, 0] and cut.end.tolist() == [6, 10, 11, 3]
    assert cut.core_start.tolist() == [0, 5, 9, 0] and cut.core_end.tolist() == [5, 9, 11, 3]
    assert cut.text.tolist() == [0, 0, 0, 1]


def test_overlap_as_long_as_window_is_refused():
    with pytest.raises(ValueError, match="cannot overlap by 4"):
        windows(np.array([9]), 4, 4)


@pytest.mark.parametrize("length", [5, 6, 7, 10, 11, 23])
def test_windows_match_tokenizers_library(length):
    """As `stride` and `return_overflowing_tokens` in transformers."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(30)}, "0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.enable_truncation(6, stride=2)
    encoded = library.encode(" ".join(map(str, range(length))))
    cut = windows(np.array([length]), 6, 2)
    expected = [piece.ids for piece in (encoded, *encoded.overflowing)]
    assert [list(range(start, end)) for start, end in zip(cut.start, cut.end, strict=True)] == expected
