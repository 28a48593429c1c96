"""The strict decoder: converts plain data to a frozen configuration, or reports all errors at once.

The same decoder reads the result of Hydra, a saved `config.yaml` and the `config.json` of a checkpoint: no Hydra, no
resolvers, no import of a name from the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config import messages
from lmtool.config.base import Auto, Config, JsonObject
from lmtool.config.messages import one_of
from lmtool.config.registry import Choice, Several, choices, chosen_class, default_values
from lmtool.errors import ConfigError, Problem, nearest

AUTO = "auto"


def _resolve_auto(
    command: type[Config],
    data: JsonObject,
    saved: Mapping[str, JsonObject | None],
    unreadable: Collection[str] = (),
) -> tuple[JsonObject, list[Problem], set[str]]:
    """Returns the data without `auto` sections, the problems, and the names of sections that stay unresolved.
    saved: the saved configurations of the "checkpoint" and of the "teacher", if there are any. unreadable: those of
    them that could not be read, which is reported already."""
    resolved, problems, unresolved = dict(data), list[Problem](), set[str]()
    sections = choices(command)
    for section, choice in sections.items():
        if isinstance(resolved.get(section), str):
            resolved[section] = {choice.key: resolved[section]}
    for section, rule in command.auto.items():
        value, choice = resolved.get(section), sections[section]
        name = value.get(choice.key, AUTO if rule.implied else None) if isinstance(value, dict) else None
        if name == AUTO or (value is None and rule.implied):
            try:
                source = _source_of(rule, section, resolved, sections, saved, unreadable)
            except _Blocked:
                unresolved.add(section)
                continue
            if source is not None:
                typed_values = {key: inside for key, inside in (value or {}).items() if key != choice.key}
                resolved[section] = merge(source, typed_values)
            elif value is not None:
                unresolved.add(section)
                sources = [f"the {source.partition('.')[0]}" for source in rule.sources if isinstance(source, str)]
                fault = f"{section}={AUTO}: no {section} is set by {one_of(sources)}"
                problems.append(Problem(section, fault, rule.hint or None, absent=True))
        if rule.agrees and saved["checkpoint"] is not None and isinstance(resolved.get(section), dict):
            problems += _disagreements(section, resolved[section], saved["checkpoint"].get(section), choice)
    return resolved, problems, unresolved


class _Blocked(Exception):
    """A section has no source because of an error in another section."""


def _source_of(
    rule: Auto,
    section: str,
    resolved: JsonObject,
    sections: Mapping[str, Choice],
    saved: Mapping[str, JsonObject | None],
    unreadable: Collection[str],
) -> JsonObject | None:
    """Returns the section from the first source that exists, or None."""
    for source in rule.sources:
        if isinstance(source, dict):
            return source
        if source in saved:
            result = (saved[source] or {}).get(section)
            if not isinstance(result, dict) and source in unreadable:
                raise _Blocked
        else:
            other, method, *keys = source.split(".")
            result = getattr(_section_or_default(resolved.get(other), sections[other]), method)()
            for key in keys:
                result = result.get(key, {})
        if isinstance(result, dict) and result:
            return json.loads(json.dumps(result))
    return None


def _section_or_default(value: object, choice: Choice) -> Config:
    """Returns the configuration of a section. If it has an error, which the decoder reports, the default values are
    returned, so that sections that depend on it can still be checked."""
    for build in (partial(choice.validate, value), chosen_class(value, choice)):
        with suppress(ValidationError, PydanticCustomError):
            if build is not None and (section := build()) is not None:
                return section
    raise _Blocked


def merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """Returns `base` updated with the values of `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        inside = merged.get(key)
        merged[key] = merge(inside, value) if isinstance(inside, dict) and isinstance(value, dict) else value
    return merged


def _disagreements(section: str, value: JsonObject, saved: object, choice: Choice) -> Iterator[Problem]:
    config_class = chosen_class(value, choice)
    if config_class is None or not isinstance(saved, dict):
        return
    defaults = default_values(config_class)
    values, saved_values = defaults | value, defaults | saved
    constant = [key for key in defaults if key not in config_class.adjustable_fields]
    for key in [choice.key] if values[choice.key] != saved.get(choice.key) else constant:
        if values[key] != saved_values[key]:
            # A selected component is displayed as its name.
            ours, theirs = (
                plain.get("name", plain) if isinstance(plain, dict) else plain
                for plain in (values[key], saved_values[key])
            )
            yield Problem(
                f"{section}.{key}",
                f"{section}.{key}={ours}, but the checkpoint has {section}.{key}={theirs}",
                f"{section}=auto takes it from the checkpoint; checkpoint=none starts without a checkpoint",
            )


WITH = "with"


def with_member_values(section: JsonObject) -> JsonObject:
    """Returns the data of a section with the values of `with` merged into its members. Raises pydantic's error if a key
    of `with` names no member."""
    changes, members = section.get(WITH), section.get("members")
    if not isinstance(changes, dict) or not isinstance(members, list):
        return section
    members, titles = list(members), [title_of(member) for member in members]
    for name, values in changes.items():
        problem = f"{WITH}.{name}={values} has no key; write {WITH}.{name}.KEY=VALUE"
        if name not in titles:
            close = nearest(name, titles)
            suggestion = f"; did you mean {WITH}.{close}?" if close else ""
            problem = f"{WITH}.{name} names no member; the members are {', '.join(titles)}{suggestion}"
        if name not in titles or not isinstance(values, dict):
            raise PydanticCustomError("value_error", "{problem}", {"problem": problem})
        members[titles.index(name)] = _with_values(members[titles.index(name)], values)
    return {**{key: value for key, value in section.items() if key != WITH}, "members": members}


def title_of(member: object) -> str:
    """Returns the name of a member: its `title` if it has one; for a task among objectives, the task's name."""
    if not isinstance(member, dict):
        return str(member)
    if "title" in member or member.get("task") is None:
        return str(member.get("title", member.get("name", member.get("kind"))))
    return title_of(member["task"])


def _with_values(member: object, values: JsonObject) -> JsonObject:
    if not isinstance(member, dict):
        return {"name": member, **values}
    inner = member.get("task")
    return merge(member, values) if inner is None else {**member, "task": _with_values(inner, values)}


MISSING = "???"
MAX_DEPTH = 50

Command = TypeVar("Command", bound=Config)
Rules = Callable[[type[Config], JsonObject], Iterable[Problem]]
"""Yields the problems of a command's class with these values by key."""


def decode(
    command: type[Command],
    data: JsonObject,
    *,
    checkpoint_config: JsonObject | None = None,
    teachers: Mapping[str, JsonObject] | None = None,
    earlier: Sequence[Problem] = (),
    rules: Rules | None = None,
) -> Command:
    """Decodes the configuration of a command and resolves every `auto` section.

    Args:
        command: the class of the command.
        data: plain nested data, as in YAML or JSON; `???` marks a required value.
        checkpoint_config: the saved configuration of the start checkpoint, which `auto` uses first.
        teachers: the saved configurations of the teachers, by path; None skips the rules that need them.
        earlier: problems found before (in the overrides, in the checkpoint), reported together with the others.
        rules: yields the problems of several valid values together; None: there are no rules.

    Raises:
        ConfigError: all problems: unknown keys, wrong types, invalid choices, missing values, violated rules.
    """
    problems, missing = list(earlier), list[str]()
    clean = _plain(data, "", problems, missing)
    # A checkpoint that cannot be read, or whose key is misspelt, is reported already.
    reported = {key for problem in earlier for key in (problem.key, *problem.likely_keys)}
    for key in clean.keys() - command.model_fields:
        reported |= {*messages.meant_by(key, clean[key], command, clean).keys}
    saved = {"checkpoint": checkpoint_config, "teacher": next(iter((teachers or {}).values()), None)}
    clean, unresolved, unresolved_sections = _resolve_auto(command, clean, saved, reported & {"checkpoint"})
    clean = command.filled(clean)
    problems += unresolved
    problems += messages.missing_values(command, missing, clean) if missing else []
    for section in unresolved_sections:
        clean.pop(section, None)
    silent = {*unresolved_sections, *missing, *(problem.key for problem in problems)}
    config, config_problems = _decode_and_check(command, clean, silent, teachers, rules)
    problems += config_problems
    for variant in command.variants(clean):
        problems += variant.problems
        if variant.data is not None:
            _, errors = _decode_and_check(command, variant.data, silent, teachers, rules)
            problems += [variant.located(problem) for problem in errors if problem not in config_problems]
    # A value is not missing if its key is misspelt, or if it could not be read. Missing values come last.
    reported_keys = {key for problem in problems if not problem.absent for key in (problem.key, *problem.likely_keys)}
    problems = sorted(
        (problem for problem in problems if not (problem.absent and problem.key in reported_keys)),
        key=lambda problem: problem.absent,
    )
    if problems:
        raise ConfigError(problems)
    assert config is not None, silent
    return config


def _decode_and_check(
    command: type[Command],
    data: JsonObject,
    silent: set[str],
    teachers: Mapping[str, JsonObject] | None,
    rules: Rules | None,
) -> tuple[Command | None, list[Problem]]:
    """Returns the decoded configuration, or None if it has an error; and the problems of its values, and of the rules
    whose keys are valid. silent: keys that are reported already, and sections without data."""
    config, problems = None, list[Problem]()
    try:
        # Strict in JSON mode: a list becomes a tuple, but "fast" is not a number, 2.5 not a count and 7 not text.
        config = command.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = messages.from_pydantic(command, data, error.errors(include_url=False, include_input=False))
    inside = tuple(f"{key}{mark}" for key in silent for mark in ".[")
    problems = [problem for problem in problems if problem.key not in silent and not problem.key.startswith(inside)]
    known = {*silent, *(problem.key for problem in problems)}
    invalid = {key.split(".")[0].split("[")[0] for key in known}
    values = _valid_values(command, data, config, invalid) | ({} if teachers is None else {"teachers": teachers})
    violations = [] if rules is None else rules(command, values)
    return config, problems + [problem for problem in violations if problem.key not in known]


def _valid_values(command: type[Config], data: JsonObject, config: Config | None, invalid: set[str]) -> JsonObject:
    """Returns the decoded values of the valid top-level keys, for the rules."""
    if config is not None:
        return {key: getattr(config, key) for key in command.model_fields if key not in invalid}
    values = {}
    for key, field in command.model_fields.items():
        if key in invalid or (key not in data and field.is_required()):
            continue
        value = data[key] if key in data else field.get_default()
        value = tuple(value) if isinstance(value, list) else value
        section = next((mark for mark in field.metadata if isinstance(mark, Choice | Several)), None)
        values[key] = value if section is None else section.validate(value)
    return values


def _plain(value: object, key: str, problems: list[Problem], missing: list[str], depth: int = 0) -> Any:
    """Returns a copy with JSON types only and without missing values, whose keys are added to `missing`. Adds a problem
    for a value of another type (a date, bytes), and for text that is not valid UTF-8."""
    if depth > MAX_DEPTH:
        message = f"{key[:60]}...: nested more than {MAX_DEPTH} deep"
        problems.append(Problem(key.split(".")[0].split("[")[0], message, "write it as text, in quotes"))
        return None
    if isinstance(value, dict):
        items = {_text(str(name), "a key", problems): item for name, item in value.items()}
        paths = {name: f"{key}.{name}" if key else name for name in items}
        missing += [paths[name] for name, item in items.items() if item == MISSING]
        return {
            name: _plain(item, paths[name], problems, missing, depth + 1)
            for name, item in items.items()
            if item != MISSING
        }
    if isinstance(value, list | tuple):
        missing += [key] if MISSING in value else []
        # A key of a section in a list is typed with its number: `phases.1.data.path`.
        places = (f"{key}.{index}" if isinstance(item, dict) else f"{key}[{index}]" for index, item in enumerate(value))
        items_by_place = zip(places, value, strict=True)
        return [_plain(item, place, problems, missing, depth + 1) for place, item in items_by_place if item != MISSING]
    if isinstance(value, str):
        return _text(value, key, problems)
    if isinstance(value, int) and abs(value) >= 2**63:
        problems.append(Problem(key, f"{key}: the number has more than 64 bits", "use a smaller number"))
        return 0
    if value is None or isinstance(value, bool | int | float):
        return value
    message = f"{key}: YAML read {value} as a {type(value).__name__}, which no key accepts"
    problems.append(Problem(key, message, f'quote it: {key}: "{value}"'))
    return str(value)


def _text(text: str, key: str, problems: list[Problem]) -> str:
    """Returns a text that files and libraries accept: without lone surrogates (invalid UTF-8 bytes of a command line)
    and NUL."""
    clean = text.encode("utf-8", "replace").decode().replace("\0", "?")
    if clean != text:
        hint = "type it in UTF-8; rename a file whose name is not UTF-8"
        problems.append(Problem(key, f"{key}: {text} has a character that UTF-8 cannot encode, or NUL", hint))
    return clean
