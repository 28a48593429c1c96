"""A score beside its baseline: the one sentence that says whether anything was learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmtool.reporting.text import count, lower_is_better, number, plain, title
from lmtool.system.terminal import plural

# Below this many standard errors a difference is not told apart from chance.
CLEAR_ERRORS = 2.0
_SHARES = ("accuracy",)
# What a term has beside its scores: these change from run to run, not while one learns.
CONSTANTS = ("_count", "_standard_error", "_baseline")


@dataclass(frozen=True)
class Score:
    """A metric's value with its standard error (None: unknown) and the baseline it must beat (None: unknown)."""

    metric: str
    value: float
    standard_error: float | None = None
    baseline: float | None = None
    baseline_name: str = "baseline"

    @property
    def gain(self) -> float | None:
        """How much better than the baseline, positive where better; None without one."""
        if self.baseline is None or not math.isfinite(self.baseline) or not math.isfinite(self.value):
            return None
        return self.baseline - self.value if lower_is_better(self.metric) else self.value - self.baseline

    @property
    def verdict(self) -> str:
        """One of better, worse, unclear (within CLEAR_ERRORS standard errors), unknown (no baseline)."""
        if self.gain is None:
            return "unknown"
        if self.standard_error and abs(self.gain) < CLEAR_ERRORS * self.standard_error:
            return "unclear"
        return "better" if self.gain > 0 else "worse" if self.gain < 0 else "unclear"

    @property
    def text(self) -> str:
        """'accuracy 0.812 ± 0.009'."""
        margin = f" ± {number(self.standard_error)}" if self.standard_error else ""
        return f"{title(self.metric)} {number(self.value)}{margin}"

    @property
    def sentence(self) -> str:
        """How the value stands to its baseline, in words."""
        if self.gain is None or self.baseline is None:
            return "no baseline to stand beside"
        beside = f"the {title(self.baseline_name)} baseline, {number(float(self.baseline))}"
        errors = ""
        if self.standard_error:
            ratio = abs(self.gain) / self.standard_error
            errors = f", {ratio:.0f} standard errors" if ratio >= 99.5 else f", {ratio:.1f} standard errors"
        amount = f"{number(abs(float(self.gain)))}{errors}"
        if self.verdict == "unclear":
            return f"not clearly different from {beside} ({amount})"
        return f"{self.verdict} than {beside}, by {amount}"


def selected_on(result: Mapping[str, Any]) -> str | None:
    """What the headline of a task's run is: the best of several evaluations on the same rows."""
    examples = result.get("validation_examples")
    return f"selected on these {count(examples)} {plural(examples, 'row')}" if isinstance(examples, int) else None


def test_scores(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each labelled test split: 'test: accuracy 0.71, loss 0.6 on 1 821 rows, scored once'."""
    sentences = []
    for split, scores in (result.get("tests") or {}).items():
        values = {name: value for name, value in scores.items() if name != "examples"}
        metric = result.get("metric")
        order = sorted(values, key=lambda name: name != metric)
        shown = ", ".join(f"{title(name)} {number(values[name])}" for name in order)
        sentences.append(f"{plain(split)}: {shown} on {count(scores['examples'])} rows, scored once")
    return sentences


def _finite(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else None


def score_of(
    result: Mapping[str, Any], baseline: Mapping[str, Any] | None, examples: int | None = None
) -> Score | None:
    """The headline score of a run, or None where the run has none.

    result: result.json ("metric", "value", optionally "standard_error"). baseline: {"name", "metric", "value"}.
    examples: number of scored examples, from which the binomial standard error of an accuracy is known.
    """
    metric, value = result.get("metric"), _finite(result.get("value"))
    if not isinstance(metric, str) or value is None:
        return None
    error = _finite(result.get("standard_error"))
    if error is None and examples and metric.endswith(_SHARES) and 0 <= value <= 1:
        error = math.sqrt(value * (1 - value) / examples)
    below = baseline or {}
    same = below.get("metric") in (None, metric)
    return Score(
        metric=metric,
        value=value,
        standard_error=error,
        baseline=_finite(below.get("value")) if same else None,
        baseline_name=str(below.get("name", "baseline")),
    )
