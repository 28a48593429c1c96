"""What a command is asked about: `text=`, or the lines or the table of `input=`."""

from __future__ import annotations

from pathlib import Path

from lmtool.data.files import STANDARD_INPUT, read_lines, regular_file
from lmtool.data.tables import Table, read_table
from lmtool.errors import UserError
from lmtool.schema.run import AskConfig
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.sources.layouts import read_file, suffixes

TABLES = (".tsv", ".csv", ".jsonl", ".json")
# The columns of a table where no task names others: the keys of the command.
TEXT, PAIR = "text", "pair"
Origin = list[tuple[str, int]]


def asked_table(config: AskConfig, task: TaskConfig | None) -> Table | None:
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


def asked_texts(config: AskConfig) -> tuple[list[str], Origin]:
    """The texts asked about, and (file, line) of each: `text`, or the lines of `input`. UserError where there are
    none."""
    if config.text is not None:
        return [config.text], [("text", 1)]
    if config.input is None:
        raise UserError("no text is given", 'give text="..." or input=FILE (- reads standard input)')
    return input_lines(config.input)


def input_lines(given: str) -> tuple[list[str], Origin]:
    """The lines of an `input=`, empty ones left out, and (file, line) of each. UserError where there are none."""
    path = STANDARD_INPUT if given == "-" else regular_file("input", given)
    lines = [(line, (given, number)) for number, line in read_lines(path) if line.strip()]
    if not lines:
        raise UserError(f"input={given}: no lines of text in it", "give one text a line")
    texts, origin = zip(*lines, strict=True)
    return list(texts), list(origin)
