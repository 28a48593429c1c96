"""Scores of runs, compared with their baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmtool.config.base import JsonMapping
from lmtool.reporting.run_files import Baseline
from lmtool.reporting.text import count, is_number, lower_is_better, number, plain, title
from lmtool.system.terminal import plural

# A difference below this many standard errors counts as chance.
CLEAR_ERRORS = 2.0
# Suffixes of metrics that are a fraction of the examples.
_FRACTION_SUFFIXES = ("accuracy",)
# Suffixes of values that do not change during training.
CONSTANT_SUFFIXES = ("_count", "_standard_error", "_baseline")


@dataclass(frozen=True)
class Score:
    """A metric's value with its standard error (None: unknown) and the baseline it must beat (None: unknown).

    gain_standard_error: the standard error of the difference to a baseline that was scored on the same examples; None
    for a constant baseline, where it is that of the value.
    """

    metric: str
    value: float
    standard_error: float | None = None
    baseline: float | None = None
    baseline_name: str = "baseline"
    gain_standard_error: float | None = None

    @property
    def _gain_error(self) -> float | None:
        return self.standard_error if self.gain_standard_error is None else self.gain_standard_error

    @property
    def gain(self) -> float | None:
        """Improvement over the baseline, positive if better; None without a baseline."""
        if self.baseline is None or not math.isfinite(self.baseline) or not math.isfinite(self.value):
            return None
        return self.baseline - self.value if lower_is_better(self.metric) else self.value - self.baseline

    @property
    def verdict(self) -> str:
        """`better` or `worse` than the baseline, `unclear` (within CLEAR_ERRORS standard errors) or `unknown`."""
        if self.gain is None:
            return "unknown"
        if self._gain_error and abs(self.gain) < CLEAR_ERRORS * self._gain_error:
            return "unclear"
        return "better" if self.gain > 0 else "worse" if self.gain < 0 else "unclear"

    @property
    def text(self) -> str:
        """'accuracy 0.812 ± 0.009'."""
        error_text = f" ± {number(self.standard_error)}" if self.standard_error else ""
        return f"{title(self.metric)} {number(self.value)}{error_text}"

    @property
    def sentence(self) -> str:
        """The comparison with the baseline, in words."""
        if self.gain is None or self.baseline is None:
            return "no baseline to compare with"
        baseline_text = f"the {title(self.baseline_name)} baseline, {number(float(self.baseline))}"
        errors = ""
        if self._gain_error:
            ratio = abs(self.gain) / self._gain_error
            errors = f", {ratio:.0f} standard errors" if ratio >= 99.5 else f", {ratio:.1f} standard errors"
        amount = f"{number(abs(float(self.gain)))}{errors}"
        if self.verdict == "unclear":
            return f"not clearly different from {baseline_text} ({amount})"
        return f"{self.verdict} than {baseline_text}, by {amount}"


def stop_reason(result: JsonMapping) -> str | None:
    """Returns the reason why a run stopped, in words: a budget, or patience."""
    reason = result.get("ended")
    if reason == "patience":
        return "stopped early (patience)"
    return f"stopped: {plain(reason)} reached" if reason else None


def selection_note(result: JsonMapping) -> str | None:
    """Returns a note that the checkpoint was selected on the scored rows; None for a run without a task."""
    examples, read = result.get("validation_examples"), result.get("selection_examples")
    if not isinstance(examples, int):
        return None
    if isinstance(read, int) and read < examples:
        return f"on {count(examples)} rows; selected on {count(read)} of them"
    return f"selected on these {count(examples)} {plural(examples, 'row')}"


def test_scores(result: JsonMapping) -> list[str]:
    """Returns a sentence for each labeled test split: 'test: accuracy 0.71, loss 0.6 on 1 821 rows, scored once'."""
    sentences = []
    for split, scores in (result.get("tests") or {}).items():
        values = {name: value for name, value in scores.items() if name != "examples"}
        metric = result.get("metric")
        order = sorted(values, key=lambda name: name != metric)
        values_text = ", ".join(f"{title(name)} {number(values[name])}" for name in order)
        sentences.append(f"{plain(split)}: {values_text} on {count(scores['examples'])} rows, scored once")
    return sentences


def as_number(value: object) -> float | None:
    """Returns the value if it is a number, otherwise None."""
    return float(value) if is_number(value) else None


def score_of(result: JsonMapping, baseline: Baseline | None, examples: int | None = None) -> Score | None:
    """Returns the headline score of a run; None if there is none. result: result.json, as `read_result` returns it.
    examples: number of scored examples, for the binomial standard error of an accuracy; None for the result's
    `validation_examples`."""
    metric, value = result.get("metric"), as_number(result.get("value"))
    if not isinstance(metric, str) or value is None:
        return None
    error = as_number(result.get("standard_error"))
    if examples is None and isinstance(result.get("validation_examples"), int):
        examples = result["validation_examples"]
    if error is None and examples and metric.endswith(_FRACTION_SUFFIXES) and 0 <= value <= 1:
        error = math.sqrt(value * (1 - value) / examples)
    baseline_values = baseline or {}
    is_same_metric = baseline_values.get("metric") in (None, metric)
    return Score(
        metric=metric,
        value=value,
        standard_error=error,
        baseline=as_number(baseline_values.get("value")) if is_same_metric else None,
        baseline_name=str(baseline_values.get("name", "baseline")),
        gain_standard_error=as_number(result.get("gain_standard_error")),
    )
