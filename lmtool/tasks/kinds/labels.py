"""Converts columns of a table to texts, class numbers and values. An invalid cell is an error with file:line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lmtool.errors import UserError
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.configs.base import joined_columns

Columns: TypeAlias = Mapping[str, list[Any]]
"""The columns of a table by name, one value per row."""
Origin: TypeAlias = list[tuple[str, int]]
"""The file and line of each row."""
# Columns that may hold row ids; the first match is used.
IDS = ("id", "idx", "index", "guid")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
# Common spellings of missing values.
_MISSING = ("na", "n/a", "nan", "null", "none", "missing", "?", "-")
_SHOWN = 8
# More distinct values than this, and than half of the rows, are not classes.
_MANY = 50


def location(origin: tuple[str, int]) -> str:
    """Returns file:line, for messages."""
    return f"{origin[0]}:{origin[1]}"


def text_of_label(value: object) -> str:
    """Returns a label as text, which is the same whether it was read from JSON, a table or the hub."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value).strip()


def cell_text(cell: object) -> str:
    """Returns a cell as text. Items of a list are joined with spaces."""
    return " ".join(map(str, cell)) if isinstance(cell, list | tuple) else str(cell)


def _listing(names: Sequence[str]) -> str:
    names_text = ", ".join(names[:_SHOWN])
    return names_text if len(names) <= _SHOWN else f"{names_text}, ... ({len(names)} in all)"


def is_unlabeled(values: Sequence[object]) -> bool:
    """Whether a label column has no labels: all cells are empty, or -1 as on the hub."""
    return all(text_of_label(value) in ("", "-1") for value in values)


def class_names(config: TaskConfig, values: Sequence[object], origin: Origin) -> tuple[str, ...]:
    """Returns the classes in a training column: its distinct values, sorted; whole numbers are sorted by value. Raises
    UserError if they cannot be classes."""
    words = [text_of_label(value) for value in values]
    if "" in words:
        raise UserError(
            f"{location(origin[words.index('')])}: no value in the column {config.label}",
            "fill it, or remove the row",
        )
    names = sorted(set(words))
    if len(names) > max(_MANY, len(words) / 2):
        raise UserError(
            f"task.label={config.label} has {len(names)} different values in {len(words)} training rows: these are "
            "not classes",
            "name another column with task.label=, or use task.kind=regression for a number",
        )
    if len(names) < 2:
        raise UserError(
            f"task.label={config.label} is {names[0]} in all {len(words)} training rows: there is nothing to learn",
            "use data of two classes or more, or name another column with task.label=",
        )
    if all(name.lstrip("+-").isdecimal() for name in names):
        names.sort(key=int)
    return tuple(names)


def class_numbers(config: TaskConfig, labels: Sequence[str], values: Sequence[object], origin: Origin) -> np.ndarray:
    """Returns (N,) int64: the classes in a column, which holds either label names or their numbers from 0.

    Raises UserError with file:line at the first invalid value.
    """
    words = [text_of_label(value) for value in values]
    number = {name: index for index, name in enumerate(labels)}
    if not all(word in number for word in words):
        numbers = {str(index): index for index in range(len(labels))}
        if sum(word in numbers for word in words) > sum(word in number for word in words):
            number = numbers
    for word, place in zip(words, origin, strict=True):
        if word not in number:
            raise unknown_label(config, labels, word, location(place))
    return np.array([number[word] for word in words], dtype=np.int64)


def unknown_label(config: TaskConfig, labels: Sequence[str], word: str, place: str) -> UserError:
    """Returns the error for an unknown label. place: its file:line."""
    problem = f"label {word!r} is unknown" if word else f"no value in the column {config.label}"
    names = ",".join(f'"{name}"' for name in labels[:2])
    return UserError(
        f"{place}: {problem}; the labels of {config.name} are {_listing(labels)}",
        f"correct the row, or give the labels in order: task.labels=[{names},...]",
    )


def numbers(config: TaskConfig, values: Sequence[object], origin: Origin) -> np.ndarray:
    """Returns (N,) float64: the numbers in a column. Raises UserError with file:line at the first value that is not a
    finite number."""
    numbers_N = np.empty(len(values))
    for index, (value, place) in enumerate(zip(values, origin, strict=True)):
        word = text_of_label(value)
        try:
            numbers_N[index] = float(word)
        except ValueError:
            numbers_N[index] = np.nan
        if not np.isfinite(numbers_N[index]):
            comma = DECIMAL_COMMA.fullmatch(word)
            raise UserError(
                f"{location(place)}: {config.label}={word!r} is not a "
                f"number{': it has a decimal comma' if comma else ''}",
                f"write decimals with a point: {word.replace(',', '.')}"
                if comma
                else "correct the row, or use task.kind=classification for classes",
            )
    return numbers_N


def repeated_ids(columns: Columns, origin: Origin) -> str | None:
    """Returns a warning if rows have duplicate ids (`row_ids`); otherwise None."""
    for name in IDS:
        if name not in columns or not len(columns[name]):
            continue
        words = [str(value) for value in columns[name]]
        first: dict[str, int] = {}
        repeated = [row for row, word in enumerate(words) if first.setdefault(word, row) != row]
        if not repeated:
            return None
        row = repeated[0]
        return (
            f"{location(origin[row])}: {name}={words[row]} repeats that of {location(origin[first[words[row]]])}"
            f"{f', and {len(repeated) - 1:,} more do' if len(repeated) > 1 else ''}: rows are numbered from 0 instead"
        )
    return None


def row_ids(columns: Columns, count: int) -> list[str | int]:
    """Returns the ids of the rows, if a column of `IDS` holds unique values; otherwise their indices from 0."""
    for name in IDS:
        if name in columns and len(set(map(str, columns[name]))) == count:
            return list(columns[name])
    return list(range(count))


def text_of(config: TaskConfig, name: str, value: object, place: tuple[str, int]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    problem = "nothing" if value is None else type(value).__name__
    raise UserError(
        f"{location(place)}: the column {name} holds {problem}, not a text",
        "correct the row, or name another column with task.text=",
    )


def with_joined_columns(config: TaskConfig, columns: Columns, origin: Origin) -> dict[str, list]:
    """Returns the columns, with the joined columns (A+B) added whose parts are present."""
    new: dict[str, list] = {}
    for name in config.text:
        parts = joined_columns(name)
        if name not in columns and all(part in columns for part in parts):
            cells = [zip(columns[part], origin, strict=True) for part in parts]
            texts = [
                [text_of(config, part, *cell) for cell in column_cells]
                for part, column_cells in zip(parts, cells, strict=True)
            ]
            new[name] = [" ".join(row) for row in zip(*texts, strict=True)]
    return {**columns, **new}


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Returns the balanced weight of each class: rows / (classes x rows of the class); 1 for an empty class."""
    counts = np.bincount(labels, minlength=classes)
    return tuple(float(len(labels) / (classes * count)) if count else 1.0 for count in counts)


def class_warnings(counts: Mapping[str, int]) -> list[str]:
    """Warnings about classes without training rows, and about classes that look like missing values. counts: the number
    of rows of each class."""
    absent = [name for name, count in counts.items() if not count]
    warnings = [f"no training row has the label {', '.join(absent)}"] if absent else []
    even_share = sum(counts.values()) / max(len(counts), 1)
    for name, count in counts.items():
        if name.lower() in _MISSING and (count == 1 or 0 < count <= even_share / 10):
            rows, them = ("1 training row is", "it") if count == 1 else (f"{count:,} training rows are", "them")
            warnings.append(f"{rows} labeled {name}: remove {them} if that means a missing label")
    return warnings


def label_counts(labels: np.ndarray, names: Sequence[str]) -> dict[str, int]:
    """Returns the number of rows of each class, by name, in class order."""
    counts = Counter(labels.tolist())
    return {name: counts.get(index, 0) for index, name in enumerate(names)}
