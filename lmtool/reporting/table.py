"""Small tables of results: lines and colour on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.text import number, plain, wrapped
from lmtool.system.secrets import masked

_CELL = 120
# Of the first column, where a table is wrapped.
_NARROWEST = 16


def cell(value: Any) -> str:
    """A value as the text of a cell: None is empty, numbers are short, text is safe and masked."""
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return plain(masked(str(value)), _CELL)


def _numeric(column: Sequence[Any]) -> bool:
    known = [value for value in column if value not in (None, "")]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[Any]], columns: int | None = None) -> list[str]:
    """The table as plain lines: a head, a rule, the rows; numbers stand right.

    columns: cells of a line, into which the texts of the first column are wrapped; None: as wide as they are.
    """
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[index]) for row in texts)]) for index, name in enumerate(header)]
    if columns is not None:
        widths[0] = min(widths[0], max(columns - sum(widths[1:]) - 2 * len(widths[1:]), _NARROWEST))
    right = [_numeric([row[index] for row in rows]) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(placed).rstrip()

    return [
        line([plain(name, _CELL) for name in header]),
        "  ".join("-" * width for width in widths),
        *(line(cells) for row in texts for cells in _wrapped_row(row, widths[0])),
    ]


def _wrapped_row(row: Sequence[str], width: int) -> list[list[str]]:
    """A row over as many lines as its first cell takes; what goes on is indented."""
    first, *others = row
    if len(first) <= width:
        return [list(row)]
    start, *rest = wrapped(first, width)
    rest = wrapped(" ".join(rest), width - 2)
    return [[start, *others], *([f"  {text}", *[""] * len(others)] for text in rest)]


def print_table(
    output: Output,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    heading: str | None = None,
    best: int | None = None,
) -> None:
    """Print a table with an optional heading; `best` is the row to set off."""
    if heading:
        output.line(heading, "bold")
    lines = table_lines(header, rows)
    if not output.live:
        for line in lines:
            output.line(line)
        return
    right = [_numeric([row[index] for row in rows]) for index in range(len(header))]
    output.table([plain(name, _CELL) for name in header], [[cell(value) for value in row] for row in rows], right, best)
    for line in lines:
        output.log(line)
