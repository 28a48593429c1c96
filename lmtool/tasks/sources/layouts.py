"""Which reader reads a data file: by its suffix and, where several formats share one, by how the file begins.

A task kind's configuration names the layouts that it reads (`TaskConfig.layouts`), the first that takes a file reads
it. To add one: a function from a path and a task's configuration to `lmtool.data.tables.Table`, and its line in
`LAYOUTS`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmtool.data.columns import read_columns, read_conllu
from lmtool.data.parquet import read_parquet
from lmtool.data.rows import delimiter_of
from lmtool.data.squad import begins_squad, read_squad
from lmtool.data.tables import Table, read_table
from lmtool.errors import UserError
from lmtool.tasks.configs import TaskConfig

# Bytes of a file that its beginning is judged by.
_HEAD = 4096


@dataclass(frozen=True)
class FileLayout:
    """suffixes: of the files it may read. read: gives the rows. begins: whether a file that begins with this text is
    one, where the suffix alone does not say; None: it does."""

    suffixes: tuple[str, ...]
    read: Callable[[Path, TaskConfig], Table]
    begins: Callable[[str], bool] | None = None

    def takes(self, file: Path) -> bool:
        """Whether it reads the file."""
        if file.suffix.lower() not in self.suffixes:
            return False
        return self.begins is None or (file.is_file() and self.begins(_beginning(file)))


def _beginning(file: Path) -> str:
    with file.open("rb") as handle:
        return handle.read(_HEAD).decode("utf-8-sig", errors="ignore")


def suffixes(config: TaskConfig) -> tuple[str, ...]:
    """Of all files that a task can read, the commonest first."""
    return tuple(dict.fromkeys(suffix for name in config.layouts for suffix in LAYOUTS[name].suffixes))


def layout_of(file: Path, config: TaskConfig) -> str | None:
    """The name of the layout that a task reads a file in; None where it cannot."""
    return next((name for name in config.layouts if LAYOUTS[name].takes(file)), None)


def read_file(file: Path, config: TaskConfig) -> Table:
    """The rows of a task's file, columns under the names that the file gives them. UserError with file:line."""
    name = layout_of(file, config)
    if name is None:
        raise UserError(
            f"{file}: {file.suffix or 'a file without suffix'} is not read by task.kind={config.kind}: "
            f"one of {', '.join(suffixes(config))}",
            "convert it; a sheet of a workbook is saved as CSV by the program that wrote it",
        )
    return LAYOUTS[name].read(file, config)


def _table(file: Path, config: TaskConfig) -> Table:
    header = None if config.header is None or _has_header(config, file) else config.header
    known = (*config.columns, config.label, *config.aliases)
    return read_table(file, header=header, skip_ragged=config.ragged_rows == "skip", known=known)


def _has_header(config: TaskConfig, file: Path) -> bool:
    """Whether a file of a data set without header lines has one all the same, as GLUE's test files do: its first line
    names the text columns."""
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".json"):
        return True
    with file.open("rb") as handle:
        line = handle.readline(1 << 20).decode("utf-8-sig", errors="replace").rstrip("\r\n")
    delimiter = delimiter_of(line, (*config.columns, config.label), config.header) if suffix == ".csv" else "\t"
    try:
        cells = next(csv.reader([line], delimiter=delimiter), []) if suffix == ".csv" else line.split("\t")
    except csv.Error:  # the strict reader will say what is wrong with it
        return False
    return {config.aliases.get(cell, cell) for cell in cells}.issuperset(config.columns)


def _columns(file: Path, config: TaskConfig) -> Table:
    return read_columns(file, config.text[0], config.label, config.header, config.ragged_rows == "skip")


def _conllu(file: Path, config: TaskConfig) -> Table:
    return read_conllu(file, config.text[0])


LAYOUTS: dict[str, FileLayout] = {
    "squad": FileLayout((".json",), lambda file, config: read_squad(file), begins_squad),
    "conll": FileLayout((".conll", ".bio", ".iob", ".iob2", ".tsv", ".txt"), _columns),
    "conllu": FileLayout((".conllu",), _conllu),
    "table": FileLayout((".tsv", ".csv", ".jsonl", ".json", ".txt"), _table),
    "parquet": FileLayout((".parquet",), lambda file, config: read_parquet(file)),
}
"""By the name that `TaskConfig.layouts` has."""
