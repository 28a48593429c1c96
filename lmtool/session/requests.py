"""Rows in and out of a command: `text=` and `input=`, and the files it writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.files import STANDARD_INPUT, read_lines, regular_file
from lmtool.data.tables import LINES, Table, read_table
from lmtool.errors import UserError
from lmtool.resolver.schema.use import AskConfig
from lmtool.runs.files import write_delimited, write_rows
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.files import read_file, suffixes

TABLES = (".tsv", ".csv", ".jsonl", ".json")
# The columns of a table unless a task names others: the keys of the command.
TEXT, PAIR = "text", "pair"
Origin = list[tuple[str, int]]


def requested_table(config: AskConfig, task: TaskConfig | None) -> Table | None:
    """The table of a command's `input=`; None for plain texts."""
    return None if config.input is None else input_table(config.input, task)


def input_table(file: str, task: TaskConfig | None) -> Table | None:
    """The table of an `input=`, in any layout that the task reads; None for plain texts."""
    suffix = Path(file).suffix.lower()
    if suffix in ("", ".txt"):
        return None
    if task is not None and suffix in suffixes(task):
        return read_file(regular_file("input", file), task)
    return read_table(regular_file("input", file)) if suffix in TABLES else None


def requested_texts(config: AskConfig) -> tuple[list[str], Origin]:
    """The texts of a command, `text=` or the lines of `input=`, and (file, line) of each. UserError if there are
    none."""
    if config.text is not None:
        return [config.text], [("text", 1)]
    if config.input is None:
        raise UserError("the command has no text", 'set text="..." or input=FILE (- reads standard input)')
    return input_lines(config.input)


def input_lines(file: str) -> tuple[list[str], Origin]:
    """The nonempty lines of an `input=`, and (file, line) of each. UserError if there are none."""
    path = STANDARD_INPUT if file == "-" else regular_file("input", file)
    lines = [(line, (file, number)) for number, line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f"input={file} has no text", "write one text per line")
    texts, origin = zip(*lines, strict=True)
    return list(texts), list(origin)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".json", "")


def check_output(path: str | None) -> None:
    """Raise UserError if no format has the suffix of an `output=`."""
    suffix = "" if path is None else Path(path).suffix.lower()
    if suffix not in (*_LINES, *DELIMITERS):
        raise UserError(
            f"output={path}: no format has the suffix {suffix}; allowed: .jsonl, {', '.join(DELIMITERS)}",
            f"set output={Path(str(path)).with_suffix('.jsonl')}",
        )


def write_output(path: str, rows: Iterable[JsonMapping], key: str = "output") -> int:
    """Write the file of an `output=` (or another key), with secrets masked: a table for .csv and .tsv, otherwise one
    JSON line per row. Returns the number of rows. UserError with the key if the file cannot be written."""
    file, written = Path(path).expanduser(), 0

    def numbered_rows() -> Iterator[JsonMapping]:
        nonlocal written
        for row in rows:
            yield row
            written += 1

    try:
        delimiter = DELIMITERS.get(file.suffix.lower())
        typed = key == "output"  # otherwise the user named its folder
        if not typed:
            file.parent.mkdir(parents=True, exist_ok=True)
        if delimiter is None:
            write_rows(file, numbered_rows(), typed)
        else:
            write_delimited(file, numbered_rows(), delimiter, typed)
    except OSError as error:
        raise UserError(f"{key}={path}: {error.strerror}", f"use another {key}=") from error
    return written


def join_columns(
    table: Table | None,
    records: Iterable[JsonMapping],
    task_columns: Mapping[str, str],
    probabilities: bool,
    flat: bool,
) -> Iterator[JsonObject]:
    """Put the columns of the table before the predictions of each record.

    Args:
        table: The table of the inputs, or None.
        records: One record per row.
        task_columns: The task's names of the table's columns, by their names in the table.
        probabilities: Whether to include the probabilities of all classes.
        flat: Whether the format has no nesting: one column per class, and lists joined by spaces.

    Raises:
        UserError: If the table has a column of the same name as a prediction's.
    """
    columns = {} if table is None else {name: values for name, values in table.columns.items() if name != LINES}
    clashing = [name for name in ("prediction", "score") if name in columns]
    if clashing:
        raise UserError(
            f"{table.origin[0][0]} already has a column {clashing[0]}" if table else "", "rename it in a copy"
        )
    for number, record in enumerate(records):
        joined = dict(record)
        probabilities_of_row = joined.pop("probabilities", None)
        if table is not None:
            table_values = {name: values[number] for name, values in columns.items()}
            # The table's columns come before the record's copies of them.
            input_columns = {*table_values, *(task_columns.get(name, name) for name in table_values)}
            input_columns |= {"id", "split", "gold"}
            joined = {**table_values, **{name: value for name, value in joined.items() if name not in input_columns}}
        if probabilities and probabilities_of_row is not None and flat:
            joined |= {f"probability_{label}": value for label, value in probabilities_of_row.items()}
        elif probabilities and probabilities_of_row is not None:
            joined["probabilities"] = probabilities_of_row
        if flat:
            for name, value in joined.items():
                joined[name] = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        yield joined
