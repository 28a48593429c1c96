"""Completes sections before they are decoded.

`auto` takes a section from the checkpoint or from the model's recipe. `with` sets keys of the named members of a
section (`task.with.sst2.path=FOLDER`).

The class of a command lists the sources of each section that may be `auto`:

    auto: ClassVar[dict[str, Auto]] = {"objective": Auto(("model.recipe.pretrain.objective",), hint=...)}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config.base import Auto as Auto
from lmtool.config.base import Config, JsonObject
from lmtool.config.nearest import nearest
from lmtool.config.tables import Choice, choices, lookup
from lmtool.config.words import one_of
from lmtool.errors import Problem

AUTO = "auto"


def resolve(
    command: type[Config],
    data: JsonObject,
    checkpoint: JsonObject | None,
    unreadable: bool = False,
    teacher: JsonObject | None = None,
) -> tuple[JsonObject, list[Problem], set[str]]:
    """Replaces every `auto` section.

    Args:
        command: the class of the command.
        data: plain nested data; not changed.
        checkpoint: the saved configuration of the checkpoint, if there is one.
        unreadable: whether reading the checkpoint failed, which is reported already.
        teacher: the saved configuration of the teacher, if there is one.

    Returns:
        The data, the problems, and the names of sections that stay unresolved.
    """
    resolved, problems, unresolved = dict(data), [], set()
    saved = {"checkpoint": checkpoint, "teacher": teacher}
    table = command.auto

    def depends_on_another(named_choice: tuple[str, Choice]) -> bool:
        rule = table.get(named_choice[0])
        return rule is not None and any(isinstance(source, str) and "." in source for source in rule.sources)

    # A section that depends on another one is resolved after it, whatever the order of the fields.
    for section, choice in sorted(choices(command).items(), key=depends_on_another):
        value = resolved.get(section)
        if isinstance(value, str):
            value = resolved[section] = {choice.key: value}
        rule = table.get(section)
        if rule is None:
            continue
        if not _is_auto(value, choice, rule):
            if rule.agrees and checkpoint is not None and isinstance(value, dict):
                problems += _disagreements(section, value, checkpoint.get(section), choice)
            continue
        source, blocked = _source(rule, section, resolved, saved, command, unreadable)
        if source is not None:
            typed_values = {key: inside for key, inside in (value or {}).items() if key != choice.key}
            resolved[section] = merge(source, typed_values)
            if rule.agrees and checkpoint is not None:
                problems += _disagreements(section, resolved[section], checkpoint.get(section), choice)
        elif value is not None or blocked:
            unresolved.add(section)
            if not blocked:
                holders = [f"the {source.partition('.')[0]}" for source in rule.sources if isinstance(source, str)]
                reason = f"no {section} is set by {one_of(holders)}"
                if rule.sources == ("checkpoint",):
                    reason = f"the checkpoint has no {section}"
                    if data.get("checkpoint") == "none":
                        reason = f"checkpoint=none has no {section}"
                    elif checkpoint is None:
                        reason = "there is no checkpoint to take it from"
                problems.append(Problem(section, f"{section}={AUTO}: {reason}", rule.hint or None, absent=True))
    return resolved, problems, unresolved


def _is_auto(value: object, choice: Choice, rule: Auto) -> bool:
    if value is None:
        return rule.implied
    if not isinstance(value, dict):
        return False
    return value.get(choice.key) == AUTO or (rule.implied and choice.key not in value)


def _source(
    rule: Auto,
    section: str,
    resolved: JsonObject,
    saved: Mapping[str, JsonObject | None],
    command: type[Config],
    unreadable: bool,
) -> tuple[JsonObject | None, bool]:
    """Returns the section from the first source that exists, or None; and whether an error in another section is the
    reason for None."""
    for source in rule.sources:
        if isinstance(source, dict):
            return source, False
        if source in saved:
            saved_section = (saved[source] or {}).get(section)
            if isinstance(saved_section, dict):
                return saved_section, False
            if unreadable and source == "checkpoint":
                return None, True
            continue
        other, method, *keys = source.split(".")
        choice, value = choices(command)[other], resolved.get(other)
        config_class = chosen_class(value, choice)
        holder = None if config_class is None else _decode(value, choice) or _default(config_class)
        if holder is None:
            return None, True
        result = getattr(holder, method)()
        for key in keys:
            result = result.get(key, {})
        if result:
            return json.loads(json.dumps(result)), False
    return None, False


def _decode(value: object, choice: Choice) -> Config | None:
    """Returns the configuration of a section, or None if it has an error, which the decoder reports."""
    try:
        return choice.validate(value)
    except ValidationError:
        return None


def _default(config_class: type[Config]) -> Config | None:
    """Returns a substitute for a section with an error, so that sections that depend on it can still be checked."""
    try:
        return config_class()
    except ValidationError:
        return None


def chosen_class(value: object, choice: Choice) -> type[Config] | None:
    """Returns the configuration class that the data of a section selects, or None."""
    name = value.get(choice.key) if isinstance(value, dict) else None
    entry = lookup(choice.group, name) if isinstance(name, str) else None
    return None if entry is None else entry.config


def merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """Returns `base` updated with the values of `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        inside = merged.get(key)
        merged[key] = merge(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return merged


def _disagreements(section: str, value: JsonObject, saved: object, choice: Choice) -> list[Problem]:
    """Returns a problem for each field of a section that differs from the checkpoint's although it must be equal."""
    config_class = chosen_class(value, choice)
    if config_class is None or not isinstance(saved, dict):
        return []
    values = {name: field.get_default() for name, field in config_class.model_fields.items()} | value
    if saved.get(choice.key) != values.get(choice.key):
        differing = [choice.key]
    else:
        adjustable = config_class.adjustable_fields
        saved_values = {name: field.get_default() for name, field in config_class.model_fields.items()} | saved
        differing = [
            key
            for key in config_class.model_fields
            if key not in adjustable and _plain(values[key]) != _plain(saved_values[key])
        ]
    checkpoint_values = saved if differing == [choice.key] else (saved_values if differing else {})
    return [
        Problem(
            f"{section}.{key}",
            f"{section}.{key}={_display(values[key])}, but the checkpoint has "
            f"{section}.{key}={_display(checkpoint_values.get(key))}",
            f"{section}=auto takes it from the checkpoint; checkpoint=none starts without a checkpoint",
        )
        for key in differing
    ]


def _plain(value: object) -> Any:
    """Returns the value of a field as plain data."""
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _display(value: object) -> Any:
    """Returns a value for a message. A selected component is displayed as its name."""
    plain = _plain(value)
    return plain.get("name", plain) if isinstance(plain, dict) else plain


WITH = "with"


def with_member_values(section: JsonObject) -> JsonObject:
    """Returns the data of a section with the values of `with` merged into its members. Raises pydantic's error if a key
    of `with` names no member."""
    changes, members = section.get(WITH), section.get("members")
    if not isinstance(changes, dict) or not isinstance(members, list):
        return section
    members = list(members)
    titles = [title_of(member) for member in members]
    for name, values in changes.items():
        if name not in titles or not isinstance(values, dict):
            raise PydanticCustomError("value_error", "{problem}", {"problem": _member_error(name, values, titles)})
        index = titles.index(name)
        members[index] = _with_values(members[index], values)
    return {**{key: value for key, value in section.items() if key != WITH}, "members": members}


def title_of(member: object) -> str:
    """Returns the name of a member: its `title` if it has one; for a task among objectives, the task's name."""
    if not isinstance(member, dict):
        return str(member)
    if "title" in member:
        return str(member["title"])
    inner = member.get("task")
    return title_of(inner) if inner is not None else str(member.get("name", member.get("kind")))


def _with_values(member: object, values: JsonObject) -> JsonObject:
    if not isinstance(member, dict):
        return {"name": member, **values}
    inner = member.get("task")
    return merge(member, values) if inner is None else {**member, "task": _with_values(inner, values)}


def _member_error(name: str, values: object, titles: list[str]) -> str:
    if name in titles:
        return f"{WITH}.{name}={values} has no key; write {WITH}.{name}.KEY=VALUE"
    close = nearest(name, titles)
    suggestion = f"; did you mean {WITH}.{close}?" if close else ""
    return f"{WITH}.{name} names no member; the members are {', '.join(titles)}{suggestion}"
