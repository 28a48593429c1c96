"""Whether a claim of the course holds in the runs that it names: two means, their difference, its standard error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_text import Claim, Value

from lmtool.learners.metrics.intervals import mean_and_error, t_quantile
from lmtool.reporting.scores import CLEAR_ERRORS
from lmtool.reporting.text import number

HOLDS, FAILS, UNCLEAR, MISSING = "holds here", "does not hold at this scale", "not clear here", "not run yet"


@dataclass(frozen=True)
class Mean:
    """The mean of a number over so many runs, with its standard error; None: unknown."""

    value: float
    error: float | None
    runs: int

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the error; infinite where it is that of many rows."""
        return self.runs - 1 if self.runs > 1 else math.inf

    def __str__(self) -> str:
        return number(self.value) + (f" (n = {self.runs})" if self.runs else "")


@dataclass(frozen=True)
class Verdict:
    """words: one of the four above. numbers: what was measured, in a sentence."""

    words: str
    numbers: str


def judge(claim: Claim, folder: Path) -> Verdict:
    """The claim in the runs below a folder: clear where the 95% interval of the difference leaves zero out (Welch's t
    over runs)."""
    try:
        left = _mean(claim.left, folder)
        right = _mean(claim.right, folder) if isinstance(claim.right, Value) else Mean(claim.right, 0.0, 0)
    except LookupError as error:
        return Verdict(MISSING, str(error.args[0]))
    difference = left.value - right.value
    measured = f"{left} against {right}, difference {difference:+.3g}"
    if left.error is None or right.error is None:
        return Verdict(UNCLEAR, f"{measured}, its standard error is unknown")
    error = math.hypot(left.error, right.error)
    if not error and max(left.runs, right.runs) > 1:
        return Verdict(UNCLEAR, f"{measured}: runs that all give the same number leave its standard error unknown")
    measured += f" ± {error:.2g}" if error else ""
    if difference == 0 or abs(difference) < _widths(left, right) * error:
        return Verdict(UNCLEAR, measured)
    return Verdict(HOLDS if (difference > 0) == (claim.sign == ">") else FAILS, measured)


def _widths(left: Mean, right: Mean) -> float:
    """Standard errors to each side of an interval of the difference (Welch 1947; Satterthwaite 1946)."""
    squares = [(mean.error or 0.0) ** 2 for mean in (left, right)]
    terms = [square**2 / mean.freedom for square, mean in zip(squares, (left, right), strict=True)]
    return t_quantile(max(1, int(sum(squares) ** 2 / sum(terms)))) if any(terms) else CLEAR_ERRORS


def result_files(value: Value, folder: Path) -> list[Path]:
    """The JSON files that a value is in: those of the run folders that its pattern matches."""
    paths = sorted(folder.glob(value.folder))
    files = [path if path.suffix == ".json" else path / "result.json" for path in paths if path.name != "latest"]
    return [path for path in files if path.is_file()]


def _mean(value: Value, folder: Path) -> Mean:
    """Over several runs the error is that of their spread, of a single one that of the rows it was scored on.
    LookupError where there is no run, or no such number in it."""
    results = [json.loads(path.read_text()) for path in result_files(value, folder)]
    if not results:
        raise LookupError(f"no result of {value.folder}")
    values = []
    for result in results:
        values.append(_number(result, value))
    mean, error = mean_and_error(values)
    return Mean(mean, _error_of_one(results[0], value.key) if len(values) == 1 else error, len(values))


def _number(result: Any, value: Value) -> float:
    for name in value.key.split("."):
        result = _named(result)
        if not isinstance(result, dict) or name not in result:
            known = ", ".join(result) if isinstance(result, dict) else "a number"
            raise LookupError(f"no {value.key} in the results of {value.folder}: {name} is not among {known}")
        result = result[name]
    if isinstance(result, dict):
        result = result.get("value")
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise LookupError(f"{value.key} of {value.folder} is no number")
    return result


def _named(result: Any) -> Any:
    """Of a list, its items by their number."""
    return {str(number): item for number, item in enumerate(result)} if isinstance(result, list) else result


def _error_of_one(result: dict[str, Any], key: str) -> float | None:
    """Standard error of a number of one run, from what stands beside it: an interval, an error, a count of rows. A
    whole number is a count, and exact; a baseline is what reading nothing scores on the same rows."""
    *above, leaf = key.split(".")
    beside: Any = result
    for name in above:
        beside = _named(beside)[name]
    value = beside[leaf]
    if isinstance(value, dict):
        return (value["high"] - value["low"]) / (2 * 1.96) if "low" in value else None
    if isinstance(value, int) or leaf.endswith("baseline"):
        return 0.0
    metric = leaf
    if key == "value":
        metric, beside = str(result.get("metric")), {**result, **result.get("metrics", {})}
    if metric == "accuracy" and "standard_error" in beside:
        return beside["standard_error"]
    if metric.endswith("accuracy"):
        rows = beside.get(f"{metric.removesuffix('accuracy')}count") or result.get("validation_examples")
        return math.sqrt(max(value * (1 - value), 0.0) / rows) if rows else None
    error = beside.get(f"{metric.removesuffix('loss')}standard_error", beside.get(f"{metric}_standard_error"))
    return error if isinstance(error, float) else None
