"""Reads the rows of a task: from local files in several layouts, and from data sets of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.base import JsonObject
from lmtool.data.compressed import Broken, open_bytes, stem_of, suffix_of
from lmtool.data.configs import is_cached
from lmtool.data.hub_source import hub_access
from lmtool.data.parquet import names_of_classes, read_parquet
from lmtool.data.rows import inferred_delimiter, records
from lmtool.data.tables import (
    LINES,
    Table,
    begins_squad,
    read_columns,
    read_conllu,
    read_squad,
    read_table,
    table_portions,
)
from lmtool.errors import UserError
from lmtool.system.files import user_path
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.kinds.labels import IDS

# Bytes read to recognize a format.
_BEGINNING_BYTES = 4096
_DEVELOPMENT_NAME = re.compile(r"^(validation|valid|val|devel|development|dev)(?=$|[_-])")


@dataclass(frozen=True)
class FileLayout:
    """A layout of files: how it is recognized and read. suffixes: the suffixes of its files. read: returns the rows of
    a file. recognizes: whether a file that begins with a text has this layout; None: the suffix decides."""

    suffixes: tuple[str, ...]
    read: Callable[[Path, TaskConfig], Table]
    recognizes: Callable[[str], bool] | None = None

    def matches(self, file: Path) -> bool:
        """Whether a file has this layout."""
        if suffix_of(file) not in self.suffixes:
            return False
        return self.recognizes is None or (file.is_file() and self.recognizes(beginning(file)))


def beginning(file: Path) -> str:
    """Returns the first characters of a file, from which its format is recognized; "" if it cannot be decompressed,
    which the reader of all rows reports."""
    try:
        with open_bytes(file) as handle:
            return handle.read(_BEGINNING_BYTES).decode("utf-8-sig", errors="ignore")
    except Broken:
        return ""


def suffixes(config: TaskConfig) -> tuple[str, ...]:
    """Returns the suffixes that a task can read, the most common first."""
    return tuple(dict.fromkeys(suffix for name in config.layouts for suffix in LAYOUTS[name].suffixes))


def layout_of(file: Path, config: TaskConfig) -> str | None:
    """Returns the name of the layout in which a task reads a file; None if it cannot."""
    return next((name for name in config.layouts if LAYOUTS[name].matches(file)), None)


def read_file(file: Path, config: TaskConfig) -> Table:
    """Reads a file of a task. Columns have the names that the file gives them. Raises UserError with file:line."""
    name = layout_of(file, config)
    if name is None:
        raise UserError(
            f"{file}: task.kind={config.kind} reads {', '.join(suffixes(config))}, not "
            f"{suffix_of(file) or 'a file without suffix'}",
            "convert the file to one of these; save a sheet of a workbook as CSV",
        )
    return LAYOUTS[name].read(file, config)


def file_portions(file: Path, config: TaskConfig, rows: int) -> Iterator[Table]:
    """Yields the rows of a file of a task in tables of at most `rows` rows; a file of another layout than a table is
    one portion. See `read_file`."""
    if layout_of(file, config) == "table":
        yield from table_portions(file, rows, **_table_options(file, config))
    else:
        yield read_file(file, config)


def _table_options(file: Path, config: TaskConfig) -> dict[str, Any]:
    header = None if config.header is None or _has_header(config, file) else config.header
    column_names = (*config.columns, config.label, *config.aliases)
    return {"header": header, "skip_ragged": config.ragged_rows == "skip", "known": column_names}


def _has_header(config: TaskConfig, file: Path) -> bool:
    """The first line may name the text columns although `task.header` is set (GLUE's test files)."""
    suffix = suffix_of(file)
    if suffix in (".jsonl", ".json"):
        return True
    try:
        known = (*config.columns, config.label)
        delimiter = inferred_delimiter(file, known, config.header) if suffix == ".csv" else None
        _, cells = next(records(file, delimiter), (0, []))
    except UserError:  # the reader of all rows reports the problem
        return False
    return {config.aliases.get(cell, cell) for cell in cells}.issuperset(config.columns)


def _read_conll_file(file: Path, config: TaskConfig) -> Table:
    return read_columns(file, config.text[0], config.label, config.header, config.ragged_rows == "skip")


LAYOUTS: dict[str, FileLayout] = {
    "squad": FileLayout((".json",), lambda file, config: read_squad(file), begins_squad),
    "conll": FileLayout((".conll", ".bio", ".iob", ".iob2", ".tsv", ".txt"), _read_conll_file),
    "conllu": FileLayout((".conllu",), lambda file, config: read_conllu(file, config.text[0])),
    "table": FileLayout(
        (".tsv", ".csv", ".jsonl", ".json", ".txt"),
        lambda file, config: read_table(file, **_table_options(file, config)),
    ),
    "parquet": FileLayout((".parquet",), lambda file, config: read_parquet(file)),
}
"""The layouts by name. `TaskConfig.layouts` lists the names that a kind supports; the first match reads a file."""


@dataclass(frozen=True)
class TaskTable:
    """A task's view of a file: columns by name, the (file, line) of each row, and all column names."""

    columns: dict[str, list[object]]
    origin: list[tuple[str, int]]
    names: tuple[str, ...] = ()


def canonical(split: str) -> str:
    """Returns the canonical name of a split: dev for validation, valid, val and devel, also before a suffix like
    _matched."""
    return _DEVELOPMENT_NAME.sub("dev", split.lower())


def read_folder(config: TaskConfig, scoring: bool = False) -> tuple[dict[str, TaskTable], JsonObject]:
    """Returns the tables of `task.path` by canonical split, and metadata: the files read, and lines skipped.

    scoring: no train file is required.
    """
    path = user_path(str(config.path))
    if not path.exists():
        raise UserError(
            f"task.path={config.path} does not exist", "name a folder with train, dev and test files, or one file"
        )
    paths = _splits(config, path, scoring) if path.is_dir() else {"train": path}
    # MNLI's files are mostly parse trees; unread columns are dropped.
    columns_read = {*config.text, *config.columns, config.label, *config.further_columns, *config.aliases, *IDS, LINES}
    tables: dict[str, TaskTable] = {}
    names = {split: file.name for split, file in paths.items()}
    metadata: JsonObject = {"source": str(path), "files": names, "skipped_rows": 0}
    for split, file in paths.items():
        table = read_file(file, config)
        columns = {name: values for name, values in table.columns.items() if name in columns_read}
        tables[split] = TaskTable(columns, table.origin, tuple(name for name in table.columns if name != LINES))
        metadata["skipped_rows"] += table.skipped
        for name, value in table.metadata.items():  # totals over all files
            metadata[name] = metadata.get(name, 0) + value if isinstance(value, int) else value
    return tables, metadata


def _splits(config: TaskConfig, folder: Path, scoring: bool) -> dict[str, Path]:
    """A split that cannot be read is an error: rows held out of train must not replace it silently."""
    development = {"dev", *map(canonical, config.validation)}
    configured = {"train", *development, *map(canonical, config.test)}
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if suffix_of(entry) in suffixes(config)]
    paths: dict[str, Path] = {}
    for file in files:
        split = canonical(stem_of(file))
        # A .txt file named after a split is not read as a table: it may be notes.
        if split not in configured or (suffix_of(file) == ".txt" and layout_of(file, config) == "table"):
            continue
        if split in paths:
            raise UserError(
                f"task.path={config.path}: {paths[split].name} and {file.name} are both {split}",
                "keep one of them in the folder",
            )
        paths[split] = file
    for file in files:
        if stem_of(file) in config.files:
            paths.setdefault(config.files[stem_of(file)], file)
    if "train" not in paths and not (scoring and paths):
        entries_text = ", ".join(entry.name for entry in entries[:12]) or "nothing"
        raise UserError(
            f"task.path={config.path} has no train file; there is {entries_text}",
            f"name a folder with {_examples(config)} (and dev, test), or one file to train on",
        )
    for split, file in paths.items():
        if not file.is_file():
            kind = "a folder" if file.is_dir() else "a dangling link" if not file.exists() else "a special file"
            raise UserError(
                f"task.path={config.path}: {file.name} is not a regular file, but {kind}",
                f"replace {file.name} with a file that has the {split} rows, or remove it",
            )
    is_default = config.validation == TaskConfig.model_fields["validation"].default
    stems = {entry: entry.name.split(".")[0].lower() for entry in entries if entry not in paths.values()}
    ignored = [
        entry
        for entry, stem in stems.items()
        if canonical(stem) in development or (not is_default and _DEVELOPMENT_NAME.match(stem))
    ]
    if ignored and not development & paths.keys():
        is_table = ignored[0] in files and suffix_of(ignored[0]) != ".txt"
        reason = f"a split is one file, {', '.join(suffixes(config))}"
        remedy = "convert it"
        if is_table:
            reason = f"task.validation={list(config.validation)}"
            remedy = f"set task.validation=[{stem_of(ignored[0])}]"
        raise UserError(
            f"task.path={config.path}: {ignored[0].name} is not read: {reason}",
            f"{remedy}, or remove it from the folder: a tenth of the training rows is then held out",
        )
    return paths


def _examples(config: TaskConfig) -> str:
    names = [f"train{suffix}" for suffix in suffixes(config) if suffix != ".txt"][:3]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def read_hub(config: TaskConfig, cache_dir: str | Path, offline: bool) -> dict[str, TaskTable]:
    """Returns the splits of a hub data set by canonical name. Classes are converted to names, so that their order does
    not matter. A data set in the cache is read without asking the hub, so that all runs read the same rows. Raises
    UserError, with an alternative command, if the data set is not available."""
    alternative_command = (
        f"lmtool finetune task={config.name} task.path=FOLDER checkpoint=RUN   (task.path: a folder with train and "
        "dev files, .tsv .csv or .jsonl; checkpoint: a run to start from, or none)"
    )
    name, _, subset = str(config.hub).partition(":")
    if not offline and is_cached(str(config.hub), str(cache_dir)):
        with suppress(UserError):  # what is cached may be another subset
            return read_hub(config, cache_dir, offline=True)
    with hub_access(f"task={config.name}: task.hub={config.hub}", name, offline, alternative_command) as datasets:
        splits = datasets.load_dataset(name, subset or None, cache_dir=str(user_path(cache_dir) / "hub"))
    return {canonical(split): hub_table(f"{config.hub} {split}", rows) for split, rows in splits.items()}


def hub_table(origin: str, rows: Any) -> TaskTable:
    """Returns a split of a hub data set. An object column is also split into a column per key, NAME.KEY
    (`translation.de`)."""
    columns: dict[str, list[Any]] = {name: list(rows[name]) for name in rows.column_names}
    for name, feature in rows.features.items():
        names = getattr(getattr(feature, "feature", feature), "names", None)  # a class, or a list of classes
        if names:
            columns[name] = [names_of_classes(value, names) for value in columns[name]]
    flat = dict(columns)
    for name, values in columns.items():
        if values and all(isinstance(value, dict) for value in values):
            flat |= {f"{name}.{key}": [value.get(key) for value in values] for key in values[0]}
    return TaskTable(flat, [(origin, number) for number in range(len(rows))], tuple(columns))
