"""Metrics, computed from plain data; tests compare them with the reference implementations."""

from __future__ import annotations

from lmtool.learners.metrics.intervals import (
    Interval,
    interval,
    mean_and_error,
    paired_standard_error,
    ratio_standard_error,
    resample_count,
    resampled_rows,
    t_quantile,
)
from lmtool.learners.metrics.scores import LOSS, METRICS, Metric, by_class, calibration, compute, confusion
from lmtool.learners.metrics.spans import ANSWER_METRICS
from lmtool.learners.metrics.texts import LANGUAGE_METRICS

__all__ = [
    "LOSS",
    "METRICS",
    "Interval",
    "Metric",
    "by_class",
    "calibration",
    "compute",
    "confusion",
    "interval",
    "mean_and_error",
    "paired_standard_error",
    "ratio_standard_error",
    "resample_count",
    "resampled_rows",
    "smaller_is_better",
    "t_quantile",
]

_SMALLER_IS_BETTER = tuple(
    name
    for table in ({LOSS.name: LOSS}, METRICS, ANSWER_METRICS, LANGUAGE_METRICS)
    for name, metric in table.items()
    if metric.smaller_is_better
)


def smaller_is_better(name: str) -> bool:
    """Returns whether smaller values of a score are better. Every score whose name ends in "error" is of this kind.

    name: the score's key in result files; it may begin with the name of a loss term or of a split (mlm_loss, dev_mse).
    """
    return name.endswith("error") or any(name == metric or name.endswith(f"_{metric}") for metric in _SMALLER_IS_BETTER)
