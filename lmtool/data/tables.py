"""Rows of labeled data, read strictly: tables, words in columns (CoNLL), and SQuAD's JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtool.data.files import no_such_file, read_lines, refuse
from lmtool.data.rows import DELIMITERS, described, header_of, objects, ragged, records, seen_delimiter
from lmtool.errors import UserError

# Rows of labeled data, read strictly: a line that does not fit is named, never shifted or turned into nothing.
#
# (`datasets` 5.2 reads a csv line of one column too many by shifting all columns, "NA" as nothing, and a missing last
# column as nothing, each silently.)


SUFFIXES = (".tsv", ".txt", ".csv", ".jsonl", ".json")


@dataclass
class Table:
    """columns: by name, one value a row, all of the same length. origin: (file, line) of each row. skipped: lines left
    out because their number of columns was wrong, where that was allowed. metadata: what else the reader says of the
    file, for the screens: counts, and words."""

    columns: dict[str, list[object]]
    origin: list[tuple[str, int]] = field(default_factory=list)
    skipped: int = 0
    metadata: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.origin)

    def take(self, numbers: Sequence[int]) -> Table:
        """Some of the rows, by number."""
        columns = {name: [values[number] for number in numbers] for name, values in self.columns.items()}
        return Table(columns, [self.origin[number] for number in numbers], self.skipped, self.metadata)


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
            table.metadata["delimiter"] = DELIMITERS[delimiter]
    if not table:
        error = f"no row of {len(table.columns)} columns" if table.skipped else "no rows"
        raise UserError(f"{path}: {error}", "use a file with rows below its header")
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
            refuse(ragged(path, number, record, names, fixed=header is not None))
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
        error = _unlike(path, number, row, table, kinds)
        if error is not None:
            refuse(error)
            continue
        for name, values in table.columns.items():
            values.append(row[name])
        table.origin.append((str(path), number))
    return table if table is not None else Table({})


def _unlike(
    path: Path, number: int, row: dict[str, object], table: Table, kinds: dict[str, tuple[str, int]]
) -> UserError | None:
    """The error of an object that has other keys than the first, or other kinds of values. kinds: of each key, and the
    line that has it first; those of the row are entered."""
    if table.columns.keys() != row.keys():
        name = min(table.columns.keys() ^ row.keys())
        error = "has no" if name in table.columns else "has a further"
        first = table.origin[0][1]
        return UserError(
            f"{path}:{number}: the object {error} key {name}, other than line {first}", "give all rows the same keys"
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


# Sentences of words in columns, read strictly: CoNLL's, a word a line, and CoNLL-U (universaldependencies.org).


LINES = "#lines"
"""The column of the lines that the words of a row stand on."""
DOCUMENT = "-DOCSTART-"
CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
"""The ten columns of CoNLL-U."""
_SPACES = re.compile("[ \t]+")
_SPANNING = re.compile(r"\d+-\d+|\d+\.\d+")


def read_columns(
    path: Path, word: str, label: str, header: Sequence[str] | None = None, skip_ragged: bool = False
) -> Table:
    """A row a sentence: lists of words, of labels, and of what further columns hold, by name.

    Columns are divided by tabs where the first word's line has one, else by spaces. A line of nothing but white space
    ends a sentence, and so does a -DOCSTART- line, which is counted. header: the columns' names in order; None: the
    first is `word`, the last `label`; a file of one column has no labels. skip_ragged: leave out and count sentences
    that have a line of another number of columns. The origin is the line of a sentence's first word.

    UserError with file:line: another number of columns than the first line has, or an empty word.
    """
    table, names, tabs, documents = Table({}), list(header or ()), None, 0
    for sentence in _sentences(path):
        number, first = sentence[0]
        if first.startswith(DOCUMENT):
            documents += 1
            continue
        tabs = "\t" in first if tabs is None else tabs
        names = names or _names(word, label, len(_cells(first, tabs)))
        cells = [_cells(line, tabs) for _, line in sentence]
        ragged = [place for place, values in enumerate(cells) if len(values) != len(names)]
        if ragged and skip_ragged:
            table.skipped += 1
            continue
        if ragged:
            refuse(_wrong_count(path, sentence[ragged[0]][0], cells[ragged[0]], names, header is not None))
            continue
        empty = [] if word not in names else [not values[names.index(word)] for values in cells]
        if any(empty):
            line = sentence[empty.index(True)][0]
            refuse(UserError(f"{path}:{line}: an empty word", "write the word, or take the line out"))
            continue
        _append(table, path, names, cells, [number for number, _ in sentence])
    if not table:
        raise UserError(f"{path}: no sentences", "use a file of a word a line and a blank line behind each sentence")
    if documents:
        table.metadata["document_lines"] = documents
    return table


def read_conllu(path: Path, word: str) -> Table:
    """A row a sentence: lists of what the columns hold by their names in lower case, the forms under `word`.

    Ranges of words written as one (1-2) and empty nodes (1.1) are left out and counted. `id` is the sentence's
    sent_id, where all have one. UserError with file:line where a line has not ten columns or words are not numbered 1,
    2, ...
    """
    table, left_out = Table({}), 0
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
                raise _wrong_count(path, number, values, CONLLU, False)
            if _SPANNING.fullmatch(values[0]):
                left_out += 1
                continue
            if values[0] != str(len(cells) + 1):
                raise UserError(
                    f"{path}:{number}: the word's number is {values[0]}, {len(cells) + 1} expected",
                    "number the words of each sentence from 1, and put a blank line behind each",
                )
            cells.append(values)
            lines.append(number)
        if cells:
            _append(table, path, names, cells, lines)
            ids += [value.strip() for key, _, value in comments if key.strip() == "sent_id"]
    if not table:
        raise UserError(f"{path}: no sentences", "use a file in CoNLL-U: ten columns divided by tabs")
    if len(ids) == len(table):
        table.columns["id"] = list(ids)
    if left_out:
        table.metadata["ranges_and_empty_nodes"] = left_out
    return table


def _sentences(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Runs of lines with their numbers, divided by lines of white space. A -DOCSTART- line is a run of its own."""
    run: list[tuple[int, str]] = []
    for number, line in read_lines(path):
        document = line.startswith(DOCUMENT)
        if line.strip() and not document:
            run.append((number, line))
            continue
        if run:
            yield run
        run = []
        if document:
            yield [(number, line)]
    if run:
        yield run


def _cells(line: str, tabs: bool) -> list[str]:
    return line.split("\t") if tabs else _SPACES.split(line.strip(" \t"))


def _names(word: str, label: str, count: int) -> list[str]:
    """The first column is the word, the last the label; those between go by their number from 1."""
    return [word] if count == 1 else [word, *(f"column_{number}" for number in range(2, count)), label]


def _append(table: Table, path: Path, names: Sequence[str], cells: list[list[str]], lines: list[int]) -> None:
    """A sentence as a row. Its lines take the place of a column of that name: CoNLL-U's numbers of words."""
    columns = {**dict(zip(names, zip(*cells, strict=True), strict=True)), LINES: lines}
    for name, values in columns.items():
        table.columns.setdefault(name, []).append(list(values))
    table.origin.append((str(path), lines[0]))


def _wrong_count(path: Path, number: int, values: list[str], names: Sequence[str], fixed: bool) -> UserError:
    hint = "write a word a line, with the same columns on each, and a blank line behind each sentence"
    if fixed:
        hint = "name all columns of the file in order: task.header=[...]"
    count = f"{len(values)} column" + ("s" if len(values) != 1 else "")
    return UserError(f"{path}:{number}: {count}, {len(names)} expected ({', '.join(names)})", hint)


# SQuAD's JSON: articles, their paragraphs, and questions about each (Rajpurkar et al. 2016), as rows of a table.


_BEGINNING = re.compile(r'\s*\{\s*"(version|data)"\s*:')
_FORM = 'give {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...]}]}]}]}'


def begins_squad(beginning: str) -> bool:
    """Whether a file that begins so is one: an object of `version` and `data`."""
    return _BEGINNING.match(beginning) is not None


def read_squad(path: Path) -> Table:
    """A row a question: `id`, `question`, `context` and, where the file has any, `answers`: a list of objects of `text`
    and `answer_start`, empty where `is_impossible`. The origin is the line on which the question's id stands.

    UserError with the line, or the place within the object, of what is not as it should be.
    """
    text = _text_of(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(f"{where}: not JSON: {error.msg}", "copy the file again") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON: {error}", "copy the file again") from error
    table = Table({name: [] for name in ("id", "question", "context", "answers")})
    place, line, labelled = 0, 1, 0
    for where, context, question in _questions(path, content):
        number = str(question["id"])
        position = text.find(json.dumps(number), place)
        if position >= 0:
            line, place = line + text.count("\n", place, position), position
        labelled += "answers" in question
        answers = [] if question.get("is_impossible") else question.get("answers")
        for name, value in (("question", question["question"]), ("context", context)):
            _require_text(f"{path}:{line}: {where}", name, value)
        values = (question["id"], question["question"], context, answers)
        for column, value in zip(table.columns.values(), values, strict=True):
            column.append(value)
        table.origin.append((str(path), line))
    if not table:
        raise UserError(f"{path}: no questions in it", _FORM)
    if not labelled:
        del table.columns["answers"]
    elif labelled < len(table):
        raise UserError(
            f"{path}: {len(table) - labelled:,} of {len(table):,} questions have no answers",
            "give all, or none, answers",
        )
    return table


def _questions(path: Path, content: object) -> Iterator[tuple[str, object, dict[str, object]]]:
    """Where each question stands, its context, and the question. UserError where a level is not as it should be."""
    for article, data in enumerate(_list(f"{path}", content, "data"), start=1):
        where = f"{path}: article {article}"
        for number, paragraph in enumerate(_list(where, data, "paragraphs"), start=1):
            inside = f"{where}, paragraph {number}"
            for question in _list(inside, paragraph, "qas"):
                missing = [name for name in ("id", "question") if name not in (question or ())]
                if "context" not in paragraph or missing:
                    name = missing[0] if missing else "context"
                    raise UserError(f"{inside}: no key {name}", _FORM)
                yield f"question {question['id']}", paragraph["context"], question


def _list(where: str, content: Any, key: str) -> list[Any]:
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, list):
        raise UserError(f"{where}: no list {key}", _FORM)
    return value


def _require_text(where: str, name: str, value: object) -> None:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} is {type(value).__name__}, not a text", "correct the question")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise UserError(
            f"{where}: {name} holds {half}, half of a character (a lone surrogate)", "write \\ufffd in its place"
        ) from error


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8",
            f"convert it, for example: iconv -f windows-1252 -t utf-8 {path}",
        ) from error
