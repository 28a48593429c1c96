"""Groups of tasks: mixtures, one run of several tasks with one metric (Caruana 1997); and GLUE, one run per task."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.data.examples import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import Predictor
from lmtool.learners.configs import ObjectiveConfig
from lmtool.learners.evaluation import Evaluation
from lmtool.learners.metrics import Metric
from lmtool.learners.mixed_examples import MixedBatch
from lmtool.learners.mixture import MixedScorer, Mixture, has_data
from lmtool.learners.writing import Writer
from lmtool.models.base import Backbone
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.mixture import GlueConfig, MixtureTaskConfig, TaskObjectiveConfig, tasks_of
from lmtool.tasks.kinds.learner import TaskEvaluation, TaskLearner
from lmtool.tasks.kinds.predictions import Label
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch


@dataclass(frozen=True)
class MixedData:
    """The data of several tasks, by name. Has the interface of `TaskData`."""

    config: TaskConfig
    members: Mapping[str, TaskData]

    @property
    def metadata(self) -> JsonObject:
        """The metadata of each member, with a warning if one member dominates the loss."""
        metadata: JsonObject = {f"task {name}": data.metadata for name, data in self.members.items()}
        first_losses = {name: build(data.config).first_loss(data.train) for name, data in self.members.items()}
        loss_warnings = [
            f"the loss of {name} is the square of values far from 0: it starts at {loss:.1f} and dominates the other "
            f"tasks, where classification starts at {math.log(2):.1f} (two classes) to {math.log(50):.1f} (fifty); "
            f"task.with.{name}.standardize=train divides it by the variance of the values"
            for name, loss in first_losses.items()
            if loss is not None and loss > math.log(50)
        ]
        return {**metadata, "warnings": loss_warnings} if loss_warnings else metadata

    def texts(self) -> list[Sequence[str]]:
        return [column for data in self.members.values() for column in data.texts()]

    def splits(self) -> dict[str, SplitData]:
        """Returns the training rows of all members; their first development splits, combined; and each further split by
        itself."""
        member_splits = {name: data.splits() for name, data in self.members.items()}
        first_names = [list(splits)[1] for splits in member_splits.values()]
        shared_name = first_names[0] if len(set(first_names)) == 1 else "dev"
        rows_by_title: dict[str, dict[str, Rows]] = {"train": {}, shared_name: {}}
        for (name, splits), first_name in zip(member_splits.items(), first_names, strict=True):
            for split, part in splits.items():
                title = shared_name if split == first_name else split if split != shared_name else f"{name}_{split}"
                rows_by_title.setdefault(title, {}).update(part.rows)
        return {split: SplitData(split, rows=rows) for split, rows in rows_by_title.items()}

    def labeled_tests(self) -> dict[str, SplitData]:
        splits: dict[str, dict[str, Rows]] = {}
        for data in self.members.values():
            for split, part in data.labeled_tests().items():
                splits.setdefault(split, {}).update(part.rows)
        return {split: SplitData(split, rows=rows) for split, rows in splits.items()}


def with_members(config: TaskConfig, members: Mapping[str, TaskData]) -> TaskData | MixedData:
    """Returns the data of a task, or of a mixture, from the data of its members."""
    if not isinstance(config, MixtureTaskConfig):
        (data,) = members.values()
        return data
    config_with_rows = config.model_copy(update={"rows": tuple(len(data.train) for data in members.values())})
    return MixedData(config_with_rows.replace_members(tuple(data.config for data in members.values())), members)


def learner(config: TaskObjectiveConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> BaseLearner:
    """Returns the learner of a task that is used as an objective."""
    return config.task.learner(backbone, tokenizer, seed)


def read_tasks(
    objective: ObjectiveConfig, seed: int, cache_dir: str | Path, offline: bool
) -> tuple[ObjectiveConfig, dict[str, TaskData]]:
    """Returns the objective with the labels found in the data of its tasks, and this data by task. Raises UserError
    like `load_task`."""
    tasks = {task.name: load_task(task, seed, cache_dir, offline) for task in tasks_of(objective)}
    parts = tuple(
        member.model_copy(update={"task": tasks[member.task.name].config})
        if isinstance(member, TaskObjectiveConfig)
        else member
        for member in objective.member_configs()
    )
    return (objective.replace_members(parts) if tasks else objective), tasks


def rows_of(tasks: Mapping[str, TaskData], split: str) -> dict[str, Rows]:
    """Returns the rows of each task that accompany a split of texts: the training rows, or the first development
    split."""
    return {
        name: data.train if split == "train" else next(iter(data.validation.values())) for name, data in tasks.items()
    }


AVERAGE = Metric("average")
# Metrics in percent, divided by 100.
_PERCENT_METRICS = ("bleu", "chrf")


@dataclass(frozen=True)
class MixedTasks:
    """Takes the place of a task's kind for a mixture."""

    config: MixtureTaskConfig

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskMixture:
        """Returns the learner of all members on a backbone."""
        return TaskMixture(self.config, backbone, tokenizer, seed)


class TaskMixture(Mixture):
    """Learns several tasks and predicts the rows of each. The main metric is the mean of the members' metrics."""

    metric = AVERAGE

    @property
    def scorer_class(self) -> type[MixedScorer]:
        return MixedTaskScorer

    @property
    def tasks(self) -> Iterator[tuple[str, TaskLearner]]:
        """The members by their names."""
        yield from ((name, cast(TaskLearner, member)) for name, member in self.named_members())

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> JsonObject:
        """Returns the mean of the members' baselines. `members` has the baseline of each."""
        parts = {name: list[Batch]() for name, _ in self.named_members()}
        for batch in batches:
            for name, entry in cast(MixedBatch, batch).members:
                parts[name].append(entry)
        members = {
            name: member.baseline(train, held_out, parts[name], predictors)
            for name, member in self.tasks
            if has_data(member, held_out)
        }
        values = {name: {entry["metric"]: entry["value"]} for name, entry in members.items()}
        return {
            "name": " and ".join(dict.fromkeys(entry["name"] for entry in members.values())),
            "metric": self.metric.name,
            "value": average({name: (entry["metric"], values[name]) for name, entry in members.items()}),
            "members": members,
        }

    def writer(self) -> Writer:
        """Raises UserError, because a prompt does not say which task it is for."""
        names = [name for name, _ in self.named_members()]
        raise UserError(
            f"a model of {len(names)} tasks ({', '.join(names)}) cannot tell which task a prompt is for",
            f"lmtool predict task={names[0]} generates the answers of a task's rows",
        )


def average(scores: Mapping[str, tuple[str, Mapping[str, float]]]) -> float:
    """Returns the mean of the tasks' metrics. scores: for each task, the name of its metric and all its scores."""
    values = [by_name[metric] / (100 if metric in _PERCENT_METRICS else 1) for metric, by_name in scores.values()]
    return sum(values) / len(values)


class MixedTaskScorer(MixedScorer):
    """Adds the mean of the members' metrics, as the first score, and the predictions of all rows."""

    def combine(self, evaluations: Mapping[str, Evaluation]) -> Evaluation:
        merged = super().combine(evaluations)
        members = {
            name: evaluation for name, evaluation in evaluations.items() if isinstance(evaluation, TaskEvaluation)
        }
        scores = {
            name: (evaluation.kind.config.metric, evaluation.scores)
            for name, evaluation in members.items()
            if evaluation.scores
        }
        task_scores = {AVERAGE.name: average(scores)} if scores else {}
        task_scores |= {f"{name}_{metric}": values[metric] for name, (metric, values) in scores.items()}
        all_scores = {**task_scores, **merged.scores}
        return MixedEvaluation(merged.terms, merged.loss_weights, all_scores, merged.warnings, {}, members)


@dataclass(frozen=True)
class MixedEvaluation(Evaluation):
    """A split of several tasks, with the evaluation of each."""

    members: Mapping[str, TaskEvaluation] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns `loss`, `average`, and for each member NAME_loss and NAME_METRIC."""
        losses = {f"{name}_loss": entry.loss for name, entry in self.members.items() if entry.terms}
        return {"loss": self.loss, **self.scores, **losses}

    def records(self) -> Iterator[JsonObject]:
        """Yields the records of all members, each with the member's name as `task`."""
        for name, entry in self.members.items():
            yield from ({"task": name, **record} for record in entry.records())

    def scored_rows(self) -> Iterator[list[object]]:
        for entry in self.members.values():
            yield from entry.scored_rows()


# GLUE: each task has its own run; here are the folders, metrics and files of its leaderboard (Wang et al. 2019).


DIAGNOSTIC = "ax"
"""The diagnostic set, which the model of MNLI answers."""
NOT_AVERAGED = "wnli"
"""Excluded from the average: its development set contradicts its training set (gluebenchmark.com, question 12)."""
# Metrics that the leaderboard averages; two metrics count as their mean.
_AVERAGED_METRICS: dict[str, tuple[str, ...]] = {
    "cola": ("matthews",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("pearson", "spearman"),
    "qqp": ("f1", "accuracy"),
    "mnli": ("dev_matched_accuracy", "dev_mismatched_accuracy"),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
FILES: dict[tuple[str, str], str] = {
    ("cola", "test"): "CoLA.tsv",
    ("sst2", "test"): "SST-2.tsv",
    ("mrpc", "test"): "MRPC.tsv",
    ("stsb", "test"): "STS-B.tsv",
    ("qqp", "test"): "QQP.tsv",
    ("mnli", "test_matched"): "MNLI-m.tsv",
    ("mnli", "test_mismatched"): "MNLI-mm.tsv",
    ("qnli", "test"): "QNLI.tsv",
    ("rte", "test"): "RTE.tsv",
    ("wnli", "test"): "WNLI.tsv",
    (DIAGNOSTIC, "test"): "AX.tsv",
}
"""The leaderboard's file for a task's test split."""
# Tasks submitted with class names; the others with numbers.
_SUBMITTED_BY_NAME = ("mnli", "qnli", "rte", DIAGNOSTIC)


class Glue:
    """Takes the place of a task's kind for GLUE, and refuses it: GLUE is several tasks."""

    def __init__(self, config: GlueConfig):
        raise UserError(
            f"task={config.name} is {len(config.members)} tasks, which lmtool finetune trains one after the other",
            f"give one of them: task={config.names[0]}",
        )


def folder_of(member: str, path: Path) -> Path | None:
    """Returns the folder of a task below `path`, or None. Punctuation, case and suffixes (mnli_10k) of its name are
    ignored."""
    simplified = {
        entry: re.sub("[^a-z0-9]", "", entry.name.lower()) for entry in sorted(path.iterdir()) if entry.is_dir()
    }
    # The official download has the diagnostic set as diagnostic/diagnostic.tsv.
    accepted = (member, "diagnostic") if member == DIAGNOSTIC else (member,)
    matches = [entry for entry, name in simplified.items() if name in accepted]
    if not matches and member != DIAGNOSTIC:
        matches = [entry for entry, name in simplified.items() if name.startswith(member)]
    if len(matches) > 1:
        names = " and ".join(entry.name for entry in matches)
        raise UserError(f"task.path={path}: {names} are both {member}", "keep one of them in the folder")
    return matches[0] if matches else None


def score_of(member: str, metrics: Mapping[str, float]) -> float:
    """Returns the score of a task in GLUE's average: the mean of its metrics. MNLI without two development sets has one
    accuracy."""
    names = [name for name in _AVERAGED_METRICS[member] if name in metrics] or ["accuracy"]
    return sum(metrics[name] for name in names) / len(names)


def glue_average(scores: Mapping[str, float]) -> float | None:
    """Returns the mean score of GLUE's tasks without WNLI; None if there are no other scores."""
    averaged = [score for member, score in scores.items() if member != NOT_AVERAGED]
    return sum(averaged) / len(averaged) if averaged else None


def submission(member: str, labels: tuple[str, ...] | None, predictions: Iterable[Label]) -> str:
    """Returns the contents of a file for the leaderboard. predictions: class names or values, in the order of the
    rows."""
    lines = ["index\tprediction"]
    for number, prediction in enumerate(predictions):
        if labels is None:
            text = f"{min(max(float(prediction), 0.0), 5.0):.3f}"
        else:
            text = prediction if member in _SUBMITTED_BY_NAME else str(labels.index(prediction))
        lines.append(f"{number}\t{text}")
    return "\n".join(lines) + "\n"
