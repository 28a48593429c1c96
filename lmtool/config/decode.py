"""The strict decoder: converts plain data to a frozen configuration, or reports all errors at once.

The same decoder reads the result of Hydra, a saved `config.yaml` and the `config.json` of a checkpoint: no Hydra, no
resolvers, no import of a name from the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from lmtool.config import problems as wording
from lmtool.config.auto import resolve
from lmtool.config.base import Config, JsonObject
from lmtool.config.tables import Choice, Several
from lmtool.errors import ConfigError, Problem

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
    problems = list(earlier)
    clean = _plain(data, "", problems)
    missing: list[str] = []
    clean = _without_missing(clean, "", missing)
    # A checkpoint that cannot be read, or whose key is misspelt, is reported already.
    misspelt = {
        name
        for key in clean.keys() - command.model_fields
        for name, _ in wording.meant_by(key, clean[key], command, clean).pairs
    }
    reported = {key for problem in earlier for key in (problem.key, *problem.likely_keys)}
    unreadable_checkpoint = "checkpoint" in reported | misspelt
    clean, unresolved, unresolved_sections = resolve(
        command, clean, checkpoint_config, unreadable_checkpoint, next(iter((teachers or {}).values()), None)
    )
    clean = command.filled(clean)
    problems += unresolved
    problems += wording.missing(command, missing, clean)
    for section in unresolved_sections:
        clean.pop(section, None)
    silent = {*unresolved_sections, *missing, *(problem.key for problem in problems)}
    config, config_problems = _decode_and_check(command, clean, silent, unresolved_sections, teachers, rules)
    problems += config_problems
    for variant in command.variants(clean):
        problems += variant.problems
        if variant.data is not None:
            _, errors = _decode_and_check(command, variant.data, silent, unresolved_sections, teachers, rules)
            problems += [variant.relocated(problem) for problem in errors if problem not in config_problems]
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
    problems = [
        problem for problem in wording.from_pydantic(command, data, errors) if not _is_covered(problem.key, silent)
    ]
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
    """Whether a key, or a section that contains it, is reported already."""
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


def _plain(value: object, key: str, problems: list[Problem], depth: int = 0) -> Any:
    """Returns a copy with JSON types only. Adds a problem for a value of another type (a date, bytes), and for text
    that is not valid UTF-8."""
    if depth > MAX_DEPTH:
        problems.append(
            Problem(
                key.split(".")[0].split("[")[0],
                f"{key[:60]}...: nested more than {MAX_DEPTH} deep",
                "write it as text, in quotes",
            )
        )
        return None
    if isinstance(value, dict):
        return {
            _text(str(name), "a key", problems): _plain(
                item, f"{key}.{name}" if key else str(name), problems, depth + 1
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{index}]", problems, depth + 1) for index, item in enumerate(value)]
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


def _without_missing(value: object, key: str, missing: list[str]) -> Any:
    """Returns a copy without `???` values, whose keys are added to `missing`."""
    if isinstance(value, dict):
        without_missing = {}
        for name, item in value.items():
            path = f"{key}.{name}" if key else name
            if item == MISSING:
                missing.append(path)
            else:
                without_missing[name] = _without_missing(item, path, missing)
        return without_missing
    if isinstance(value, list):
        if MISSING in value:
            missing.append(key)
        # A key of a section in a list is typed with its number: `phases.1.data.path`.
        paths = [f"{key}.{index}" if isinstance(item, dict) else f"{key}[{index}]" for index, item in enumerate(value)]
        return [
            _without_missing(item, path, missing) for path, item in zip(paths, value, strict=True) if item != MISSING
        ]
    return value
