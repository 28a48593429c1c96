"""Strict streaming readers of .csv, .tsv and .jsonl files: a malformed line is an error with its number."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lmtool.data.compressed import without_compression_suffix
from lmtool.data.files import read_lines, refuse
from lmtool.errors import UserError, nearest

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
"""Delimiters of a .csv file; the comma is the default."""
_CELL = 10_000_000  # maximum characters of a csv cell; the default of 131,072 is less than a long text
_MAX_NAMES = 12  # maximum number of column names in an error
_SEPARATOR = re.compile(r'"?sep[=](.)"?', re.IGNORECASE)  # the first line of a file for Excel
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def records(
    path: Path, delimiter: str | None, encoding: str = "utf-8", key: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the first line, and the cells, of each record, including the header. delimiter: of cells,
    which may be quoted as in RFC 4180; None: tabs, without quoting. key: the key that sets the encoding. Raises
    UserError as in `read_lines`, for broken quotes, and for a first line `sep=` with another delimiter."""
    lines = read_lines(path, encoding, key, keep_ends=delimiter is not None)
    first = next(lines, None)
    if first is None:
        return
    separator = _separator(path, first[1].rstrip("\r\n"))
    if separator is None:
        lines = chain([first], lines)
    elif separator != (delimiter or "\t"):
        named, used = DELIMITERS[separator], DELIMITERS[delimiter or "\t"]
        raise UserError(
            f"{path}:1: the line names the delimiter {named}, but the file is read with the delimiter {used}",
            "remove the line; a .tsv file with another delimiter is a .csv file",
        )
    if delimiter is None:
        yield from ((number, line.split("\t")) for number, line in lines if line)
    else:
        yield from _split_quoted(path, lines, delimiter, 1 if separator is None else 2)


def _separator(path: Path, line: str) -> str | None:
    """The delimiter that the first line of a file names for Excel (`sep=;`); None if it is another line."""
    match = _SEPARATOR.fullmatch(line)
    if match is not None and match[1] not in DELIMITERS:
        raise UserError(
            f"{path}:1: {match[1]!r} is not one of the delimiters {', '.join(DELIMITERS.values())}",
            "write the table with one of them",
        )
    return None if match is None else match[1]


def delimiter_of(line: str, known: Sequence[str] = (), header: Sequence[str] | None = None) -> str:
    """Infers the delimiter of a .csv file from its first line; a comma if none fits. known: expected column names: the
    delimiter that yields the most of them is used. header: the names of all columns, if they are not in the file: the
    delimiter that yields as many cells is used."""
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
    except csv.Error:  # reported by `records`
        return []


def inferred_delimiter(
    path: Path,
    known: Sequence[str],
    header: Sequence[str] | None = None,
    encoding: str = "utf-8",
    key: str | None = None,
) -> str:
    """Returns the delimiter that the first line of a file names (`sep=;`), otherwise `delimiter_of` this line."""
    first = next((line for _, line in read_lines(path, encoding, key) if line), "")
    return _separator(path, first) or delimiter_of(first, known, header)


def delimiter_for(path: Path, name: str | None, known: Sequence[str], encoding: str) -> str | None:
    """Returns the `delimiter` for `records`: the one with this `name`, None for a .tsv file, or the inferred one."""
    if name not in (None, "null"):
        return next((delimiter for delimiter, delimiter_name in DELIMITERS.items() if delimiter_name == name), ",")
    if without_compression_suffix(path.name).lower().endswith(".tsv"):
        return None
    return inferred_delimiter(path, known, None, encoding, "data.encoding")


def _split_quoted(
    path: Path, numbered: Iterator[tuple[int, str]], delimiter: str, first: int
) -> Iterator[tuple[int, list[str]]]:
    """numbered: lines with their ends, which quoted cells keep. first: the number of the first one."""
    last = 0

    def lines() -> Iterator[str]:
        nonlocal last
        for number, line in numbered:
            last = number
            yield line

    csv.field_size_limit(_CELL)
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _broken_csv(path, first, last, error) from error
        if record:
            yield first, record
        first = last + 1


def _broken_csv(path: Path, first: int, last: int, error: csv.Error) -> UserError:
    hint = 'quote the whole cell and double the quotes inside it: "say ""hi"""'
    if "unexpected end" in str(error) or "field limit" in str(error):
        return UserError(f"{path}:{first}: a quote is never closed", hint)
    through = f" (the row continues to line {last}: is a quote not closed?)" if last > first else ""
    return UserError(f"{path}:{first}: {error}{through}", hint)


def header_of(
    path: Path, records: Iterator[tuple[int, list[str]]], fixed: Sequence[str] | None = None
) -> tuple[int, list[str]]:
    """Returns the line of the header (0 if there is none) and the names of the columns: `fixed`, or those of the first
    record. Raises UserError if a name is repeated or the file is empty."""
    number, names = (0, list(fixed)) if fixed is not None else next(records, (0, []))
    if fixed is None and number == 0:
        raise UserError(f"{path} is empty", "use a file with a header line and rows")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{path}:{number}: the column {repeated[0]!r} is named twice", "rename one of them")
    return number, names


def ragged_error(path: Path, number: int, record: Sequence[str], names: Sequence[str], hint: str = "") -> UserError:
    """Returns the error for a record with a wrong number of cells."""
    count = f"{len(record)} column" + ("s" if len(record) != 1 else "")
    return UserError(
        f"{path}:{number}: {count}, {len(names)} expected ({name_list(names)})",
        hint or "write one row per line with as many columns as the header names",
    )


def name_list(names: Sequence[str]) -> str:
    """Returns the names of columns for an error."""
    shown_names = [name if len(name) <= 40 else f"{name[:40]}..." for name in names[:_MAX_NAMES]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(shown_names) + more


def no_column(place: str, name: str, names: Sequence[str], key: str, listed: bool = False) -> UserError:
    """Returns the error for a missing column, with the nearest name. key: the key that names the column. listed:
    whether its value is a list."""
    like = nearest(name, names)
    form = "{}=[{}]" if listed else "{}={}"
    hint = f"did you mean {form.format(key, like)}?" if like else f"name the column: {form.format(key, 'COLUMN')}"
    return UserError(f"{place}: no column {name}; there are {name_list(names) or 'none'}", hint)


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line that is not blank. Raises UserError like `read_lines` and
    `object_of`."""
    for number, line in read_lines(path):
        if line and not line.isspace():
            try:
                row = object_of(path, number, line)
            except UserError as error:
                refuse(error)
                continue
            yield number, row


class _Refused(Exception):
    """The reason and a hint for content that the parser accepts but a row must not have."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    columns = dict(pairs)
    if len(columns) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the key {repeated} is given twice", "rename or remove one of them")
    return columns


def _refuse_nan(name: str) -> object:
    raise _Refused(f"{name} is not a number in JSON", "write a finite number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_nan)  # reused; creation is slow


def object_of(path: Path, number: int, line: str) -> dict[str, object]:
    """Returns the JSON object in a line. Raises UserError if it is not an object, or has a repeated key or half a
    character."""
    try:
        row = _DECODER.decode(line)
    except _Refused as error:
        message, hint = error.args
        raise UserError(f"{path}:{number}: {message}", hint) from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number}:{error.colno}: not JSON: {error.msg}", _JSON_HINT) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise UserError(f"{path}:{number}: not readable JSON: {error}", _JSON_HINT) from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: {type(row).__name__} instead of an object", _JSON_HINT)
    if _SURROGATE.search(line):
        for name, value in row.items():
            require_characters(f"{path}:{number}", name, value)
    return row


_JSON_HINT = "write one JSON object per line"


def require_characters(place: str, name: str, value: object) -> None:
    """Raises UserError if JSON escapes contain half of a character, which files and tokenizers do not accept."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise UserError(
            f"{place}: {name} contains {half}, half of a character (a lone surrogate)",
            "write both halves, the character itself, or \\ufffd in its place",
        ) from error


def fields_of(row: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of an object by key; those of nested objects by dotted path (meta.text)."""
    fields: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{path}": inner for path, inner in fields_of(value).items()}
        else:
            fields[name] = value
    return fields


def values_of(place: str, row: Mapping[str, object], names: Sequence[str], key: str) -> list[object]:
    """Returns the values of columns in a row; a name that is not a key is a dotted path. place, key: file and line, and
    the key that names the columns, for errors. Raises UserError if a column is missing."""
    values = []
    for name in names:
        try:
            values.append(_at_path(row, name))
        except KeyError:
            raise no_column(place, name, [*fields_of(row)], key) from None
    return values


def _at_path(part: object, path: str) -> object:
    """None below a null. Raises KeyError if there is none."""
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


def text_of(place: str, names: Sequence[str], values: Sequence[object], key: str) -> str:
    """Returns the text of a row: its values joined by newlines, without null and blank ones. place, key: file and line,
    and the key that names the columns, for errors. Raises UserError if a value is not text."""
    texts = []
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{place}: {name} is {describe(value)}, not text", f"name a column of text: {key}=COLUMN")
        if value and not value.isspace():
            texts.append(value)
    return "\n".join(texts)


def text_cell(place: tuple[str, int], name: str, value: object) -> str:
    """Returns a cell with a text or a number as text. Raises UserError for any other value. place: file and line."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{place[0]}:{place[1]}: the column {name} has no text", "fill it, or remove the row")


def describe(value: object) -> str:
    """Returns the type of a JSON value, in words."""
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"
