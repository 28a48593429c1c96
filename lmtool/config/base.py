"""What every configuration class is: a frozen, strict pydantic model whose fields are all documented."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from lmtool.errors import Problem


@dataclass(frozen=True)
class Auto:
    """Where a section comes from when its name is `auto`; the first source that exists is taken.

    sources: "checkpoint" (the section of that name in the checkpoint's saved configuration), "teacher" (that of the
    model it is distilled from), "SECTION.METHOD.KEYS" (what a method of another, already resolved section returns under
    these keys), or a section itself.
    hint: what to type where none exists. implied: a null section, and one without a name, are `auto` too.
    agrees: a section that is typed must agree with the checkpoint's, but for the `free_fields` of its class.
    """

    sources: tuple[str | dict[str, Any], ...]
    hint: str = ""
    implied: bool = False
    agrees: bool = False


@dataclass(frozen=True)
class Variant:
    """path: the key under which it stands. data: the whole configuration as plain data; None where there is none to
    check. problems: what is wrong with how it is written. keys: those that it may give, which are typed under its path.
    """

    path: str
    data: dict[str, Any] | None
    problems: tuple[Problem, ...] = ()
    keys: tuple[str, ...] = ()

    def placed(self, problem: Problem) -> Problem:
        """A problem of its configuration in the words of the command's, in which its keys stand under its path."""
        keys = "|".join(map(re.escape, sorted({problem.key, *self.keys}, key=len, reverse=True)))
        pattern = re.compile(rf"(?<![\w.\-/])(?<!lmtool show )({keys})(?=[=:.]|$)")

        def moved(text: str) -> str:
            text = re.sub(r"^unknown key ", f"unknown key {self.path}.", text)
            return pattern.sub(lambda match: f"{self.path}.{match[1]}", text)

        hint = None if problem.hint is None else moved(problem.hint)
        return replace(problem, key=f"{self.path}.{problem.key}", message=moved(problem.message), hint=hint, meant=())


class Config(BaseModel):
    """A section of a run's configuration.

    Unknown keys are refused, types are not coerced, values do not change after decoding. Every field has a
    `description` with its unit. Its first sentence is the comment of the field in the YAML
    file (`make conf` writes it); `lmtool show KEY` prints all of it.
    """

    # defer_build: the validator of a class is built when something is decoded as it; of most components never.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    auto: ClassVar[dict[str, Auto]] = {}
    """Of a command: where a section that is `auto` comes from."""
    overlays: ClassVar[tuple[str, ...]] = ()
    """Of a command: groups that set values of other sections and have none of their own."""
    free_fields: ClassVar[tuple[str, ...]] = ()
    """Of a component: fields that may differ from a checkpoint's."""
    descriptions: ClassVar[dict[str, str]] = {}
    """Descriptions of inherited fields that mean something more specific in this class."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """A field that is declared again, for another default, keeps the description of the base class."""
        specific = cls.__dict__.get("descriptions", {})
        for name, field in cls.model_fields.items():
            inherited = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, Config))
            described = next((parent for parent in inherited if parent is not None), None)
            if name in specific or (field.description is None and described is not None):
                field.description = specific.get(name) or (described and described.description)

    @classmethod
    def filled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The data of a command, or of a section, with values that follow from its other values: none."""
        return data

    @classmethod
    def variants(cls, data: dict[str, Any]) -> Iterable[Variant]:
        """Further configurations that a command's data bring along: none."""
        return ()


def summary(description: str | None) -> str:
    """The part of a field's description that its YAML file repeats: its first sentence."""
    return re.split(r"(?<!et al)\. ", description or "")[0].removesuffix(".")
