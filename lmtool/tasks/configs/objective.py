"""A task among the objectives of pretraining, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import Choice, component
from lmtool.learners.configs import ObjectiveConfig
from lmtool.tasks.configs.base import TaskConfig


@component("objective", "task", builder="lmtool.tasks.members:learner")
class TaskObjectiveConfig(ObjectiveConfig):
    """A labelled task in pretraining, beside other objectives (Raffel et al. 2020, section 3.5.3)."""

    architectures: ClassVar[tuple[str, ...]] = TaskConfig.architectures

    name: Literal["task"] = Field("task", description="A task.")
    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="The task, as `lmtool finetune` has it, with its kind and where its data are: "
        "{kind: classification, name: reviews, path: FOLDER}."
    )

    @property
    def title(self) -> str:
        """Tasks go by their own names."""
        return self.task.name

    @property
    def predicted_fraction(self) -> float:
        """No token is predicted."""
        return 0.0


def tasks_of(objective: ObjectiveConfig) -> tuple[TaskConfig, ...]:
    """The tasks that an objective is or has among its members."""
    return tuple(part.task for part in objective.parts() if isinstance(part, TaskObjectiveConfig))
