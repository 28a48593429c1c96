"""Replaces names of tasks and of text sources by their configuration sections, after composing and before decoding.

Names occur as members of mixtures, in `data.task` and `objective.task`, and in phases. A saved configuration contains
the sections, not the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmtool.config import compose
from lmtool.config.auto import merge
from lmtool.config.base import JsonObject
from lmtool.config.problems import unknown_choice
from lmtool.config.tables import lookup
from lmtool.errors import ConfigError
from lmtool.resolver.schema.phases import nested_keys
from lmtool.resolver.shorthands import CommandLine


def with_sections_of(data: JsonObject, line: CommandLine) -> JsonObject:
    """Calls `with_sections` with the signature of a shorthand."""
    return with_sections(data, line.config_dirs)


def with_sections(data: JsonObject, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns composed data with names replaced by sections: in lists of members, `data.task`, `objective.task` and
    `phases`. Raises ConfigError for an unknown name."""
    completed = dict(data)
    for key in ("task", "objective", "data"):
        section = data.get(key)
        if not isinstance(section, dict):
            continue
        section = dict(section)
        if isinstance(section.get("members"), list):
            expanders: dict[str, Callable[[Any, Sequence[Path]], Any]]
            expanders = {"task": partial(_task, "task.members"), "objective": _objective, "data": _text}
            section["members"] = [expanders[key](member, config_dirs) for member in section["members"]]
        if key != "task" and section.get("name") == "task" and "task" in section:
            section["task"] = _task(f"{key}.task", section["task"], config_dirs)
        completed[key] = section
    if isinstance(data.get("phases"), list):
        completed["phases"] = [_phase(phase, number, config_dirs) for number, phase in enumerate(data["phases"])]
    return completed


def _phase(phase: object, number: int, config_dirs: Sequence[Path]) -> Any:
    """Returns a phase with the name of its text source replaced by the section of the source, updated with the keys of
    the phase."""
    nested = nested_keys(phase) if isinstance(phase, dict) else {}
    text = nested.get("data")
    if not isinstance(text, dict) or not isinstance(text.get("name"), str):
        return phase
    name, offered = text["name"], compose.accepted_overrides("pretrain", config_dirs).groups.get("data", ())
    if name in offered:
        section = merge(compose.option("data", name, config_dirs), text)
        return {**nested, "data": with_sections({"data": section}, config_dirs)["data"]}
    if lookup("data", name) is None:
        raise ConfigError([unknown_choice("data", f"phases.{number}.data", name, offered)])
    return nested


def _task(key: str, member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of a task. member: the task's name, or a section with this name and keys to change; any
    other member is returned unchanged. key: the key that errors name."""
    name = member if isinstance(member, str) else None
    if isinstance(member, dict) and "kind" not in member and isinstance(member.get("name"), str):
        name = member["name"]
    if name is None or name == "???":
        return member
    offered = _tasks(config_dirs)
    if name not in offered:
        raise ConfigError([unknown_choice("task", key, name, offered)])
    section = compose.option("task", name, config_dirs)
    return merge(section, member) if isinstance(member, dict) else section


def _objective(member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns a member of a mixture of objectives. A name that is not an objective but a task becomes a task's
    section."""
    if isinstance(member, dict) and member.get("name") == "task" and "task" in member:
        return {**member, "task": _task("objective.members", member["task"], config_dirs)}
    if isinstance(member, str) and lookup("objective", member) is None and member in _tasks(config_dirs):
        return {"name": "task", "task": _task("objective.members", member, config_dirs)}
    return member


def _text(member: object, config_dirs: Sequence[Path]) -> Any:
    """Returns the section of a text source. member: the name of an option of `data`, or a section with this name and
    keys to change."""
    name = member.get("name") if isinstance(member, dict) else member
    if not isinstance(name, str) or name == "???":
        return member
    if name.startswith("task:"):
        return {"name": "task", "task": _task("data.members", name.removeprefix("task:"), config_dirs)}
    offered = compose.accepted_overrides("pretrain", config_dirs).groups.get("data", ())
    if name not in offered:
        if lookup("data", name) is not None:
            return member
        raise ConfigError([unknown_choice("data", "data.members", name, offered)])
    # Required values (???) are left out: the member may set them, and the decoder reports them if it does not.
    section = {key: value for key, value in compose.option("data", name, config_dirs).items() if value != "???"}
    title = {} if section.get("name") == name else {"title": name}
    changes = {key: value for key, value in member.items() if key != "name"} if isinstance(member, dict) else {}
    return {**title, **merge(section, changes)}


def _tasks(config_dirs: Sequence[Path]) -> tuple[str, ...]:
    return compose.accepted_overrides("finetune", config_dirs).groups.get("task", ())
