"""What an evaluation shows beyond a score: intervals by resampling the rows, the difference of two systems on the same
rows with its interval, and the rows that a model finds hardest. Plain data for screens and files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.errors import UserError
from lmtool.learners.metrics import interval, resample_count, resampled_rows
from lmtool.tasks.kinds.learner import TaskEvaluation

HARDEST = 20


def analysis(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Of a labelled split: `n`, `loss`, `metrics` by name ({"value", "low", "high"}: the 95% bootstrap interval over
    rows), `hardest` (records with their `loss`, the largest first), `warnings`, and the details of the kind."""
    kind, rows = evaluation.kind, evaluation.rows
    assert kind is not None and rows is not None and evaluation.losses is not None
    samples = _resampled(evaluation, resample_count(len(rows), evaluation.scores))
    order = np.argsort(-evaluation.losses, kind="stable")[:HARDEST]
    hardest = [
        {
            "id": rows.ids[number],
            **kind.record(rows, int(number), evaluation.predictions[number]),
            "loss": float(evaluation.losses[number]),
        }
        for number in order
    ]
    return {
        "n": len(rows),
        "loss": evaluation.loss,
        "metrics": {name: _with_interval(value, samples.get(name, [])) for name, value in evaluation.scores.items()},
        "warnings": list(evaluation.warnings),
        **evaluation.details,
        "hardest": hardest,
    }


def difference(first: TaskEvaluation, second: TaskEvaluation) -> dict[str, dict[str, float]]:
    """By metric, the first system's score less the second's on the same rows ({"value", "low", "high"}), the rows
    resampled for both alike. UserError where they were not scored on the same rows."""
    rows, other = first.rows, second.rows
    assert rows is not None and other is not None
    if list(rows.ids) != list(other.ids) or rows.columns != other.columns:
        raise UserError(
            "the two checkpoints were scored on different rows: nothing to compare by pairs",
            "name the data with task.path=, for both",
        )
    resamples = resample_count(len(rows), first.scores)
    mine, theirs = _resampled(first, resamples), _resampled(second, resamples)
    return {
        name: _with_interval(value - second.scores[name], np.subtract(mine[name], theirs[name]))
        for name, value in first.scores.items()
        if name in second.scores
    }


def _resampled(evaluation: TaskEvaluation, resamples: int) -> dict[str, list[float]]:
    """The scores of each resample of the rows."""
    kind, rows = evaluation.kind, evaluation.rows
    assert kind is not None and rows is not None
    return kind.resampled(rows, evaluation.predictions, resampled_rows(len(rows), resamples))


def _with_interval(value: float, samples: Any) -> dict[str, float]:
    return {"value": value, **interval(samples)._asdict()}
