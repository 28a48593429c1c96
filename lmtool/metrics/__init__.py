"""Scores over plain data, proven against the reference implementations."""

from __future__ import annotations

from lmtool.metrics.bootstrap import Interval, interval, resampled_rows
from lmtool.metrics.classes import by_class, calibration
from lmtool.metrics.intervals import paired_standard_error, ratio_standard_error
from lmtool.metrics.metric import LOSS, Metric
from lmtool.metrics.scores import METRICS, compute, confusion

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
    "paired_standard_error",
    "ratio_standard_error",
    "resampled_rows",
]
