"""Small tables of results: lines and colour on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.text import number, plain
from lmtool.secrets import masked

_CELL = 120


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


def table_lines(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The table as plain lines: a head, a rule, the rows; numbers stand right."""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[index]) for row in texts)]) for index, name in enumerate(header)]
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
        *map(line, texts),
    ]


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
