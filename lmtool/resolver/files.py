"""`task=FILE` and `data=FILE`: expands a file or folder, typed instead of the name of a task or source, into overrides.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtool.config.base import JsonMapping
from lmtool.config.groups import is_path_only, options
from lmtool.data.compressed import compressed_suffixes, without_compression_suffix
from lmtool.data.configs import SUFFIXES, kind_of
from lmtool.data.files import check_encoding, collect_errors, find, no_such_file
from lmtool.data.parquet import parquet_rows
from lmtool.data.rows import delimiter_for, fields_of, header_of, objects, records
from lmtool.errors import UserError
from lmtool.resolver.shorthands import CommandLine
from lmtool.system.files import user_path
from lmtool.system.terminal import say
from lmtool.tasks.files import canonical
from lmtool.tasks.guessing import TABLES, guess, headless, is_path, is_text, quote_value

_SAMPLE = 100  # rows from which the text column is inferred
_FIRST_WORD = re.compile(r"[A-Za-z]+")


def with_keys(line: CommandLine) -> list[str]:
    """Returns the arguments, with the key task= or data= added to each file or folder."""
    return [
        word if "=" in word else f"{'task' if Path(word).suffix.lower() in TABLES else 'data'}={word}"
        for word in line.words
    ]


def with_task(line: CommandLine) -> list[str]:
    """Returns the overrides with `task=FILE` expanded, if it is among them, and prints the expansion. Raises UserError
    if the kind of task cannot be inferred from the file."""
    values = line.values

    def expand(file: str) -> list[str]:
        if line.verb == "evaluate":
            return [f"task.path={file}"]  # the rest of the task is in the checkpoint
        typed_keys = {key.removeprefix("task."): value for key, value in values.items() if key.startswith("task.")}
        # `check` lists the rows with errors instead of stopping.
        with collect_errors() if line.verb == "check" else contextlib.nullcontext():
            return guess(file, typed_keys).words(file)

    names = options("task", line.config_dirs)
    return _expand(line, "task", lambda file: is_path(file, names), expand)


def with_text(line: CommandLine) -> list[str]:
    """Returns the overrides with `data=FILE` expanded, if it is among them, and prints the expansion. Raises UserError
    if the file type cannot be inferred."""
    names = options("data", line.config_dirs)
    return _expand(line, "data", lambda file: _is_path(file, names), lambda file: _text_overrides(file, line.values))


def _expand(
    line: CommandLine,
    section: str,
    is_file: Callable[[str], bool],
    expand: Callable[[str], list[str]],
) -> list[str]:
    """Returns the overrides with SECTION=FILE expanded, and prints the expansion together with other keys of the
    section. The files of a sweep (-m SECTION=FILE,FILE2) may differ only in their paths.

    Args:
        line: The command line.
        section: "task" or "data".
        is_file: Whether a value is a file or folder rather than a name.
        expand: Returns the overrides for a file.

    Raises:
        UserError: If the path is also set by its key, or the values of a sweep cannot be expanded together.
    """
    value = line.values.get(section, "")
    files = [value] if set(value) & set("[]()") else value.split(",")
    if not any(map(is_file, files)):
        return list(line.words)
    path = f"{section}.path"
    if path in line.values:
        raise UserError(
            f"{section}={value} and {path}={line.values[path]} both set {path}",
            f"set {section}=NAME {path}={line.values[path]}, or only {section}={value}",
        )
    if not all(map(is_file, files)):
        raise UserError(f"{section}={value}: a sweep takes either names or files", "sweep them separately")
    expansions = [dict(word.split("=", 1) for word in expand(file)) for file in files]
    if any({**expansion, path: ""} != {**expansions[0], path: ""} for expansion in expansions):
        raise UserError(
            f"{section}={value}: the files have different columns or types, so one sweep cannot read them",
            "repeat the command for each file",
        )
    merged = expansions[0] | {path: ",".join(expansion[path] for expansion in expansions)}
    expanded = [f"{key}={item}" for key, item in merged.items() if key == section or key not in line.values]
    typed_keys = [word for word in line.words if word.startswith(f"{section}.")]
    say(f"{section}={value} is read as: {shlex.join([*expanded, *typed_keys])}", sys.stderr)
    index = line.words.index(f"{section}={value}")
    return [*line.words[:index], *expanded, *line.words[index + 1 :]]


def _is_path(value: str, names: Sequence[str]) -> bool:
    """Whether the value of `data=` is a file, a folder or a pattern rather than the name of a source."""
    if not value or value in names or "," in value:
        return False
    path = user_path(value)
    if not path.exists() and kind_of(value) is None and is_path_only(value) and not set(value) & {*"*?["}:
        raise no_such_file("data", value)
    if kind_of(value) is None and path.is_file():
        raise UserError(
            f"data={value}: its type cannot be inferred from its name",
            f"set data.path={value} and the type: data=text, data=jsonl, data=csv or data=parquet",
        )
    return kind_of(value) is not None or path.is_dir()


def _text_overrides(value: str, values: Mapping[str, str]) -> list[str]:
    """Returns the overrides that `data=VALUE` stands for, if the value is a path. values: all overrides by key."""
    path = user_path(value)
    paths = {"data.path": value} if not path.is_dir() else _paths_in_folder(value, path)
    kind = kind_of(paths["data.path"]) or _only_kind(value, path)
    words = [f"data={kind}", *(f"{key}={quote_value(file)}" for key, file in paths.items())]
    if kind != "text" and "data.text" not in values:
        file = find("data", paths["data.path"], SUFFIXES[kind] + compressed_suffixes(*SUFFIXES[kind]))[0]
        column = _column(value, _rows(file, kind, values), shlex.join(words), kind == "csv")
        words += [] if column == "text" else [f"data.text={quote_value(column)}"]
    return words


def _paths_in_folder(value: str, folder: Path) -> dict[str, str]:
    """Returns the keys that `data=FOLDER` sets: `data.path` to the folder; or, if its files are named after splits,
    `data.path` to the training files and `data.validation` to the development files. Test files are left out. Raises
    UserError if the files of a split have several types."""
    patterns: dict[str, set[str]] = {}  # by split
    for name in sorted(os.listdir(folder)):
        unpacked, first_word = without_compression_suffix(name), _FIRST_WORD.match(name)
        if kind_of(name) is not None and first_word is not None:
            suffixes = Path(unpacked).suffix + name[len(unpacked) :]
            patterns.setdefault(canonical(first_word[0]), set()).add(f"{first_word[0]}*{suffixes}")
    if "train" not in patterns or not patterns.keys() & {"dev", "test"}:
        return {"data.path": value}
    paths: dict[str, str] = {}
    for split, key in (("train", "data.path"), ("dev", "data.validation")):
        for pattern in patterns.get(split, ()):
            if key in paths:
                raise UserError(
                    f"data={value}: its {split} files have several types: {', '.join(sorted(patterns[split]))}",
                    f"choose one type, for example data={kind_of(pattern)} data.path='{folder / pattern}'",
                )
            paths[key] = str(folder / pattern)
    return paths


def _only_kind(value: str, folder: Path) -> str:
    """Returns the type of the files in a folder and its subfolders. Raises UserError if there are none, or several
    types."""
    kinds: Counter[str] = Counter()
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        kinds.update(kind for name in names if not name.startswith(".") and (kind := kind_of(name)))
    if not kinds:
        raise UserError(
            f"data={value}: the folder has no .txt, .jsonl, .csv, .tsv or .parquet file",
            "use another folder, or a pattern: data=text data.path='FOLDER/*.md'",
        )
    if len(kinds) > 1:
        counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
        forms = "   or ".join(f"data={kind} data.path={value}" for kind, _ in kinds.most_common())
        raise UserError(f"data={value}: the folder has files of several types: {counts}", f"use {forms}")
    return next(iter(kinds))


def _column(value: str, rows: Iterator[JsonMapping], words: str, has_header: bool) -> str:
    """Returns the text column: `text`, or the only text column in the first rows.

    value: the value of `data=`. words: its expansion, for hints. has_header: whether the first line should contain
    column names. Raises UserError if that line is a row, or if the column is ambiguous."""
    columns: dict[str, list[Any]] = {}
    # Errors in rows, or in the rest of the file, are reported when the text is read.
    with collect_errors(), contextlib.suppress(UserError):
        for row in itertools.islice(rows, _SAMPLE):
            for name, cell in row.items():
                columns.setdefault(name, []).append(cell)
    if "text" in columns or not columns:
        return "text"
    if has_header and (why := headless(columns)):
        raise UserError(
            f"data={value}: {why}",
            f"add a line of column names; if the first line has them, set {words} data.text=COLUMN",
        )
    texts = [name for name, cells in columns.items() if is_text(cells)]
    if len(texts) == 1:
        return texts[0]
    message = f"several columns contain text: {', '.join(texts)}"
    if not texts:
        message = f"no column contains text; the columns are {', '.join(columns)}"
    forms = "   or ".join(f"{words} data.text={quote_value(name)}" for name in (texts or [*columns])[:2])
    raise UserError(f"data={value}: {message}", f"use {forms}")


def _rows(file: Path, kind: str, values: Mapping[str, str]) -> Iterator[JsonMapping]:
    if kind == "parquet":
        return parquet_rows(file)
    if kind == "jsonl":
        return (fields_of(row) for _, row in objects(file))
    encoding = values.get("data.encoding", "utf-8")
    check_encoding("data.encoding", encoding)
    delimiter = delimiter_for(file, values.get("data.delimiter"), ("text",), encoding)
    lines = records(file, delimiter, encoding, "data.encoding")
    _, names = header_of(file, lines)
    return (dict(zip(names, record, strict=False)) for _, record in lines)
