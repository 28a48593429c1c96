"""The texts of a task as text to pretrain on, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.tables import Choice, component
from lmtool.data.configs import DataConfig
from lmtool.tasks.configs.base import TaskConfig


@component("data", "task", builder="lmtool.tasks.text:TaskText")
class TaskTextConfig(DataConfig):
    """The texts of a task without their labels (task-adaptive pretraining, Gururangan et al. 2020)."""

    downloads: ClassVar[bool] = True  # a task may name the hub

    name: Literal["task"] = Field("task", description="The texts of a task.")
    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(
        description="The task: a shipped one by its name, whose keys stand beside it (data.task=sst2 "
        "data.task.path=FOLDER), or a section with a kind and a path. Labels are not read."
    )
    validation_fraction: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="Share of the rows held out for validation, at least one, where the task has no development "
        "split; the same ones for every seed.",
    )
