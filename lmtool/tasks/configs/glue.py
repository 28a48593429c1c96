"""All tasks of GLUE, as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from lmtool.config.members import reached, title_of
from lmtool.config.tables import component
from lmtool.tasks.configs.base import TaskConfig

Member = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]


@component("task", "glue", builder="lmtool.tasks.suites:Glue")
class GlueConfig(TaskConfig):
    """The tasks of GLUE, each in a run of its own (Wang et al. 2019)."""

    kind: Literal["glue"] = Field("glue", description="The tasks of GLUE, each in a run of its own.")
    name: str = Field("glue", description="What the runs are called together.", pattern=r"^[a-z][a-z0-9_]*$")
    path: str | None = Field(
        None,
        description="A folder with a folder of each task, named after it (cola, CoLA, mnli_10k), and one named ax for "
        "the diagnostic set. Null: the hub.",
    )
    hub: str | None = Field(
        "nyu-mll/glue", description="Where no path is given, each task is read from where its own YAML says."
    )
    members: tuple[Member | dict[str, Any], ...] = Field(
        ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"),
        min_length=1,
        description="The tasks, in the order of their runs. task.with.NAME.KEY= sets a key of one of them.",
    )
    metrics: tuple[Literal["average"], ...] = Field(
        ("average",), min_length=1, description="The mean of the tasks' scores, WNLI left out."
    )
    metric: Literal["average"] = Field("average", description="What result.json of all runs says.")

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return reached(data)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks."""
        return tuple(map(title_of, self.members))

    @model_validator(mode="after")
    def _members_of_glue(self) -> GlueConfig:
        others = [name for name in self.names if name not in get_args(Member)]
        if others:
            raise ValueError(f"members: {others[0]} is no task of GLUE; these are {', '.join(get_args(Member))}")
        return self
