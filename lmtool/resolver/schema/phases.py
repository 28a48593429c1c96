"""The phases of a pretraining run: overrides of its keys, each for a fraction of its budget.

    phases:
      - {share: 0.9, max_length: 128, batch_examples: 256}
      - {max_length: 512, batch_examples: 64, optimizer.lr: 5.0e-5}

The keys of a phase are merged into the run's configuration, and the result is checked like any other. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lmtool.config.auto import chosen_class, merge, title_of
from lmtool.config.base import JsonMapping, JsonObject, Variant
from lmtool.config.tables import Choice
from lmtool.errors import Problem
from lmtool.learners.configs import MixtureConfig, ObjectiveConfig

BATCH = ("batch_examples", "batch_tokens")
"""Batch sizes: a phase that sets one of them clears the other."""
EPOCH_KEYS = ("max_length", *BATCH, "data")
"""Keys that determine the number of steps in an epoch."""
_KEYS = ("max_length", *BATCH, "micro_batch_tokens")
_SECTIONS = ("data", "objective", "optimizer")
_TOLERANCE = 1e-6


def normalize(phases: object) -> Any:
    """Phases with dotted keys as nested sections, names of sections too, and the remaining share for the last phase.
    Other values than a list of sections stay unchanged."""
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return phases
    nested = [nested_keys(phase) for phase in phases]
    fractions: list[Any] = [phase.get("share") for phase in nested]
    if nested and fractions[-1] is None and all(map(_is_number, fractions[:-1])):
        nested[-1] = {"share": round(1 - math.fsum(fractions[:-1]), 12), **nested[-1]}
    return nested


def nested_keys(phase: JsonMapping) -> JsonObject:
    """Returns a phase with nested sections instead of dotted keys and names of sections."""
    nested: JsonObject = {}
    for key, value in phase.items():
        above = str(key).split(".")
        if above[0] in _SECTIONS and len(above) == 1 and isinstance(value, str):
            value = {"name": value}
        for name in reversed(above):
            value = {name: value}
        nested = merge(nested, value)
    return nested


def words_of(phase: JsonMapping, above: str = "") -> str:
    """Returns a phase as overrides, without its share: `max_length=512 batch_examples=64`. Default values of whole
    sections are omitted; lists of sections show only names."""
    words, config_class = [], chosen_class(phase, Choice("data")) if above == "data." else None
    for key, value in phase.items():
        if isinstance(value, dict):
            words.append(words_of(value, f"{above}{key}."))
            continue
        if isinstance(value, list):
            value = "[" + ",".join(title_of(item) for item in value) + "]"
        default = config_class is not None and key != "name" and value == config_class.model_fields[key].get_default()
        if (above or key != "share") and not default:
            words.append(f"{above}{key}={value}")
    return " ".join(words)


def overridden(data: JsonMapping, phase: JsonMapping) -> JsonObject:
    """Returns the configuration of a phase as plain data: that of the run, updated with the keys of the phase. A text
    source of another kind replaces the section."""
    changes = {key: value for key, value in phase.items() if key != "share"}
    base = {key: value for key, value in data.items() if key != "phases"}
    if sum(changes.get(key) is not None for key in BATCH) == 1:
        changes = {**dict.fromkeys(BATCH), **changes}
    text, before = changes.get("data"), base.get("data")
    if (
        isinstance(text, dict)
        and isinstance(before, dict)
        and text.get("name", before.get("name")) != before.get("name")
    ):
        base["data"] = {}
    return merge(base, changes)


def variants(data: JsonMapping) -> Iterator[Variant]:
    """Yields the configuration of each phase, to be checked like that of the run, and the problems of the phases
    themselves. data: the run's configuration, resolved."""
    phases = data.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return
    yield Variant("phases", None, tuple(_share_problems(phases, data.get("max_steps"))))
    for number, phase in enumerate(phases):
        path, problems, valid = f"phases.{number}", [], {}
        for key, value in phase.items():
            fixed = list(_fixed_value_problems(key, value, data, path))
            problems += fixed
            if not fixed:
                valid[key] = value
        yield Variant(path, overridden(data, valid), tuple(problems), (*_KEYS, *_SECTIONS))


def _share_problems(phases: Sequence[JsonMapping], max_steps: object) -> Iterator[Problem]:
    fractions: list[Any] = [phase.get("share") for phase in phases]
    for number, share in enumerate(fractions):
        key = f"phases.{number}.share"
        if share is None:
            hint = f"set {key}=0.5, its fraction of the budget; the last phase needs none"
            yield Problem(key, f"missing required value: {key}", hint)
        elif not _is_number(share) or not 0 < share <= 1:
            last = number == len(fractions) - 1 and _is_number(share) and share <= 0
            hint = "make the other shares smaller" if last else "set shares that add up to 1 over all phases"
            yield Problem(key, f"{key}={share}: a share must be above 0 and at most 1", hint)
        elif isinstance(max_steps, int) and share * max_steps < 0.5:
            yield Problem(
                key,
                f"{key}={share} of max_steps={max_steps} is less than one step",
                "use a larger share, or more steps",
            )
    if all(map(_is_number, fractions)) and fractions and abs(math.fsum(fractions) - 1) > _TOLERANCE:
        total = math.fsum(fractions)
        hint = "omit the share of the last phase, which gets the rest" if total < 1 else "make the shares smaller"
        yield Problem("phases", f"phases: the shares add up to {total:.6g} instead of 1", hint)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fixed_value_problems(key: str, value: object, data: JsonMapping, path: str) -> Iterator[Problem]:
    """Yields the problems of a key in a phase that must have the same value in the whole run. Unknown keys are reported
    elsewhere."""
    section = data.get(key)
    if key in ("share", "data", *_KEYS):
        return
    if key == "optimizer" and isinstance(value, dict):
        yield from _fixed_fields(value, section, ("lr",), f"{path}.optimizer", "optimizer.lr")
    elif key == "objective" and isinstance(value, dict):
        yield from _objective_problems(value, section, path)
    elif key in data or key in _SECTIONS:
        assignment = f"={value}" if isinstance(value, str | int | float) else ""
        hint = f"set it for the whole run; a phase may set {', '.join(_KEYS)}, data, objective.KEY and optimizer.lr"
        yield Problem(f"{path}.{key}", f"{path}.{key}{assignment}: {key} cannot change during a run", hint)


def _objective_problems(value: JsonMapping, section: object, path: str) -> Iterator[Problem]:
    config_class = chosen_class(section, Choice("objective"))
    if config_class is None or not issubclass(config_class, ObjectiveConfig):
        return
    if not issubclass(config_class, MixtureConfig):
        yield from _fixed_fields(value, section, config_class.phase_fields, f"{path}.objective", "objective")
        return
    members = value.get("with")
    yield from _fixed_fields(value, section, ("with",), f"{path}.objective", "objective")
    try:
        parts = {part.title: part for part in Choice("objective").validate(section).member_configs()}  # type: ignore[union-attr]
    except ValueError:  # reported for the section of the run
        return
    for name, inside in members.items() if isinstance(members, dict) else ():
        part = parts.get(name)
        if part is not None and isinstance(inside, dict):  # otherwise the decoder reports it
            member_path = f"{path}.objective.with.{name}"
            yield from _fixed_fields(
                inside, part.model_dump(), part.phase_fields, member_path, f"objective.with.{name}"
            )


def _fixed_fields(changes: JsonMapping, of_run: object, free: Sequence[str], path: str, key: str) -> Iterator[Problem]:
    """Yields the problems of fields in a phase that must have the same value in the whole run. of_run: the run's
    section."""
    of_run = of_run if isinstance(of_run, dict) else {}
    config_class = chosen_class(of_run, Choice(key.split(".")[0]))
    fields = set(of_run) if config_class is None else set(config_class.model_fields)
    for name, value in changes.items():
        if name in free or name not in fields or (name == "name" and value == of_run.get("name")):
            continue
        allowed = ", ".join(key if key.endswith(f".{field}") else f"{key}.{field}" for field in free)
        assignment = f"={value}" if isinstance(value, str | int | float) else ""
        yield Problem(
            f"{path}.{name}",
            f"{path}.{name}{assignment}: {name} cannot change during a run, because all phases train the same "
            "parameters",
            f"set it for the whole run; a phase may set {allowed}" if allowed else "set it for the whole run",
        )
