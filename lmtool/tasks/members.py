"""Tasks among the objectives of pretraining, alone or as members of a mixture (Raffel et al. 2020, sections 2.4 and
3.5.3): their rows are read before the run begins, and lie beside its text. All else is the task's own learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.data.split import Rows
from lmtool.learners.configs import ObjectiveConfig
from lmtool.tasks.configs import TaskObjectiveConfig, tasks_of
from lmtool.tasks.loading import TaskData, load_task


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
