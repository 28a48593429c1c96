"""Rows in and out of a command: `text=` and `input=`, and the files it writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.files import STANDARD_INPUT, read_lines, regular_file
from lmtool.data.tables import LINES, Table, read_table
from lmtool.errors import UserError
from lmtool.resolver.schema.run import AskConfig
from lmtool.runs.files import write_delimited, write_rows
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.files import read_file, suffixes

# The inputs of a command: `text=`, or the lines or the table of `input=`.


TABLES = (".tsv", ".csv", ".jsonl", ".json")
# The columns of a table where no task names others: the keys of the command.
TEXT, PAIR = "text", "pair"
Origin = list[tuple[str, int]]


def requested_table(config: AskConfig, task: TaskConfig | None) -> Table | None:
    """The table that is asked about; None for plain texts."""
    return None if config.input is None else input_table(config.input, task)


def input_table(given: str, task: TaskConfig | None) -> Table | None:
    """The table of an `input=`, in any layout that the task reads; None of plain texts."""
    suffix = Path(given).suffix.lower()
    if suffix in ("", ".txt"):
        return None
    if task is not None and suffix in suffixes(task):
        return read_file(regular_file("input", given), task)
    return read_table(regular_file("input", given)) if suffix in TABLES else None


def requested_texts(config: AskConfig) -> tuple[list[str], Origin]:
    """The texts asked about, and (file, line) of each: `text`, or the lines of `input`. UserError where there are
    none."""
    if config.text is not None:
        return [config.text], [("text", 1)]
    if config.input is None:
        raise UserError("no text is given", 'set text="..." or input=FILE (- reads standard input)')
    return input_lines(config.input)


def input_lines(given: str) -> tuple[list[str], Origin]:
    """The lines of an `input=`, empty ones left out, and (file, line) of each. UserError where there are none."""
    path = STANDARD_INPUT if given == "-" else regular_file("input", given)
    lines = [(line, (given, number)) for number, line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f"input={given}: no lines of text in it", "give one text a line")
    texts, origin = zip(*lines, strict=True)
    return list(texts), list(origin)


# The outputs of a command: JSON lines, or a table by the suffix of `output=`.


DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".json", "")


def check_output(path: str | None) -> None:
    """UserError where no format goes by the suffix of an `output=`."""
    suffix = "" if path is None else Path(path).suffix.lower()
    if suffix not in (*_LINES, *DELIMITERS):
        raise UserError(
            f"output={path}: {suffix} is not written: one of .jsonl, {', '.join(DELIMITERS)}",
            f"output={Path(str(path)).with_suffix('.jsonl')}",
        )


def write_output(path: str, rows: Iterable[JsonMapping], key: str = "output") -> int:
    """Write the file of an `output=` (or another key), masked: a table where its suffix is .csv or .tsv, else a JSON
    line a row. The number of rows. UserError naming the key where the disk refuses."""
    file, written = Path(path).expanduser(), 0

    def numbered_rows() -> Iterator[JsonMapping]:
        nonlocal written
        for row in rows:
            yield row
            written += 1

    try:
        delimiter = DELIMITERS.get(file.suffix.lower())
        typed = key == "output"  # else it lies in a folder that was
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
    """Records with all columns of their table, in its order, before the predictions.

    task_columns: the task's names of the table's columns, by their names in the table. probabilities: keep those of
    all classes. flat: for a format without nesting: a column a class, lists as words.
    """
    columns = {} if table is None else {name: values for name, values in table.columns.items() if name != LINES}
    clashing = [name for name in ("prediction", "score") if name in columns]
    if clashing:
        raise UserError(
            f"{table.origin[0][0]} has a column {clashing[0]} already" if table else "", "rename it in a copy"
        )
    for number, record in enumerate(records):
        joined = dict(record)
        probabilities_of_row = joined.pop("probabilities", None)
        if table is not None:
            table_values = {name: values[number] for name, values in columns.items()}
            # The table's columns come before the record's copies of them.
            input_columns = {
                *table_values,
                *(task_columns.get(name, name) for name in table_values),
                "id",
                "split",
                "gold",
            }
            joined = {**table_values, **{name: value for name, value in joined.items() if name not in input_columns}}
        if probabilities and probabilities_of_row is not None:
            joined |= {f"probability_{label}": value for label, value in probabilities_of_row.items()} if flat else {
                "probabilities": probabilities_of_row
            }  # fmt: skip
        yield {name: _cell(value) for name, value in joined.items()} if flat else joined


def _cell(value: Any) -> Any:
    """A value of a table's cell: a list as its items with spaces between them."""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
