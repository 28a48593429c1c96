"""`lmtool show KEY`: description, type and default of a key; `lmtool show GROUP=NAME`: the YAML of an option; `lmtool
list`: the groups, or the options of a group; `lmtool show schema`: the JSON Schema of the YAML, for editors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from lmtool.config import groups, messages, registry, saved
from lmtool.config.base import Config, JsonObject
from lmtool.config.messages import section_class
from lmtool.config.registry import choice_of, several_of
from lmtool.errors import UserError, nearest, nearest_keys
from lmtool.models import recipes
from lmtool.resolver.verbs import TRAINING, VERBS, command_classes, keys_of
from lmtool.system.terminal import say

# The name of the YAML file that each command composes its configuration from.
PRIMARY = {name: verb.primary for name, verb in VERBS.items() if verb.primary is not None}


@dataclass(frozen=True)
class DocumentedField:
    """A key in one component or command: its dotted name, its field, and the YAML that sets it."""

    key: str
    owner: str
    field: FieldInfo
    file: Path | None
    yaml_path: str


def main(arguments: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Prints each argument. Raises UserError for an unknown key or option."""
    if not arguments:
        raise UserError("show needs a key", "lmtool show optimizer.lr, or lmtool show model=bert")
    fields = list(all_fields(config_dirs))
    for typed in arguments:
        if typed == "schema":
            say(json.dumps(json_schema(config_dirs), indent=1, ensure_ascii=False))
        elif "=" in typed:
            group, _, name = typed.partition("=")
            _require_group(group, registry.all_options(config_dirs), f"show {{}}={name}")
            _show_choice(group, name, config_dirs)
        else:
            _show_key(typed, fields)
    return 0


def all_fields(config_dirs: Sequence[Path] = ()) -> Iterator[DocumentedField]:
    """Yields every key of every command and component."""
    for verb, command in command_classes().items():
        file = groups.conf_dir() / f"{PRIMARY[verb]}.yaml"
        yield from _fields(command, "", f"lmtool {verb}", file, "")
    for verb in VERBS:
        if (keys := keys_of(verb)) is not None:
            yield from _fields(keys, "", f"lmtool {verb}", None, "")
    for group in registry.groups():
        for entry in registry.entries(group):
            file_or_none = groups.yaml_file(group, entry.name, config_dirs)
            prefix = group.replace("/", ".") + (f".{entry.name}." if group in registry.MULTI_SELECT_GROUPS else ".")
            yield from _fields(entry.config, prefix, f"{group}={entry.name}", file_or_none, "")


def _fields(
    config: type[Config], prefix: str, owner: str, file: Path | None, yaml_path: str
) -> Iterator[DocumentedField]:
    for name, field in config.model_fields.items():
        yield DocumentedField(prefix + name, owner, field, file, yaml_path + name)
        section = section_class(field)
        if section is not None and choice_of(field) is None:
            yield from _fields(section, f"{prefix}{name}.", owner, file, f"{yaml_path}{name}.")


def _full_key(typed_key: str, fields: list[DocumentedField]) -> str:
    """Rewrites a key in a nested section as a key of the section's own group: `data.task.labels` becomes
    `task.labels`."""
    for field_entry in fields:
        choice = choice_of(field_entry.field) or several_of(field_entry.field)
        group = "" if choice is None else choice.group.replace("/", ".")
        if not group or group == field_entry.key or not typed_key.startswith(f"{field_entry.key}."):
            continue
        suffix = typed_key.removeprefix(field_entry.key)
        if several_of(field_entry.field) is not None:  # GROUP.NAME.KEY: a section for each selected option
            suffix = "".join(suffix.partition(".")[2].partition(".")[1:])
        return _full_key(group + suffix, fields)
    return typed_key


def _show_key(typed_key: str, fields: list[DocumentedField]) -> None:
    key = typed_key if any(field_entry.key == typed_key for field_entry in fields) else _full_key(typed_key, fields)
    matches = [field_entry for field_entry in fields if field_entry.key == key]
    nested_keys = sorted({field_entry.key for field_entry in fields if field_entry.key.startswith(key + ".")})
    if not matches and not nested_keys and typed_key in groups.all_options():
        raise UserError(f"{typed_key} is a group, whose options set keys of others", f"lmtool list {typed_key}")
    if not matches and not nested_keys:
        known = sorted({field_entry.key for field_entry in fields})
        meaning = messages.meaning_elsewhere(typed_key, None, {*known, *registry.groups()}.__contains__)
        similar = nearest_keys(typed_key, known) if meaning is None else list(meaning.keys[-1:])
        options = [f"{group}={typed_key}" for group in registry.groups() if typed_key in groups.options(group)]
        similar = options or similar
        hint = f"did you mean {' or '.join(f'lmtool show {key}' for key in similar)}?" if similar else "lmtool list"
        if not similar and typed_key.split(".")[0] in registry.groups():
            hint = f"lmtool show {typed_key.split('.')[0]}"
        raise UserError(f"unknown key {typed_key}", hint)
    for field, same_fields in _by_description(matches):
        say(f"{typed_key} ({', '.join(field_entry.owner for field_entry in same_fields)})")
        say(f"  {field.description}")
        say(f"  takes:   {messages.allowed_values(field)}")
        for default, place in _defaults(same_fields):
            say(f"  default: {default}{f'  ({place})' if place else ''}")
    for key in nested_keys:
        descriptions = Counter(field_entry.field.description for field_entry in fields if field_entry.key == key)
        # Omits `name`, which each component describes differently: the user sets it with GROUP=NAME.
        if len(descriptions) == 1 or not key.endswith(".name"):
            say(f"  {key:<34} {descriptions.most_common(1)[0][0]}")


def _by_description(fields: list[DocumentedField]) -> list[tuple[FieldInfo, list[DocumentedField]]]:
    by_text: dict[tuple[str, str], list[DocumentedField]] = {}
    for entry in fields:
        by_text.setdefault((entry.field.description or "", messages.allowed_values(entry.field)), []).append(entry)
    return [(same_fields[0].field, same_fields) for same_fields in by_text.values()]


def _defaults(entries: list[DocumentedField]) -> list[tuple[str, str]]:
    defaults: dict[tuple[str, str], None] = {}
    for field_entry in entries:
        line = _line_of(field_entry.file, field_entry.yaml_path) if field_entry.file is not None else None
        place = f"{_short(field_entry.file)}:{line}" if field_entry.file is not None and line is not None else ""
        defaults[(_value(field_entry, line), place)] = None
    return list(defaults)


def _value(field_entry: DocumentedField, line: int | None) -> str:
    if field_entry.file is not None and line is not None:
        value: object = saved.read_yaml(field_entry.file)
        for part in field_entry.yaml_path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return "must be given" if value == "???" else _format(value)
    choice = choice_of(field_entry.field)
    if choice is not None and field_entry.file is not None:
        for item in saved.read_yaml(field_entry.file).get("defaults", []):
            if isinstance(item, dict) and field_entry.yaml_path in item:
                chosen = item[field_entry.yaml_path]
                group = choice.group if "." in field_entry.key else field_entry.key
                return f"{group}={chosen}" if chosen else "none chosen"
    if field_entry.field.is_required():
        return "must be given"
    default = field_entry.field.get_default(call_default_factory=True)
    return _format(default.model_dump(mode="json") if isinstance(default, Config) else default)


def _line_of(path: Path, key: str) -> int | None:
    """Returns the number of the line that sets a key in a block-style YAML file; `loss.label_smoothing` is a nested
    key."""
    open_keys: list[tuple[int, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = re.match(r"^( *)([A-Za-z0-9_]+):", line)
        if match:
            indent = len(match[1])
            open_keys = [(column, name) for column, name in open_keys if column < indent] + [(indent, match[2])]
            if ".".join(name for _, name in open_keys) == key:
                return number
    return None


def _format(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip()


def _short(path: Path) -> str:
    base = groups.conf_dir()
    return f"conf/{path.relative_to(base)}" if path.is_relative_to(base) else str(path)


def _show_choice(group: str, name: str, config_dirs: Sequence[Path]) -> None:
    path = groups.yaml_file(group, name, config_dirs)
    entry = registry.lookup(group, name)
    if path is not None:
        say(f"# {_short(path)}")
        say(path.read_text(encoding="utf-8").removesuffix("\n"))
    elif entry is not None:
        say(f"# {about(group, name)}")
        say(yaml.safe_dump(registry.default_values(entry.config), sort_keys=False).removesuffix("\n"))
    else:
        offered = groups.options(group, config_dirs) or registry.names(group)
        problem = messages.unknown_choice(group, group, name, offered)
        raise UserError(problem.message, problem.hint)
    for recipe in _recipes(group, registry.component_of(group, name, config_dirs)):
        say(f"\n# {_short(recipe)}")
        say(recipe.read_text(encoding="utf-8").removesuffix("\n"))


def _recipes(group: str, name: str) -> list[Path]:
    entry = registry.lookup(group, name)
    if entry is None or group not in ("model", "tuning"):
        return []
    if group == "model":
        return recipes.files_of(entry.config)
    from lmtool.tuning.configs.base import TuningConfig

    defaults = entry.config.model_construct()
    assert isinstance(defaults, TuningConfig)
    file = recipes.tuning_file(entry.config, defaults.recipe_name)
    return [] if file is None else [file]


# --- lmtool show schema ---------------------------------------------------------------------------------------------


def json_schema(config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns the JSON Schema of the YAML, for the completion and the checks of editors.

    The schema itself is for files that set keys of a whole run (experiments, `config.yaml`); `$defs` has one for the
    files of each group and each command. A file may set some of the keys, and its `defaults` may choose the component,
    so a section accepts the keys of all components of its group; the decoder decides.
    """
    definitions: JsonObject = {}
    for group in registry.groups():
        configs = {entry.config: groups.yaml_file(group, entry.name, config_dirs) for entry in registry.entries(group)}
        section = definitions[group.replace("/", ".")] = _section_schema(configs, definitions)
        if "auto" in groups.options(group, config_dirs):
            section["properties"]["name"]["anyOf"].append({"const": "auto"})
    commands: dict[str, dict[type[Config], Path | None]] = {
        verb: {config: groups.conf_dir() / f"{PRIMARY[verb]}.yaml"} for verb, config in command_classes().items()
    }
    definitions |= {PRIMARY[verb]: _section_schema(config, definitions) for verb, config in commands.items()}
    run = _section_schema(dict(pair for verb in TRAINING for pair in commands[verb].items()), definitions)
    saved_keys = {"version": {"const": saved.VERSION}, "command": {"enum": list(TRAINING)}}
    run["properties"] |= {"hydra": {"type": "object"}, **saved_keys}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": "The YAML of lmtool", **run, "$defs": definitions}


def _section_schema(configs: Mapping[type[Config], Path | None], definitions: JsonObject) -> JsonObject:
    """Returns the schema of a section of one of these classes, or of a file with its keys. configs: each class with its
    base YAML; a key may be the word there that is replaced before decoding: null, auto or ???."""
    schemas: dict[str, list[JsonObject]] = {}
    for config, file in configs.items():
        written = {} if file is None else saved.read_yaml(file)
        for name, field in config.model_fields.items():
            schema = _value_schema(field, definitions)
            word, allowed = written.get(name, ""), [schema, *schema.get("anyOf", [])]
            accepted = any(
                word in part.get("enum", []) or (word is None and part.get("type") == "null") for part in allowed
            )
            if word in (None, "auto", "???") and not accepted:
                schema = {"anyOf": [schema, {"const": word}]}
            schemas.setdefault(name, []).append({**schema, "description": field.description or ""})
    properties = {"defaults": {"type": "array"}} | {name: _alternatives(same) for name, same in schemas.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value_schema(field: FieldInfo, definitions: JsonObject) -> JsonObject:
    choice, several, section = choice_of(field), several_of(field), section_class(field)
    if several is not None:
        names = {
            entry.name: _section_schema({entry.config: None}, definitions) for entry in registry.entries(several.group)
        }
        return {"type": ["object", "null"], "properties": names, "additionalProperties": False}
    if choice is not None:
        return {"anyOf": [{"$ref": f"#/$defs/{choice.group.replace('/', '.')}"}, {"type": "null"}]}
    if section is not None:
        return {"anyOf": [_section_schema({section: None}, definitions), {"type": "null"}]}
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    schema = TypeAdapter(annotation).json_schema()
    definitions |= schema.pop("$defs", {})
    return schema


def _alternatives(schemas: list[JsonObject]) -> JsonObject:
    descriptions: dict[str, dict[str, None]] = {}
    for schema in schemas:
        text = json.dumps({name: value for name, value in schema.items() if name != "description"})
        descriptions.setdefault(text, {})[schema.get("description", "")] = None
    merged = [{**json.loads(text), "description": "\n".join(same)} for text, same in descriptions.items()]
    return merged[0] if len(merged) == 1 else {"anyOf": merged}


# --- lmtool list ----------------------------------------------------------------------------------------------------


def list_options(arguments: Sequence[str], config_dirs: Sequence[Path] = ()) -> int:
    """Prints the groups, or the options of the named ones. Raises UserError for an unknown group."""
    offered = registry.all_options(config_dirs)
    requested = [groups.singular(argument, offered) for argument in arguments]
    for group in requested:
        _require_group(group, offered, "list {}")
    if not arguments:
        for group, options in offered.items():
            _line(group, ", ".join(options), max(map(len, offered)))
        say("\n`lmtool list GROUP` prints one line per option; `lmtool show GROUP=NAME` prints its YAML.")
    for group in requested:
        for name in offered[group]:
            _line(name, about(group, name, config_dirs), max(map(len, offered[group])))
    return 0


def _require_group(group: str, known: Collection[str], command: str) -> None:
    if group not in known:
        close = nearest(group, known)
        hint = f"did you mean lmtool {command.format(close)}?" if close else "`lmtool list` prints the groups"
        raise UserError(f"there is no group {group}; there are {', '.join(known)}", hint)


def about(group: str, name: str, config_dirs: Sequence[Path] = ()) -> str:
    """Returns a line about an option: the first comment of its YAML, or the first line of its class's docstring."""
    path = groups.yaml_file(group, name, config_dirs)
    if path is not None:
        return groups.purpose(path)
    entry = registry.lookup(group, name)
    text = (entry.config.__doc__ or "") if entry else ""
    return text.strip().split("\n")[0]


def _line(name: str, text: str, width: int) -> None:
    say(f"  {name:<{width}}  {text}".rstrip())
