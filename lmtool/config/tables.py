"""The tables: which component a name stands for.

A component is chosen by a name looked up here; a string from a configuration is never imported. The builder is a
literal in our code (or in a plugin the user named), imported when the component is built, so that composing and
decoding a configuration never imports torch.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from lmtool.config.base import Config

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
        if name in table and table[name].config.__qualname__ != config.__qualname__:
            raise ValueError(f"{group}={name} is in the table already, as {table[name].config.__qualname__}")
        table[name] = _ENTRIES[config] = Entry(group, name, config, builder)
        return config

    return enter


def names(group: str) -> tuple[str, ...]:
    """The names a group offers, sorted."""
    return tuple(sorted(_TABLES.get(group, {})))


def lookup(group: str, name: str) -> Entry | None:
    """The entry of a name, or None."""
    return _TABLES.get(group, {}).get(name)


def entry_of(config: Config) -> Entry:
    """The entry a decoded configuration belongs to."""
    return _ENTRIES[type(config)]


def load_builder(config: Config) -> Callable[..., Any]:
    """Import the builder of a decoded component and return it uncalled."""
    module, _, attribute = entry_of(config).builder.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(config: Config, *arguments: Any, **keywords: Any) -> Any:
    """Build a component: `builder(config, *arguments, **keywords)`."""
    return load_builder(config)(config, *arguments, **keywords)


def nearest(word: str, known: Any) -> str | None:
    """The known word most like `word`, or None where nothing is close."""
    close = difflib.get_close_matches(str(word), [str(one) for one in known], n=1, cutoff=0.6)
    return close[0] if close else None


@dataclass(frozen=True)
class Choice:
    """Marks a field whose class is chosen by a name: `model: Annotated[Config, Choice("model")]`.

    The name stands under `key` inside the section and is looked up when the section is validated, so a plugin's
    component needs nothing special. It stays in the section: every component's class declares the field.
    """

    group: str
    key: str = "name"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda one: one.model_dump())
        )

    def _validate(self, value: Any) -> Config:
        if isinstance(value, Config):
            return value
        allowed = ", ".join(names(self.group))
        if not isinstance(value, dict) or not isinstance(value.get(self.key), str):
            raise PydanticCustomError("choice_missing", "no `{key}` given: one of {allowed}", {"key": self.key, "allowed": allowed})
        entry = lookup(self.group, value[self.key])
        if entry is None:
            raise PydanticCustomError(
                "choice_unknown",
                "{key}={given} is not one of {allowed}",
                {"key": self.key, "given": value[self.key], "allowed": allowed, "nearest": nearest(value[self.key], names(self.group)) or ""},
            )
        # JSON mode, like the outermost decode: lists become tuples, but "fast" is no number and 2.5 is no count.
        return entry.config.model_validate_json(json.dumps(value))
