"""Rows of labelled data, read strictly: a line that does not fit is named, never shifted or turned into nothing.

(`datasets` 5.2 reads a csv line of one column too many by shifting all columns, "NA" as nothing, and a missing last
column as nothing, each silently.)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtool.data.files import no_such_file, read_lines
from lmtool.errors import UserError

SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".json")
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
"""What may divide the cells of a .csv file, the standard's own first."""
_CELL = 10_000_000  # characters of a csv cell: the standard library's 131,072 is less than a long text


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
        delimiter = "\t" if suffix != ".csv" else _delimiter(path, known, header)
        records = _split_quoted(path, delimiter) if suffix == ".csv" else _split_tabs(path)
        table = _from_records(path, records, header, skip_ragged)
        if suffix == ".csv" and delimiter != ",":
            table.facts["delimiter"] = DELIMITERS[delimiter]
    if not table:
        problem = f"no row of {len(table.columns)} columns" if table.skipped else "no rows"
        raise UserError(f"{path}: {problem}", "give a file with rows below its header")
    return table


def delimiter_of(line: str, known: Sequence[str] = (), header: Sequence[str] | None = None) -> str:
    """What divides the cells of a .csv file, by its first line: of the delimiters that divide it at all, the one that
    gives as many cells as `header` names, or with which all `known` names of columns that occur are cells; else the
    comma."""
    cells = {delimiter: _quoted_cells(line, delimiter) for delimiter in DELIMITERS}
    dividing = [delimiter for delimiter, values in cells.items() if len(values) > 1]
    if header is not None:
        fitting = [delimiter for delimiter in dividing if len(cells[delimiter]) == len(header)]
    else:
        hits = {delimiter: len({*known} & {*cells[delimiter]}) for delimiter in dividing}
        fitting = [delimiter for delimiter in dividing if hits[delimiter] == max(hits.values())]
    return fitting[0] if fitting else ","


def _quoted_cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # the strict reader says what is wrong with it
        return []


def _delimiter(path: Path, known: Sequence[str], header: Sequence[str] | None) -> str:
    first = next((line for _, line in read_lines(path) if line), "")
    return delimiter_of(first, known, header)


def _split_tabs(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in read_lines(path):
        if line:
            yield number, line.split("\t")


def _split_quoted(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Cells of each record with the line it begins on."""
    started = 0

    def lines() -> Iterator[str]:
        nonlocal started
        for number, line in read_lines(path):
            started = number
            yield line + "\n"

    csv.field_size_limit(_CELL)
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    first = 1
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            raise _broken_csv(path, first, started, problem) from problem
        if record:
            yield first, record
        first = started + 1


def _broken_csv(path: Path, first: int, last: int, problem: csv.Error) -> UserError:
    hint = 'quote the whole cell and double the quotes inside it: "say ""hi"""'
    if "unexpected end" in str(problem) or "field limit" in str(problem):
        return UserError(f"{path}:{first}: a quote is opened and never closed", hint)
    through = f" (the row runs on to line {last}: is a quote left open?)" if last > first else ""
    return UserError(f"{path}:{first}: {problem}{through}", hint)


def _from_records(
    path: Path,
    records: Iterator[tuple[int, list[str]]],
    header: Sequence[str] | None,
    skip_ragged: bool,
) -> Table:
    names, at = (list(header), 0) if header is not None else _header(path, records)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{path}:{at}: the column {twice[0]!r} is named twice", "rename one of them")
    table = Table({name: [] for name in names})
    for number, record in records:
        if len(record) != len(names):
            if skip_ragged:
                table.skipped += 1
                continue
            hint = "write a row a line with as many columns as the header names"
            if header is not None:
                hint = "give as many column names as the file has columns"
            raise UserError(f"{path}:{number}: {len(record)} columns, {len(names)} expected ({', '.join(names)})", hint)
        for values, value in zip(table.columns.values(), record, strict=True):
            values.append(value)
        table.origin.append((str(path), number))
    return table


def _header(path: Path, records: Iterator[tuple[int, list[str]]]) -> tuple[list[str], int]:
    number, names = next(records, (0, []))
    if number == 0:
        raise UserError(f"{path} is empty", "give a file with a header line and rows")
    return names, number


def _from_objects(path: Path) -> Table:
    table: Table | None = None
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in read_lines(path):
        if not line or line.isspace():
            continue
        row = _object(path, number, line)
        if table is None:
            table = Table({name: [] for name in row})
        if table.columns.keys() != row.keys():
            name = min(table.columns.keys() ^ row.keys())
            problem = "has no" if name in table.columns else "has a further"
            first = table.origin[0][1]
            raise UserError(
                f"{path}:{number}: the object {problem} key {name}, other than line {first}",
                "give all rows the same keys",
            )
        for name, values in table.columns.items():
            values.append(row[name])
            if row[name] is None:
                continue
            kind = _kind(row[name])
            before, line_before = kinds.setdefault(name, (kind, number))
            if kind != before:
                raise UserError(
                    f"{path}:{number}: {name} is {kind}, on line {line_before} it is {before}",
                    "write all values of a column alike",
                )
        table.origin.append((str(path), number))
    return table if table is not None else Table({})


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        columns = dict(pairs)
        if len(columns) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}:{number}: the key {twice} is given twice", "rename or drop one of them")
        return columns

    def no_number(name: str) -> Any:
        raise UserError(f"{path}:{number}: {name} is no number in JSON", "write a finite number")

    try:
        row = json.loads(line, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as problem:
        raise UserError(
            f"{path}:{number}:{problem.colno}: not JSON: {problem.msg}", "write one JSON object a line"
        ) from problem
    except (RecursionError, ValueError) as problem:  # nested too deep; a number of thousands of digits
        raise UserError(f"{path}:{number}: not readable JSON: {problem}", "write one JSON object a line") from problem
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: {type(row).__name__} instead of an object", "write one JSON object a line")
    if "\\u" in line:
        _require_text(path, number, row)
    return row


def _require_text(path: Path, number: int, row: dict[str, Any]) -> None:
    """UserError where a JSON escape stands for half a character: no file and no tokenizer takes it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            half = ascii(problem.object[problem.start])[1:-1]
            raise UserError(
                f"{path}:{number}: {name} holds {half}, half of a character (a lone surrogate)",
                "write both halves, the character itself, or \\ufffd in its place",
            ) from problem


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
