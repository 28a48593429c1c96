"""`task=FILE`: guesses the task kind of a user's file from its columns. Imports no torch.

The guess becomes explicit overrides; if a file fits two kinds, or more columns than one, the error lists the full form
of each.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.groups import is_path_only
from lmtool.data.files import no_such_file
from lmtool.data.parquet import read_parquet
from lmtool.data.rows import no_column
from lmtool.data.tables import LINES, SUFFIXES, begins_squad, read_table
from lmtool.errors import UserError
from lmtool.tasks.configs.base import parts_of
from lmtool.tasks.files import beginning
from lmtool.tasks.kinds.labels import DECIMAL_COMMA, IDS, word_of

_WORDS = (".conll", ".conllu", ".bio", ".iob", ".iob2")
_SUFFIXES = (*SUFFIXES, ".parquet", *_WORDS)
TABLES = tuple(suffix for suffix in _SUFFIXES if suffix != ".txt")
"""Suffixes of files that hold rows."""
# Integer labels: up to _FEW distinct values mean classes, from _MANY on regression; in between, either is possible.
_FEW, _MANY = 20, 50
_LABELS = (
    "label", "labels", "class", "category", "gold", "score", "rating", "stars", "sentiment", "intent",
    "topic", "topics",
)  # fmt: skip
# Names of columns that hold several labels per row, if their cells do.
_SEVERAL = ("labels", "topics", "classes", "categories", "tags", "genres", "emotions")
_MARKS = (",", ";", "|")
# A column whose values have at least this many words on average is input text, not a label.
_LONG = 3
_TAG = re.compile(r"O|[BIEMSLU]-\S+")
_PAIRS = (("source", "target"), ("src", "tgt"))
_WITH_HEADER = (".tsv", ".txt", ".csv")
_WORKBOOKS = (".xlsx", ".xls", ".ods")
SAVE_AS = "save one sheet per CSV file in the program that wrote it, and give that"


@dataclass(frozen=True)
class Guess:
    """A task kind with its text and label columns. delimiter: between the labels of a cell, if not a comma."""

    kind: str
    text: tuple[str, ...]
    label: str
    delimiter: str | None = None

    def words(self, path: str) -> list[str]:
        """The explicit overrides."""
        text = ",".join(map(typed, self.text))
        return [
            "task=custom", f"task.kind={self.kind}", f"task.path={typed(path)}", f"task.text=[{text}]",
            f"task.label={typed(self.label)}", *([f"task.delimiter={typed(self.delimiter)}"] if self.delimiter else []),
        ]  # fmt: skip


def is_path(value: str, options: Collection[str]) -> bool:
    """Whether the value of `task=` is a file or folder, not the name of a task."""
    if value in options or not value or "," in value:
        return False
    path = Path(value).expanduser()
    return path.suffix.lower() in (*_SUFFIXES, *_WORKBOOKS) or path.is_dir() or is_path_only(value)


def guess(value: str, overrides: Mapping[str, str]) -> Guess:
    """Guesses the task of a file or a folder. overrides: the typed `task.*` values; a typed `kind`, `label`, `text` or
    `header` is not guessed. UserError if nothing fits, if the guess is ambiguous, and if the first line of a table is a
    row."""
    file = _file(value)
    suffix = file.suffix.lower()
    if suffix in _WORKBOOKS:
        raise UserError(f"task={value} is a workbook; lmtool reads tables as text", SAVE_AS)
    kind, text, label = overrides.get("kind"), _list(overrides.get("text")), overrides.get("label")
    if suffix in _WORDS or (kind == "token_classification" and suffix in (".tsv", ".txt")):
        return Guess(kind or "token_classification", text or ("tokens",), label or "tags")
    if suffix == ".json" and begins_squad(beginning(file)):
        return Guess(kind or "extractive_qa", text or ("question", "context"), label or "answers")
    columns = _columns(file, _list(overrides.get("header")))
    if kind is None and suffix in (".tsv", ".txt") and any(map(_are_tags, columns, columns.values())):
        return Guess("token_classification", text or ("tokens",), label or "tags")
    if suffix in _WITH_HEADER and not (text and label) and "header" not in overrides and (why := headless(columns)):
        raise UserError(f"task={value}: {why}", _with_header(value, columns, kind))
    columns = _without_ids(columns)
    lower = {name.lower(): name for name in columns}
    if kind is None and text is None and label is None:
        if {"question", "context", "answers"} <= lower.keys():
            return Guess("extractive_qa", (lower["question"], lower["context"]), lower["answers"])
        for source, target in _PAIRS:
            if {source, target} <= lower.keys():
                return Guess("seq2seq", (lower[source],), lower[target])
    return _of_columns(value, columns, kind, text, label)


def _columns(file: Path, header: tuple[str, ...] | None) -> dict[str, list[Any]]:
    """The columns of a table. header: their names, if typed; the file then has no header, or the same one."""
    if file.suffix.lower() == ".parquet":
        return read_parquet(file).columns
    table = read_table(file)
    return table.columns if header in (None, tuple(table.columns)) else read_table(file, header=header).columns


def _are_tags(name: str, values: Sequence[str]) -> bool:
    """Whether a column, its first line included, holds the tags of words: O occurs outside of entities."""
    return "O" in values and all(map(_TAG.fullmatch, (name, *values)))


def headless(columns: Mapping[str, list[object]]) -> str | None:
    """Evidence that a table's header is its first row: a number above numbers, or one of the classes or texts below it.
    None if there is no evidence."""
    names = [name for name in columns if name]
    if names == [str(number) for number in range(len(names))]:  # pandas numbers unnamed columns
        return None
    for name, values in columns.items():
        words = [word_of(value) for value in values if word_of(value)]
        same = f"its first line is a row, not the names of its columns: {name.strip()!r} is "
        if words and _number(name) is not None and all(_number(word) is not None for word in words):
            return f"{same}a number, as all that follow in its column"
        # A one-word name may well occur in a list of distinct words.
        repeated = len(set(words)) <= max(2, len(words) / 2)
        if name.strip() in words and (len(name.split()) >= _LONG or repeated):
            return f"{same}a value of its column too ({words.count(name.strip()):,} of {len(words):,} rows)"
    return None


def _with_header(value: str, columns: Mapping[str, list[object]], kind: str | None) -> str:
    """The hint for a table that may lack a header: how to name its columns, and how to use its first line as the
    header."""
    names = [f"column_{number}" for number in range(1, len(columns) + 1)]
    rows = dict(zip(names, ([name, *values] for name, values in columns.items()), strict=True))
    with contextlib.suppress(UserError):
        guessed = _of_columns(value, rows, kind, None, None)
        texts = ["text"] if len(guessed.text) == 1 else [f"text_{number}" for number, _ in enumerate(guessed.text, 1)]
        names_by_role = {guessed.label: "label", **dict(zip(guessed.text, texts, strict=True))}
        names = [names_by_role.get(name, name) for name in names]
    header = f"task.header=[{','.join(names)}]"
    hints = [f"name them: {shlex.join([f'task={value}', header])}"]
    with contextlib.suppress(UserError):
        words = _of_columns(value, _without_ids(columns), kind, None, None).words(value)
        hints.append(f"if it is a header: {shlex.join(words)}")
    return "   ".join(hints)


def _without_ids(columns: Mapping[str, list[object]]) -> dict[str, list[object]]:
    """The candidates for text and label columns."""
    return {name: values for name, values in columns.items() if name.lower() not in IDS and name != LINES}


def _of_columns(
    value: str, columns: dict[str, list[object]], kind: str | None, text: tuple[str, ...] | None, label: str | None
) -> Guess:
    typed = [part for name in text or () for part in ([name] if name in columns else parts_of(name))]
    unknown = [name for name in (*typed, *([label] if label else [])) if name not in columns]
    if unknown:
        of_texts = unknown[0] in typed
        key = "task.text" if of_texts else "task.label"
        raise no_column(f"task={value}", unknown[0], [*columns], key, listed=of_texts)
    read = typed or _words_of(columns)
    kinds = {
        name: _kinds(values, bool(_parallel(columns, name)), kind is None and name.lower() in _SEVERAL)
        for name, values in columns.items()
        if name not in read
    }
    if label is None:
        fitting = [name for name, those in kinds.items() if those and (kind is None or kind in those)]
        named = [name for name in fitting if name.lower() in _LABELS]
        fitting = named if len(named) == 1 else fitting
        if not fitting:
            raise UserError(
                f"task={value}: none of its columns {', '.join(columns)} holds classes, numbers or tags",
                "name the label: task=custom task.kind=KIND task.path=FILE task.text=[COLUMN] task.label=COLUMN",
            )
        options = [(name, kinds[name]) for name in fitting]
    else:
        options = [(label, kinds.get(label) or ["classification"])]
    guesses = [
        Guess(each, text or _texts(value, columns, name, each), name, _delimiter(each, columns[name]))
        for name, those in options
        for each in ([kind] if kind else those)
    ]
    if len(guesses) > 1:
        _refuse(value, guesses)
    return guesses[0]


def _words_of(columns: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """The column of the words of sentences: of equally long lists, the one with the most distinct values."""
    lists = [name for name in columns if _parallel(columns, name)]
    return tuple(sorted(lists, key=lambda name: -len({str(item) for row in columns[name] for item in row}))[:1])


def _parallel(columns: Mapping[str, list[Any]], name: str) -> list[str]:
    """The other list columns whose lengths match in each row."""
    if not all(isinstance(value, list) for value in columns[name]):
        return []
    sizes = [len(value) for value in columns[name]]
    return [
        other for other, values in columns.items()
        if other != name and [len(value) if isinstance(value, list) else -1 for value in values] == sizes
    ]  # fmt: skip


def _kinds(values: list[object], of_words: bool = False, plural: bool = False) -> list[str]:
    """The task kinds for which a column may be the label; none for texts. of_words: other columns hold lists. plural:
    its name is that of several labels."""
    present = [value for value in values if word_of(value)]
    if not present:
        return []
    if all(isinstance(value, list) for value in present):
        return ["token_classification" if of_words else "multi_label"]
    words = [word_of(value) for value in present]
    multiple = ["multi_label"] if _mark_between(words) else []
    if multiple and plural:
        return multiple
    different = set(words)
    numbers = [_number(word) for word in words]
    if None not in numbers:
        integers = all(number is not None and number == int(number) for number in numbers)
        if integers and len(different) <= _FEW:
            return ["classification"] if len(different) > 1 else []
        if len(different) >= _MANY or (not integers and len(different) > _FEW):
            return ["regression"]
        return ["classification", "regression"]
    # Class names recur; texts rarely do.
    few = len(different) <= max(2, min(len(words) / 2, 1000))
    short = sum(len(word.split()) for word in words) / len(words) < _LONG
    return [*multiple, *(["classification"] if few and short and len(different) > 1 else [])]


def _mark_between(words: Sequence[str]) -> str | None:
    """The separator of cells that hold several labels, each as short and frequent as labels are; None if each cell is
    one value."""
    for mark in _MARKS:
        # First, since a text column fails it at once.
        if not all(0 < len(part.split()) < _LONG for word in words for part in word.split(mark)):
            continue
        cells = [tuple(part.strip() for part in word.split(mark)) for word in words]
        parts = Counter(part for cell in cells for part in cell)
        shared = Counter(part for cell in set(cells) for part in set(cell))
        few = len(parts) <= max(2, parts.total() / 2) and max(shared.values(), default=0) > 1
        if few and parts.total() > len(words):
            return mark
    return None


def _delimiter(kind: str, values: Sequence[object]) -> str | None:
    """The separator of the labels in a text cell, if not a comma."""
    if kind != "multi_label" or any(isinstance(value, list) for value in values):
        return None
    mark = _mark_between([word_of(value) for value in values if word_of(value)])
    return None if mark == "," else mark


def _number(word: str) -> float | None:
    """A finite number with a decimal point or comma."""
    try:
        number = float(word.replace(",", ".") if DECIMAL_COMMA.fullmatch(word) else word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _texts(value: str, columns: dict[str, list[object]], label: str, kind: str) -> tuple[str, ...]:
    """The text columns for a label. UserError if there are none, or more than a pair."""
    rest = [name for name in columns if name != label]
    if kind == "token_classification":
        return _words_of(columns) or ("tokens",)
    texts = [name for name in rest if is_text(columns[name])]
    if len(texts) in (1, 2):
        return tuple(texts)
    if len(columns) == 1 and (between := next((mark for mark in ",;|" if mark in label), None)):
        raise UserError(
            f"task={value}: one column, {label!r}, with values separated by {between!r}",
            "rename the file: .tsv for tabs, .csv for commas or semicolons",
        )
    if not texts:
        raise UserError(
            f"task={value}: none of its columns {', '.join(rest) or 'but ' + label} holds texts to read",
            f"name it: task.text=[COLUMN] task.label={typed(label)}",
        )
    _refuse(value, [Guess(kind, (name,), label) for name in texts])
    raise AssertionError


def is_text(values: list[object]) -> bool:
    """Whether a column holds texts: mostly several words, or mostly distinct values that are not numbers."""
    words = [value for value in values if isinstance(value, str)]
    if len(words) < len(values) / 2 or all(_number(word) is not None for word in words):
        return False
    multiple = sum(len(word.split()) >= _LONG for word in words)
    return multiple > len(words) / 2 or len(set(words)) > len(words) / 2


def _refuse(value: str, guesses: Sequence[Guess]) -> None:
    first, second = (shlex.join(guess.words(value)) for guess in guesses[:2])
    more = f" (or {len(guesses) - 2} more)" if len(guesses) > 2 else ""
    differ = "which column is the label" if guesses[0].label != guesses[1].label else "which task is meant"
    raise UserError(f"task={value}: its columns do not determine {differ}", f"set {first}   or {second}{more}")


def _file(value: str) -> Path:
    """The training file. UserError if there is none."""
    path = Path(value).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise no_such_file("task", value)
    for entry in sorted(path.iterdir()):
        if entry.stem.lower() == "train" and entry.suffix.lower() in _SUFFIXES:
            return entry
    entries_text = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
    raise UserError(
        f"task={value}: the folder has no train file; there is {entries_text}",
        "name a folder with train.csv, train.tsv, train.jsonl or train.parquet, or one file",
    )


def _list(value: str | None) -> tuple[str, ...] | None:
    """The columns of a typed `task.text=[a,b]`."""
    if value is None:
        return None
    return tuple(part.strip().strip("'\"") for part in value.strip().strip("[]").split(","))


def typed(value: str) -> str:
    """A value in Hydra's syntax: quoted unless it is a plain word."""
    if re.fullmatch(r"[A-Za-z_./~-][\w./-]*", value) and value.lower() not in ("null", "true", "false"):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
