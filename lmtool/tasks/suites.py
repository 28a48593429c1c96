"""Groups of tasks: the folders, metrics and files of GLUE's leaderboard (Wang et al. 2019).

A group has no learner: `lmtool finetune` trains each of its members in its own run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.tasks.configs.mixture import GlueConfig

DIAGNOSTIC = "ax"
"""The diagnostic set, which the model of MNLI answers."""
LEFT_OUT = "wnli"
"""Excluded from the average: its development set contradicts its training set (gluebenchmark.com, question 12)."""
# Metrics that the leaderboard averages; two metrics count as their mean.
_SCORES: dict[str, tuple[str, ...]] = {
    "cola": ("matthews",), "sst2": ("accuracy",), "mrpc": ("f1", "accuracy"), "stsb": ("pearson", "spearman"),
    "qqp": ("f1", "accuracy"), "mnli": ("dev_matched_accuracy", "dev_mismatched_accuracy"), "qnli": ("accuracy",),
    "rte": ("accuracy",), "wnli": ("accuracy",),
}  # fmt: skip
FILES: dict[tuple[str, str], str] = {
    ("cola", "test"): "CoLA.tsv", ("sst2", "test"): "SST-2.tsv", ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv", ("qqp", "test"): "QQP.tsv", ("mnli", "test_matched"): "MNLI-m.tsv",
    ("mnli", "test_mismatched"): "MNLI-mm.tsv", ("qnli", "test"): "QNLI.tsv", ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv", (DIAGNOSTIC, "test"): "AX.tsv",
}  # fmt: skip
"""The leaderboard's file for a task's test split."""
# Tasks submitted with class names; the others with numbers.
_BY_NAME = ("mnli", "qnli", "rte", DIAGNOSTIC)


class Glue:
    """Built in place of a single task's kind, to report that there are several."""

    def __init__(self, config: GlueConfig):
        raise UserError(
            f"task={config.name} is {len(config.members)} tasks, which lmtool finetune trains one after the other",
            f"give one of them: task={config.names[0]}",
        )


def folder_of(member: str, path: Path) -> Path | None:
    """The folder of a task below `path`, by name: signs and case are ignored, and a suffix may follow (mnli_10k). None
    if absent; UserError if ambiguous."""
    named = {entry: re.sub("[^a-z0-9]", "", entry.name.lower()) for entry in sorted(path.iterdir()) if entry.is_dir()}
    matches = [entry for entry, name in named.items() if name == member]
    if not matches and member != DIAGNOSTIC:
        matches = [entry for entry, name in named.items() if name.startswith(member)]
    if len(matches) > 1:
        names = " and ".join(entry.name for entry in matches)
        raise UserError(f"task.path={path}: {names} are both {member}", "keep one of them in the folder")
    return matches[0] if matches else None


def score_of(member: str, metrics: Mapping[str, float]) -> float:
    """The score that enters the average. MNLI without two development sets has one accuracy."""
    names = [name for name in _SCORES[member] if name in metrics] or ["accuracy"]
    return sum(metrics[name] for name in names) / len(names)


def average(scores: Mapping[str, float]) -> float | None:
    """The mean of the tasks' scores without WNLI; None if empty."""
    averaged = [score for member, score in scores.items() if member != LEFT_OUT]
    return sum(averaged) / len(averaged) if averaged else None


def submission(member: str, labels: tuple[str, ...] | None, predictions: Iterable[Any]) -> str:
    """The contents of a leaderboard file. predictions: class names or values, in row order."""
    lines = ["index\tprediction"]
    for number, prediction in enumerate(predictions):
        if labels is None:
            text = f"{min(max(float(prediction), 0.0), 5.0):.3f}"
        else:
            text = prediction if member in _BY_NAME else str(labels.index(prediction))
        lines.append(f"{number}\t{text}")
    return "\n".join(lines) + "\n"
