"""Input and output of commands that use a trained model: texts from `text=` and `input=`, and files of `output=`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.compressed import suffix_of
from lmtool.data.files import STANDARD_INPUT, read_lines, regular_file
from lmtool.data.tables import LINES, Table, read_table, table_portions
from lmtool.errors import UserError
from lmtool.learners.base import Responder
from lmtool.resolver.commands import AskConfig
from lmtool.runs.files import write_delimited, write_rows
from lmtool.system.files import sha256, user_path
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.files import file_portions, read_file, suffixes

TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")
# The columns of a table that is read without a task, named as the keys text= and pair=.
TEXT, PAIR = "text", "pair"
Origin = list[tuple[str, int]]
"""The file and the line of each text, for messages."""


@dataclass(frozen=True)
class Input:
    """What a command reads: a table, or plain texts. origin: the file and the line of each row, for messages."""

    table: Table | None
    texts: list[str]
    origin: Origin

    def __len__(self) -> int:
        return len(self.origin)


def requested_input(config: AskConfig, task: TaskConfig | None) -> Input:
    """Reads the table or the texts of a command, from `text=` or `input=`. Raises UserError if there are none."""
    table = None if config.input is None else input_table(config.input, task)
    return Input(None, *_requested_texts(config)) if table is None else _of_table(table)


def input_portions(file: str, task: TaskConfig | None, rows: int) -> Iterator[Input]:
    """Yields what `requested_input` reads from a file, in portions of at most `rows` rows. A file with several lines
    per row is one portion. Raises UserError, with file and line, at the first row that cannot be read; if all texts are
    blank, at the end."""
    suffix = suffix_of(Path(file))
    if suffix in ("", ".txt"):
        lines, has_text = read_lines(regular_file("input", file)), False
        while portion := list(islice(lines, rows)):
            texts = [line for _, line in portion]
            has_text = has_text or any(map(str.strip, texts))
            yield Input(None, texts, [(file, number) for number, _ in portion])
        if not has_text:
            raise _no_text(file)
    elif task is not None and suffix in suffixes(task):
        yield from map(_of_table, file_portions(regular_file("input", file), task, rows))
    elif suffix in TABLE_SUFFIXES:
        yield from map(_of_table, table_portions(regular_file("input", file), rows))
    else:
        yield Input(None, *input_lines(file))


def _of_table(table: Table) -> Input:
    return Input(table, [], table.origin)


def file_digest(file: str) -> str:
    """Returns the sha256 of a file of `input=`."""
    return sha256(regular_file("input", file))


def input_table(file: str, task: TaskConfig | None) -> Table | None:
    """Reads the table in a file, in any layout that the task reads; None for a file of plain texts."""
    suffix = suffix_of(Path(file))
    if suffix in ("", ".txt"):
        return None
    if task is not None and suffix in suffixes(task):
        return read_file(regular_file("input", file), task)
    return read_table(regular_file("input", file)) if suffix in TABLE_SUFFIXES else None


def _requested_texts(config: AskConfig) -> tuple[list[str], Origin]:
    if config.text is not None:
        return [config.text], [("text", 1)]
    if config.input is None:
        raise UserError("neither text= nor input= is set", 'set text="..." or input=FILE (- reads standard input)')
    return input_lines(config.input)


def input_lines(file: str) -> tuple[list[str], Origin]:
    """Returns the lines of a file and their origins: text i is line i, so blank lines are texts too. Raises UserError
    if all are blank."""
    path = STANDARD_INPUT if file == "-" else regular_file("input", file)
    texts = [line for _, line in read_lines(path)]
    if not any(map(str.strip, texts)):
        raise _no_text(file)
    return texts, [(file, number) for number in range(1, len(texts) + 1)]


def _no_text(file: str) -> UserError:
    return UserError(f"input={file} has no text", "write one text per line")


def columns_of(responder: Responder, texts: list[str], pairs: list[str] | None) -> dict[str, list[str]]:
    """Returns texts, and optionally second texts, by the names of the responder's columns. Raises UserError if they do
    not fit."""
    names = ", ".join(responder.columns)
    if len(responder.columns) == 1 and pairs is not None:
        raise UserError(
            f"task={responder.learner.config.name} reads one text, {names}, but pair= is a second one", "omit pair="
        )
    if len(responder.columns) == 2 and pairs is None:
        raise UserError(
            f"task={responder.learner.config.name} reads pairs: {names}",
            'set text="..." pair="...", or input=FILE with both columns',
        )
    return dict(zip(responder.columns, (texts, pairs or []), strict=False))


DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_SUFFIXES = (".jsonl", ".json", "")


def check_output(path: str | None) -> None:
    """Raises UserError if the suffix of an `output=` does not belong to a supported format."""
    suffix = "" if path is None else Path(path).suffix.lower()
    if suffix not in (*_JSON_SUFFIXES, *DELIMITERS):
        raise UserError(
            f"output={path}: files with the suffix {suffix} cannot be written; allowed: .jsonl, "
            f"{', '.join(DELIMITERS)}",
            f"set output={Path(str(path)).with_suffix('.jsonl')}",
        )


def write_output(path: str, rows: Iterable[JsonMapping], key: str = "output") -> int:
    """Writes rows to a file, with secrets masked: a table for .csv and .tsv, otherwise one JSON line per row. key: the
    key that names the file or, unless it is `output`, only its folder, which is created if needed. Returns the number
    of rows. Raises UserError if the file cannot be written."""
    file, rows_written = user_path(path), 0

    def counted_rows() -> Iterator[JsonMapping]:
        nonlocal rows_written
        for row in rows:
            yield row
            rows_written += 1

    try:
        delimiter = DELIMITERS.get(file.suffix.lower())
        named_by_user = key == "output"  # with another key the user named only the folder
        if not named_by_user:
            file.parent.mkdir(parents=True, exist_ok=True)
        if delimiter is None:
            write_rows(file, counted_rows(), named_by_user)
        else:
            write_delimited(file, counted_rows(), delimiter, named_by_user)
    except OSError as error:
        raise UserError(f"{key}={path}: {error.strerror}", f"use another {key}=") from error
    return rows_written


def join_columns(
    table: Table | None,
    records: Iterable[JsonMapping],
    task_columns: Mapping[str, str],
    read: Collection[str],
    probabilities: bool,
    flat: bool,
) -> Iterator[JsonObject]:
    """Yields the rows of an output file: the columns of the input table, then the model's predictions.

    task_columns: the task's name of each column of the table, by the column's name there. read: the columns that the
    model reads, by the task's names. probabilities: whether to include the probabilities of all classes. flat: whether
    the format has no nested values; then each class has a column, and lists are joined by spaces. Raises UserError if a
    column of the table has the name of a column of predictions.
    """
    columns = {} if table is None else {name: values for name, values in table.columns.items() if name != LINES}
    repeated = {"id", "split", "gold", *read}
    for number, record in enumerate(records):
        row = dict(record)
        probabilities_of_row = row.pop("probabilities", None)
        if probabilities and probabilities_of_row is not None and flat:
            row |= {f"probability_{label}": value for label, value in probabilities_of_row.items()}
        elif probabilities and probabilities_of_row is not None:
            row["probabilities"] = probabilities_of_row
        if table is not None:
            clashing = [name for name in row if name in columns and name not in repeated]
            if clashing:
                raise UserError(
                    f"{table.origin[0][0]} already has a column {clashing[0]}, which the predictions need",
                    "rename this column in a copy of the file",
                )
            table_values = {name: values[number] for name, values in columns.items()}
            # The record repeats columns of the table; only the table's values are retained.
            input_columns = {*table_values, *(task_columns.get(name, name) for name in table_values)}
            input_columns |= {"id", "split", "gold"}
            row = {**table_values, **{name: value for name, value in row.items() if name not in input_columns}}
        if flat:
            for name, value in row.items():
                row[name] = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        yield row
