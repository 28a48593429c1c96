"""A task's scores over its development sets, and what each row was predicted to be.

Shape letters: E rows, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmtool.errors import UserError
from lmtool.metrics import compute, confusion
from lmtool.tasks.configs import ClassificationConfig, TaskConfig
from lmtool.tasks.rows import TaskRows
from lmtool.tasks.sequence import SequenceLearner
from lmtool.types import Batch

Autocast = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Predicted:
    """Every row of a split, in the order of its file.

    values_E: the best class (int64) or the value (float64). scores_E: the probability of that class, or the value.
    """

    values_E: np.ndarray
    scores_E: np.ndarray


@dataclass(frozen=True)
class TaskEvaluation:
    """One split. metrics: `loss` and the task's scores. confusion: counts, rows gold and columns predicted; None for
    a regression. collapsed: the one class or value that every row was predicted to be, where gold has several."""

    metrics: dict[str, float]
    predicted: Predicted
    confusion: np.ndarray | None = None
    collapsed: str | None = None


@dataclass(frozen=True)
class TaskReport:
    """All development splits. metrics: plain names for the first split, SPLIT_NAME for the others too where there
    are several. value: the task's main score on the first split."""

    metric: str
    value: float
    metrics: dict[str, float]
    splits: dict[str, TaskEvaluation] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        return [
            f"{split}: every row was predicted {one.collapsed}: the model learned a constant"
            for split, one in self.splits.items()
            if one.collapsed is not None
        ]


def predict(
    learner: SequenceLearner,
    rows: int,
    batches: Iterable[Batch],
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
    labelled: bool = False,
) -> tuple[Predicted, float]:
    """Predictions of all rows, and with `labelled` the mean loss. Two numbers a row are kept, no logits.

    batches: together hold every row once, in any order; `Batch.examples` are row numbers. The learner is left in the
    mode it came in.
    """
    classes = isinstance(learner.config, ClassificationConfig)
    values, scores = np.zeros(rows, dtype=np.int64 if classes else np.float64), np.zeros(rows)
    seen, total, was_training = np.zeros(rows, dtype=np.int64), 0.0, learner.training
    learner.eval()
    try:
        for batch in batches:
            at = batch.examples.numpy()
            batch = batch.to(torch.device(device))
            with autocast(), torch.no_grad():
                outputs = learner.outputs(batch, 0)
            best, score = learner.best(outputs)
            values[at], scores[at] = best.cpu().numpy(), score.cpu().numpy()
            if labelled:
                total += float(learner.losses(outputs, learner.labels(batch)).double().sum())
            seen[at] += 1
    finally:
        learner.train(was_training)
    if not (seen == 1).all():
        raise RuntimeError(f"{int((seen != 1).sum())} of {rows} rows were not predicted exactly once")
    return Predicted(values, scores), total / rows


def evaluate(
    learner: SequenceLearner,
    rows: TaskRows,
    batches: Iterable[Batch],
    device: torch.device | str = "cpu",
    autocast: Autocast = nullcontext,
) -> TaskEvaluation:
    """Scores of one labelled split. batches: of `learner.examples(rows, ...)`, every row once."""
    if rows.labels is None:
        raise UserError(
            f"task={learner.config.name}: the split has no labels to score against", "use lmtool predict on it"
        )
    predicted, loss = predict(learner, len(rows), batches, device, autocast, labelled=True)
    metrics = {"loss": loss, **compute(learner.config.metrics, rows.labels, predicted.values_E)}
    constant = len(rows) > 1 and np.ptp(predicted.values_E) == 0 and np.ptp(rows.labels) > 0
    collapsed = named(learner.config, predicted.values_E[0]) if constant else None
    counts = None
    if isinstance(learner.config, ClassificationConfig):
        counts = confusion(rows.labels, predicted.values_E, len(learner.config.labels or ()))
    return TaskEvaluation(metrics, predicted, counts, None if collapsed is None else str(collapsed))


def report(config: TaskConfig, splits: Mapping[str, TaskEvaluation]) -> TaskReport:
    """Join the development splits; the first gives the main score."""
    first = next(iter(splits.values()))
    metrics = dict(first.metrics)
    if len(splits) > 1:
        metrics |= {f"{split}_{name}": value for split, one in splits.items() for name, value in one.metrics.items()}
    return TaskReport(config.metric, first.metrics[config.metric], metrics, dict(splits))


def predictions(config: TaskConfig, rows: TaskRows, predicted: Predicted, split: str) -> Iterator[dict[str, Any]]:
    """Rows of predictions.jsonl: id, split, the texts by column name, gold (where known), prediction, score."""
    for number in range(len(rows)):
        texts = {name: text[number] for name, text in zip(config.text, rows.texts, strict=True)}
        row: dict[str, Any] = {"id": rows.ids[number], "split": split, **texts}
        if rows.labels is not None:
            row["gold"] = named(config, rows.labels[number])
        prediction = named(config, predicted.values_E[number])
        yield {**row, "prediction": prediction, "score": float(predicted.scores_E[number])}


def baseline(config: TaskConfig, train: TaskRows, rows: TaskRows) -> dict[str, Any]:
    """What reading nothing scores: the majority class or the mean of the training rows, on the rows given.

    Plain data: name (majority or mean), prediction, metric, value, metrics.
    """
    if train.labels is None or rows.labels is None:
        raise ValueError("a baseline needs labels on both sides")
    if isinstance(config, ClassificationConfig):
        name, value = "majority", np.bincount(train.labels).argmax()
    else:
        name, value = "mean", train.labels.mean()
    metrics = compute(config.metrics, rows.labels, np.full(len(rows), value))
    return {
        "name": name,
        "prediction": named(config, value),
        "metric": config.metric,
        "value": metrics[config.metric],
        "metrics": metrics,
    }


def named(config: TaskConfig, value: Any) -> str | float:
    """A class by its name, a value as a number."""
    if isinstance(config, ClassificationConfig) and config.labels is not None:
        return config.labels[int(value)]
    return float(value)
