"""Two runs on the same rows, from their predictions.jsonl alone: what `lmtool evaluate A against=B` prints, without a
model.

A score is paired only where the predictions give the very score of result.json: of kinds whose scores are no function
of single labels (answers, entities, written texts) it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtool.metrics import METRICS, Metric, interval, resample_count, resampled_rows
from lmtool.reporting.run_files import RunFiles, read_predictions

# How far a score may be from the saved one: predictions of a regression are rounded in the file.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class LabelledRows:
    """The rows of a run's first labelled split, in their order. gold and predicted: labels, or numbers."""

    ids: list[Any]
    gold: list[Any]
    predicted: list[Any]

    @classmethod
    def of(cls, run: RunFiles) -> LabelledRows:
        rows, split = cls([], [], []), None
        for row in read_predictions(run):
            split = row.get("split") if split is None else split
            if row.get("split") == split:
                rows.ids.append(row.get("id"))
                rows.gold.append(row["gold"])
                rows.predicted.append(row["prediction"])
        return rows


def paired_difference(first: RunFiles, second: RunFiles) -> dict[str, dict[str, float]] | str:
    """By metric, the first run's score less the second's on the same rows, with the 95% bootstrap interval, the rows
    resampled for both alike ({"value", "low", "high"}); else the sentence why there is none."""
    mine, theirs = LabelledRows.of(first), LabelledRows.of(second)
    for run, rows in ((first, mine), (second, theirs)):
        if not rows.ids:
            return f"{run.name} has no labelled predictions"
    if (mine.ids, mine.gold) != (theirs.ids, theirs.gold):
        return "their predictions are of different rows"
    columns = _columns(mine.gold, mine.predicted, theirs.predicted)
    if columns is None:
        return "their predictions are no single labels or numbers: lmtool evaluate A against=B"
    gold, predicted, other = columns
    shared = [metric for metric in _metrics(first, gold, predicted) if metric in list(_metrics(second, gold, other))]
    if not shared:
        return "their scores are no function of single labels: lmtool evaluate A against=B"
    resamples = resample_count(len(gold), [metric.name for metric in shared])
    gaps: dict[str, list[float]] = {metric.name: [] for metric in shared}
    for rows_N in resampled_rows(len(gold), resamples):
        mine_N, theirs_N, gold_N = predicted[rows_N], other[rows_N], gold[rows_N]
        for metric in shared:
            gaps[metric.name].append(metric(gold_N, mine_N) - metric(gold_N, theirs_N))
    return {
        metric.name: {
            "value": metric(gold, predicted) - metric(gold, other),
            **interval(gaps[metric.name])._asdict(),
        }
        for metric in shared
    }


def _columns(*columns: Sequence[Any]) -> tuple[np.ndarray, ...] | None:
    """The columns as numbers: of labels their places in the sorted labels of all."""
    values = [value for column in columns for value in column]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return tuple(np.asarray(column, dtype=np.float64) for column in columns)
    if not all(isinstance(value, str) for value in values):
        return None
    places = {label: place for place, label in enumerate(sorted(set(values)))}
    return tuple(np.asarray([places[value] for value in column], dtype=np.int64) for column in columns)


def _metrics(run: RunFiles, gold: np.ndarray, predicted: np.ndarray) -> Iterator[Metric]:
    """The metrics of the run that its predictions give again."""
    saved = run.result.get("metrics")
    for name, value in (saved if isinstance(saved, dict) else {}).items():
        metric = METRICS.get(name)
        if metric is None or not isinstance(value, int | float) or (name in _OF_CLASSES) != (gold.dtype == np.int64):
            continue
        if math.isclose(metric(gold, predicted), value, abs_tol=_TOLERANCE):
            yield metric


_OF_CLASSES = ("accuracy", "f1", "macro_f1", "matthews")
