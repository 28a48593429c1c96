"""Several tasks in one run (Caruana 1997): the learner of `task=mixture`, a mixture whose members have rows, and one
score over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lmtool.data.split import SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import Predictor
from lmtool.learners.evaluation import Evaluation
from lmtool.learners.mixed_examples import MixedBatch
from lmtool.learners.mixture import MixedScorer, Mixture
from lmtool.learners.writing import Writer
from lmtool.metrics import Metric
from lmtool.models.base import Backbone
from lmtool.tasks.configs import MixtureTaskConfig
from lmtool.tasks.kinds.learner import TaskEvaluation, TaskLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch

AVERAGE = Metric("average")
# Scores of 100, which count as shares of 1.
_OF_100 = ("bleu", "chrf")


def build(config: MixtureTaskConfig) -> MixedTasks:
    """What the table of tasks builds."""
    return MixedTasks(config)


@dataclass(frozen=True)
class MixedTasks:
    """What is built where the kind of a single task is wanted."""

    config: MixtureTaskConfig

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TaskMixture:
        """What learns all members on a backbone."""
        return TaskMixture(self.config, backbone, tokenizer, seed)


class TaskMixture(Mixture):
    """Predicts the rows of every member. The headline is the mean of the members' metrics."""

    predicts_rows = True
    metric = AVERAGE

    @property
    def joins(self) -> type[MixedScorer]:
        return MixedTaskScorer

    @property
    def tasks(self) -> Iterator[tuple[str, TaskLearner]]:
        """The members by their names."""
        yield from ((name, cast(TaskLearner, member)) for name, member in self.named())

    @property
    def scores_part(self) -> bool:  # type: ignore[override]
        """Whether a member scores a part of its rows in training."""
        return any(member.scores_part for _, member in self.named())

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, Any]:
        """The mean of the members' baselines; theirs are among `members`."""
        parts = {name: list[Batch]() for name, _ in self.named()}
        for batch in batches:
            for name, own in cast(MixedBatch, batch).members:
                parts[name].append(own)
        members = {
            name: member.baseline(train, held_out, parts[name], predictors)
            for name, member in self.tasks
            if member.is_in(held_out)
        }
        values = {name: {own["metric"]: own["value"]} for name, own in members.items()}
        return {
            "name": " and ".join(dict.fromkeys(own["name"] for own in members.values())),
            "metric": self.metric.name,
            "value": average({name: (own["metric"], values[name]) for name, own in members.items()}),
            "members": members,
        }

    def writer(self) -> Writer:
        """UserError: which task's texts a prompt is read as is not said."""
        names = [name for name, _ in self.named()]
        raise UserError(
            f"a model of {len(names)} tasks ({', '.join(names)}) reads a prompt as none of them",
            f"lmtool predict task={names[0]} writes what a task's rows ask for",
        )


def average(scores: Mapping[str, tuple[str, Mapping[str, float]]]) -> float:
    """The mean of the tasks' scores. scores: by task, the name of its metric, and its scores."""
    values = [own[metric] / (100 if metric in _OF_100 else 1) for metric, own in scores.values()]
    return sum(values) / len(values)


class MixedTaskScorer(MixedScorer):
    """Also the mean of the members' metrics, which goes before all scores with these; and the predictions of all
    rows."""

    def joined(self, evaluations: Mapping[str, Evaluation]) -> Evaluation:
        both = super().joined(evaluations)
        own = {name: evaluation for name, evaluation in evaluations.items() if isinstance(evaluation, TaskEvaluation)}
        scores = {
            name: (evaluation.kind.config.metric, evaluation.scores)
            for name, evaluation in own.items()
            if evaluation.kind is not None and evaluation.scores
        }
        first = {AVERAGE.name: average(scores)} if scores else {}
        first |= {f"{name}_{metric}": values[metric] for name, (metric, values) in scores.items()}
        return MixedEvaluation(both.terms, both.weights, {**first, **both.scores}, both.warnings, {}, own)


@dataclass(frozen=True)
class MixedEvaluation(Evaluation):
    """A split of several tasks, with the evaluation of each."""

    members: Mapping[str, TaskEvaluation] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """`loss`, `average`, and of each member NAME `NAME_loss` and its scores as NAME_SCORE."""
        losses = {f"{name}_loss": own.loss for name, own in self.members.items() if own.terms}
        return {"loss": self.loss, **self.scores, **losses}

    def records(self) -> Iterator[dict[str, Any]]:
        """Those of each member, with the name of the `task`."""
        for name, own in self.members.items():
            yield from ({"task": name, **record} for record in own.records())
