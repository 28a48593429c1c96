"""pydantic's errors in plain words: the key, its value, the allowed values, and what to type."""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmtool.config import aliases, groups, words
from lmtool.config.aliases import Meaning
from lmtool.config.auto import chosen_class
from lmtool.config.base import Config, JsonObject, summary
from lmtool.config.nearest import nearest, nearest_keys
from lmtool.config.tables import Choice, Several, choices, entries, lookup, names
from lmtool.config.tables import groups as components
from lmtool.errors import Problem

_ABSENT = object()  # unlike None, no value of a key
Fields = Mapping[str, Sequence[FieldInfo | None]]
"""Fields by key, one for each component that has the key; None for a key that only contains others."""


def from_pydantic(command: type[Config], data: JsonObject, errors: list[Any]) -> list[Problem]:
    """Returns one problem per key. errors: `ValidationError.errors()` of decoding `data` as `command`."""
    problems: dict[str, Problem] = {}
    for error in errors:
        for problem in _reword(command, data, error):
            problems.setdefault(problem.key, problem)
    # Of a list, only the first wrong item is reported, and the list itself only if no item is wrong.
    first_in_list: dict[str, Problem] = {}
    for key, problem in sorted(problems.items(), key=lambda pair: "[" not in pair[0]):
        first_in_list.setdefault(key.split("[")[0], problem)
    return [problem for problem in problems.values() if problem in first_in_list.values()]


def _reword(command: type[Config], data: JsonObject, error: Any) -> Iterator[Problem]:
    """Yields the problems that one error of pydantic stands for."""
    key, field, value = _locate(command, data, error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        yield from _unknown(command, data, key, value)
    elif error["type"] == "missing" and isinstance(value, list) and field is not None:
        yield _not_allowed(key, field, value)  # a list that is too short
    elif error["type"] in ("missing", "choice_missing"):
        yield from missing(command, [key], data)
    elif error["type"] == "choice_unknown":
        yield unknown_choice(context["group"], f"{key}.{context['key']}", context["given"])
    elif error["type"] in ("value_error", "assertion_error"):
        yield _validator_problem(command, data, key, str(context.get("error", error["msg"])))
    elif field is None and error["type"].startswith("model_"):
        hint = f"write {key}.KEY=VALUE; `lmtool show {key}` prints the keys"
        yield Problem(key, f"{key}: given {words.quoted(value)}; this is a section of keys", hint)
    elif field is None:
        yield Problem(key, f"{key}: {error['msg']}")
    else:
        yield _not_allowed(key, field, value)


def _validator_problem(command: type[Config], data: JsonObject, key: str, text: str) -> Problem:
    """Returns an error of a section's validator with its keys as on the command line: `sharing=` becomes
    objective.sharing=."""
    keys = known_keys(command, data)

    def with_section(match: re.Match[str]) -> str:
        sections = (f"{key}.", f"{key.rpartition('.')[0]}.")
        return next((f"{section}{match[0]}" for section in sections if section + match[1] in keys), match[0])

    text = re.sub(r"(?<![\w.=])with\.(?=\w)", f"{key}.with.", re.sub(r"(?<![\w.=])([\w.]+)=", with_section, text))
    message, *advice = re.split("[;:] (?=set |use |omit |give |write |did you mean )", text, maxsplit=1)
    named_keys = [name for name in aliases.keys_in(message) if name in keys] or ([key] if key else [])
    message = message if not key or message.startswith((f"{key}.", f"{key}=")) else f"{key}: {message}"
    explained = f"`lmtool show {named_keys[0]}` explains it" if named_keys else None
    return Problem(key, message, advice[0] if advice else explained)


def _not_allowed(key: str, field: FieldInfo, value: Any) -> Problem:
    """Returns the problem of a value that a field does not allow."""
    options = words.options(field)
    is_name = options and isinstance(value, str)
    allowed = (
        words.one_of(options) if is_name else words.allowed_item(field) if "[" in key else words.allowed_values(field)
    )
    close = aliases.of_value(key.split("[")[0], value) or (nearest(value, options) if is_name else None)
    hint = f"did you mean {close if '[' in key else f'{key}={close}'}?" if close else None
    if isinstance(value, bool) and "[" in key:
        list_key = key.split("[")[0]
        hint = f'YAML reads a bare yes, no, on or off as true or false: quote your labels, \'{list_key}=["yes","no"]\''
    elif isinstance(value, bool | int | float) and "text" in allowed:
        hint = f"quote it: '{key}=\"{value}\"'"
    elif (number := _number(value)) is not None and _takes(field, number):
        read_as_text = isinstance(value, str) and isinstance(yaml.safe_load(value), str)
        hint = f"YAML reads {value} as text: write {_for_yaml(number)}" if read_as_text else f"write {key}={number}"
    elif not isinstance(value, list | dict) and value is not None and _takes(field, [value]):
        hint = "write " + shlex.quote(f"{key}=[{aliases.as_typed(value)}]")
    hint = hint or f"{summary(field.description)} (`lmtool show {key.split('[')[0]}`)".strip()
    return Problem(key, f"{key}: given {words.quoted(value)}; allowed: {allowed}", hint)


def _number(value: object) -> int | float | None:
    """Returns the number that a text stands for, or the integer that a float equals; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _takes(field: FieldInfo, value: object) -> bool:
    """Whether a field allows a value."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field], config=Config.model_config)  # type: ignore[arg-type]
        adapter.validate_json(json.dumps(value))
        return True
    except (ValidationError, PydanticUserError):  # also for sections, whose class has a configuration of its own
        return False


def _for_yaml(number: int | float) -> str:
    """Returns a number in the syntax of YAML 1.1, which reads 1e-5 as text."""
    displayed = repr(number)
    return displayed if "e" not in displayed or "." in displayed else displayed.replace("e", ".0e", 1)


def missing(command: type[Config], keys: list[str], data: JsonObject) -> list[Problem]:
    """Returns the problems of required keys without a value."""
    problems, sections = [], choices(command)
    for key in keys:
        if key in sections:
            offered = groups.options(sections[key].group) or names(sections[key].group)
            hint = f"set {key}=NAME; `lmtool list {sections[key].group}` prints them with a line each"
            problems.append(
                Problem(key, f"missing required value: {key}, one of {', '.join(offered)}", hint, absent=True)
            )
            continue
        field = _locate(command, data, tuple(key.split(".")))[1]
        choice = None if field is None else choice_of(field)
        if choice is not None:
            # A group within the section, or a key of it.
            override = choice.group if choice.group.replace("/", ".") == key else f"{key}.{choice.key}"
            hint = f"set {override}=NAME, one of {', '.join(names(choice.group))}"
            problems.append(
                Problem(
                    key,
                    f"missing required value: {key}.{choice.key}",
                    hint,
                    absent=True,
                )
            )
            continue
        about = f" ({summary(field.description)})" if field is not None and field.description else ""
        problems.append(Problem(key, f"missing required value: {key}", f"set {key}=...{about}", absent=True))
    return problems


def unknown_choice(group: str, key: str, name: str, offered: tuple[str, ...] | None = None) -> Problem:
    """Returns the problem of a name that its group does not have. key: the key as on the command line, or that of a
    list, whose members are typed without a key."""
    offered = names(group) if offered is None else offered
    prefix = "" if key.endswith(".members") else f"{key}="
    close = aliases.of_value(group, name) or _last_part(name, offered) or nearest(name, offered)
    hint = f"did you mean {prefix}{close}?" if close else f"`lmtool list {group}` prints them with a line each"
    other_groups = [other for other in groups.all_groups() if other != group and name in groups.options(other)]
    if other_groups and not close:
        hint = f"{name} is an option of {other_groups[0]}: `lmtool show {other_groups[0]}={name}` says how it is used"
    elif prefix and group in _HUB_OVERRIDES and (published := _HUB_OVERRIDES[group](name)) is not None:
        hint = f"{hint.removesuffix('?')}, or {published}?" if close else f"did you mean {published}?"
    return Problem(key, f"{prefix or f'{key}: '}{name} is not one of {', '.join(offered)}", hint)


def _last_part(name: str, offered: Sequence[str]) -> str | None:
    """Returns the option that is the last part of a longer name: `glue/sst2`."""
    last = re.split("[/:]", name)[-1]
    return last if last != name and last in offered else None


# For an unknown option that may be a name on the hub: the override to type, by the group of the option.
_HUB_OVERRIDES: dict[str, Callable[[str], str | None]] = {
    "model": lambda name: f"checkpoint=hf://{name}" if "-" in name or "/" in name else None,
    "data": lambda name: f"data=hub data.hub={name}" if "/" in name else None,
    "task": lambda name: f"task=custom task.kind=classification task.hub={name}" if "/" in name else None,
}


def _unknown(command: type[Config], data: JsonObject, key: str, value: object) -> Iterator[Problem]:
    """Yields the problems of an unknown key, or of each key in an unknown section."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _unknown(command, data, f"{key}.{name}", item)
        return
    yield unknown_key(key, value, command, data)


def unknown_key(key: str, value: object, command: type[Config], data: JsonObject) -> Problem:
    """Returns the problem of an unknown key, with a hint: its meaning in other tools, otherwise the most similar keys.
    value: plain data; None: unknown."""
    suggestions = meant_by(key, value, command, data)
    return Problem(
        key,
        f"unknown key {key}",
        suggestions.hint or _elsewhere(key, command),
        likely_keys=tuple(name for name, _ in suggestions.pairs),
    )


def meant_by(key: str, value: object, command: type[Config], data: JsonObject) -> Meaning:
    """Returns the overrides to type instead of an unknown key, and a hint. They have its meaning in other tools;
    otherwise, the most similar spelling among the keys that take the value. Both are empty if nothing is similar."""
    known = known_fields(command, data)
    if aliases.has_meaning(key):
        fields = {**known_fields(command, {}), **known}
        meaning = aliases.meaning(key, value, known.__contains__) or aliases.meaning(key, value, fields.__contains__)
        if meaning is not None:
            return replace(meaning, hint=_fitting_hint(meaning, value, command, known, fields))
    near = nearest_keys(key, list(known))
    values = {name: aliases.of_value(name, value) or value for name in near}
    suggestions = {name: shlex.quote(f"{name}={aliases.as_typed(values[name])}") for name in near}
    fitting = [suggestions[name] for name in near if any(_may_take(field, values[name]) for field in known[name])]
    hint = f"did you mean {' or '.join(fitting if value is not None else near)}?"
    if near and value is not None and not fitting:
        hint = f"did you mean {near[0]}? `lmtool show {near[0]}` says what it takes"
    return Meaning(tuple(f"{name}=" for name in near), hint if near else "")


def _fitting_hint(meaning: Meaning, value: object, command: type[Config], known: Container[str], fields: Fields) -> str:
    """Returns the hint of a meaning. It omits the value if the key does not take it, and names the component to select
    if the selected one does not have the key. known: keys of the selected components. fields: all fields by key."""
    selected = {name for name, _ in meaning.pairs if name in components()}
    for name, text in meaning.pairs:
        if value is not None and not _has_option(name, text) and not _takes_text(fields[name], text):
            command_words = f"list {name}" if name in groups.all_groups() else f"show {name}"
            return f"use {name}= instead; `lmtool {command_words}` says what it takes"
        if name not in known and name.partition(".")[0] not in selected:
            return f"{meaning.hint} {_elsewhere(name, command)}"
    return meaning.hint


def _may_take(field: FieldInfo | None, value: object) -> bool:
    """Whether a field allows a value; a section allows the name of an option."""
    choice = None if field is None else choice_of(field)
    if choice is not None:
        return isinstance(value, str) and _has_option(choice.group, value)
    return isinstance(value, str) if field is None else _takes(field, value)


def _has_option(group: str, name: str) -> bool:
    """Whether a group has an option; for options that are files or folders, whether the name could be one."""
    return name == "null" or name in groups.options(group) or (group in ("data", "task") and groups.is_path_like(name))


def takes(command: type[Config], key: str, value: object) -> bool:
    """Whether a field of this key allows a plain value."""
    return any(field is not None and _takes(field, value) for field in known_fields(command, {}).get(key, ()))


def _takes_text(fields: Sequence[FieldInfo | None], text: str) -> bool:
    """Whether one of the fields allows the value written as this text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    number = _number(value) if isinstance(value, str) else None
    return any(field is not None and _takes(field, value if number is None else number) for field in fields)


def _elsewhere(key: str, command: type[Config]) -> str:
    """Returns a hint: another component of the group that has the key, or else the command that lists the keys."""
    section, _, name = key.partition(".")
    choice = choices(command).get(section)
    if choice is None and section in components() and section in command.model_fields:
        return f"`lmtool list {section}` prints what it may hold, `lmtool show {section}` their keys"
    if choice is None and section in components():
        return f"this command reads no {section}"
    if choice is None:
        return "`lmtool list` prints the groups, `lmtool show KEY` explains a key"
    holders = [entry.name for entry in entries(choice.group) if name.partition(".")[0] in entry.config.model_fields]
    if holders:
        return f"{section}={holders[0]} has {name}"
    return f"`lmtool show {section}` prints the keys of {section}"


def known_keys(command: type[Config], data: JsonObject) -> list[str]:
    """Returns every dotted key that is allowed with the components selected in `data`; for a section without a valid
    selection, the keys of all its components."""
    return list(known_fields(command, data))


def known_fields(command: type[Config], data: JsonObject) -> dict[str, list[FieldInfo | None]]:
    """Returns every key of `known_keys` with its fields, see `Fields`."""
    fields: dict[str, list[FieldInfo | None]] = {key: [None] for key in command.overlays}
    for key, field in _fields(command, "", data):
        fields.setdefault(key, []).append(field)
    return fields


def _fields(config: type[Config], above: str, value: object) -> Iterator[tuple[str, FieldInfo | None]]:
    for name, field in config.model_fields.items():
        yield f"{above}{name}", field
        inside = value.get(name) if isinstance(value, dict) else None
        for entry in entries(several.group) if (several := several_of(field)) is not None else ():
            yield f"{above}{name}.{entry.name}", None
            yield from _fields(entry.config, f"{above}{name}.{entry.name}.", None)
        for config_class in _classes(field, inside):
            yield from _fields(config_class, f"{above}{name}.", inside)


def _classes(field: FieldInfo, value: object) -> list[type[Config]]:
    """Returns the classes that a section may have; empty if the field is not a section."""
    choice = choice_of(field)
    config_class = chosen_class(value, choice) if choice else section_class(field)
    if config_class is None and choice is not None:
        return [entry.config for entry in entries(choice.group)]
    return [] if config_class is None else [config_class]


def choice_of(field: FieldInfo) -> Choice | None:
    """Returns the `Choice` of a field whose section is selected by a name, or None."""
    return next((mark for mark in field.metadata if isinstance(mark, Choice)), None)


def several_of(field: FieldInfo) -> Several | None:
    """Returns the `Several` of a field that holds components by name, or None."""
    return next((mark for mark in field.metadata if isinstance(mark, Several)), None)


def section_class(field: FieldInfo) -> type[Config] | None:
    """Returns the class of a field that is a section itself, also if null is allowed."""
    kinds = (
        get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else (field.annotation,)
    )
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Config):
            return kind
    return None


def _locate(command: type[Config], data: JsonObject, loc: tuple[Any, ...]) -> tuple[str, FieldInfo | None, Any]:
    """Returns the dotted key of a pydantic location (which also contains tags of unions), its field and its value."""
    key, field = "", None
    value: Any = data
    owner: type[Config] | None = command
    several: Several | None = None
    for part in loc:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            key, value, owner = f"{key}[{part}]", value[part], None
        elif several is not None and isinstance(value, dict) and part in value:
            key, field, value = f"{key}.{part}", None, value[part]
            entry, several = lookup(several.group, str(part)), None
            owner = None if entry is None else entry.config
        elif isinstance(value, dict) and (part in value or (owner is not None and part in owner.model_fields)):
            key = f"{key}.{part}" if key else str(part)
            if owner is not None:
                field = owner.model_fields.get(part)
            value = value.get(part, _ABSENT)
            several = None if field is None else several_of(field)
            owner = None if field is None or owner is None else _class_below(field, value)
        elif part == loc[-1] and len(loc) == 1 or (owner is not None and part == loc[-1]):
            key = f"{key}.{part}" if key else str(part)
            field, value = None, _ABSENT
        else:
            break
    return key, field, None if value is _ABSENT else value


def _class_below(field: FieldInfo, value: object) -> type[Config] | None:
    """Returns the class of a section, or None if the field is not a section or its selection is not valid."""
    choice = choice_of(field)
    return chosen_class(value, choice) if choice else section_class(field)
