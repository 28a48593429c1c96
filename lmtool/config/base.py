"""The base of all configuration classes: a frozen, strict pydantic model whose fields are all documented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from lmtool.errors import Problem

JsonObject: TypeAlias = dict[str, Any]
"""A parsed JSON or YAML object, not yet decoded."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same, read only."""


@dataclass(frozen=True)
class Auto:
    """The sources of a section whose name is `auto`; the first one that exists is used.

    sources: "checkpoint" or "teacher" (the same section of its saved configuration), "SECTION.METHOD.KEYS" (a method of
    another section, and the keys of its result), or the data of a section. hint: the hint of the error if no source
    exists. implied: whether a null section, or one without a name, counts as `auto`. agrees: whether a typed section
    must be equal to the checkpoint's, except for the `adjustable_fields` of its class.
    """

    sources: tuple[str | JsonObject, ...]
    hint: str = ""
    implied: bool = False
    agrees: bool = False


@dataclass(frozen=True)
class Variant:
    """A further configuration within a command's, such as that of a phase.

    path: its key. data: the complete configuration as plain data; None if it cannot be checked. problems: errors in how
    it is written.
    """

    path: str
    data: JsonObject | None
    problems: tuple[Problem, ...] = ()

    def located(self, problem: Problem) -> Problem:
        """Returns a problem of this configuration with its path."""
        key, message = f"{self.path}.{problem.key}", f"{self.path}: {problem.message}"
        return replace(problem, key=key, message=message, likely_keys=())


class Config(BaseModel):
    """A section of a run's configuration.

    Unknown keys are refused, types are not coerced, and values do not change after decoding. Every field has a
    `description` with its unit. Its first sentence is the field's comment in the YAML file, which `make conf` writes;
    `lmtool show KEY` prints all of it.
    """

    # defer_build: the validator of a class is built at its first use; most components of a run are never used.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    auto: ClassVar[dict[str, Auto]] = {}
    """For commands: the sources of each section that may be `auto`, in the order in which they are resolved: a section
    comes after those that it is derived from."""
    overlays: ClassVar[tuple[str, ...]] = ()
    """For commands: groups that only set values of other sections."""
    adjustable_fields: ClassVar[tuple[str, ...]] = ()
    """For components: fields that may differ from a checkpoint's."""
    descriptions: ClassVar[dict[str, str]] = {}
    """More specific descriptions of inherited fields."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """A field that is declared again, for another default, keeps the description of the base class."""
        specific = cls.__dict__.get("descriptions", {})
        for name, field in cls.model_fields.items():
            inherited = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, Config))
            base_field = next((parent for parent in inherited if parent is not None), None)
            if name in specific or (field.description is None and base_field is not None):
                field.description = specific.get(name) or (base_field and base_field.description)

    @classmethod
    def filled(cls, data: JsonObject) -> JsonObject:
        """Returns the data of a command or section with derived values filled in. By default there are none."""
        return data

    @classmethod
    def variants(cls, data: JsonObject) -> Iterable[Variant]:
        """Returns further configurations within a command's data. By default there are none."""
        return ()


class Component(Config):
    """A section that is selected by a name. group: its key on the command line."""

    group: ClassVar[str] = ""

    if TYPE_CHECKING:
        name: str

    @property
    def typed(self) -> str:
        """The override that selects this component, such as "model=bert"."""
        return f"{self.group}={self.name}"


def summary(description: str | None) -> str:
    """Returns the first sentence of a description, which is the field's comment in YAML."""
    return re.split(r"(?<!et al)\. ", description or "")[0].removesuffix(".")


class CommandConfig(Config):
    """The keys that every command shares."""

    verbatim: ClassVar[tuple[str, ...]] = ()
    """Keys whose value is text as typed: commas, quotes and brackets have no special meaning in it."""
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys that exclude each other."""

    starts_with_checkpoint: ClassVar[bool] = True
    """Whether sections may come from the checkpoint, whose configuration is then read first."""

    plugins: tuple[str, ...] = Field(
        (), description="Python modules whose components are added; typed with --plugin, never read from a file."
    )
