"""Rows of labelled data, read strictly: a line that does not fit is named, never shifted or turned into nothing.

(`datasets` 5.2 reads a csv line of one column too many by shifting all columns, "NA" as nothing, and a missing last
column as nothing, each silently.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtool.data.files import no_such_file
from lmtool.data.problems import refuse
from lmtool.data.rows import DELIMITERS, described, header_of, objects, ragged, records, seen_delimiter
from lmtool.errors import UserError

SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".json")


@dataclass
class Table:
    """columns: by name, one value a row, all of the same length. origin: (file, line) of each row. skipped: lines left
    out because their number of columns was wrong, where that was allowed. facts: what else the reader says of the
    file, for the screens: counts, and words."""

    columns: dict[str, list[Any]]
    origin: list[tuple[str, int]] = field(default_factory=list)
    skipped: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, numbers: Sequence[int]) -> Table:
        """Some of the rows, by number."""
        columns = {name: [values[number] for number in numbers] for name, values in self.columns.items()}
        return Table(columns, [self.origin[number] for number in numbers], self.skipped, self.facts)


def read_table(
    path: str | Path, header: Sequence[str] | None = None, skip_ragged: bool = False, known: Sequence[str] = ()
) -> Table:
    """The rows of a .tsv (or .txt), .csv or .jsonl (or .json) file.

    tsv: no quoting, every tab divides. csv: RFC 4180, quotes double inside quotes, cells may hold line ends; what
    divides them is seen from the first line (`delimiter_of`), by `known` names of columns where that says several.
    jsonl: an object a line; numbers, truth values and null stay what they are. header: column names of a file without
    a header line (not for jsonl). skip_ragged: leave out and count lines of another number of columns. Values of tsv
    and csv are text as it stands ("NA" too).

    UserError with file:line: a ragged line, a quote that is not closed, bytes that are not UTF-8, NUL, a column named
    twice, a broken or incomplete object, numbers mixed with text, no rows.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise no_such_file("path", str(path))
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path}: {suffix or 'a file without suffix'} is not read: one of {', '.join(SUFFIXES)}",
            "rename the file after what it holds",
        )
    if suffix in (".jsonl", ".json"):
        table = _from_objects(path)
    else:
        delimiter = seen_delimiter(path, known, header) if suffix == ".csv" else None
        table = _from_records(path, records(path, delimiter), header, skip_ragged)
        if delimiter not in (None, ","):
            table.facts["delimiter"] = DELIMITERS[delimiter]
    if not table:
        problem = f"no row of {len(table.columns)} columns" if table.skipped else "no rows"
        raise UserError(f"{path}: {problem}", "give a file with rows below its header")
    return table


def _from_records(
    path: Path,
    lines: Iterator[tuple[int, list[str]]],
    header: Sequence[str] | None,
    skip_ragged: bool,
) -> Table:
    _, names = header_of(path, lines, header)
    table = Table({name: [] for name in names})
    for number, record in lines:
        if len(record) != len(names):
            if skip_ragged:
                table.skipped += 1
                continue
            refuse(ragged(path, number, record, names, given=header is not None))
            continue
        for values, value in zip(table.columns.values(), record, strict=True):
            values.append(value)
        table.origin.append((str(path), number))
    return table


def _from_objects(path: Path) -> Table:
    table: Table | None = None
    kinds: dict[str, tuple[str, int]] = {}
    for number, row in objects(path):
        if table is None:
            table = Table({name: [] for name in row})
        problem = _unlike(path, number, row, table, kinds)
        if problem is not None:
            refuse(problem)
            continue
        for name, values in table.columns.items():
            values.append(row[name])
        table.origin.append((str(path), number))
    return table if table is not None else Table({})


def _unlike(
    path: Path, number: int, row: dict[str, Any], table: Table, kinds: dict[str, tuple[str, int]]
) -> UserError | None:
    """The error of an object that has other keys than the first, or other kinds of values. kinds: of each key, and the
    line that has it first; those of the row are entered."""
    if table.columns.keys() != row.keys():
        name = min(table.columns.keys() ^ row.keys())
        problem = "has no" if name in table.columns else "has a further"
        first = table.origin[0][1]
        return UserError(
            f"{path}:{number}: the object {problem} key {name}, other than line {first}", "give all rows the same keys"
        )
    for name, value in row.items():
        kind = described(value)
        before, line_before = kinds.setdefault(name, (kind, number)) if value is not None else (kind, number)
        if kind != before:
            return UserError(
                f"{path}:{number}: {name} is {kind}, on line {line_before} it is {before}",
                "write all values of a column alike",
            )
    return None
