"""Several tasks in one run, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.members import reached, title_of
from lmtool.config.tables import Choice, component, lookup, names
from lmtool.errors import Problem
from lmtool.learners.configs import member_problem
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.glue import GlueConfig
from lmtool.tasks.configs.sequence import TEXT_TO_TEXT

_OWN = "Each member's own: task.with.NAME.{}=."
_TASK = Choice("task", key="kind")


@component("task", "mixture", builder="lmtool.tasks.mixture:build")
class MixtureTaskConfig(TaskConfig):
    """Several tasks that share a model, each with a head of its own (Caruana 1997), or all of them written by one
    language model (Raffel et al. 2020, section 2.4)."""

    members_key: ClassVar[str] = "task.members"
    repeats: ClassVar[bool] = True

    kind: Literal["mixture"] = Field("mixture", description="Several tasks in one run.")
    name: str = Field("mixture", description="What they are called together.", pattern=r"^[a-z][a-z0-9_]*$")
    members: tuple[dict[str, Any], ...] = Field(
        min_length=2,
        description="The tasks: names of shipped ones, or sections with a kind, a name and a path. No name twice. "
        "task.with.NAME.KEY= sets a key of one of them.",
    )
    sampling: Literal["proportional", "uniform", "temperature", "capped"] = Field(
        "proportional",
        description="The shares of the members, of n training rows each (Raffel et al. 2020, section 3.5.2). "
        "proportional: as n. uniform: all alike. temperature: as n^(1/temperature). capped: as the smaller of n and "
        "cap. Their losses have the same weights.",
    )
    temperature: float = Field(2.0, ge=1, description="Of sampling=temperature; 1 is proportional. Published: 2.")
    cap: int = Field(2**19, ge=1, description="Of sampling=capped, in rows. Published: 2^19.")
    head: Literal["text_to_text"] | None = Field(
        None, description="text_to_text: the labels of all members are written (T5). Null: as each member says."
    )
    rows: tuple[int, ...] | None = Field(None, description="Training rows of each member. Null: they are counted.")

    text: tuple[()] = Field((), description=_OWN.format("text"))
    label: Literal[""] = Field("", description=_OWN.format("label"))
    path: None = Field(None, description=_OWN.format("path"))
    hub: None = Field(None, description=_OWN.format("hub"))
    embedded: None = Field(None, description=_OWN.format("embedded"))
    header: None = Field(None, description=_OWN.format("header"))
    aliases: dict[str, str] = Field({}, max_length=0, description=_OWN.format("aliases"))
    files: dict[str, str] = Field({}, max_length=0, description=_OWN.format("files"))
    ragged_rows: Literal["refuse"] = Field("refuse", description=_OWN.format("ragged_rows"))
    validation: tuple[()] = Field((), description=_OWN.format("validation"))
    test: tuple[()] = Field((), description=_OWN.format("test"))
    train_examples: None = Field(None, description=_OWN.format("train_examples"))
    dropout: None = Field(None, description=_OWN.format("dropout"))

    metrics: tuple[Literal["average"], ...] = Field(
        ("average",), min_length=1, description="The mean of the members' metrics, those of 100 taken as shares of 1."
    )
    metric: Literal["average"] = Field("average", description="The score that chooses the best checkpoint.")

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return reached(data)

    @classmethod
    def longest(cls, section: dict[str, Any]) -> int:
        """That of the member with the longest sequences."""
        entries = [
            lookup("task", str(part.get("kind"))) for part in section.get("members") or () if isinstance(part, dict)
        ]
        lengths = [entry.config.default_max_length for entry in entries if entry is not None]  # type: ignore[attr-defined]
        return max(lengths, default=cls.default_max_length)

    def parts(self) -> tuple[TaskConfig, ...]:
        """The members, as they are learned."""
        parts = [_TASK.validate(member) for member in self.members]
        tasks = tuple(part for part in parts if isinstance(part, TaskConfig))
        if self.head is None:
            return tasks
        return tuple(task.with_head({"head": self.head}) if hasattr(task, "head") else task for task in tasks)

    def with_parts(self, parts: tuple[TaskConfig, ...]) -> MixtureTaskConfig:
        return self.model_copy(update={"members": tuple(part.model_dump(mode="json") for part in parts)})

    def of_parts(self, parts: Sequence[TaskConfig]) -> MixtureTaskConfig:
        own = dict(zip((part.name for part in self.parts()), self.rows or (), strict=False))
        rows = tuple(own[part.name] for part in parts) if own else None
        return self.with_parts(tuple(parts)).model_copy(update={"rows": rows})

    def shares(self) -> tuple[float, ...]:
        """Of the members in the examples and in the loss, adding up to 1. ValueError where the rows are not counted."""
        if self.rows is None:
            raise ValueError("build a mixture from the config that its data give back: its rows are counted")
        of_rows = {
            "proportional": lambda count: float(count),
            "uniform": lambda count: 1.0,
            "temperature": lambda count: count ** (1 / self.temperature),
            "capped": lambda count: float(min(count, self.cap)),
        }[self.sampling]
        sizes = [of_rows(count) for count in self.rows]
        return tuple(size / sum(sizes) for size in sizes)

    def text_format(self, model: Any) -> str:
        return self.parts()[0].text_format(model)

    def misfit(self, model: Any) -> Problem | None:
        for part in self.parts():
            if self.head == TEXT_TO_TEXT and not hasattr(part, "head") and not getattr(part, "writes", False):
                message = (
                    f"task.head={TEXT_TO_TEXT}: the labels of the member {part.name} ({part.kind}) are not written"
                )
                return Problem("task.head", message, f"leave {part.name} out of task.members, or task.head")
            problem = part.misfit(model)
            if problem is not None:
                message = f"task.members: {part.name}: {problem.message}"
                return Problem("task.members", message, problem.hint)
        return None

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureTaskConfig:
        for member in self.members:
            try:
                _TASK.validate(member)
            except (ValidationError, PydanticCustomError) as error:
                raise ValueError(f"members: {title_of(member)}: {member_problem(error, names('task'))}") from error
        members = self.parts()
        titles = [member.name for member in members]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice is not None:
            raise ValueError(
                f"members={titles}: two are called {twice}; give one another name, as a section: "
                f"{{kind: {members[titles.index(twice)].kind}, name: {twice}_2, path: FOLDER}}"
            )
        nested = [member.name for member in members if isinstance(member, (MixtureTaskConfig, GlueConfig))]
        if nested:
            raise ValueError(f"members={titles}: {nested[0]} is several tasks; name each of them")
        if self.rows is not None and len(self.rows) != len(titles):
            raise ValueError(f"rows={list(self.rows)}: a number for each of the {len(titles)} members")
        return self
