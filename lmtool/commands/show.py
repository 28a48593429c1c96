"""`lmtool show KEY`: what a key means, takes and defaults to; `lmtool show GROUP=NAME`: the YAML of a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from lmtool.commands.list import about
from lmtool.config import aliases, groups, plugins, saved, tables, words
from lmtool.config.base import Config
from lmtool.config.nearest import nearest_keys
from lmtool.config.problems import choice_of, section_class, several_of
from lmtool.errors import UserError
from lmtool.models import recipes
from lmtool.resolver.schema.verbs import COMMANDS, VERBS
from lmtool.system.terminal import say

PRIMARY = {verb: str(VERBS[verb].primary) for verb in COMMANDS}


@dataclass(frozen=True)
class ShownField:
    """A key in one component or command: its dotted name, its field, and the YAML that sets it."""

    key: str
    owner: str
    field: FieldInfo
    file: Path | None
    path_inside: str


def main(arguments: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Print each of the arguments. Raises UserError for a key or choice that does not exist."""
    if not arguments:
        raise UserError("show: no key given", "lmtool show optimizer.lr, or lmtool show model=bert")
    fields = list(all_fields(config_dirs))
    for key_typed in arguments:
        if "=" in key_typed:
            group, _, name = key_typed.partition("=")
            _show_choice(group, name, config_dirs)
        else:
            _show_key(key_typed, fields)
    return 0


def all_fields(config_dirs: Sequence[Path] = ()) -> Iterator[ShownField]:
    """Every key of every command and component."""
    for verb, command in COMMANDS.items():
        file = groups.conf_dir() / f"{PRIMARY[verb]}.yaml"
        yield from _fields(command, "", f"lmtool {verb}", file, "")
    for group in tables.groups():
        for entry in tables.entries(group):
            file_or_none = groups.yaml_file(group, entry.name, config_dirs)
            prefix = group.replace("/", ".") + (f".{entry.name}." if group in tables.SEVERAL else ".")
            yield from _fields(entry.config, prefix, f"{group}={entry.name}", file_or_none, "")


def _fields(config: type[Config], prefix: str, owner: str, file: Path | None, path_inside: str) -> Iterator[ShownField]:
    for name, field in config.model_fields.items():
        yield ShownField(prefix + name, owner, field, file, path_inside + name)
        below = section_class(field)
        if below is not None and not choice_of(field) is not None:
            yield from _fields(below, f"{prefix}{name}.", owner, file, f"{path_inside}{name}.")


def _full_key(key_typed: str, fields: list[ShownField]) -> str:
    """A key below a section that is an option of another group (`data.task.labels`) as a key of that group."""
    for shown_field in fields:
        mark = choice_of(shown_field.field) or several_of(shown_field.field)
        group = "" if mark is None else mark.group.replace("/", ".")
        if not group or group == shown_field.key or not key_typed.startswith(f"{shown_field.key}."):
            continue
        rest = key_typed.removeprefix(shown_field.key)
        if several_of(shown_field.field) is not None:  # the options have sections by their names
            rest = "".join(rest.partition(".")[2].partition(".")[1:])
        return _full_key(group + rest, fields)
    return key_typed


def _show_key(key_typed: str, fields: list[ShownField]) -> None:
    key = key_typed if any(shown_field.key == key_typed for shown_field in fields) else _full_key(key_typed, fields)
    matching = [shown_field for shown_field in fields if shown_field.key == key]
    below = sorted({shown_field.key for shown_field in fields if shown_field.key.startswith(key + ".")})
    if not matching and not below and key_typed in groups.all_groups():
        raise UserError(f"{key_typed} is a group, whose options set keys of others", f"lmtool list {key_typed}")
    if not matching and not below:
        known = sorted({shown_field.key for shown_field in fields})
        meaning = aliases.meaning(key_typed, None, {*known, *tables.groups()}.__contains__)
        near = nearest_keys(key_typed, known) if meaning is None else [key for key, _ in meaning.pairs][-1:]
        hint = f"did you mean {' or '.join(f'lmtool show {key}' for key in near)}?" if near else "lmtool list"
        if not near and key_typed.split(".")[0] in tables.groups():
            hint = f"lmtool show {key_typed.split('.')[0]}"
        raise UserError(f"unknown key {key_typed}", hint)
    for field, same in _by_meaning(matching):
        say(f"{key_typed} ({', '.join(shown_field.owner for shown_field in same)})")
        say(f"  {field.description}")
        say(f"  takes:   {words.allowed(field)}")
        for default, where in _defaults(same):
            say(f"  default: {default}{f'  ({where})' if where else ''}")
    for key in below:
        meanings = Counter(shown_field.field.description for shown_field in fields if shown_field.key == key)
        # The name of a component, which each describes for itself, is chosen with GROUP=NAME.
        if len(meanings) == 1 or not key.endswith(".name"):
            say(f"  {key:<34} {meanings.most_common(1)[0][0]}")


def _by_meaning(fields: list[ShownField]) -> list[tuple[FieldInfo, list[ShownField]]]:
    """Places whose description and type are the same, together."""
    groups_: dict[tuple[str, str], list[ShownField]] = {}
    for shown_field in fields:
        groups_.setdefault((shown_field.field.description or "", words.allowed(shown_field.field)), []).append(
            shown_field
        )
    return [(same[0].field, same) for same in groups_.values()]


def _defaults(same: list[ShownField]) -> list[tuple[str, str]]:
    """The defaults with the file and line that set them; equal ones once where no file does."""
    defaults: dict[tuple[str, str], None] = {}
    for shown_field in same:
        line = groups.line_of(shown_field.file, shown_field.path_inside) if shown_field.file is not None else None
        where = f"{_short(shown_field.file)}:{line}" if shown_field.file is not None and line is not None else ""
        defaults[(_value(shown_field, line), where)] = None
    return list(defaults)


def _value(shown_field: ShownField, line: int | None) -> str:
    """The value the YAML gives, else the class's default."""
    if shown_field.file is not None and line is not None:
        value: Any = saved.read_yaml(shown_field.file)
        for part in shown_field.path_inside.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return "must be given" if value == "???" else _written(value)
    choice = choice_of(shown_field.field)
    if choice is not None and shown_field.file is not None:
        for item in saved.read_yaml(shown_field.file).get("defaults", []):
            if isinstance(item, dict) and shown_field.path_inside in item:
                chosen = item[shown_field.path_inside]
                return (
                    f"{choice.group if '.' in shown_field.key else shown_field.key}={chosen}"
                    if chosen
                    else "none chosen"
                )
    if shown_field.field.is_required():
        return "must be given"
    default = shown_field.field.get_default(call_default_factory=True)
    return _written(default.model_dump(mode="json") if isinstance(default, Config) else default)


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()
    return text


def _short(path: Path) -> str:
    """A file of conf/ from conf/ on."""
    base = groups.conf_dir()
    return f"conf/{path.relative_to(base)}" if path.is_relative_to(base) else str(path)


def _show_choice(group: str, name: str, config_dirs: Sequence[Path]) -> None:
    path = groups.yaml_file(group, name, config_dirs)
    entry = tables.lookup(group, name)
    if path is not None:
        say(f"# {_short(path)}")
        say(path.read_text(encoding="utf-8").removesuffix("\n"))
    elif entry is not None:
        say(f"# {about(group, name)}")
        say(yaml.safe_dump(plugins.defaults(entry), sort_keys=False).removesuffix("\n"))
    else:
        from lmtool.config.problems import unknown_choice

        problem = unknown_choice(group, group, name, groups.options(group, config_dirs) or tables.names(group))
        raise UserError(problem.message, problem.hint)
    for recipe in _recipes(group, _component(group, name, config_dirs)):
        say(f"\n# {_short(recipe)}")
        say(recipe.read_text(encoding="utf-8").removesuffix("\n"))


def _recipes(group: str, name: str) -> list[Path]:
    """What papers prescribe for a model or a tuning method of this name."""
    entry = tables.lookup(group, name)
    if entry is None or group not in ("model", "tuning"):
        return []
    if group == "model":
        return recipes.files_of(entry.config)
    defaults: Any = entry.config.model_construct()
    file = recipes.tuning_file(entry.config, defaults.recipe_name)
    return [] if file is None else [file]


def _component(group: str, name: str, config_dirs: Sequence[Path]) -> str:
    """The component that an option is of, by the defaults list of its YAML."""
    path = groups.yaml_file(group, name, config_dirs)
    written = {} if path is None else saved.read_yaml(path)
    base = next((item for item in written.get("defaults", []) if isinstance(item, str) and item != "_self_"), None)
    return _component(group, base, config_dirs) if base else name
