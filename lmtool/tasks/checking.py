"""Checks a task's data before training: invalid rows, lengths, labels, duplicates, distribution shifts. Returns plain
data; imports no torch."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.data.duplicates import Matches, TextIndex, key_of, texts_with_numbers
from lmtool.data.examples import Rows
from lmtool.data.files import collect_errors
from lmtool.data.sources import OnStage
from lmtool.errors import UserError
from lmtool.random_streams import Permutation
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.files import TaskTable
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import cell_text, location
from lmtool.tasks.kinds.predictions import Label
from lmtool.tasks.loading import TaskData, decode_tables, read_tables

_WORD = re.compile(r"\w+")
# Number of histogram bins for numeric labels, over the range of both sets of rows.
_BINS = 10
# Position in the random stream "sample".
_SAMPLE_COUNTER = 16
MAX_ROWS = 20_000
"""The maximum number of rows read from each set. Larger sets are sampled."""


@dataclass(frozen=True)
class Shift:
    """The distribution shift from the texts of `source` to those of `target`.

    rows: the number of target rows. words: the divergence of the lower-cased unigrams. chance: the same divergence
    between a random sample of the source and its remainder, as a baseline. unknown: the fraction of the target's words
    that the source lacks; unknown_types: the same fraction over distinct words. labels: the divergence of the labels;
    None if they cannot be compared.
    """

    source: str
    target: str
    rows: int
    words: float
    chance: float
    unknown: float
    unknown_types: float
    labels: float | None


@dataclass(frozen=True)
class ComparedRows:
    """Two sets of rows to compare, with their titles. kind: the task kind of both; None for rows of different tasks."""

    source: str
    first: Rows
    target: str
    second: Rows
    kind: TaskKind | None = None


def compared_rows(members: Mapping[str, TaskData]) -> Iterator[ComparedRows]:
    """Yields the training rows of each task with its other rows, and the training rows of every two tasks."""
    for name, data in members.items():
        kind: TaskKind = build(data.config)
        title = "" if len(members) == 1 else f"{name} "
        other_splits = {**data.validation, **data.test}
        if data.unlabeled is not None:
            other_splits["unlabeled texts"] = data.unlabeled
        for split, rows in other_splits.items():
            if len(rows):
                yield ComparedRows(f"{title}train", data.train, f"{title}{split}", rows, kind)
    for (first, source), (second, target) in combinations(members.items(), 2):
        yield ComparedRows(f"{first} train", source.train, f"{second} train", target.train)


def shift(rows: ComparedRows) -> Shift:
    """Returns the shift from the first rows to the second."""
    target_count = len(rows.second)
    first, second = (
        _sample_rows(side, MAX_ROWS) if len(side) > MAX_ROWS else side for side in (rows.first, rows.second)
    )
    words, other_words = unigrams(first), unigrams(second)
    unknown = {word: count for word, count in other_words.items() if word not in words}
    sampled_words = unigrams(_sample_rows(first, min(len(second), len(first) // 2)))
    return Shift(
        rows.source,
        rows.target,
        target_count,
        divergence(words, other_words),
        divergence(sampled_words, words - sampled_words),
        sum(unknown.values()) / max(other_words.total(), 1),
        len(unknown) / max(len(other_words), 1),
        None if rows.kind is None else _label_shift(rows.kind, first, second),
    )


def _sample_rows(rows: Rows, count: int) -> Rows:
    return rows.take(Permutation(len(rows), 0, "sample", _SAMPLE_COUNTER)(np.arange(count)))


def unigrams(rows: Rows) -> Counter[str]:
    """Counts the lower-cased words in all columns."""
    return Counter(word for text in passages_of(rows) for word in _WORD.findall(text.lower()))


_SHARED_WORDS = 8


def independent_passages(rows: Rows) -> list[str]:
    """Returns the texts of rows that share neither a line of their file, such as the replies of a dialogue, nor a cell
    of `_SHARED_WORDS` words or more, such as the questions about a paragraph: of these, the first row."""
    seen: set[object] = set()
    texts = []
    for text, place, cells in zip(
        passages_of(rows), rows.origin, zip(*rows.columns.values(), strict=True), strict=True
    ):
        keys = {place, *(cell for cell in map(cell_text, cells) if len(cell.split()) >= _SHARED_WORDS)}
        if seen.isdisjoint(keys):
            texts.append(text)
        seen |= keys
    return texts


def passages_of(rows: Rows) -> Iterator[str]:
    """Yields the text of each row, its columns joined."""
    return (" ".join(map(cell_text, cells)) for cells in zip(*rows.columns.values(), strict=True))


def divergence(first: Mapping[Label, float], second: Mapping[Label, float]) -> float:
    """Returns the Jensen-Shannon divergence, in bits, of two distributions given by counts; nan if either is empty."""
    names = sorted({*first, *second}, key=str)
    sides = [np.array([side.get(name, 0) for name in names], dtype=np.float64) for side in (first, second)]
    if not all(side.sum() for side in sides):
        return float("nan")
    probabilities = [side / side.sum() for side in sides]
    middle = (probabilities[0] + probabilities[1]) / 2
    return sum(float(np.sum(side[side > 0] * np.log2(side[side > 0] / middle[side > 0]))) for side in probabilities) / 2


def _label_shift(kind: TaskKind, first: Rows, second: Rows) -> float | None:
    if first.labels is None or second.labels is None:
        return None
    sides = [np.asarray(list(kind.flat_values(labels))) for labels in (first.labels, second.labels)]
    if any(side.ndim != 1 or side.dtype.kind not in "iufU" or not len(side) for side in sides):
        return None
    if sides[0].dtype.kind == "f":
        edges = np.histogram_bin_edges(np.concatenate(sides), _BINS)
        sides = [np.digitize(side, edges[1:-1]) for side in sides]
    return divergence(*(Counter(side.tolist()) for side in sides))


MOST_FAILING = 1000
"""The maximum number of invalid rows that are listed. Reading stops beyond it."""
_TEXTS_PER_BATCH = 1000  # texts measured at a time
_PLACE = re.compile(r"(.+?):(\d+)(?::\d+)?: ")


@dataclass(frozen=True)
class LabeledTexts:
    """The texts of a split, one for each row.

    texts: the texts, which can be iterated several times. place: returns the location of a text, given its index.
    labels: the label of each text, or None for a text without one; the whole list is None if no text has a label.
    label_counts: the frequency of each label, or statistics of numeric labels. by_words: whether a text counts as its
    number of words, rather than as 1, in fractions of the split.
    """

    texts: Iterable[str]
    place: Callable[[int], str]
    labels: list[object] | None = None
    label_counts: dict[str, object] | None = None
    by_words: bool = False

    @classmethod
    def of(cls, kind: TaskKind, rows: Rows) -> LabeledTexts:
        cells = zip(*rows.columns.values(), strict=True)
        texts = ["\n".join(map(cell_text, row)) for row in cells]
        labels = None if rows.labels is None else [kind.shown(label) for label in rows.labels]
        return cls(texts, lambda number: location(rows.origin[number]), labels, _label_counts(kind, rows))

    @classmethod
    def of_documents(cls, texts: Iterable[str], split: str) -> LabeledTexts:
        """Returns the documents to pretrain on. They are weighted by their words, because repeated headings are many
        documents but little text."""
        return cls(texts, lambda number: f"{split} document {number + 1:,}", by_words=True)


@dataclass(frozen=True)
class _Measures:
    lengths: np.ndarray
    weights: np.ndarray
    keys: np.ndarray
    empty: int

    @classmethod
    def of(cls, split_texts: LabeledTexts, length_of: Callable[[Sequence[str]], list[int]]) -> _Measures:
        lengths, weights, keys, empty = array("q"), array("q"), array("Q"), 0
        texts = iter(split_texts.texts)
        while batch := list(islice(texts, _TEXTS_PER_BATCH)):
            lengths.extend(length_of(batch))
            weights.extend(len(_WORD.findall(text)) if split_texts.by_words else 1 for text in batch)
            keys.extend(map(key_of, batch))
            empty += sum(not text.strip() for text in batch)
        return cls(np.array(lengths), np.array(weights), np.array(keys, dtype=np.uint64), empty)


def read_valid_rows(
    config: TaskConfig, seed: int, cache_dir: str, offline: bool
) -> tuple[TaskData | None, list[UserError]]:
    """Reads a task's data, leaving out invalid rows. Returns the data, or None if there are too many invalid rows; and
    the error of each invalid row. Raises UserError if the data cannot be read at all."""
    with collect_errors() as problems:
        tables, metadata = read_tables(config, cache_dir, offline)
        while len(problems) < MOST_FAILING:
            try:
                return decode_tables(config, tables, dict(metadata), seed), problems
            except UserError as problem:
                valid_tables = _without_row(tables, problem)
                if valid_tables is None:
                    if not problems:
                        raise
                    problems.append(problem)  # the error names no row that could be left out
                    return None, problems
                problems.append(problem)
                tables = valid_tables
    return None, problems


def _without_row(tables: Mapping[str, TaskTable], problem: UserError) -> dict[str, TaskTable] | None:
    match = _PLACE.match(problem.message)
    if match is None:
        return None
    origin = match[1], int(match[2])
    for split, table in tables.items():
        if origin in table.origin:
            row = table.origin.index(origin)
            columns = {name: values[:row] + values[row + 1 :] for name, values in table.columns.items()}
            retained = table.origin[:row] + table.origin[row + 1 :]
            return {**tables, split: replace(table, columns=columns, origin=retained)}
    return None


def texts_of_splits(data: TaskData) -> dict[str, LabeledTexts]:
    """Returns the texts of a task's splits, the training texts first."""
    kind: TaskKind = build(data.config)
    rows_of_splits = {"train": data.train, **data.validation, **data.test}
    return {split: LabeledTexts.of(kind, rows) for split, rows in rows_of_splits.items()}


def compare(
    splits: Mapping[str, LabeledTexts],
    near: float | None,
    length_of: Callable[[Sequence[str]], list[int]],
    longest: int,
    max_pairs: int,
    seed: int,
    progress: OnStage,
) -> JsonObject:
    """Returns the findings of each split: the numbers of rows and labels, lengths, and duplicate texts. splits: that of
    the training texts first. near: the minimum similarity of near-duplicates; None to find only exact duplicates.
    longest: the length above which texts are truncated. max_pairs: the maximum number of pairs to list. seed: seeds the
    sample in which near-duplicates are searched."""
    index, train, report = None, None, {}
    for split, split_texts in splits.items():
        progress(f"comparing the texts of {split}", 0, 1)
        measures = _Measures.of(split_texts, length_of)
        split_index = TextIndex(split_texts.texts, near, seed, keys=measures.keys)
        report[split] = {
            "rows": len(measures.keys),
            "empty": measures.empty,
            "labels": split_texts.label_counts,
            "lengths": _quantiles(measures.lengths, longest),
            "near_compared": None if near is None else dict(zip(("texts", "of"), split_index.compared, strict=True)),
            "within": _repeats(split_texts, split_texts, split_index.repeats(), measures.weights, max_pairs),
        }
        if index is None or train is None:
            index, train = split_index, split_texts
        else:
            matches = index.overlap(split_index)
            report[split]["in_training"] = _repeats(split_texts, train, matches, measures.weights, max_pairs)
    return report


def _repeats(
    split_texts: LabeledTexts, other_texts: LabeledTexts, matches: Matches, weights: np.ndarray, max_pairs: int
) -> JsonObject:
    """Equal texts are equal up to case, punctuation and spacing. Pairs with different labels come first."""
    numbers = np.flatnonzero(matches.repeated >= 0)
    repeated, similarity = matches.repeated[numbers], matches.similarity[numbers]
    equal, differ = similarity == 1, np.zeros(len(numbers), dtype=bool)
    if split_texts.labels is not None and other_texts.labels is not None:
        labels, other_labels = split_texts.labels, other_texts.labels
        label_pairs = ((labels[here], other_labels[there]) for here, there in zip(numbers, repeated, strict=True))
        differ = np.array([None not in pair and pair[0] != pair[1] for pair in label_pairs], dtype=bool)
    order = np.lexsort((-similarity.round(3), ~differ))[:max_pairs]
    texts = dict(texts_with_numbers(split_texts.texts, np.unique(numbers[order])))
    repeated_texts = dict(texts_with_numbers(other_texts.texts, np.unique(repeated[order])))
    pairs = []
    for index in order.tolist():
        here, there = int(numbers[index]), int(repeated[index])
        pair = {
            "row": split_texts.place(here),
            "repeats": other_texts.place(there),
            "similarity": round(float(similarity[index]), 3),
            "text": texts[here],
            "text_repeated": repeated_texts[there],
        }
        if differ[index]:
            assert split_texts.labels is not None and other_texts.labels is not None
            pair |= {"label": split_texts.labels[here], "label_repeated": other_texts.labels[there]}
        pairs.append(pair)
    return {
        "equal": int(equal.sum()),
        "similar": int((~equal).sum()),
        "other_label": int((equal & differ).sum()),
        "share": int(weights[numbers[equal]].sum()) / max(int(weights.sum()), 1),
        "pairs": pairs,
    }


def _label_counts(kind: TaskKind, rows: Rows) -> dict[str, object] | None:
    if rows.labels is None or not len(rows):
        return None
    flat_labels = kind.flat_values(rows.labels)
    if isinstance(flat_labels, np.ndarray) and flat_labels.dtype.kind == "f" and flat_labels.ndim == 1:
        return {
            "mean": float(flat_labels.mean()),
            "deviation": float(flat_labels.std()),
            "least": float(flat_labels.min()),
            "most": float(flat_labels.max()),
        }
    labels_text = [kind.shown(label) for label in flat_labels]
    names = [label if isinstance(label, str) else None for label in labels_text]
    return None if None in names else {str(name): count for name, count in Counter(names).most_common()}


def _quantiles(lengths: np.ndarray, longest: int) -> dict[str, float]:
    """`cut` is the fraction of lengths above `longest`."""
    return {
        "median": float(np.median(lengths)),
        "percentile_95": float(np.percentile(lengths, 95)),
        "longest": int(lengths.max()),
        "cut": float((lengths > longest).mean()),
    }
