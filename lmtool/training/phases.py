"""The phases of a pretraining run: what each may change, and the configuration of each as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lmtool.config.base import Config, JsonMapping, JsonObject, Variant
from lmtool.config.decode import merge, title_of
from lmtool.config.messages import known_keys
from lmtool.config.registry import Choice, chosen_class
from lmtool.errors import Problem

BATCH = ("batch_examples", "batch_tokens")
"""Batch sizes: a phase that sets one of them clears the other."""
EPOCH_KEYS = ("max_length", *BATCH, "data")
"""Keys that determine the number of steps in an epoch."""
_PHASE_KEYS = ("max_length", *BATCH, "micro_batch_tokens")
_PHASE_SECTIONS = ("data", "objective", "optimizer")
_TOLERANCE = 1e-6


def normalize_phases(phases: object) -> Any:
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
        if above[0] in _PHASE_SECTIONS and len(above) == 1 and isinstance(value, str):
            value = {"name": value}
        for name in reversed(above):
            value = {name: value}
        nested = merge(nested, value)
    return nested


def words_of_phase(phase: JsonMapping, above: str = "") -> str:
    """Returns a phase as overrides, without its share: `max_length=512 batch_examples=64`. Default values of whole
    sections are omitted; lists of sections show only names."""
    words, config_class = [], chosen_class(phase, Choice("data")) if above == "data." else None
    for key, value in phase.items():
        if isinstance(value, dict):
            words.append(words_of_phase(value, f"{above}{key}."))
            continue
        if isinstance(value, list):
            value = "[" + ",".join(title_of(item) for item in value) + "]"
        default = config_class is not None and key != "name" and value == config_class.model_fields[key].get_default()
        if (above or key != "share") and not default:
            words.append(f"{above}{key}={value}")
    return " ".join(words)


def with_phase(data: JsonMapping, phase: JsonMapping) -> JsonObject:
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


def phase_variants(command: type[Config], data: JsonMapping) -> Iterator[Variant]:
    """Yields the configuration of each phase, to be checked like that of the run, and the problems of the phases
    themselves. command: the class of the configuration. data: the run's configuration, resolved."""
    phases = data.get("phases")
    if not phases or not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return
    yield Variant("phases", None, tuple(_share_problems(phases, data.get("max_steps"))))
    free, known = _keys_of_phase(command, data)
    hint = f"set it for the whole run; a phase may set {', '.join(sorted(free))}"
    for number, phase in enumerate(phases):
        path, problems, valid = f"phases.{number}", list[Problem](), dict[str, Any]()
        for name, value in phase.items():
            fixed = dict(_fixed_keys({name: value}, data, free, known))
            for key, constant in fixed.items():
                assignment = f"={constant}" if isinstance(constant, str | int | float) else ""
                fault = f"{key.rpartition('.')[2]} cannot change during a run"
                problems.append(Problem(f"{path}.{key}", f"{path}.{key}{assignment}: {fault}", hint))
            valid |= {} if fixed else {name: value}
        yield Variant(path, with_phase(data, valid), tuple(problems))


def _keys_of_phase(command: type[Config], data: JsonMapping) -> tuple[set[str], set[str]]:
    """The keys that a phase may set, and all keys of the run; unknown keys are reported by the decoder."""
    free, known = {"share", "data", *_PHASE_KEYS, "optimizer.lr"}, {*known_keys(command, dict(data))}
    try:
        objective: Any = Choice("objective").validate(data.get("objective"))
        parts = {part.title: part for part in objective.member_configs()} if objective.name == "mixture" else {}
    except ValueError:  # reported for the section of the run
        return free | {"objective"}, known
    members = {"objective": objective} | {f"objective.with.{title}": part for title, part in parts.items()}
    for path, part in members.items():
        free |= {f"{path}.{field}" for field in part.phase_fields}
        known |= {f"{path}.{field}" for field in type(part).model_fields}
    return free, known


def _fixed_keys(
    phase: JsonMapping, of_run: object, free: set[str], known: set[str], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the keys of a phase that must have the same value in the whole run, with their values."""
    of_run = of_run if isinstance(of_run, dict) else {}
    for name, value in phase.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and any(other.startswith(f"{key}.") for other in free):
            yield from _fixed_keys(value, of_run.get(name), free, known, f"{key}.")
        elif key in known - free and not (name == "name" and value == of_run.get(name)):
            yield key, value


def _share_problems(phases: Sequence[JsonMapping], max_steps: object) -> Iterator[Problem]:
    shares: list[Any] = [phase.get("share") for phase in phases]
    for number, share in enumerate(shares):
        key = f"phases.{number}.share"
        if share is None:
            hint = f"set {key}=0.5, its fraction of the budget; the last phase needs none"
            yield Problem(key, f"missing required value: {key}", hint)
        elif not _is_number(share) or not 0 < share <= 1:
            hint = "set shares that add up to 1 over all phases"
            yield Problem(key, f"{key}={share}: a share must be above 0 and at most 1", hint)
        elif isinstance(max_steps, int) and share * max_steps < 0.5:
            fault = f"{key}={share} of max_steps={max_steps} is less than one step"
            yield Problem(key, fault, "use a larger share, or more steps")
    if all(map(_is_number, shares)) and shares and abs(math.fsum(shares) - 1) > _TOLERANCE:
        hint = "omit the share of the last phase, which gets the rest, or make the shares smaller"
        yield Problem("phases", f"phases: the shares add up to {math.fsum(shares):.6g} instead of 1", hint)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
