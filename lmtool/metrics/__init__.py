"""Scores over plain data, proven against the reference implementations."""

from __future__ import annotations

from lmtool.metrics.intervals import paired_standard_error, ratio_standard_error
from lmtool.metrics.scores import SCORES, SMALLER_IS_BETTER, compute, confusion

__all__ = ["SCORES", "SMALLER_IS_BETTER", "compute", "confusion", "paired_standard_error", "ratio_standard_error"]
