"""A task's local files: which file is which split, and its columns."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.data.tables import read_rows
from lmtool.errors import UserError
from lmtool.tasks.configs import TaskConfig

SUFFIXES = (".tsv", ".csv", ".jsonl", ".txt")
# Columns where a row's own number may stand; the first that a file has is taken.
IDS = ("id", "idx", "index", "guid")
_DEVELOPMENT = re.compile(r"^(validation|valid|val|devel|development|dev)(?=$|[_-])")


@dataclass(frozen=True)
class Table:
    """A file's columns by name, and the (file, line) of each row."""

    columns: dict[str, list]
    origin: list[tuple[str, int]]


def canonical(split: str) -> str:
    """The one name of a split: dev for validation, valid, val and devel, also before _matched and the like."""
    return _DEVELOPMENT.sub("dev", split.lower())


def read_folder(config: TaskConfig) -> tuple[dict[str, Table], dict[str, Any]]:
    """The tables of `task.path` by canonical split, and facts: the files read, and lines skipped."""
    path = Path(str(config.path)).expanduser()
    if not path.exists():
        raise UserError(
            f"task.path={config.path} does not exist", "name a folder with train, dev and test files, or one file"
        )
    found = _splits(config, path) if path.is_dir() else {"train": path}
    tables, skipped = {}, 0
    for split, file in found.items():
        tables[split], count = _read(config, file)
        skipped += count
    facts: dict[str, Any] = {"source": str(path), "files": {split: file.name for split, file in found.items()}}
    return tables, {**facts, "skipped_rows": skipped}


def _splits(config: TaskConfig, folder: Path) -> dict[str, Path]:
    """Files by the split they are. A file named after its split goes before one that `task.files` maps to it."""
    wanted = {"train", "dev", *map(canonical, config.validation), *map(canonical, config.test)}
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    found: dict[str, Path] = {}
    for file in files:
        split = canonical(file.stem)
        if split not in wanted or file.suffix.lower() == ".txt":
            continue
        if split in found:
            raise UserError(
                f"task.path={config.path}: {found[split].name} and {file.name} are both {split}",
                "keep one of them in the folder",
            )
        found[split] = file
    for file in files:
        split = config.files.get(file.stem)
        if split is not None:
            found.setdefault(split, file)
    if "train" not in found:
        there = ", ".join(one.name for one in sorted(folder.iterdir())[:12]) or "nothing"
        raise UserError(
            f"task.path={config.path} has no train file; there is {there}",
            "name a folder with train.tsv, train.csv or train.jsonl (and dev, test), or one file to train on",
        )
    return found


def _read(config: TaskConfig, file: Path) -> tuple[Table, int]:
    names = _first_cells(file)
    known = {config.aliases.get(name, name) for name in names}
    # A data set without header lines may have one all the same, as GLUE's test files do: it names the text columns.
    header = None if known.issuperset(config.text) or file.suffix.lower() == ".jsonl" else config.header
    needed = None
    if known.issuperset((*config.text, config.label)):
        # MNLI's files are mostly parse trees that nobody reads.
        kept = {*config.text, config.label, *IDS}
        needed = [name for name in names if config.aliases.get(name, name) in kept]
    rows = read_rows(file, header=header, ragged=config.ragged_rows, needed=needed)
    return Table(rows.columns, rows.origin), rows.skipped


def _first_cells(file: Path) -> list[str]:
    """The cells of a table's first line; nothing for JSON lines, and for what the strict reader will refuse."""
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        return []
    with file.open("rb") as handle:
        line = handle.readline(1 << 20).decode("utf-8-sig", errors="replace").rstrip("\r\n")
    return next(csv.reader([line]), []) if suffix == ".csv" else line.split("\t")
