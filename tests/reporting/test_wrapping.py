"""Lines wrapped to a number of cells, and names shortened without becoming equal."""

from __future__ import annotations

import io

import pytest

from lmtool.reporting.console import Output, table_lines
from lmtool.reporting.inspection import InspectionScreen, print_inspection
from lmtool.reporting.text import cells, shorten, wrap


@pytest.mark.parametrize("width", [10, 60, 80, 200])
@pytest.mark.parametrize("text", ["", "a few  words and 長い文字列です and " + "x" * 90, "é" * 30, "e\u0301 " * 40])
def test_wrapped_lines_fit_and_keep_text(width: int, text: str) -> None:
    lines = wrap(text, width)
    assert lines and all(cells(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_wrapping_keeps_words_whole() -> None:
    assert wrap("one two three four", 9) == ["one two", "three", "four"]


@pytest.mark.parametrize("limit", [5, 12, 40])
def test_shortened_names_stay_distinct(limit: int) -> None:
    names = ["top_up_by_bank_transfer_charge", "top_up_by_card_charge", "top_up_by_cash_or_cheque", "a_b", "a b"]
    names += [f"{'x' * 30}{number}{'y' * 30}" for number in range(12)]
    shown = shorten(names, limit)
    assert len(set(shown)) == len(names) and shown[3:5] == ["a_b", "a b"]
    assert shorten(names[:1], 12) == ["top_up…harge"]
    assert shorten([names[0]] * 2, 12) == ["top_up…harge"] * 2, "equal names stay equal"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_long_name_in_table_continues_below(columns: int) -> None:
    rows = [["random second segments where there is a choice " * 2, "40.6%", "24.6% .. 56.5%", "217"]]
    lines = table_lines(["statistic", "measured", "interval", "of"], rows, columns)
    assert all(len(line) <= columns for line in lines)
    assert " ".join(line[:50] for line in lines[2:]).count("segments") == 2 or columns == 200
    assert all(line.startswith("  ") for line in lines[3:])


@pytest.mark.parametrize(("labels", "shown"), [([(0, "b")], "a→b c"), ([(0, "b"), (0, "c")], "a c")])
def test_arrow_marks_token_with_one_target_only(labels: list[tuple[int, str]], shown: str) -> None:
    stream = io.StringIO()
    places = [{"position": at, "label": label} for at, label in labels]
    example = {"example": 0, "epoch": 0, "input": {"pieces": ["a", "c"]}, "targets": {"term": places}}
    screen = InspectionScreen(
        "heading", finding="", examples=[example], statistics=[], broken=frozenset(), summary="", checks=""
    )
    print_inspection(Output(stream), screen)
    assert f" input  {shown}\n" in stream.getvalue()
