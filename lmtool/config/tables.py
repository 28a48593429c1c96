"""The tables: which component a name stands for.

A component is chosen by a name looked up here; a string from a configuration is never imported. The builder is a
literal in our code (or in a plugin the user named), imported when the component is built, so that composing and
decoding a configuration never imports torch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import PydanticCustomError, core_schema

from lmtool.config.base import Config
from lmtool.config.nearest import nearest as nearest
from lmtool.errors import UserError

ConfigClass = TypeVar("ConfigClass", bound=type[Config])


@dataclass(frozen=True)
class Entry:
    """One component: its group and name, the class of its configuration, and `module:attribute` of its builder."""

    group: str
    name: str
    config: type[Config]
    builder: str


_TABLES: dict[str, dict[str, Entry]] = {}
_ENTRIES: dict[type[Config], Entry] = {}


def component(group: str, name: str, builder: str) -> Callable[[ConfigClass], ConfigClass]:
    """Class decorator: enter a configuration class into the table of its group.

    `builder` is `package.module:attribute`, called as `builder(config, ...)` by `build`.
    """

    def enter(config: ConfigClass) -> ConfigClass:
        table = _TABLES.setdefault(group, {})
        if name in table and _origin(table[name].config) != _origin(config):
            both = [".".join(_origin(known)) for known in (table[name].config, config)]
            raise UserError(f"{group}={name} is both {both[0]} and {both[1]}", "give the plugin's another name")
        table[name] = _ENTRIES[config] = Entry(group, name, config, builder)
        return config

    return enter


def register(package: str) -> None:
    """Import the modules of a package that hold configuration classes, which enter themselves into the tables: those
    named `configs`, `..._configs`, or in a package `configs`."""
    for path in importlib.import_module(package).__path__:
        for file in sorted(Path(path).glob("*configs.py")):
            importlib.import_module(f"{package}.{file.stem}")
        for file in sorted(Path(path, "configs").glob("[!_]*.py")):
            importlib.import_module(f"{package}.configs.{file.stem}")


def _origin(config: type[Config]) -> tuple[str, str]:
    return config.__module__, config.__qualname__


def groups() -> tuple[str, ...]:
    """The groups that have components, sorted."""
    return tuple(sorted(_TABLES))


def names(group: str) -> tuple[str, ...]:
    """The names a group offers, sorted."""
    return tuple(sorted(_TABLES.get(group, {})))


def entries(group: str) -> tuple[Entry, ...]:
    """The components of a group, by name."""
    return tuple(_TABLES[group][name] for name in names(group))


def lookup(group: str, name: str) -> Entry | None:
    """The entry of a name, or None."""
    return _TABLES.get(group, {}).get(name)


def entry_of(config: Config) -> Entry:
    """The entry a decoded configuration belongs to."""
    return _ENTRIES[type(config)]


def load_builder(config: Config) -> Callable[..., Any]:
    """Import the builder of a decoded component and return it uncalled."""
    return imported(entry_of(config).builder)


def imported(name: str) -> Any:
    """Import what a literal "package.module:attribute" of lmtool's own code names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def builder_module(entry: Entry) -> Any:
    """Import the module of a component's builder: a model family's holds the maps from and to published weights."""
    return importlib.import_module(entry.builder.partition(":")[0])


def build(config: Config, *arguments: Any, **keywords: Any) -> Any:
    """Build a component: `builder(config, *arguments, **keywords)`."""
    return load_builder(config)(config, *arguments, **keywords)


@dataclass(frozen=True)
class Choice:
    """Marks a field whose class is chosen by a name: `model: Annotated[ModelConfig, Choice("model")]`.

    The name stands under `key` inside the section and is looked up when the section is validated, so a plugin's
    component needs nothing special. It stays in the section: every component's class declares the field.
    `optional`: null is allowed.
    """

    group: str
    key: str = "name"
    optional: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda config: None if config is None else config.model_dump()
            ),
        )

    def validate(self, value: Any) -> Config | None:
        """The decoded section. Raises pydantic's errors, which the decoder words."""
        if isinstance(value, Config) or (value is None and self.optional):
            return value
        if not isinstance(value, dict) or not isinstance(value.get(self.key), str):
            raise PydanticCustomError("choice_missing", "no {key} given", {"key": self.key, "group": self.group})
        entry = lookup(self.group, value[self.key])
        if entry is None:
            raise PydanticCustomError(
                "choice_unknown", "{key}={given}", {"key": self.key, "given": value[self.key], "group": self.group}
            )
        # JSON mode, like the outermost decode: lists become tuples, but "fast" is no number and 2.5 is no count.
        return entry.config.model_validate_json(json.dumps(entry.config.filled(value)))


@dataclass(frozen=True)
class Several:
    """Marks a field that holds any number of a group's components by their names:
    `terms: Annotated[dict[str, TermConfig], Several("distill/term")]`. A name with null is left out."""

    group: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda sections: {name: config.model_dump() for name, config in sections.items()}
            ),
        )

    def validate(self, value: Any) -> dict[str, Config]:
        """The decoded sections. Raises pydantic's errors, which the decoder words."""
        if not isinstance(value, dict):
            raise PydanticCustomError("several", "a section for each name")
        if all(isinstance(section, Config) for section in value.values()):
            return value
        fields: dict[str, Any] = {entry.name: (entry.config | None, None) for entry in entries(self.group)}
        decoded = create_model("Sections", __base__=Config, **fields).model_validate_json(json.dumps(value))
        sections = {name: getattr(decoded, name) for name in value}
        return {name: section for name, section in sections.items() if section is not None}


def choices(config: type[Config]) -> dict[str, Choice]:
    """The fields of a command's class that are sections chosen by a name."""
    marked = {}
    for name, field in config.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Choice):
                marked[name] = mark
    return marked
