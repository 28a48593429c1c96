"""Strict readers of labeled data: tables, words in columns (CoNLL, CoNLL-U), and SQuAD's JSON.

A malformed line is an error with its number. `datasets` 5.2 silently shifts the columns of a csv line with one too
many, reads "NA" as null, and a missing last column as null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtool.data.compressed import Broken, open_bytes, suffix_of
from lmtool.data.files import no_such_file, read_lines, refuse
from lmtool.data.rows import (
    DELIMITERS,
    describe,
    header_of,
    inferred_delimiter,
    objects,
    ragged_error,
    records,
    require_characters,
)
from lmtool.errors import UserError
from lmtool.system.files import parse_json, user_path

SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".json")


@dataclass
class Table:
    """Rows of a file. columns: the values of all rows by name. origin: (file, line) of each row. skipped: number of
    omitted lines with a wrong number of columns. metadata: other plain data about the file for the screens. index: the
    columns that are the index of a data frame of pandas."""

    columns: dict[str, list[object]]
    origin: list[tuple[str, int]] = field(default_factory=list)
    skipped: int = 0
    metadata: dict[str, object] = field(default_factory=dict)
    index: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, numbers: Sequence[int]) -> Table:
        """Returns the rows with these numbers."""
        columns = {name: [values[number] for number in numbers] for name, values in self.columns.items()}
        return Table(columns, [self.origin[number] for number in numbers], self.skipped, self.metadata, self.index)


def read_table(
    path: str | Path, header: Sequence[str] | None = None, skip_ragged: bool = False, known: Sequence[str] = ()
) -> Table:
    """Returns the rows of a file: .tsv or .txt (tabs, no quoting), .csv (RFC 4180, with an inferred delimiter), .jsonl
    or .json (one object per line). All values of tsv and csv are text, including "NA". header: column names of a file
    without a header line (not for jsonl). skip_ragged: omit and count lines with a wrong number of columns. known:
    expected column names, to infer the delimiter (`delimiter_of`).

    Raises UserError, with file and line, for malformed lines and objects, objects with different keys or types,
    repeated columns, bytes that are not UTF-8, and a file without rows.
    """
    (table,) = table_portions(path, None, header, skip_ragged, known)
    if suffix_of(Path(path)) in (".tsv", ".txt") and (place := _quoted_cell(table)):
        table.metadata["quoted_cell"] = place
    return table


def table_portions(
    path: str | Path,
    rows: int | None,
    header: Sequence[str] | None = None,
    skip_ragged: bool = False,
    known: Sequence[str] = (),
) -> Iterator[Table]:
    """Yields the rows of a file as `read_table` reads them, in tables of at most `rows` rows (None: in one table), so
    that a large file needs little memory."""
    path = user_path(path)
    if not path.is_file():
        raise no_such_file("path", str(path))
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path}: {suffix or 'no suffix'} is not one of {', '.join(SUFFIXES)}",
            "rename the file according to its content",
        )
    if suffix in (".jsonl", ".json"):
        yield from _from_objects(path, rows)
        return
    delimiter = inferred_delimiter(path, known, header) if suffix == ".csv" else None
    for table in _from_records(path, records(path, delimiter), header, skip_ragged, rows):
        if delimiter not in (None, ","):
            table.metadata["delimiter"] = DELIMITERS[delimiter]
        yield table


def _require_rows(path: Path, table: Table) -> None:
    if not table:
        error = f"no row of {len(table.columns)} columns" if table.skipped else "no rows"
        raise UserError(f"{path}: {error}", "use a file with rows below its header")


def _quoted_cell(table: Table) -> str | None:
    """Returns the place of a cell with doubled quotes inside of quotes, if all cells with quotes are quoted like this,
    as programs write them that quote the cells of a .tsv."""
    place = None
    for values in table.columns.values():
        for row, cell in enumerate(values):
            if not isinstance(cell, str) or '"' not in cell:
                continue
            inside = cell[1:-1]
            if len(cell) < 2 or cell[0] != '"' or cell[-1] != '"' or '"' in inside.replace('""', ""):
                return None
            if place is None and '""' in inside:
                place = f"{table.origin[row][0]}:{table.origin[row][1]}"
    return place


_HEADER_HINT = "give as many column names as the file has columns: task.header=[...]"


def _from_records(
    path: Path,
    lines: Iterator[tuple[int, list[str]]],
    header: Sequence[str] | None,
    skip_ragged: bool,
    rows: int | None,
) -> Iterator[Table]:
    _, names = header_of(path, lines, header)
    table = Table({name: [] for name in names})
    for number, record in lines:
        if len(table) == rows:
            yield table
            table = Table({name: [] for name in names})
        if len(record) != len(names):
            if skip_ragged:
                table.skipped += 1
                continue
            refuse(ragged_error(path, number, record, names, "" if header is None else _HEADER_HINT))
            continue
        for values, value in zip(table.columns.values(), record, strict=True):
            values.append(value)
        table.origin.append((str(path), number))
    _require_rows(path, table)
    yield table


def _from_objects(path: Path, rows: int | None) -> Iterator[Table]:
    table: Table | None = None
    first_line = 0
    kinds: dict[str, tuple[str, int]] = {}
    for number, row in objects(path):
        if table is None:
            table, first_line = Table({name: [] for name in row}), number
        elif len(table) == rows:
            yield table
            table = Table({name: [] for name in table.columns})
        error = _difference(path, number, row, table.columns, first_line, kinds)
        if error is not None:
            refuse(error)
            continue
        for name, values in table.columns.items():
            values.append(row[name])
        table.origin.append((str(path), number))
    table = Table({}) if table is None else table
    _require_rows(path, table)
    yield table


def _difference(
    path: Path,
    number: int,
    row: dict[str, object],
    keys: Collection[str],
    first_line: int,
    kinds: dict[str, tuple[str, int]],
) -> UserError | None:
    """keys, first_line: of the first object. kinds: the type and the first line of each key; the row's keys are
    added."""
    if {*keys} != row.keys():
        name = min({*keys} ^ row.keys())
        error = "lacks the" if name in keys else "has the additional"
        return UserError(
            f"{path}:{number}: the object {error} key {name}, unlike line {first_line}", "give all rows the same keys"
        )
    for name, value in row.items():
        kind = describe(value)
        before, line_before = kinds.setdefault(name, (kind, number)) if value is not None else (kind, number)
        if kind != before:
            return UserError(
                f"{path}:{number}: {name} is {kind}, but {before} on line {line_before}",
                "give all values of a column the same type",
            )
    return None


LINES = "#lines"
"""The column with the line numbers of a row's words."""
DOCUMENT = "-DOCSTART-"
CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""The ten columns of CoNLL-U."""
_SPACES = re.compile("[ \t]+")
_RANGE_OR_EMPTY = re.compile(r"\d+-\d+|\d+\.\d+")


def read_columns(
    path: Path, word: str, label: str, header: Sequence[str] | None = None, skip_ragged: bool = False
) -> Table:
    """Reads CoNLL's format, one word per line: a row per sentence, with a list of the words' values for each column.

    Columns are separated by tabs if the first word's line has one, otherwise by spaces. Blank lines and -DOCSTART-
    lines end a sentence; -DOCSTART- lines are counted. The origin is the line of a sentence's first word. word, label:
    names of the first column and, if there are several, of the last. header: names of all columns instead. skip_ragged:
    omit and count sentences with a wrong number of columns. Raises UserError, with file and line, for a wrong number of
    columns, or an empty word.
    """
    table, names, tabs, documents = Table({}), list(header or ()), None, 0
    hint = "write one word per line with the same columns, and a blank line after each sentence"
    hint = hint if header is None else _HEADER_HINT
    for sentence in _sentences(path):
        number, first = sentence[0]
        if first.startswith(DOCUMENT):
            documents += 1
            continue
        tabs = "\t" in first if tabs is None else tabs
        names = names or _names(word, label, len(_cells(first, tabs)))
        cells = [_cells(line, tabs) for _, line in sentence]
        wrong = [index for index, values in enumerate(cells) if len(values) != len(names)]
        if wrong and skip_ragged:
            table.skipped += 1
            continue
        if wrong:
            refuse(ragged_error(path, sentence[wrong[0]][0], cells[wrong[0]], names, hint))
            continue
        empty = [] if word not in names else [not values[names.index(word)] for values in cells]
        if any(empty):
            line = sentence[empty.index(True)][0]
            refuse(UserError(f"{path}:{line}: an empty word", "write the word, or remove the line"))
            continue
        _append(table, path, names, cells, [number for number, _ in sentence])
    if not table:
        raise UserError(f"{path}: no sentences", hint)
    if documents:
        table.metadata["document_lines"] = documents
    return table


def read_conllu(path: Path, word: str) -> Table:
    """Reads CoNLL-U (universaldependencies.org): a row per sentence, with a list of the words' values for each column,
    by its name in lower case, and the forms in the column `word`.

    Multiword ranges (1-2) and empty nodes (1.1) are omitted and counted. `id` is the sentences' sent_id, if all have
    one. Raises UserError, with file and line, if a line does not have ten columns or words are not numbered from 1.
    """
    table, omitted = Table({}), 0
    names = [LINES if name == "id" else word if name == "form" else name for name in CONLLU]
    ids: list[str] = []
    for sentence in _sentences(path):
        comments = [line[1:].partition("=") for _, line in sentence if line.startswith("#")]
        cells: list[list[str]] = []
        lines: list[int] = []
        for number, line in sentence:
            if line.startswith("#"):
                continue
            values = line.split("\t")
            if len(values) != len(CONLLU):
                raise ragged_error(path, number, values, CONLLU, _CONLLU_HINT)
            if _RANGE_OR_EMPTY.fullmatch(values[0]):
                omitted += 1
                continue
            if values[0] != str(len(cells) + 1):
                raise UserError(
                    f"{path}:{number}: the word's number is {values[0]}, {len(cells) + 1} expected",
                    "number the words of each sentence from 1, and put a blank line after each sentence",
                )
            cells.append(values)
            lines.append(number)
        if cells:
            _append(table, path, names, cells, lines)
            ids += [value.strip() for key, _, value in comments if key.strip() == "sent_id"]
    if not table:
        raise UserError(f"{path}: no sentences", _CONLLU_HINT)
    if len(ids) == len(table):
        table.columns["id"] = list(ids)
    if omitted:
        table.metadata["ranges_and_empty_nodes"] = omitted
    return table


_CONLLU_HINT = "use CoNLL-U: ten columns separated by tabs"


def _sentences(path: Path) -> Iterator[list[tuple[int, str]]]:
    """A -DOCSTART- line is a separate item."""
    sentence: list[tuple[int, str]] = []
    for number, line in read_lines(path):
        document = line.startswith(DOCUMENT)
        if line.strip() and not document:
            sentence.append((number, line))
            continue
        if sentence:
            yield sentence
        sentence = []
        if document:
            yield [(number, line)]
    if sentence:
        yield sentence


def _cells(line: str, tabs: bool) -> list[str]:
    return line.split("\t") if tabs else _SPACES.split(line.strip(" \t"))


def _names(word: str, label: str, count: int) -> list[str]:
    """Without a header: the word, numbered columns, the label."""
    return [word] if count == 1 else [word, *(f"column_{number}" for number in range(2, count)), label]


def _append(table: Table, path: Path, names: Sequence[str], cells: list[list[str]], lines: list[int]) -> None:
    """The line numbers replace a column named `LINES`: CoNLL-U's word numbers."""
    columns = {**dict(zip(names, zip(*cells, strict=True), strict=True)), LINES: lines}
    for name, values in columns.items():
        table.columns.setdefault(name, []).append(list(values))
    table.origin.append((str(path), lines[0]))


_BEGINNING = re.compile(r'\s*\{\s*"(version|data)"\s*:')
_HINT = 'give {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def begins_squad(beginning: str) -> bool:
    """Whether a file begins like SQuAD's JSON, with an object whose first key is `version` or `data`."""
    return _BEGINNING.match(beginning) is not None


def read_squad(path: Path) -> Table:
    """Reads SQuAD's JSON: articles with paragraphs and questions about them (Rajpurkar et al. 2016).

    A row is a question: `id`, `question`, `context` and, if there are any in the file, `answers`, a list of objects
    with `text` and `answer_start`, which is empty if `is_impossible`. The origin is the line of the question's id.
    Raises UserError with the line or the location of an error.
    """
    try:
        with open_bytes(path) as file:
            text = file.read().decode("utf-8-sig")
    except Broken as error:
        raise UserError(f"{path}: {error.reason}", error.hint) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8",
            f"convert it, for example: iconv -f windows-1252 -t utf-8 {path}",
        ) from error
    content = parse_json(text, path, "correct the file, or copy it again if it was damaged")
    table = Table({name: [] for name in ("id", "question", "context", "answers")})
    offset, line, labeled = 0, 1, 0
    for place, context, question in _questions(path, content):
        position = text.find(json.dumps(str(question["id"])), offset)
        if position >= 0:
            line, offset = line + text.count("\n", offset, position), position
        labeled += "answers" in question
        answers = [] if question.get("is_impossible") else question.get("answers")
        for name, value in (("question", question["question"]), ("context", context)):
            if not isinstance(value, str):
                message = f"{path}:{line}: {place}: {name} is {type(value).__name__}, not text"
                raise UserError(message, "correct the question")
            require_characters(f"{path}:{line}: {place}", name, value)
        values = (question["id"], question["question"], context, answers)
        for column, value in zip(table.columns.values(), values, strict=True):
            column.append(value)
        table.origin.append((str(path), line))
    if not table:
        raise UserError(f"{path}: no questions", _HINT)
    if not labeled:
        del table.columns["answers"]
    elif labeled < len(table):
        raise UserError(
            f'{path}: {len(table) - labeled:,} of {len(table):,} questions have no field "answers"',
            'add "answers" to all questions ([] if there is no answer), or to none',
        )
    return table


def _questions(path: Path, content: object) -> Iterator[tuple[str, object, dict[str, object]]]:
    for article, data in enumerate(_list_of(f"{path}", content, "data"), start=1):
        place = f"{path}: article {article}"
        for number, paragraph in enumerate(_list_of(place, data, "paragraphs"), start=1):
            inside = f"{place}, paragraph {number}"
            for question in _list_of(inside, paragraph, "qas"):
                missing = [name for name in ("id", "question") if name not in (question or ())]
                if "context" not in paragraph or missing:
                    name = missing[0] if missing else "context"
                    raise UserError(f"{inside}: no key {name}", _HINT)
                yield f"question {question['id']}", paragraph["context"], question


def _list_of(place: str, content: Any, key: str) -> list[Any]:
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, list):
        raise UserError(f"{place}: no list under the key {key}", _HINT)
    return value
