"""Strict streaming readers of .csv, .tsv and .jsonl files.

A line that does not fit is named, never shifted or turned into nothing.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtool.config.nearest import nearest
from lmtool.data.compressed import without_packing
from lmtool.data.files import read_lines, refuse
from lmtool.errors import UserError

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
"""What may divide the cells of a .csv file, the standard's own first."""
_CELL = 10_000_000  # characters of a csv cell: the standard library's 131,072 is less than a long text
_SHOWN = 12  # names of columns in an error
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def records(
    path: Path, delimiter: str | None, encoding: str = "utf-8", key: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Cells of each record with the line it begins on, the header's too.

    delimiter: of RFC 4180, where quotes double inside quotes and cells may hold line ends; None: every tab divides, and
    nothing is quoted. key: the key that sets the encoding. UserError: as `read_lines`, and for broken quotes.
    """
    lines = read_lines(path, encoding, key)
    return _split_tabs(lines) if delimiter is None else _split_quoted(path, lines, delimiter)


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


def seen_delimiter(
    path: Path,
    known: Sequence[str],
    header: Sequence[str] | None = None,
    encoding: str = "utf-8",
    key: str | None = None,
) -> str:
    """`delimiter_of` the first line of a file."""
    first = next((line for _, line in read_lines(path, encoding, key) if line), "")
    return delimiter_of(first, known, header)


def delimiter_for(path: Path, typed: str | None, known: Sequence[str], encoding: str) -> str | None:
    """What divides the cells of a file of text: the delimiter that was typed by its name; in a .tsv file None, as
    `records` takes it; else what its first line shows."""
    if typed not in (None, "null"):
        return next((mark for mark, name in DELIMITERS.items() if name == typed), ",")
    if without_packing(path.name).lower().endswith(".tsv"):
        return None
    return seen_delimiter(path, known, None, encoding, "data.encoding")


def _split_tabs(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines:
        if line:
            yield number, line.split("\t")


def _split_quoted(path: Path, numbered: Iterator[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Cells of each record with the line it begins on."""
    started = 0

    def lines() -> Iterator[str]:
        nonlocal started
        for number, line in numbered:
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
        except csv.Error as error:
            raise _broken_csv(path, first, started, error) from error
        if record:
            yield first, record
        first = started + 1


def _broken_csv(path: Path, first: int, last: int, error: csv.Error) -> UserError:
    hint = 'quote the whole cell and double the quotes inside it: "say ""hi"""'
    if "unexpected end" in str(error) or "field limit" in str(error):
        return UserError(f"{path}:{first}: a quote is opened and never closed", hint)
    through = f" (the row runs on to line {last}: is a quote left open?)" if last > first else ""
    return UserError(f"{path}:{first}: {error}{through}", hint)


def header_of(
    path: Path, lines: Iterator[tuple[int, list[str]]], fixed: Sequence[str] | None = None
) -> tuple[int, list[str]]:
    """The line of the header, and the names of the columns: `fixed`, or taken from the first of the records.

    UserError where a name comes twice, or nothing is there.
    """
    number, names = (0, list(fixed)) if fixed is not None else next(lines, (0, []))
    if fixed is None and number == 0:
        raise UserError(f"{path} is empty", "use a file with a header line and rows")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{path}:{number}: the column {twice[0]!r} is named twice", "rename one of them")
    return number, names


def ragged(path: Path, number: int, record: Sequence[str], names: Sequence[str], fixed: bool = False) -> UserError:
    """The error for a record of another number of cells than there are columns. fixed: the names are not the file's."""
    hint = "write a row a line with as many columns as the header names"
    if fixed:
        hint = "give as many column names as the file has columns"
    count = f"{len(record)} column" + ("s" if len(record) != 1 else "")
    return UserError(f"{path}:{number}: {count}, {len(names)} expected ({name_list(names)})", hint)


def name_list(names: Sequence[str]) -> str:
    """Names of columns as an error lists them."""
    listed = [name if len(name) <= 40 else f"{name[:40]}..." for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(listed) + more


def no_column(where: str, name: str, names: Sequence[str], key: str, listed: bool = False) -> UserError:
    """The error for a column that is not there, with the nearest that is. key: the key that names it. listed: it takes
    a list."""
    like = nearest(name, names)
    form = "{}=[{}]" if listed else "{}={}"
    hint = f"did you mean {form.format(key, like)}?" if like else f"name the column: {form.format(key, 'COLUMN')}"
    return UserError(f"{where}: no column {name}; there are {name_list(names) or 'none'}", hint)


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The object of each line with its number; numbers, truth values and null stay what they are. UserError: as
    `read_lines` and `object_of`."""
    for number, line in read_lines(path):
        if line and not line.isspace():
            try:
                row = object_of(path, number, line)
            except UserError as error:
                refuse(error)
                continue
            yield number, row


class _Refused(Exception):
    """What JSON allows and a row must not hold, and what to do."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    columns = dict(pairs)
    if len(columns) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the key {twice} is given twice", "rename or drop one of them")
    return columns


def _no_number(name: str) -> object:
    raise _Refused(f"{name} is no number in JSON", "write a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)  # made once: half of a row's time


def object_of(path: Path, number: int, line: str) -> dict[str, object]:
    """A line as the object it holds. UserError if it is not one, or holds a key twice or half a character."""
    try:
        row = _DECODER.decode(line)
    except _Refused as error:
        message, hint = error.args
        raise UserError(f"{path}:{number}: {message}", hint) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{number}:{error.colno}: not JSON: {error.msg}", "write one JSON object a line"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep; a number of thousands of digits
        raise UserError(f"{path}:{number}: not readable JSON: {error}", "write one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: {type(row).__name__} instead of an object", "write one JSON object a line")
    if _SURROGATE.search(line):
        _require_text(path, number, row)
    return row


def _require_text(path: Path, number: int, row: dict[str, object]) -> None:
    """UserError where a JSON escape stands for half a character: no file and no tokenizer takes it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise UserError(
                f"{path}:{number}: {name} holds {half}, half of a character (a lone surrogate)",
                "write both halves, the character itself, or \\ufffd in its place",
            ) from error


def fields_of(row: Mapping[str, object]) -> dict[str, object]:
    """What an object holds, by key; in the place of an object inside it what that holds, by its path (meta.text)."""
    fields: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{path}": inner for path, inner in fields_of(value).items()}
        else:
            fields[name] = value
    return fields


def values_of(where: str, row: Mapping[str, object], names: Sequence[str], key: str) -> list[object]:
    """What a row holds in the columns of these names; a name that is no key of it is a dotted path into its objects.
    where: file and line. key: the key that names the columns. UserError for one that is not there."""
    values = []
    for name in names:
        try:
            values.append(_at_path(row, name))
        except KeyError:
            raise no_column(where, name, [*fields_of(row)], key) from None
    return values


def _at_path(part: object, path: str) -> object:
    """What stands at a path in a part of a row, null in an object that is null. KeyError where there is no such key."""
    if part is None:
        return None
    if not isinstance(part, dict):
        raise KeyError(path)
    if path in part:
        return part[path]
    head, dot, rest = path.partition(".")
    if not dot:
        raise KeyError(path)
    return _at_path(part[head], rest)


def text_of(where: str, names: Sequence[str], values: Sequence[object], key: str) -> str:
    """The text of a row: what its columns hold, under each other, null and white space left out. where: file and line.
    key: the key that names the columns. UserError where a value is no text."""
    texts = []
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: {name} is {described(value)}, not text", f"name a column of text: {key}=COLUMN")
        if value and not value.isspace():
            texts.append(value)
    return "\n".join(texts)


def described(value: object) -> str:
    """What kind of value JSON holds, in words."""
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
