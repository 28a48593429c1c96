"""Lines of so many cells, and names that are shortened without becoming the same."""

from __future__ import annotations

import io

import pytest

from lmtool.reporting.console import Output, table_lines
from lmtool.reporting.inspection import InspectionScreen, print_inspection
from lmtool.reporting.text import cells, shorten, wrap


@pytest.mark.parametrize("width", [10, 60, 80, 200])
@pytest.mark.parametrize("text", ["", "a few  words and 長い文字列です and " + "x" * 90, "é" * 30, "e\u0301 " * 40])
def test_lines_fit_and_lose_nothing(width: int, text: str) -> None:
    lines = wrap(text, width)
    assert lines and all(cells(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_words_stay_in_one_piece_where_they_fit() -> None:
    assert wrap("one two three four", 9) == ["one two", "three", "four"]


@pytest.mark.parametrize("limit", [5, 12, 40])
def test_names_become_no_twins(limit: int) -> None:
    names = ["top_up_by_bank_transfer_charge", "top_up_by_card_charge", "top_up_by_cash_or_cheque", "a_b", "a b"]
    names += [f"{'x' * 30}{number}{'y' * 30}" for number in range(12)]
    shown = shorten(names, limit)
    assert len(set(shown)) == len(names) and shown[3:5] == ["a_b", "a b"]
    assert shorten(names[:1], 12) == ["top_up…harge"]
    assert shorten([names[0]] * 2, 12) == ["top_up…harge"] * 2, "the same name twice is the same name"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_name_that_does_not_fit_its_table_continues_below(columns: int) -> None:
    rows = [["random second segments where there is a choice " * 2, "40.6%", "24.6% .. 56.5%", "217"]]
    lines = table_lines(["statistic", "measured", "interval", "of"], rows, columns)
    assert all(len(line) <= columns for line in lines)
    assert " ".join(line[:50] for line in lines[2:]).count("segments") == 2 or columns == 200
    assert all(line.startswith("  ") for line in lines[3:])


@pytest.mark.parametrize(("labels", "shown"), [([(0, "b")], "a→b c"), ([(0, "b"), (0, "c")], "a c")])
def test_an_arrow_is_drawn_where_one_thing_is_predicted(labels: list[tuple[int, str]], shown: str) -> None:
    stream = io.StringIO()
    places = [{"position": at, "label": label} for at, label in labels]
    example = {"example": 0, "epoch": 0, "input": {"pieces": ["a", "c"]}, "targets": {"term": places}}
    print_inspection(Output(stream), InspectionScreen("heading", "", [example], [], frozenset(), "", ""))
    assert f" input  {shown}\n" in stream.getvalue()
