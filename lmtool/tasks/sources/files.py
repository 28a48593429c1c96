"""A task's local files: which file is which split, and its columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.data.columns import LINES
from lmtool.data.tables import Table
from lmtool.errors import UserError
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.kinds.labels import IDS
from lmtool.tasks.sources.layouts import layout_of, read_file, suffixes

_DEVELOPMENT = re.compile(r"^(validation|valid|val|devel|development|dev)(?=$|[_-])")


@dataclass(frozen=True)
class TaskTable:
    """What a task reads of a file: columns by name, the (file, line) of each row, the names of all columns it has."""

    columns: dict[str, list[Any]]
    origin: list[tuple[str, int]]
    names: tuple[str, ...] = ()


def canonical(split: str) -> str:
    """The one name of a split: dev for validation, valid, val and devel, also before _matched and the like."""
    return _DEVELOPMENT.sub("dev", split.lower())


def read_folder(config: TaskConfig, scoring: bool = False) -> tuple[dict[str, TaskTable], dict[str, Any]]:
    """The tables of `task.path` by canonical split, and facts: the files read, and lines skipped.

    scoring: there need be no train file.
    """
    path = Path(str(config.path)).expanduser()
    if not path.exists():
        raise UserError(
            f"task.path={config.path} does not exist", "name a folder with train, dev and test files, or one file"
        )
    paths = _splits(config, path, scoring) if path.is_dir() else {"train": path}
    tables: dict[str, TaskTable] = {}
    facts: dict[str, Any] = {"source": str(path), "files": {split: file.name for split, file in paths.items()}}
    facts["skipped_rows"] = 0
    for split, file in paths.items():
        tables[split], table = _read(config, file)
        facts["skipped_rows"] += table.skipped
        for name, fact in table.facts.items():  # counts of all files together
            facts[name] = facts.get(name, 0) + fact if isinstance(fact, int) else fact
    return tables, facts


def _splits(config: TaskConfig, folder: Path, scoring: bool) -> dict[str, Path]:
    """Files by the split they are. A file named after its split goes before one that `task.files` maps to it.

    UserError where a split is there and cannot be read: rows held out of train must not take its place silently.
    """
    development = {"dev", *map(canonical, config.validation)}
    wanted = {"train", *development, *map(canonical, config.test)}
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if entry.suffix.lower() in suffixes(config)]
    paths: dict[str, Path] = {}
    for file in files:
        split = canonical(file.stem)
        # A table in .txt is none by its name alone: notes are.
        if split not in wanted or (file.suffix.lower() == ".txt" and layout_of(file, config) == "table"):
            continue
        if split in paths:
            raise UserError(
                f"task.path={config.path}: {paths[split].name} and {file.name} are both {split}",
                "keep one of them in the folder",
            )
        paths[split] = file
    for file in files:
        if file.stem in config.files:
            paths.setdefault(config.files[file.stem], file)
    if "train" not in paths and not (scoring and paths):
        there = ", ".join(entry.name for entry in entries[:12]) or "nothing"
        raise UserError(
            f"task.path={config.path} has no train file; there is {there}",
            f"name a folder with {_examples(config)} (and dev, test), or one file to train on",
        )
    for split, file in paths.items():
        if not file.is_file():
            kind = "a folder" if file.is_dir() else "a dangling link" if not file.exists() else "a special file"
            raise UserError(
                f"task.path={config.path}: {file.name} is no regular file, but {kind}",
                f"put the {split} rows there, or take it out of the folder",
            )
    plain = config.validation == TaskConfig.model_fields["validation"].default
    stems = {entry: entry.name.split(".")[0].lower() for entry in entries if entry not in paths.values()}
    unread = [
        entry for entry, stem in stems.items()
        if canonical(stem) in development or (not plain and _DEVELOPMENT.match(stem))
    ]  # fmt: skip
    if unread and not development & paths.keys():
        is_table = unread[0] in files and unread[0].suffix.lower() != ".txt"
        why = (
            f"task.validation={list(config.validation)}"
            if is_table
            else f"a split is one file, {', '.join(suffixes(config))}"
        )
        mend = f"give task.validation=[{unread[0].stem}]" if is_table else "convert it"
        raise UserError(
            f"task.path={config.path}: {unread[0].name} is not read: {why}",
            f"{mend}, or take it out of the folder: a tenth of the training rows is then held out",
        )
    return paths


def _examples(config: TaskConfig) -> str:
    names = [f"train{suffix}" for suffix in suffixes(config) if suffix != ".txt"][:3]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _read(config: TaskConfig, file: Path) -> tuple[TaskTable, Table]:
    table = read_file(file, config)
    # MNLI's files are mostly parse trees that nobody reads: not kept.
    kept = {*config.text, *config.columns, config.label, *config.aliases, *IDS, LINES}
    columns = {name: values for name, values in table.columns.items() if name in kept}
    names = tuple(name for name in table.columns if name != LINES)
    return TaskTable(columns, table.origin, names), table
