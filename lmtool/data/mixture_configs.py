"""Several texts in one run, as configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lmtool.config.members import reached, title_of
from lmtool.config.nearest import nearest
from lmtool.config.tables import Choice, component, lookup, names
from lmtool.data.configs import DataConfig


@component("data", "mixture", builder="lmtool.data.mixture:MixtureSource")
class MixtureTextConfig(DataConfig):
    """Several texts in one run, each with a store of its own, by weights."""

    downloads: ClassVar[bool] = True  # where a member does

    name: Literal["mixture"] = Field("mixture", description="A mixture of texts.")
    members: tuple[str | dict[str, Any], ...] = Field(
        min_length=1,
        description="The texts, two or more: options of data (text, wikipedia, ...), or sections with a name and the "
        "keys that differ; `title` is what a section is called here, by default its name. "
        "data.with.TITLE.KEY= sets a key of one of them.",
    )
    weights: tuple[float, ...] | None = Field(
        None,
        description="A number for each member: its share of the examples. Null: as many as it has, so that every "
        "example comes once an epoch.",
    )
    documents: Literal["separate", "joined"] | None = Field(  # type: ignore[assignment]
        None, description="As in any text, for all members. Null: as each member says."
    )
    validation_fraction: float | None = Field(  # type: ignore[assignment]
        None, gt=0, lt=1, description="As in any text, for all members. Null: as each member says."
    )

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        return reached(data)

    def parts(self) -> dict[str, DataConfig]:
        """The members by their titles."""
        common = {
            name: value for name in ("documents", "validation_fraction") if (value := getattr(self, name)) is not None
        }
        return {title_of(member): _section(member).model_copy(update=common) for member in self.members}

    def shares(self) -> tuple[float, ...] | None:
        """The weights, adding up to 1; None where nothing weighs them."""
        return None if self.weights is None else tuple(weight / sum(self.weights) for weight in self.weights)

    @model_validator(mode="after")
    def _members_fit(self) -> MixtureTextConfig:
        titles = [title_of(member) for member in self.members]
        written = ", ".join(titles)
        if len(titles) < 2:
            raise ValueError(f"members=[{written}]: a mixture has two or more; data={written} reads one")
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice is not None:
            raise ValueError(
                f"members=[{written}]: {twice} is there twice; give one of them a title of its own: "
                f"{{title: more, name: {twice}, path: FILE}}"
            )
        for member, title in zip(self.members, titles, strict=True):
            if isinstance(member, dict) and "name" not in member:
                raise ValueError(f"members: a section has no name, which is one of {', '.join(names('data'))}")
            if title == "mixture":
                raise ValueError("members: a mixture is no member of another; name its members here")
            if not title.isidentifier() or lookup("objective", title) is not None:
                raise ValueError(f"members: the title {title} is no word of its own: scores are called by it")
            try:
                section = _section(member)
            except (ValidationError, PydanticCustomError) as error:
                raise ValueError(f"members: {_problem(title, member, error)}") from error
            if isinstance(section, MixtureTextConfig):
                raise ValueError(f"members: {title} is a mixture itself; name its members here")
        if self.weights is not None and (len(self.weights) != len(titles) or min(self.weights) <= 0):
            raise ValueError(f"weights={list(self.weights)}: a number above 0 for each of the {len(titles)} members")
        return self


def _section(member: str | dict[str, Any]) -> DataConfig:
    """A decoded member. Raises pydantic's errors."""
    section = {"name": member} if isinstance(member, str) else {k: v for k, v in member.items() if k != "title"}
    decoded = Choice("data").validate(section)
    assert isinstance(decoded, DataConfig)
    return decoded


def _problem(title: str, member: str | dict[str, Any], error: ValidationError | PydanticCustomError) -> str:
    """What is wrong with a member, in words, and what to type."""
    if isinstance(error, PydanticCustomError):
        given = (error.context or {}).get("given")
        subject = "a section has no name, which is" if given is None else f"{given} is not"
        close = nearest(str(given), names("data"))
        return f"{subject} one of {', '.join(names('data'))}" + (f"; did you mean {close}?" if close else "")
    problems = error.errors(include_url=False, include_input=False)
    problem = min(problems, key=lambda problem: problem["type"] == "missing")  # a misspelt key is why another lacks
    key = ".".join(map(str, (f"data.with.{title}", *problem["loc"])))
    if problem["type"] == "missing":
        return f"{title} lacks a value; give {key}=..."
    if problem["type"] == "extra_forbidden":
        close = nearest(str(problem["loc"][-1]), _keys(member))
        return f"unknown key {key}" + (f"; did you mean data.with.{title}.{close}?" if close else "")
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}"


def _keys(member: str | Mapping[str, Any]) -> tuple[str, ...]:
    entry = lookup("data", member if isinstance(member, str) else str(member.get("name")))
    return () if entry is None else tuple(entry.config.model_fields)
