"""Names of shipped tasks among the members of a mixture, replaced by their sections after composing and before
decoding. A saved configuration contains the sections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmtool.config import compose
from lmtool.config.auto import merge
from lmtool.config.problems import unknown_choice
from lmtool.config.tables import lookup
from lmtool.errors import ConfigError
from lmtool.resolver.schema.phases import nested_keys
from lmtool.resolver.shorthands import CommandLine


def with_sections_of(data: dict[str, Any], line: CommandLine) -> dict[str, Any]:
    """`with_sections` for the composed data of a command line."""
    return with_sections(data, line.config_dirs)


def with_sections(data: dict[str, Any], config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Composed data in which the names of tasks in a list of members, in `data.task` and in `objective.task` are
    replaced by their sections. Raises UserError for an unknown task."""
    completed = dict(data)
    for key in ("task", "objective", "data"):
        section = data.get(key)
        if not isinstance(section, dict):
            continue
        section = dict(section)
        if isinstance(section.get("members"), list):
            forms: dict[str, Callable[[Any, Sequence[Path]], Any]]
            forms = {"task": partial(_task, "task.members"), "objective": _objective, "data": _text}
            form = forms[key]
            section["members"] = [form(member, config_dirs) for member in section["members"]]
        if key != "task" and section.get("name") == "task" and "task" in section:
            section["task"] = _task(f"{key}.task", section["task"], config_dirs)
        completed[key] = section
    if isinstance(data.get("phases"), list):
        completed["phases"] = [_phase(phase, number, config_dirs) for number, phase in enumerate(data["phases"])]
    return completed


def _phase(phase: Any, number: int, config_dirs: Sequence[Path]) -> Any:
    """A phase whose text source is a name gets the section of that name, updated with its own keys."""
    nested = nested_keys(phase) if isinstance(phase, dict) else {}
    given = nested.get("data")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return phase
    name, offered = given["name"], compose.offers_of_primary("pretrain", config_dirs).groups.get("data", ())
    if name in offered:
        section = merge(compose.option("data", name, config_dirs), given)
        return {**nested, "data": with_sections({"data": section}, config_dirs)["data"]}
    if lookup("data", name) is None:
        raise ConfigError([unknown_choice("data", f"phases.{number}.data", name, offered)])
    return nested


def _task(key: str, member: Any, config_dirs: Sequence[Path]) -> Any:
    """The section of a task that is given by name, alone or with further keys; other sections stay. key: its key."""
    given = member if isinstance(member, str) else None
    if isinstance(member, dict) and "kind" not in member and isinstance(member.get("name"), str):
        given = member["name"]
    if given is None or given == "???":
        return member
    offered = _tasks(config_dirs)
    if given not in offered:
        raise ConfigError([unknown_choice("task", key, given, offered)])
    section = compose.option("task", given, config_dirs)
    return merge(section, member) if isinstance(member, dict) else section


def _objective(member: Any, config_dirs: Sequence[Path]) -> Any:
    """A member of a mixture of objectives: a name that is not an objective is a task."""
    if isinstance(member, dict) and member.get("name") == "task" and "task" in member:
        return {**member, "task": _task("objective.members", member["task"], config_dirs)}
    if isinstance(member, str) and lookup("objective", member) is None and member in _tasks(config_dirs):
        return {"name": "task", "task": _task("objective.members", member, config_dirs)}
    return member


def _text(member: Any, config_dirs: Sequence[Path]) -> Any:
    """A member of a mixture of texts: an option of the group by name, alone or with further keys."""
    given = member.get("name") if isinstance(member, dict) else member
    if not isinstance(given, str) or given == "???":
        return member
    if given.startswith("task:"):
        return {"name": "task", "task": _task("data.members", given.removeprefix("task:"), config_dirs)}
    offered = compose.offers_of_primary("pretrain", config_dirs).groups.get("data", ())
    if given not in offered:
        if lookup("data", given) is not None:
            return member
        raise ConfigError([unknown_choice("data", "data.members", given, offered)])
    section = compose.option("data", given, config_dirs)
    # What is missing here may be given by its key, and the decoder asks for it by that.
    section = {key: value for key, value in section.items() if value != "???"}
    own = member if isinstance(member, dict) else {}
    title = {} if section.get("name") == given else {"title": given}
    return {**title, **merge(section, {key: value for key, value in own.items() if key != "name"})}


def _tasks(config_dirs: Sequence[Path]) -> tuple[str, ...]:
    return compose.offers_of_primary("finetune", config_dirs).groups.get("task", ())
