"""The data of several tasks: of `task=mixture`, and of tasks among the objectives of pretraining, alone or as members
of a mixture (Raffel et al. 2020, sections 2.4 and 3.5.3), whose rows lie beside its text. They are read before the run
begins. All else is each task's own learner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.tables import build
from lmtool.data.split import Rows, SplitData
from lmtool.learners.configs import ObjectiveConfig
from lmtool.tasks.configs import MixtureTaskConfig, TaskConfig, TaskObjectiveConfig, tasks_of
from lmtool.tasks.loading import TaskData, load_task


@dataclass(frozen=True)
class MixedData:
    """As `TaskData`, of several tasks: `members`, by their names."""

    config: TaskConfig
    members: Mapping[str, TaskData]

    @property
    def facts(self) -> dict[str, Any]:
        """Those of each member, and which of them outweighs the others."""
        facts: dict[str, Any] = {f"task {name}": data.facts for name, data in self.members.items()}
        first = {name: build(data.config).first_loss(data.train) for name, data in self.members.items()}
        heavy = [
            f"the loss of {name} is the square of values far from 0: it begins at {loss:.1f} and outweighs the other "
            f"tasks, where one of classes begins at {math.log(2):.1f} (two) to {math.log(50):.1f} (fifty); "
            f"task.with.{name}.standardize=train measures it in the deviation of the values"
            for name, loss in first.items()
            if loss is not None and loss > math.log(50)
        ]
        return {**facts, "warnings": heavy} if heavy else facts

    def texts(self) -> list[Sequence[str]]:
        return [column for data in self.members.values() for column in data.texts()]

    def splits(self) -> dict[str, SplitData]:
        """The training rows of all members; the first development split of each, together; and the further ones that
        some of them have, under their own names."""
        own = {name: data.splits() for name, data in self.members.items()}
        firsts = [list(splits)[1] for splits in own.values()]
        first = firsts[0] if len(set(firsts)) == 1 else "dev"
        joined: dict[str, dict[str, Rows]] = {"train": {}, first: {}}
        for (name, splits), chief in zip(own.items(), firsts, strict=True):
            for split, part in splits.items():
                title = first if split == chief else split if split != first else f"{name}_{split}"
                joined.setdefault(title, {}).update(part.rows)
        return {split: SplitData(split, rows=rows) for split, rows in joined.items()}

    def labelled_tests(self) -> dict[str, SplitData]:
        splits: dict[str, dict[str, Rows]] = {}
        for data in self.members.values():
            for split, part in data.labelled_tests().items():
                splits.setdefault(split, {}).update(part.rows)
        return {split: SplitData(split, rows=rows) for split, rows in splits.items()}


def with_members(config: TaskConfig, members: Mapping[str, TaskData]) -> TaskData | MixedData:
    """The data of a task, or of a mixture, from those of its parts."""
    if not isinstance(config, MixtureTaskConfig):
        (data,) = members.values()
        return data
    counted = config.model_copy(update={"rows": tuple(len(data.train) for data in members.values())})
    return MixedData(counted.with_parts(tuple(data.config for data in members.values())), members)


def learner(config: TaskObjectiveConfig, *arguments: Any) -> Any:
    """The learner of the task: finetuning it starts from the head that pretraining gave it."""
    return config.task.learner(*arguments)


def read_tasks(
    objective: ObjectiveConfig, seed: int, cache_dir: str | Path, offline: bool
) -> tuple[ObjectiveConfig, dict[str, TaskData]]:
    """The objective with the labels of its tasks as the data have them, and these data by the task's name. UserError
    as `load_task` has it."""
    read = {task.name: load_task(task, seed, cache_dir, offline) for task in tasks_of(objective)}
    parts = tuple(
        part.model_copy(update={"task": read[part.task.name].config}) if isinstance(part, TaskObjectiveConfig) else part
        for part in objective.parts()
    )
    return (objective.with_parts(parts) if read else objective), read


def rows_of(read: Mapping[str, TaskData], split: str) -> dict[str, Rows]:
    """What lies beside the text of a split: the training rows, or those of the first development split."""
    return {
        name: data.train if split == "train" else next(iter(data.validation.values())) for name, data in read.items()
    }
