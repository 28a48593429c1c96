"""The phases of a pretraining run: overrides of its keys, each for a share of its budget.

    phases:
      - {share: 0.9, max_length: 128, batch_examples: 256}
      - {max_length: 512, batch_examples: 64, optimizer.lr: 5.0e-5}

The keys of a phase are merged into the run's configuration, and the result is checked like any other. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmtool.config.auto import chosen_class, merge
from lmtool.config.base import Variant
from lmtool.config.members import title_of
from lmtool.config.tables import Choice
from lmtool.errors import Problem
from lmtool.learners.configs import MixtureConfig, ObjectiveConfig

BATCH = ("batch_examples", "batch_tokens")
"""A phase that gives one of these sizes does without the other."""
OF_A_PASS = ("max_length", *BATCH, "data")
"""What decides how many steps a pass has."""
_KEYS = ("max_length", *BATCH, "micro_batch_tokens")
_SECTIONS = ("data", "objective", "optimizer")
_TOLERANCE = 1e-6


def normalized(phases: Any) -> Any:
    """Phases with dotted keys as nested sections, names of sections too, and the remaining share for the last phase.
    Other values than a list of sections stay unchanged."""
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return phases
    nested = [nested_keys(phase) for phase in phases]
    fractions: list[Any] = [phase.get("share") for phase in nested]
    if nested and fractions[-1] is None and all(map(_is_number, fractions[:-1])):
        nested[-1] = {"share": round(1 - math.fsum(fractions[:-1]), 12), **nested[-1]}
    return nested


def nested_keys(phase: Mapping[str, Any]) -> dict[str, Any]:
    """A phase with nested sections instead of dotted keys and names of sections."""
    whole: dict[str, Any] = {}
    for key, value in phase.items():
        above = str(key).split(".")
        if above[0] in _SECTIONS and len(above) == 1 and isinstance(value, str):
            value = {"name": value}
        for name in reversed(above):
            value = {name: value}
        whole = merge(whole, value)
    return whole


def words_of(phase: Mapping[str, Any], above: str = "") -> str:
    """A phase as overrides, without its share: `max_length=512 batch_examples=64`. Default values of whole sections are
    omitted; lists of sections show only names."""
    words, chosen = [], chosen_class(phase, Choice("data")) if above == "data." else None
    for key, value in phase.items():
        if isinstance(value, dict):
            words.append(words_of(value, f"{above}{key}."))
            continue
        if isinstance(value, list):
            value = "[" + ",".join(title_of(item) for item in value) + "]"
        default = chosen is not None and key != "name" and value == chosen.model_fields[key].get_default()
        if (above or key != "share") and not default:
            words.append(f"{above}{key}={value}")
    return " ".join(words)


def overridden(data: Mapping[str, Any], phase: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a phase as plain data: that of the run, updated with the keys of the phase. A text source of
    another kind replaces the section."""
    given = {key: value for key, value in phase.items() if key != "share"}
    base = {key: value for key, value in data.items() if key != "phases"}
    sizes = [key for key in BATCH if given.get(key) is not None]
    if len(sizes) == 1:
        given = {**dict.fromkeys(BATCH), **given}
    text, own = given.get("data"), base.get("data")
    if isinstance(text, dict) and isinstance(own, dict) and text.get("name", own.get("name")) != own.get("name"):
        base["data"] = {}
    return merge(base, given)


def variants(data: Mapping[str, Any]) -> Iterator[Variant]:
    """The configuration of each phase, to be checked like that of the run, and the problems of the phases themselves.
    data: the run's configuration, resolved."""
    phases = data.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return
    yield Variant("phases", None, tuple(_of_shares(phases, data.get("max_steps"))))
    for number, phase in enumerate(phases):
        path, problems, kept = f"phases.{number}", [], {}
        for key, value in phase.items():
            fixed = list(_fixed(key, value, data, path))
            problems += fixed
            if not fixed:
                kept[key] = value
        yield Variant(path, overridden(data, kept), tuple(problems), (*_KEYS, *_SECTIONS))


def _of_shares(phases: Sequence[Mapping[str, Any]], max_steps: Any) -> Iterator[Problem]:
    fractions: list[Any] = [phase.get("share") for phase in phases]
    for number, share in enumerate(fractions):
        key = f"phases.{number}.share"
        if share is None:
            hint = f"set {key}=0.5, its share of the budget; the last phase's may be left out"
            yield Problem(key, f"missing required value: {key}", hint)
        elif not _is_number(share) or not 0 < share <= 1:
            last = number == len(fractions) - 1 and _is_number(share) and share <= 0
            hint = "leave room for the last phase" if last else "the shares of all phases add up to 1"
            yield Problem(key, f"{key}={share}: a share of the budget, above 0 and at most 1", hint)
        elif isinstance(max_steps, int) and share * max_steps < 0.5:
            yield Problem(
                key, f"{key}={share} of max_steps={max_steps} is no step", "use a larger share, or more steps"
            )
    if all(map(_is_number, fractions)) and fractions and abs(math.fsum(fractions) - 1) > _TOLERANCE:
        total = math.fsum(fractions)
        hint = "leave out the share of the last one: it gets what is left" if total < 1 else "make them smaller"
        yield Problem("phases", f"phases: the shares add up to {total:.6g}, and the whole budget is 1", hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fixed(key: str, value: Any, data: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """The problems of a key in a phase that must have the same value in the whole run. Unknown keys are reported
    elsewhere."""
    own = data.get(key)
    if key in ("share", "data", *_KEYS):
        return
    if key == "optimizer" and isinstance(value, dict):
        yield from _others(value, own, ("lr",), f"{path}.optimizer", "optimizer.lr")
    elif key == "objective" and isinstance(value, dict):
        yield from _of_objective(value, own, path)
    elif key in data or key in _SECTIONS:
        given = f"={value}" if isinstance(value, str | int | float) else ""
        hint = f"leave it to the run; a phase may set {', '.join(_KEYS)}, data, objective.KEY and optimizer.lr"
        yield Problem(f"{path}.{key}", f"{path}.{key}{given}: {key} does not change during a run", hint)


def _of_objective(value: Mapping[str, Any], own: Any, path: str) -> Iterator[Problem]:
    chosen = chosen_class(own, Choice("objective"))
    if chosen is None or not issubclass(chosen, ObjectiveConfig):
        return
    if not issubclass(chosen, MixtureConfig):
        yield from _others(value, own, chosen.phase_fields, f"{path}.objective", "objective")
        return
    members = value.get("with")
    yield from _others(value, own, ("with",), f"{path}.objective", "objective")
    try:
        parts = {part.title: part for part in Choice("objective").validate(own).parts()}  # type: ignore[union-attr]
    except ValueError:  # said of the run's own section
        return
    for name, inside in members.items() if isinstance(members, dict) else ():
        part = parts.get(name)
        if part is not None and isinstance(inside, dict):  # else decoding says so
            at = f"{path}.objective.with.{name}"
            yield from _others(inside, part.model_dump(), part.phase_fields, at, f"objective.with.{name}")


def _others(value: Mapping[str, Any], own: Any, free: Sequence[str], path: str, section: str) -> Iterator[Problem]:
    """The fields of a section that must have the same value in the whole run. own: the section of the run."""
    own = own if isinstance(own, dict) else {}
    for name, given in value.items():
        chosen = chosen_class(own, Choice(section.split(".")[0]))
        known = set(own) if chosen is None else set(chosen.model_fields)
        if name in free or name not in known or (name == "name" and given == own.get("name")):
            continue
        may = ", ".join(section if section.endswith(f".{field}") else f"{section}.{field}" for field in free)
        shown = f"={given}" if isinstance(given, str | int | float) else ""
        yield Problem(
            f"{path}.{name}",
            f"{path}.{name}{shown}: {name} does not change during a run, whose phases share all parameters",
            f"leave it to the run; a phase may set {may}" if may else "leave it to the run",
        )
