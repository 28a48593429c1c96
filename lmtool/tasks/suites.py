"""Several tasks under one name: the folders, scores and files of GLUE's leaderboard (Wang et al. 2019).

A suite has no learner: `lmtool finetune` trains each of its members in a run of its own.
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
"""Not in the average: its development set contradicts its training set (gluebenchmark.com, question 12)."""
# What the leaderboard averages; of two scores their mean.
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
"""The file of the leaderboard for a task's test split."""
# Tasks whose classes the leaderboard takes by name; of the others by number.
_BY_NAME = ("mnli", "qnli", "rte", DIAGNOSTIC)


class Glue:
    """What is built where a single task is wanted: it says that there are several."""

    def __init__(self, config: GlueConfig):
        raise UserError(
            f"task={config.name} is {len(config.members)} tasks, which lmtool finetune trains one after the other",
            f"give one of them: task={config.names[0]}",
        )


def folder_of(member: str, path: Path) -> Path | None:
    """The folder of a task below `path`, by name: sign and case do not count, and a part may follow (mnli_10k). None
    without one; UserError where there are two."""
    named = {entry: re.sub("[^a-z0-9]", "", entry.name.lower()) for entry in sorted(path.iterdir()) if entry.is_dir()}
    matches = [entry for entry, name in named.items() if name == member]
    if not matches and member != DIAGNOSTIC:
        matches = [entry for entry, name in named.items() if name.startswith(member)]
    if len(matches) > 1:
        names = " and ".join(entry.name for entry in matches)
        raise UserError(f"task.path={path}: {names} are both {member}", "keep one of them in the folder")
    return matches[0] if matches else None


def score_of(member: str, metrics: Mapping[str, float]) -> float:
    """The score of a task that the average counts. MNLI without two development sets has its one accuracy."""
    names = [name for name in _SCORES[member] if name in metrics] or ["accuracy"]
    return sum(metrics[name] for name in names) / len(names)


def average(scores: Mapping[str, float]) -> float | None:
    """The mean of the tasks' scores, WNLI left out; None without any."""
    averaged = [score for member, score in scores.items() if member != LEFT_OUT]
    return sum(averaged) / len(averaged) if averaged else None


def submission(member: str, labels: tuple[str, ...] | None, predictions: Iterable[Any]) -> str:
    """The contents of a file of the leaderboard. predictions: names of classes, or values, in the order of the rows."""
    lines = ["index\tprediction"]
    for number, prediction in enumerate(predictions):
        if labels is None:
            text = f"{min(max(float(prediction), 0.0), 5.0):.3f}"
        else:
            text = prediction if member in _BY_NAME else str(labels.index(prediction))
        lines.append(f"{number}\t{text}")
    return "\n".join(lines) + "\n"
