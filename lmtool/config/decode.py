"""The strict decoder: converts plain data to a frozen configuration, or reports all errors at once.

The same decoder reads the result of Hydra, a saved `config.yaml` and the `config.json` of a checkpoint: no Hydra, no
resolvers, no import of a name from the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lmtool.config import messages
from lmtool.config.base import Auto as Auto
from lmtool.config.base import Config, JsonObject
from lmtool.config.messages import one_of
from lmtool.config.registry import Choice, Several, choices, chosen_class
from lmtool.errors import ConfigError, Problem, nearest

AUTO = "auto"


def resolve_auto(
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
    resolved, problems, unresolved = dict(data), list[Problem](), set[str]()
    sections = choices(command)
    for section, choice in sections.items():
        if isinstance(resolved.get(section), str):
            resolved[section] = {choice.key: resolved[section]}
    for section, rule in command.auto.items():
        value, choice = resolved.get(section), sections[section]
        if _is_auto(value, choice, rule):
            source, blocked = _source_of(rule, section, resolved, checkpoint, teacher, command, unreadable)
            if source is not None:
                typed_values = {key: inside for key, inside in (value or {}).items() if key != choice.key}
                resolved[section] = merge(source, typed_values)
            elif value is not None or blocked:
                unresolved.add(section)
                if not blocked:
                    sources = [source.partition(".")[0] for source in rule.sources if isinstance(source, str)]
                    fault = f"{section}={AUTO}: no {section} is set by {one_of([f'the {name}' for name in sources])}"
                    problems.append(Problem(section, fault, rule.hint or None, absent=True))
        if rule.agrees and checkpoint is not None and isinstance(resolved.get(section), dict):
            problems += _disagreements(section, resolved[section], checkpoint.get(section), choice)
    return resolved, problems, unresolved


def _is_auto(value: object, choice: Choice, rule: Auto) -> bool:
    if value is None:
        return rule.implied
    if not isinstance(value, dict):
        return False
    return value.get(choice.key) == AUTO or (rule.implied and choice.key not in value)


def _source_of(
    rule: Auto,
    section: str,
    resolved: JsonObject,
    checkpoint: JsonObject | None,
    teacher: JsonObject | None,
    command: type[Config],
    unreadable: bool,
) -> tuple[JsonObject | None, bool]:
    """Returns the section from the first source that exists, or None; and whether an error in another section is the
    reason for None."""
    for source in rule.sources:
        if isinstance(source, dict):
            return source, False
        if source in ("checkpoint", "teacher"):
            saved = ((checkpoint if source == "checkpoint" else teacher) or {}).get(section)
            if isinstance(saved, dict):
                return saved, False
            if unreadable and source == "checkpoint":
                return None, True
            continue
        other, method, *keys = source.split(".")
        holder = _section_or_default(resolved.get(other), choices(command)[other])
        if holder is None:
            return None, True
        result = getattr(holder, method)()
        for key in keys:
            result = result.get(key, {})
        if result:
            return json.loads(json.dumps(result)), False
    return None, False


def _section_or_default(value: object, choice: Choice) -> Config | None:
    """Returns the configuration of a section. If it has an error, which the decoder reports, the default values are
    returned, so that sections that depend on it can still be checked."""
    for build in (partial(choice.validate, value), chosen_class(value, choice)):
        with suppress(ValidationError, PydanticCustomError):
            return None if build is None else build()
    return None


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
    defaults = {name: field.get_default() for name, field in config_class.model_fields.items()}
    values, saved_values = defaults | value, defaults | saved
    constant = [key for key in defaults if key not in config_class.adjustable_fields]
    for key in [choice.key] if values[choice.key] != saved.get(choice.key) else constant:
        ours, theirs = (_plain_value(section_values[key]) for section_values in (values, saved_values))
        if ours != theirs:
            yield Problem(
                f"{section}.{key}",
                f"{section}.{key}={_displayed(ours)}, but the checkpoint has {section}.{key}={_displayed(theirs)}",
                f"{section}=auto takes it from the checkpoint; checkpoint=none starts without a checkpoint",
            )


def _plain_value(value: object) -> Any:
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _displayed(plain: object) -> Any:
    """Returns a value for a message. A selected component is displayed as its name."""
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
    misspelt = {
        name
        for key in clean.keys() - command.model_fields
        for name, _ in messages.meant_by(key, clean[key], command, clean).pairs
    }
    reported = {key for problem in earlier for key in (problem.key, *problem.likely_keys)}
    unreadable_checkpoint = "checkpoint" in reported | misspelt
    clean, unresolved, unresolved_sections = resolve_auto(
        command, clean, checkpoint_config, unreadable_checkpoint, next(iter((teachers or {}).values()), None)
    )
    clean = command.filled(clean)
    problems += unresolved
    problems += messages.missing_values(command, missing, clean) if missing else []
    for section in unresolved_sections:
        clean.pop(section, None)
    silent = {*unresolved_sections, *missing, *(problem.key for problem in problems)}
    config, config_problems = _decode_and_check(command, clean, silent, unresolved_sections, teachers, rules)
    problems += config_problems
    for variant in command.variants(clean):
        problems += variant.problems
        if variant.data is not None:
            _, errors = _decode_and_check(command, variant.data, silent, unresolved_sections, teachers, rules)
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
    unresolved_sections: set[str],
    teachers: Mapping[str, JsonObject] | None,
    rules: Rules | None,
) -> tuple[Command | None, list[Problem]]:
    """Returns the decoded configuration, or None if it has an error; and the problems of its values, and of the rules
    whose keys are valid. silent: keys that are reported already. unresolved_sections: sections without
    data."""
    config, errors = _validate(command, data)
    problems = messages.from_pydantic(command, data, errors) if errors else []
    problems = [problem for problem in problems if not _is_covered(problem.key, silent)]
    known = {*silent, *(problem.key for problem in problems)}
    values = _valid_values(
        command, data, config, {key.split(".")[0].split("[")[0] for key in known} | unresolved_sections
    )
    values |= {} if teachers is None else {"teachers": teachers}
    violations = [] if rules is None else rules(command, values)
    return config, problems + [problem for problem in violations if problem.key not in known]


def _validate(command: type[Command], data: JsonObject) -> tuple[Command | None, list[Any]]:
    try:
        # Strict in JSON mode: a list becomes a tuple, but "fast" is not a number, 2.5 not a count and 7 not text.
        return command.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        return None, error.errors(include_url=False, include_input=False)


def _is_covered(key: str, keys: set[str]) -> bool:
    return any(key == other or key.startswith((f"{other}.", f"{other}[")) for other in keys)


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
        section = key.split(".")[0].split("[")[0]
        message = f"{key[:60]}...: nested more than {MAX_DEPTH} deep"
        problems.append(Problem(section, message, "write it as text, in quotes"))
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
    kind = type(value).__name__
    problems.append(
        Problem(key, f"{key}: YAML read {value} as a {kind}, which no key accepts", f'quote it: {key}: "{value}"')
    )
    return str(value)


def _text(text: str, key: str, problems: list[Problem]) -> str:
    """Returns a text that files and libraries accept: without lone surrogates (invalid UTF-8 bytes of a command line)
    and NUL."""
    clean = text.encode("utf-8", "replace").decode().replace("\0", "?")
    if clean != text:
        hint = "type it in UTF-8; rename a file whose name is not UTF-8"
        problems.append(Problem(key, f"{key}: {text} has a character that UTF-8 cannot encode, or NUL", hint))
    return clean
