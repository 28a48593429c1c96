"""`auto`: a section taken from what the checkpoint or the model's configuration names.

A command's class says where each of its sections may come from, in a table of its own:

    auto: ClassVar[dict[str, Auto]] = {"objective": Auto(("model.recipe.pretrain.objective",), hint=...)}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lmtool.config.base import Auto as Auto
from lmtool.config.base import Config
from lmtool.config.tables import Choice, choices, lookup
from lmtool.errors import Problem

AUTO = "auto"


def resolve(
    command: type[Config],
    data: dict[str, Any],
    checkpoint: dict[str, Any] | None,
    unreadable: bool = False,
    teacher: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Problem], set[str]]:
    """The data with every `auto` section replaced, the problems, and the sections left unresolved.

    data: plain nested data, not changed. checkpoint, teacher: the saved configurations of the checkpoint and of the
    teacher, if there are such. unreadable: there should be a checkpoint, and its error is reported already.
    """
    resolved, problems, left = dict(data), [], set()
    saved = {"checkpoint": checkpoint, "teacher": teacher}
    table = command.auto

    def named_by_another(named_choice: tuple[str, Choice]) -> bool:
        how = table.get(named_choice[0])
        return how is not None and any(isinstance(source, str) and "." in source for source in how.sources)

    # A section that another one names is resolved after it, wherever the fields stand in the class.
    for section, choice in sorted(choices(command).items(), key=named_by_another):
        value = resolved.get(section)
        if isinstance(value, str):
            value = resolved[section] = {choice.key: value}
        how = table.get(section)
        if how is None:
            continue
        if not _is_auto(value, choice, how):
            if how.agrees and checkpoint is not None and isinstance(value, dict):
                problems += _disagreements(section, value, checkpoint.get(section), choice)
            continue
        source, blocked = _source(how, section, resolved, saved, command, unreadable)
        if source is not None:
            typed = {key: inside for key, inside in (value or {}).items() if key != choice.key}
            resolved[section] = merge(source, typed)
            if how.agrees and checkpoint is not None:
                problems += _disagreements(section, resolved[section], checkpoint.get(section), choice)
        elif value is not None or blocked:
            left.add(section)
            if not blocked:
                reason = "nothing chosen names one to take it from"
                if how.sources == ("checkpoint",):
                    reason = f"the checkpoint has no {section}"
                    if data.get("checkpoint") == "none":
                        reason = f"checkpoint=none has no {section}"
                    elif checkpoint is None:
                        reason = "no checkpoint is given to take it from"
                problems.append(Problem(section, f"{section}={AUTO}: {reason}", how.hint or None, absent=True))
    return resolved, problems, left


def _is_auto(value: Any, choice: Choice, how: Auto) -> bool:
    if value is None:
        return how.implied
    if not isinstance(value, dict):
        return False
    return value.get(choice.key) == AUTO or (how.implied and choice.key not in value)


def _source(
    how: Auto,
    section: str,
    resolved: dict[str, Any],
    saved: Mapping[str, dict[str, Any] | None],
    command: type[Config],
    unreadable: bool,
) -> tuple[dict[str, Any] | None, bool]:
    """The first source that exists; and whether another section's mistake is why there is none."""
    for source in how.sources:
        if isinstance(source, dict):
            return source, False
        if source in saved:
            known = (saved[source] or {}).get(section)
            if isinstance(known, dict):
                return known, False
            if unreadable and source == "checkpoint":
                return None, True
            continue
        other, method, *keys = source.split(".")
        choice, value = choices(command)[other], resolved.get(other)
        chosen = chosen_class(value, choice)
        holder = None if chosen is None else _decoded(value, choice) or _default(chosen)
        if holder is None:
            return None, True
        named = getattr(holder, method)()
        for key in keys:
            named = named.get(key, {})
        if named:
            return json.loads(json.dumps(named)), False
    return None, False


def _decoded(value: Any, choice: Choice) -> Config | None:
    """A section's configuration, or None where it has a mistake, which the decoder will word."""
    try:
        return choice.validate(value)
    except ValidationError:
        return None


def _default(chosen: type[Config]) -> Config | None:
    """Stands in for a section with a mistake, so that what depends on it is checked all the same."""
    try:
        return chosen()
    except ValidationError:
        return None


def chosen_class(value: Any, choice: Choice) -> type[Config] | None:
    """The configuration class a section's data choose, or None."""
    name = value.get(choice.key) if isinstance(value, dict) else None
    entry = lookup(choice.group, name) if isinstance(name, str) else None
    return None if entry is None else entry.config


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        inside = merged.get(key)
        merged[key] = merge(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return merged


def _disagreements(section: str, value: dict[str, Any], saved: Any, choice: Choice) -> list[Problem]:
    """Fields in which a typed section differs from the checkpoint's and may not."""
    chosen = chosen_class(value, choice)
    if chosen is None or not isinstance(saved, dict):
        return []
    here = {name: field.get_default() for name, field in chosen.model_fields.items()} | value
    if saved.get(choice.key) != here.get(choice.key):
        differing = [choice.key]
    else:
        free = chosen.free_fields
        there = {name: field.get_default() for name, field in chosen.model_fields.items()} | saved
        differing = [
            key for key in chosen.model_fields if key not in free and _listed(here[key]) != _listed(there[key])
        ]
    theirs = saved if differing == [choice.key] else (there if differing else {})
    return [
        Problem(
            f"{section}.{key}",
            f"{section}.{key}={_shown(here[key])}, but the checkpoint has {section}.{key}={_shown(theirs.get(key))}",
            f"{section}=auto takes it from the checkpoint; or start from checkpoint=none",
        )
        for key in differing
    ]


def _listed(value: Any) -> Any:
    """A field's value as plain data."""
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> Any:
    """A value for a message: a choice by its name."""
    plain = _listed(value)
    return plain.get("name", plain) if isinstance(plain, dict) else plain
