"""What there is to say of a task's data before anything is trained on them: rows that fail, lengths, labels, texts that
occur twice. Plain data; imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from lmtool.config.tables import build
from lmtool.data.duplicates import Match, overlap, repeats
from lmtool.data.examples import Rows
from lmtool.data.files import collected
from lmtool.errors import UserError
from lmtool.random_streams import Permutation
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.files import TaskTable
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import location
from lmtool.tasks.loading import TaskData, decode_tables, read_tables

_WORD = re.compile(r"\w+")
# Bins of values, over the range of both sides.
_BINS = 10
# Of the stream "sample": which rows of the source are held against the rest.
_CHANCE = 16
MOST = 20_000
"""Rows of a side that are read, a seeded draw of them."""


@dataclass(frozen=True)
class Shift:
    """From the texts of `source` to those of `target`. rows: of the target. words: divergence of their unigrams, in
    lower case; chance: of a draw of the source, as large as the target or half of the source, beside the rest.
    unknown: share of the target's words that the source never has; unknown_types: the same of different words. labels:
    divergence of the labels, None where there are none to compare."""

    source: str
    target: str
    rows: int
    words: float
    chance: float
    unknown: float
    unknown_types: float
    labels: float | None


def shifts(members: Mapping[str, TaskData]) -> Iterator[Shift]:
    """Within each task from its training rows to its other rows, and between the training rows of each two tasks."""
    for name, data in members.items():
        kind: TaskKind = build(data.config)
        title = "" if len(members) == 1 else f"{name} "
        other_splits = {**data.validation, **data.test}
        if data.unlabelled is not None:
            other_splits["unlabelled texts"] = data.unlabelled
        for split, rows in other_splits.items():
            if len(rows):
                yield shift(f"{title}train", data.train, f"{title}{split}", rows, kind)
    for (first, source), (second, target) in combinations(members.items(), 2):
        yield shift(f"{first} train", source.train, f"{second} train", target.train)


def shift(source: str, first: Rows, target: str, second: Rows, kind: TaskKind | None = None) -> Shift:
    """The shift from the first rows to the second. kind: of the labels of both; None where they are of two tasks."""
    count = len(second)
    first, second = (_sampled(rows, min(len(rows), MOST)) for rows in (first, second))
    known, other = unigrams(first), unigrams(second)
    unknown = {word: count for word, count in other.items() if word not in known}
    order = Permutation(len(first), 0, "sample", _CHANCE)(np.arange(len(first)))
    size = min(len(second), len(first) // 2)
    sampled_words = unigrams(first.take(order[:size]))
    return Shift(
        source,
        target,
        count,
        divergence(known, other),
        divergence(sampled_words, known - sampled_words),
        sum(unknown.values()) / max(other.total(), 1),
        len(unknown) / max(len(other), 1),
        None if kind is None else _label_shift(kind, first, second),
    )


def _sampled(rows: Rows, count: int) -> Rows:
    """A seeded draw of rows."""
    return rows.take(Permutation(len(rows), 0, "sample", _CHANCE)(np.arange(count))) if count < len(rows) else rows


def unigrams(rows: Rows) -> Counter[str]:
    """How often each word comes in all columns of rows, in lower case."""
    return Counter(word for text in _texts(rows) for word in _WORD.findall(text.lower()))


def _texts(rows: Rows) -> Iterator[str]:
    for column in rows.columns.values():
        yield from (" ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in column)


def divergence(first: Mapping[Any, float], second: Mapping[Any, float]) -> float:
    """The Jensen-Shannon divergence of two distributions given by counts, in bits; nan where one has none."""
    names = sorted({*first, *second}, key=str)
    sides = [np.array([side.get(name, 0) for name in names], dtype=np.float64) for side in (first, second)]
    if not all(side.sum() for side in sides):
        return float("nan")
    fractions = [side / side.sum() for side in sides]
    middle = (fractions[0] + fractions[1]) / 2
    return sum(float(np.sum(side[side > 0] * np.log2(side[side > 0] / middle[side > 0]))) for side in fractions) / 2


def _label_shift(kind: TaskKind, first: Rows, second: Rows) -> float | None:
    """Of classes by their numbers, of values by bins; None of labels that are neither."""
    if first.labels is None or second.labels is None:
        return None
    sides = [np.asarray(list(_single(kind, rows))) for rows in (first, second)]
    if any(side.ndim != 1 or side.dtype.kind not in "iufU" or not len(side) for side in sides):
        return None
    if sides[0].dtype.kind == "f":
        edges = np.histogram_bin_edges(np.concatenate(sides), _BINS)
        sides = [np.digitize(side, edges[1:-1]) for side in sides]
    return divergence(*(Counter(side.tolist()) for side in sides))


def _single(kind: TaskKind, rows: Rows) -> Iterable[object]:
    assert rows.labels is not None
    return kind.single(rows.labels)


MOST_FAILING = 1000
"""Rows that fail, at most: of more, their number is not known."""
_PLACE = re.compile(r"(.+?):(\d+)(?::\d+)?: ")
OnStage = Callable[[str, int, int], None]


@dataclass
class Twice:
    """Rows of a split whose text occurs before them (`within`), or in the training rows (`in_training`): equal but for
    case, punctuation and spacing, or similar. other_label: of the equal ones, those with another label. size: of the
    equal ones together, as `Texts.sizes` has it. pairs: (row, the row it repeats, similarity) by file:line and text,
    those with another label first."""

    equal: int = 0
    similar: int = 0
    other_label: int = 0
    size: int = 0
    pairs: list[dict[str, Any]] = field(default_factory=list)

    def plain(self, total: int, most: int) -> dict[str, object]:
        """total: the size of all rows. most: pairs that are listed. share: that of the equal ones."""
        pairs = sorted(self.pairs, key=lambda pair: ("label" not in pair, -pair["similarity"]))[:most]
        counts = {"equal": self.equal, "similar": self.similar, "other_label": self.other_label}
        return {**counts, "share": self.size / max(total, 1), "pairs": pairs}


@dataclass(frozen=True)
class LabeledTexts:
    """What is read of the rows of a split, a text each; where each stands; its label, None where it has none; how much
    each counts in shares; and how often each label occurs."""

    texts: list[str]
    places: list[str]
    labels: list[object]
    sizes: list[int]
    label_counts: dict[str, object] | None = None

    @classmethod
    def of(cls, kind: TaskKind, rows: Rows) -> LabeledTexts:
        cells = zip(*rows.columns.values(), strict=True)
        texts = ["\n".join(_text(cell) for cell in row) for row in cells]
        labels = [None] * len(rows) if rows.labels is None else [kind.shown(label) for label in rows.labels]
        return cls(texts, [location(origin) for origin in rows.origin], labels, [1] * len(rows), _counted(kind, rows))

    @classmethod
    def of_documents(cls, texts: list[str], split: str) -> LabeledTexts:
        """Documents of text to pretrain on. They count by their words: what recurs in all prose (a chapter's heading,
        "Yes.", a line of asterisks) is many documents and little text."""
        places = [f"{split} document {number:,}" for number in range(1, len(texts) + 1)]
        return cls(texts, places, [None] * len(texts), [len(_WORD.findall(text)) for text in texts])


def _text(cell: object) -> str:
    return " ".join(map(str, cell)) if isinstance(cell, (list, tuple)) else str(cell)


def read_sound(config: TaskConfig, seed: int, cache_dir: str, offline: bool) -> tuple[TaskData | None, list[UserError]]:
    """The data of a task without the rows that fail, and what is wrong with each of these; None where too many do.
    UserError where the data fail as a whole."""
    with collected() as problems:
        tables, metadata = read_tables(config, cache_dir, offline)
        while len(problems) < MOST_FAILING:
            try:
                return decode_tables(config, tables, dict(metadata), seed), problems
            except UserError as problem:
                rest = _without(tables, problem)
                if rest is None:
                    if not problems:
                        raise
                    problems.append(problem)  # what is left after the rows above
                    return None, problems
                problems.append(problem)
                tables = rest
    return None, problems


def _without(tables: Mapping[str, TaskTable], problem: UserError) -> dict[str, TaskTable] | None:
    """The tables without the row that a problem names by file:line; None where it names none."""
    match = _PLACE.match(problem.message)
    if match is None:
        return None
    origin = match[1], int(match[2])
    for split, table in tables.items():
        if origin in table.origin:
            row = table.origin.index(origin)
            columns = {name: values[:row] + values[row + 1 :] for name, values in table.columns.items()}
            kept = table.origin[:row] + table.origin[row + 1 :]
            return {**tables, split: replace(table, columns=columns, origin=kept)}
    return None


def findings(
    data: TaskData,
    near: float | None,
    length_of: Callable[[Sequence[str]], list[int]],
    longest: int,
    most: int,
    progress: OnStage | None = None,
) -> dict[str, object]:
    """By split: rows, labels, lengths, texts that occur twice. near: least similarity of near-duplicates, None: equal
    texts alone. length_of: lengths of texts. longest: one from which on they are cut. most: pairs that are listed."""
    kind: TaskKind = build(data.config)
    splits = {
        name: LabeledTexts.of(kind, rows)
        for name, rows in {"train": data.train, **data.validation, **data.test}.items()
    }
    return compared(splits, near, length_of, longest, most, progress)


def compared(
    splits: Mapping[str, LabeledTexts],
    near: float | None,
    length_of: Callable[[Sequence[str]], list[int]],
    longest: int,
    most: int,
    progress: OnStage | None = None,
) -> dict[str, Any]:
    """The same of texts by split, training ones first."""
    index, train, report = None, None, {}
    for split, split_texts in splits.items():
        if progress is not None:
            progress(f"comparing the texts of {split}", 0, 1)
        index_here, matches = repeats(split_texts.texts, near)
        report[split] = {
            "rows": len(split_texts.texts),
            "empty": sum(not text.strip() for text in split_texts.texts),
            "labels": split_texts.label_counts,
            "lengths": _quantiles(np.array(length_of(split_texts.texts)), longest),
            "within": _twice(split_texts, split_texts, matches.items()).plain(sum(split_texts.sizes), most),
        }
        if index is None or train is None:
            index, train = index_here, split_texts
        else:
            shared = _twice(split_texts, train, overlap(split_texts.texts, index))
            report[split]["in_training"] = shared.plain(sum(split_texts.sizes), most)
    return report


def _twice(split_texts: LabeledTexts, other_splits: LabeledTexts, matches: Iterable[tuple[int, Match]]) -> Twice:
    twice = Twice()
    for number, match in matches:
        equal = match.similarity == 1.0
        labels = split_texts.labels[number], other_splits.labels[match.number]
        differ = None not in labels and labels[0] != labels[1]
        twice.equal += equal
        twice.similar += not equal
        twice.other_label += equal and differ
        twice.size += split_texts.sizes[number] if equal else 0
        twice.pairs.append(
            {
                "row": split_texts.places[number],
                "repeats": other_splits.places[match.number],
                "similarity": round(match.similarity, 3),
                "text": split_texts.texts[number],
                "text_repeated": other_splits.texts[match.number],
                **({"label": labels[0], "label_repeated": labels[1]} if differ else {}),
            }
        )
    return twice


def _counted(kind: TaskKind, rows: Rows) -> dict[str, object] | None:
    """How often each label occurs, the commonest first; of values their mean, spread and ends; None without labels."""
    if rows.labels is None or not len(rows):
        return None
    single = kind.single(rows.labels)
    if isinstance(single, np.ndarray) and single.dtype.kind == "f" and single.ndim == 1:
        return {
            "mean": float(single.mean()),
            "deviation": float(single.std()),
            "least": float(single.min()),
            "most": float(single.max()),
        }
    shown = [kind.shown(label) for label in single]
    words = [label if isinstance(label, str) else None for label in shown]
    return None if None in words else {str(word): count for word, count in Counter(words).most_common()}


def _quantiles(lengths: np.ndarray, longest: int) -> dict[str, float]:
    """Median, 95th percentile and longest; `cut`: the share of those longer than `longest`."""
    return {
        "median": float(np.median(lengths)),
        "percentile_95": float(np.percentile(lengths, 95)),
        "longest": int(lengths.max()),
        "cut": float((lengths > longest).mean()),
    }
