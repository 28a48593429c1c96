"""A task as an objective: what finetuning learns, learned while pretraining, alone or as a member of a mixture.

Raffel et al. 2020, sections 2.4 and 3.5.3: supervised tasks are mixed into pretraining. The rows of a task lie beside
the text (`TokenStore.rows`); all else is the task's own learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from lmtool.config.tables import build
from lmtool.data.loader import PackedLoader
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.heads.learner import BaseLearner
from lmtool.metrics import compute
from lmtool.models.base import Backbone
from lmtool.objectives.baseline import ConstantPredictor, ConstantValue
from lmtool.objectives.configs import ObjectiveConfig
from lmtool.tasks.configs import TaskObjectiveConfig, tasks_of
from lmtool.tasks.evaluation import named, predict, predictions
from lmtool.tasks.examples import SequenceExamples
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tasks.rows import TaskRows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

# Tokens in one forward without gradients.
_TOKENS = 8192


def read_tasks(
    objective: ObjectiveConfig, seed: int, cache_dir: str | Path, offline: bool
) -> tuple[ObjectiveConfig, dict[str, TaskData]]:
    """The objective with the labels of its tasks as found, and their data by the task's name. UserError as `load_task`
    has it."""
    read = {one.name: load_task(one, seed, cache_dir, offline) for one in tasks_of(objective)}
    parts = tuple(
        one.model_copy(update={"task": read[one.task.name].config}) if isinstance(one, TaskObjectiveConfig) else one
        for one in objective.parts()
    )
    return (objective.with_parts(parts) if read else objective), read


def rows_of(read: Mapping[str, TaskData], split: str) -> dict[str, TaskRows]:
    """What lies beside the text of a split: the training rows, or those of the first development split."""
    return {name: one.train if split == "train" else next(iter(one.validation.values())) for name, one in read.items()}


class TaskObjective(BaseLearner):
    """The one term has the name of the task, and so has its head: finetuning the task goes on from there."""

    def __init__(self, config: TaskObjectiveConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(backbone, seed)
        self.config, self.tokenizer = config, tokenizer
        learner = build(config.task, backbone, tokenizer, seed)
        # In a tuple: its parameters are named as this learner's own, under `backbone` and `heads`.
        self._learner: tuple[Any] = (learner,)
        self.heads, self.weights = learner.heads, learner.weights
        self.measures = {config.task.name: partial(compute, config.task.metrics)}

    def train(self, mode: bool = True) -> Self:
        """The task's learner follows."""
        super().train(mode)
        self._learner[0].train(mode)
        return self

    def examples(self, store: TokenStore, max_length: int, documents: str, split: str) -> SequenceExamples:
        """The rows of the task beside a store's text."""
        return self._learner[0].examples(store.rows[self.config.task.name], max_length, split)

    def baselines(self, store: TokenStore, examples: SequenceExamples) -> dict[str, ConstantPredictor | ConstantValue]:
        """The shares of the classes, or the mean, of the training rows."""
        task, labels = self.config.task, store.rows[self.config.task.name].labels
        if labels.dtype != np.int64:
            return {task.name: ConstantValue("mean", float(labels.mean()))}
        counts = np.bincount(labels, minlength=len(getattr(task, "labels", None) or ()))
        return {task.name: ConstantPredictor.of_counts("base rate", counts)}

    def counts(self, batch: Batch) -> dict[str, float]:
        return self._learner[0].counts(batch)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        return self._learner[0](batch, step)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each example's loss and prediction, in evaluation."""
        return self._learner[0].score(batch)

    @torch.no_grad()
    def samples(self, batch: Batch, tokenizer: Tokenizer, n: int) -> list[dict[str, Any]]:
        """The first n texts of a batch as plain data: `text`, `gold`, `prediction` and its `score`."""
        learner, task = self._learner[0], self.config.task
        best_N, scores_N = (one.tolist() for one in learner.best(learner.outputs(batch, 0)))
        labels_N = learner.labels(batch).tolist()
        texts = [tokenizer.decode(ids) for ids in batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]]
        return [
            {"text": text, "gold": named(task, gold), "prediction": named(task, best), "score": score}
            for text, gold, best, score in zip(texts, labels_N, best_N, scores_N, strict=False)
        ]

    def complete(
        self, texts: Sequence[str], autocast: Callable[[], AbstractContextManager]
    ) -> Iterator[dict[str, Any]]:
        """What the texts are predicted to be. UserError where the task reads pairs."""
        task = self.config.task
        if len(task.text) > 1:
            raise UserError(
                f"task.name={task.name} reads pairs: {', '.join(task.text)}",
                "finetune the checkpoint on the task, and predict with that",
            )
        rows = TaskRows(list(range(len(texts))), (list(texts),), None, [("text", 1)] * len(texts))
        examples = self._learner[0].examples(rows, self.backbone.config.max_positions, "input")
        batches = PackedLoader(examples, 0, None, _TOKENS, shuffle=False).epoch_batches()
        device = next(self.parameters()).device
        found, _ = predict(self._learner[0], len(rows), batches, device, autocast)
        yield from predictions(task, rows, found, "input")
