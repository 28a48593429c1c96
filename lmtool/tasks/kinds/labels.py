"""Converts columns of a table to texts, class numbers and values. An invalid cell is an error with file:line."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np

from lmtool.data.tables import LINES
from lmtool.data.trees import NoTree, numbers_of_heads
from lmtool.errors import UserError
from lmtool.system.terminal import counted
from lmtool.tasks.configs.base import TaskConfig, joined_columns

Columns: TypeAlias = Mapping[str, list[Any]]
"""The columns of a table by name, one value per row."""
Origin: TypeAlias = list[tuple[str, int]]
"""The file and line of each row."""
# Columns that may hold row ids; the first match is used.
IDS = ("id", "idx", "index", "guid")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_WHOLE_NUMBER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
# Common spellings of missing values.
_MISSING = ("na", "n/a", "nan", "null", "none", "missing", "?", "-")
_MAX_LISTED = 8
# More distinct values than this, and than half of the rows, are not classes.
_MAX_CLASSES = 50


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
    names_text = ", ".join(names[:_MAX_LISTED])
    return names_text if len(names) <= _MAX_LISTED else f"{names_text}, ... ({len(names)} in all)"


def _labels_override(names: Sequence[str]) -> str:
    texts = ",".join(name if name == "..." else f'"{name}"' for name in names)
    return shlex.quote(f"task.labels=[{texts}]")


def is_unlabeled(values: Sequence[object], labels: Sequence[str] = ()) -> bool:
    """Whether a label column has no labels: all cells are empty, or -1 as on the hub, unless that is one of the
    labels."""
    return all(text_of_label(value) in {"", "-1"}.difference(labels) for value in values)


def class_names(config: TaskConfig, values: Sequence[object], origin: Origin) -> tuple[str, ...]:
    """Returns the classes in a training column: its distinct values, sorted; whole numbers are sorted by value. Raises
    UserError if they cannot be classes."""
    texts = [text_of_label(value) for value in values]
    if "" in texts:
        raise UserError(
            f"{location(origin[texts.index('')])}: no value in the column {config.label}",
            "fill it, or remove the row",
        )
    names = sorted(set(texts))
    if len(names) > max(_MAX_CLASSES, len(texts) / 2):
        raise UserError(
            f"task.label={config.label} has {len(names)} different values in {len(texts)} training rows: these are "
            "not classes",
            "name another column with task.label=, or use task.kind=regression for a number",
        )
    if len(names) < 2:
        raise UserError(
            f"task.label={config.label} is {names[0]} in all {len(texts)} training rows: there is nothing to learn",
            "use data of two classes or more, or name another column with task.label=",
        )
    spellings: dict[Decimal, str] = {}
    for name in filter(_NUMBER.fullmatch, names):
        same = spellings.setdefault(Decimal(name), name)
        if same != name:
            raise UserError(
                f"{location(origin[texts.index(name)])}: label {name!r} is the same number as {same!r} of "
                f"{location(origin[texts.index(same)])}",
                "write both alike if they are one class; if they are two, give the labels in order: "
                + _labels_override(names),
            )
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        names.sort(key=Decimal)
    return tuple(names)


def class_indices(labels: Sequence[str]) -> dict[str, int]:
    """Returns the class of each number that a file may hold in place of a label: its index from 0. Empty if a label is
    a number itself, since a number is then a label's name."""
    return {} if any(map(_NUMBER.fullmatch, labels)) else {str(index): index for index in range(len(labels))}


def class_numbers(config: TaskConfig, labels: Sequence[str], values: Sequence[object], origin: Origin) -> np.ndarray:
    """Returns (N,) int64: the classes in a column, which holds either label names or numbers (`class_indices`).

    Raises UserError with file:line at the first invalid value.
    """
    texts = [text_of_label(value) for value in values]
    number, indices = {name: index for index, name in enumerate(labels)}, class_indices(labels)
    if sum(text in indices for text in texts) > sum(text in number for text in texts):
        number = indices
    for text, place in zip(texts, origin, strict=True):
        if text not in number:
            raise unknown_label(config, labels, text, location(place))
    return np.array([number[text] for text in texts], dtype=np.int64)


def unknown_label(config: TaskConfig, labels: Sequence[str], text: str, place: str) -> UserError:
    """Returns the error for an unknown label. place: its file:line."""
    problem = f"label {text!r} is unknown" if text else f"no value in the column {config.label}"
    return UserError(
        f"{place}: {problem}; the labels of {config.name} are {_listing(labels)}",
        f"correct the row, or train with all labels: {_labels_override([*labels[:2], '...'])}",
    )


def numbers(config: TaskConfig, values: Sequence[object], origin: Origin) -> np.ndarray:
    """Returns (N,) float64: the numbers in a column. Raises UserError with file:line at the first value that is not a
    finite number."""
    numbers_N = np.empty(len(values))
    for index, (value, place) in enumerate(zip(values, origin, strict=True)):
        text = text_of_label(value)
        try:
            numbers_N[index] = float(text)
        except ValueError:
            numbers_N[index] = np.nan
        if not np.isfinite(numbers_N[index]):
            comma = DECIMAL_COMMA.fullmatch(text)
            raise UserError(
                f"{location(place)}: {config.label}={text!r} is not a "
                f"number{': it has a decimal comma' if comma else ''}",
                f"write decimals with a point: {text.replace(',', '.')}"
                if comma
                else "correct the row, or use task.kind=classification for classes",
            )
    return numbers_N


def repeated_ids(columns: Columns, origin: Origin) -> str | None:
    """Returns a warning if rows have duplicate ids (`row_ids`); otherwise None."""
    for name in IDS:
        if name not in columns or not len(columns[name]):
            continue
        ids = [str(value) for value in columns[name]]
        first: dict[str, int] = {}
        repeated = [row for row, row_id in enumerate(ids) if first.setdefault(row_id, row) != row]
        if not repeated:
            return None
        row, others = repeated[0], len(repeated) - 1
        others_text = (
            f", and {counted(others, 'more row')} {'repeats' if others == 1 else 'repeat'} an id" if others else ""
        )
        return (
            f"{location(origin[row])}: {name}={ids[row]} repeats the id of {location(origin[first[ids[row]]])}"
            f"{others_text}: rows are numbered from 0 instead"
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


def items_of(cells: Sequence[Any]) -> list[list[Any]]:
    """Returns the items of each cell: those of a list, or of a text split at white space."""
    return [cell.split() if isinstance(cell, str) else list(cell or ()) for cell in cells]


def word_location(columns: Columns, origin: Origin, row: int, word: int) -> str:
    """Returns the file:line of a word, or of its row in a file with a line per row."""
    lines = columns.get(LINES)
    sentence = lines[row] if lines is not None else []
    return f"{origin[row][0]}:{sentence[word] if word < len(sentence) else origin[row][1]}"


def words_of(name: str, columns: Columns, origin: Origin) -> list[list[str]]:
    """Returns the words of each cell of a column. Raises UserError with file:line at the first item that is no word."""
    sentences = items_of(columns[name])
    for row, sentence in enumerate(sentences):
        for number, word in enumerate(sentence):
            if not isinstance(word, str):
                raise UserError(
                    f"{word_location(columns, origin, row, number)}: the column {name} holds {type(word).__name__}, "
                    "not words",
                    "write a list of words or a text, or name another column with task.text=",
                )
    return sentences


def parents_of(name: str, sentences: Sequence[Sequence[str]], columns: Columns, origin: Origin) -> list[list[int]]:
    """Returns, for each sentence, the index of each word's head, -1 for the root. name: the column of the heads. Raises
    UserError with file:line at the first sentence whose heads are no tree."""
    if name not in columns:
        raise UserError(
            f"{origin[0][0]}: no column {name} of heads",
            "use rows with this column, such as a CoNLL-U file, or name another one with task.heads=",
        )
    parents = []
    for row, (sentence, heads) in enumerate(zip(sentences, items_of(columns[name]), strict=True)):
        try:
            parents.append(numbers_of_heads(heads, len(sentence)))
        except NoTree as no_tree:
            raise UserError(
                f"{word_location(columns, origin, row, no_tree.word)}: column {name}: {no_tree.problem}",
                "correct the heads: one word has 0, all others lead to it; or remove the row",
            ) from no_tree
    return parents


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
