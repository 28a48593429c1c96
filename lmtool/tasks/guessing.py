"""`task=FILE` and `data=FILE`: guesses the task of a user's file from its columns, or how its text is read. Imports no
torch.

The guess is turned into explicit overrides, which are printed. If a file fits two kinds, or if several columns can be
the label, the error lists the overrides of all candidates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lmtool.config.base import JsonMapping
from lmtool.config.groups import is_path_only
from lmtool.data import configs as text_configs
from lmtool.data.compressed import compressed_suffixes, stem_of, suffix_of, without_compression_suffix
from lmtool.data.configs import kind_of
from lmtool.data.files import check_encoding, collect_errors, find, no_such_file
from lmtool.data.parquet import parquet_rows, read_parquet
from lmtool.data.rows import delimiter_for, fields_of, header_of, no_column, objects, records
from lmtool.data.tables import LINES, SUFFIXES, begins_squad, read_table
from lmtool.errors import UserError
from lmtool.system.files import user_path
from lmtool.tasks.configs.base import joined_columns
from lmtool.tasks.files import beginning, canonical
from lmtool.tasks.kinds.labels import DECIMAL_COMMA, IDS, Columns, text_of_label

_TAG_SUFFIXES = (".conll", ".conllu", ".bio", ".iob", ".iob2")
_SUFFIXES = (*SUFFIXES, ".parquet", *_TAG_SUFFIXES)
TABLES = tuple(suffix for suffix in _SUFFIXES if suffix != ".txt")
"""Suffixes of files that hold rows."""
# Up to _MAX_CLASSES distinct integers are classes; _MIN_VALUES or more are values; numbers between can be either.
_MAX_CLASSES, _MIN_VALUES = 20, 50
_LABEL_NAMES = (
    "label",
    "labels",
    "class",
    "category",
    "gold",
    "score",
    "rating",
    "stars",
    "sentiment",
    "intent",
    "topic",
    "topics",
)
# Column names that suggest several labels per cell.
_PLURAL_NAMES = ("labels", "topics", "classes", "categories", "tags", "genres", "emotions")
# Separators of the labels in a cell.
_DELIMITERS = (",", ";", "|")
# A column whose values have at least this many words on average is input text, not a label.
_MIN_TEXT_WORDS = 3
_TAG = re.compile(r"O|[BIEMSLU]-\S+")
# Names of the source and target columns of seq2seq.
_SEQ2SEQ_NAMES = (("source", "target"), ("src", "tgt"))
_HEADER_SUFFIXES = (".tsv", ".txt", ".csv")
_WORKBOOKS = (".xlsx", ".xls", ".ods")
SAVE_AS = "save one sheet per CSV file in the program that wrote it, and give that"


@dataclass(frozen=True)
class Guess:
    """A guessed task: its kind, text columns and label column. delimiter: the separator of several labels in a cell;
    None for a comma."""

    kind: str
    text: tuple[str, ...]
    label: str
    delimiter: str | None = None

    def words(self, path: str) -> list[str]:
        """Returns the guess as overrides. path: the value of task.path."""
        overrides = {
            "kind": self.kind,
            "path": quote_value(path),
            "text": f"[{','.join(map(quote_value, self.text))}]",
            "label": quote_value(self.label),
            **({"delimiter": quote_value(self.delimiter)} if self.delimiter else {}),
        }
        return ["task=custom", *(f"task.{key}={value}" for key, value in overrides.items())]


def is_path(value: str, options: Collection[str]) -> bool:
    """Whether the value of `task=` is a file or folder, not the name of a task."""
    if value in options or not value or "," in value:
        return False
    path = user_path(value)
    return suffix_of(path) in (*_SUFFIXES, *_WORKBOOKS) or path.is_dir() or is_path_only(value)


def guess(value: str, overrides: Mapping[str, str]) -> Guess:
    """Guesses the task of a file or a folder. value: the path, as typed. overrides: the values of `task.*` on the
    command line. `kind`, `label`, `text` and `header` are not guessed if they are set. Raises UserError if no kind
    fits, if several kinds fit, or if the first line of a table is a row, not column names."""
    file = _training_file(value)
    suffix = suffix_of(file)
    if suffix in _WORKBOOKS:
        raise UserError(f"task={value} is a workbook; lmtool reads tables as text", SAVE_AS)
    kind, text, label = overrides.get("kind"), _list(overrides.get("text")), overrides.get("label")
    if suffix in _TAG_SUFFIXES or (kind == "token_classification" and suffix in (".tsv", ".txt")):
        return Guess(kind or "token_classification", text or ("tokens",), label or "tags")
    if suffix == ".json" and begins_squad(beginning(file)):
        return Guess(kind or "extractive_qa", text or ("question", "context"), label or "answers")
    columns = _columns(file, _list(overrides.get("header")), (*(text or ()), label))
    if kind is None and suffix in (".tsv", ".txt") and any(map(_are_tags, columns, columns.values())):
        return Guess("token_classification", text or ("tokens",), label or "tags")
    if suffix in _HEADER_SUFFIXES and not (text and label) and "header" not in overrides and (why := headless(columns)):
        raise UserError(f"task={value}: {why}", _with_header(value, columns, kind))
    columns = _without_ids(columns)
    lower = {name.lower(): name for name in columns}
    if kind is None and text is None and label is None:
        if {"question", "context", "answers"} <= lower.keys():
            return Guess("extractive_qa", (lower["question"], lower["context"]), lower["answers"])
        for source, target in _SEQ2SEQ_NAMES:
            if {source, target} <= lower.keys():
                return Guess("seq2seq", (lower[source],), lower[target])
    return _guess_from_columns(value, columns, kind, text, label)


def _columns(file: Path, header: tuple[str, ...] | None, named: Collection[str | None]) -> Columns:
    if suffix_of(file) == ".parquet":
        table = read_parquet(file)
        index = {*table.index} - {*named}
        return {name: values for name, values in table.columns.items() if name not in index}
    table = read_table(file)
    return table.columns if header in (None, tuple(table.columns)) else read_table(file, header=header).columns


def _are_tags(name: str, values: Sequence[str]) -> bool:
    return "O" in values and all(map(_TAG.fullmatch, (name, *values)))


def headless(columns: Columns) -> str | None:
    """Returns a sentence with the evidence that a table has no header line, so that its first row was read as column
    names: a name is a number, like all values below it, or occurs among the values below it. None if there is no
    evidence."""
    names = [name for name in columns if name]
    if names == [str(number) for number in range(len(names))]:  # pandas numbers unnamed columns
        return None
    for name, values in columns.items():
        words = [text_of_label(value) for value in values if text_of_label(value)]
        problem = f"its first line is a row, not the names of its columns: {name.strip()!r} is "
        if words and _number(name) is not None and all(_number(word) is not None for word in words):
            return f"{problem}a number, like all other values of its column"
        # A one-word name may well occur in a list of distinct words.
        repeated = len(set(words)) <= max(2, len(words) / 2)
        if name.strip() in words and (len(name.split()) >= _MIN_TEXT_WORDS or repeated):
            return f"{problem}also a value of its column ({words.count(name.strip()):,} of {len(words):,} rows)"
    return None


def _with_header(value: str, columns: Columns, kind: str | None) -> str:
    names = [f"column_{number}" for number in range(1, len(columns) + 1)]
    rows = dict(zip(names, ([name, *values] for name, values in columns.items()), strict=True))
    with contextlib.suppress(UserError):
        guessed = _guess_from_columns(value, rows, kind, None, None)
        texts = ["text"] if len(guessed.text) == 1 else [f"text_{number}" for number, _ in enumerate(guessed.text, 1)]
        names_by_role = {guessed.label: "label", **dict(zip(guessed.text, texts, strict=True))}
        names = [names_by_role.get(name, name) for name in names]
    header = f"task.header=[{','.join(names)}]"
    hints = [f"name them: {shlex.join([f'task={value}', header])}"]
    with contextlib.suppress(UserError):
        words = _guess_from_columns(value, _without_ids(columns), kind, None, None).words(value)
        hints.append(f"if it is a header: {shlex.join(words)}")
    return "   ".join(hints)


def _without_ids(columns: Columns) -> Columns:
    return {name: values for name, values in columns.items() if name.lower() not in IDS and name != LINES}


def _guess_from_columns(
    value: str, columns: Columns, kind: str | None, text: tuple[str, ...] | None, label: str | None
) -> Guess:
    text_columns = [part for name in text or () for part in ([name] if name in columns else joined_columns(name))]
    unknown = [name for name in (*text_columns, *([label] if label else [])) if name not in columns]
    if unknown:
        is_text_column = unknown[0] in text_columns
        key = "task.text" if is_text_column else "task.label"
        raise no_column(f"task={value}", unknown[0], [*columns], key, listed=is_text_column)
    inputs = text_columns or _word_column(columns)
    kinds = {
        name: _kinds(values, bool(_parallel_columns(columns, name)), kind is None and name.lower() in _PLURAL_NAMES)
        for name, values in columns.items()
        if name not in inputs
    }
    if label is None:
        labels = [name for name, candidates in kinds.items() if candidates and (kind is None or kind in candidates)]
        labels_by_name = [name for name in labels if name.lower() in _LABEL_NAMES]
        constant = [
            name for name in kinds if name.lower() in _LABEL_NAMES and len(set(map(text_of_label, columns[name]))) == 1
        ]
        if constant and not labels_by_name:
            raise UserError(
                f"task={value}: all rows have the same {constant[0]}, {text_of_label(columns[constant[0]][0])!r}",
                "add rows of other classes, or name another label: task.label=COLUMN",
            )
        labels = labels_by_name if len(labels_by_name) == 1 else labels
        if not labels:
            if kind is None and text is None:
                _offer_seq2seq(value, [name for name, values in columns.items() if is_text(values)])
            raise UserError(
                f"task={value}: none of its columns {', '.join(columns)} holds classes, numbers or tags",
                "name the label: task=custom task.kind=KIND task.path=FILE task.text=[COLUMN] task.label=COLUMN",
            )
        options = {name: kinds[name] for name in labels}
    else:
        options = {label: kinds.get(label) or ["classification"]}
    guesses = [
        Guess(candidate, text or _texts(value, columns, name, candidate), name, _delimiter(candidate, columns[name]))
        for name, candidates in options.items()
        for candidate in ([kind] if kind else candidates)
    ]
    if len(guesses) > 1:
        _refuse(value, guesses)
    return guesses[0]


def _offer_seq2seq(value: str, texts: Sequence[str]) -> None:
    if len(texts) != 2:
        return
    source, target = texts
    forms = [shlex.join(Guess("seq2seq", (first,), last).words(value)) for first, last in (texts, reversed(texts))]
    hint = f"set {forms[0]}   or {forms[1]}"
    if any(len(name.split()) >= _MIN_TEXT_WORDS for name in texts):
        source, target = "the first column", "the second"
        hint = f"name the columns if its first line is a row: task={quote_value(value)} task.header=[source,target]"
    raise UserError(f"task={value}: {source} and {target} hold texts, and no column holds labels", hint)


def _word_column(columns: Columns) -> tuple[str, ...]:
    lists = [name for name in columns if _parallel_columns(columns, name)]
    return tuple(sorted(lists, key=lambda name: -len({str(item) for row in columns[name] for item in row}))[:1])


def _parallel_columns(columns: Columns, name: str) -> list[str]:
    if not all(isinstance(value, list) for value in columns[name]):
        return []
    sizes = [len(value) for value in columns[name]]
    return [
        other
        for other, values in columns.items()
        if other != name and [len(value) if isinstance(value, list) else -1 for value in values] == sizes
    ]


def _kinds(values: list[object], has_parallel_column: bool = False, is_plural: bool = False) -> list[str]:
    present = [value for value in values if text_of_label(value)]
    if not present:
        return []
    if all(isinstance(value, list) for value in present):
        return ["token_classification" if has_parallel_column else "multi_label"]
    words = [text_of_label(value) for value in present]
    multi_label = ["multi_label"] if _delimiter_of(words) else []
    if multi_label and is_plural:
        return multi_label
    distinct = len(set(words))
    numbers = [number for number in map(_number, words) if number is not None]
    if len(numbers) == len(words):
        integers = all(number == int(number) for number in numbers)
        if integers and distinct <= _MAX_CLASSES:
            return ["classification"] if distinct > 1 else []
        return (
            ["regression"]
            if distinct >= (_MIN_VALUES if integers else _MAX_CLASSES + 1)
            else ["classification", "regression"]
        )
    # Class names recur; texts rarely do.
    few = 1 < distinct <= max(2, min(len(words) / 2, 1000))
    short = sum(len(word.split()) for word in words) / len(words) < _MIN_TEXT_WORDS
    return [*multi_label, *(["classification"] if few and short else [])]


def _delimiter_of(cells: Sequence[str]) -> str | None:
    for delimiter in _DELIMITERS:
        # Checked first, since a text column fails it at once.
        if not all(0 < len(part.split()) < _MIN_TEXT_WORDS for cell in cells for part in cell.split(delimiter)):
            continue
        split_cells = [tuple(part.strip() for part in cell.split(delimiter)) for cell in cells]
        labels = Counter(label for split_cell in split_cells for label in split_cell)
        shared = Counter(label for split_cell in set(split_cells) for label in set(split_cell))
        few = len(labels) <= max(2, labels.total() / 2) and max(shared.values(), default=0) > 1
        if few and labels.total() > len(cells):
            return delimiter
    return None


def _delimiter(kind: str, values: Sequence[object]) -> str | None:
    """None for a comma, or if there is one label."""
    if kind != "multi_label" or any(isinstance(value, list) for value in values):
        return None
    delimiter = _delimiter_of([text_of_label(value) for value in values if text_of_label(value)])
    return None if delimiter == "," else delimiter


def _number(word: str) -> float | None:
    try:
        number = float(word.replace(",", ".") if DECIMAL_COMMA.fullmatch(word) else word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _texts(value: str, columns: Columns, label: str, kind: str) -> tuple[str, ...]:
    other_columns = [name for name in columns if name != label]
    if kind == "token_classification":
        return _word_column(columns) or ("tokens",)
    texts = [name for name in other_columns if is_text(columns[name])]
    if len(texts) in (1, 2):
        return tuple(texts)
    if len(columns) == 1 and (separator := next((mark for mark in ",;|" if mark in label), None)):
        raise UserError(
            f"task={value} was read as one column, {label!r}, whose values seem to be separated by {separator!r}",
            "rename the file to match its separator: .tsv for tabs, .csv for commas or semicolons",
        )
    if not texts:
        raise UserError(
            f"task={value}: none of its columns {', '.join(other_columns) or 'but ' + label} holds texts to read",
            f"name it: task.text=[COLUMN] task.label={quote_value(label)}",
        )
    _refuse(value, [Guess(kind, (name,), label) for name in texts])


def is_text(values: list[object]) -> bool:
    """Whether a column holds texts: mostly several words, or mostly distinct values that are not numbers."""
    words = [value for value in values if isinstance(value, str)]
    if len(words) < len(values) / 2 or all(_number(word) is not None for word in words):
        return False
    long_texts = sum(len(word.split()) >= _MIN_TEXT_WORDS for word in words)
    return long_texts > len(words) / 2 or len(set(words)) > len(words) / 2


def _refuse(value: str, guesses: Sequence[Guess]) -> NoReturn:
    first, second = (shlex.join(guess.words(value)) for guess in guesses[:2])
    more = f" (or {len(guesses) - 2} more)" if len(guesses) > 2 else ""
    question = "which column is the label" if guesses[0].label != guesses[1].label else "which task is meant"
    raise UserError(f"task={value}: its columns do not determine {question}", f"set {first}   or {second}{more}")


def _training_file(value: str) -> Path:
    path = user_path(value)
    if path.is_file():
        return path
    if not path.is_dir():
        raise no_such_file("task", value)
    for entry in sorted(path.iterdir()):
        if stem_of(entry).lower() == "train" and suffix_of(entry) in _SUFFIXES:
            return entry
    entries_text = ", ".join(sorted(entry.name for entry in path.iterdir())[:12]) or "nothing"
    raise UserError(
        f"task={value}: the folder has no train file; there is {entries_text}",
        "name a folder with train.csv, train.tsv, train.jsonl or train.parquet, or one file",
    )


def _list(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(part.strip().strip("'\"") for part in value.strip().strip("[]").split(","))


def quote_value(value: str) -> str:
    """Returns a value in Hydra's syntax: quoted unless it is a plain word."""
    if re.fullmatch(r"[A-Za-z_./~-][\w./-]*", value) and value.lower() not in ("null", "true", "false"):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SAMPLE = 100  # rows from which the text column is inferred
_FIRST_WORD = re.compile(r"[A-Za-z]+")


def is_text_path(value: str, names: Sequence[str]) -> bool:
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


def text_overrides(value: str, values: Mapping[str, str]) -> list[str]:
    """Returns the overrides that `data=VALUE` stands for, if the value is a path. values: all overrides by key."""
    path = user_path(value)
    paths = {"data.path": value} if not path.is_dir() else _paths_in_folder(value, path)
    kind = kind_of(paths["data.path"]) or _only_kind(value, path)
    words = [f"data={kind}", *(f"{key}={quote_value(file)}" for key, file in paths.items())]
    if kind != "text" and "data.text" not in values:
        suffixes = text_configs.SUFFIXES[kind]
        file = find("data", paths["data.path"], suffixes + compressed_suffixes(*suffixes))[0]
        column = _column(value, _rows(file, kind, values), shlex.join(words), kind == "csv")
        words += [] if column == "text" else [f"data.text={quote_value(column)}"]
    return words


def _paths_in_folder(value: str, folder: Path) -> dict[str, str]:
    """Test files are left out. Raises UserError if the files of a split have several types."""
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
    """value: of `data=`. words: its expansion, for hints. has_header: whether the first line should name columns."""
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
