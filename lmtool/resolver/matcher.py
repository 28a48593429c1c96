"""Compatibility of sections: compares the requirements of each section with the other sections (config/needs.py). Each
error names the nearest legal override."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from lmtool.config.base import Config, JsonObject
from lmtool.config.decode import rule
from lmtool.config.needs import Component, Offer, Requirement, unmet
from lmtool.config.tables import Choice, entries
from lmtool.data.configs import FORMATS, DataConfig
from lmtool.distillation.configs import DistillConfig
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, MixtureConfig, ObjectiveConfig, special_token
from lmtool.models.configs import ModelConfig
from lmtool.resolver.schema.phases import EPOCH_KEYS, words_of
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tuning.configs.base import components_by_section

Roles = frozenset[str] | None
"""The roles of a vocabulary's special tokens; None if they are not known yet."""


def text_format_needs(model: ModelConfig, text_format: str | None = None) -> Iterator[Requirement]:
    """Yields a requirement for each special token that the model adds to its texts. text_format: the name of a format
    that replaces the model's own."""
    definition, start = FORMATS.get(text_format or model.text_format), model.start_role
    for role in (*(definition.roles if definition is not None else ()), *([start] if start else [])):
        reason = f"model={model.name} adds to its texts"  # completes "has no mask token, which ..."
        yield Requirement(special_token(role), "tokenizer", reason, "set tokenizer=auto")


def missing_token(needs: Iterable[Requirement], roles: Iterable[str]) -> str | None:
    """Returns what a vocabulary lacks, as the predicate of a sentence: "has no mask token, which objective=mlm needs".
    None if it has all tokens. roles: the special tokens of the vocabulary."""
    tokens = frozenset(roles)
    unmet_needs = (need for need in needs if need.offer.section == "roles" and not need.offer.holds(tokens))
    return next((need.problem(tokens).message for need in unmet_needs), None)


def fits(learned: LearnedConfig, model: ModelConfig, roles: Roles) -> bool:
    """Whether an objective or a task is compatible with a model and with a vocabulary. roles: its special tokens; None
    if they are not known, and then not compared."""
    if roles is not None and missing_token(text_format_needs(model), roles) is not None:
        return False
    return not any(True for member in learned.member_configs() for _ in unmet(member, model=model, roles=roles))


Phases = tuple[JsonObject, ...]
SectionsOf = Callable[..., dict[str, Any]]
"""A function that returns sections by name from the values of some keys."""


def match(command: type[Config], section: str, *keys: str, others: SectionsOf | None = None) -> None:
    """Registers a rule that compares the requirements of a section, or of every member of a mixture, with other keys.
    The rule reports only the first unmet requirement of each.

    Args:
        command: The class of the commands that the rule applies to.
        section: The section whose requirements are compared.
        keys: The keys that it is compared with.
        others: Builds the sections by name from the values of `keys`; None: each key is a section.
    """

    def check(component: Component, *values: object) -> Iterator[Problem]:
        sections = dict(zip(keys, values, strict=True)) if others is None else others(*values)
        yield from _incompatibilities(section, component, sections)

    check.__qualname__ = f"{section} with {' and '.join(keys)}"
    rule(command, section, *keys)(check)


def _incompatibilities(section: str, component: Component, others: JsonObject) -> Iterator[Problem]:
    """Yields the first unmet requirement of a component and of each member of a mixture. If the requirement has no
    hint, or is one of an objective in a mixture, the hint is the nearest legal override."""
    parts = component.member_configs() if isinstance(component, LearnedConfig) else (component,)
    for part in (component, *(part for part in parts if part is not component)):
        for need, other in unmet(part, **others):
            problem = _reword(section, component, part, need.problem(other))
            in_objective_mixture = part is not component and isinstance(component, ObjectiveConfig)
            if need.hint is not None and not in_objective_mixture:
                yield problem
                break
            yield replace(problem, hint=_nearest_hint(component, part, others))
            if isinstance(component, ObjectiveConfig):
                return  # the hint replaces every incompatible member
            break


def _reword(section: str, component: Component, part: Component, problem: Problem) -> Problem:
    """Returns a problem, rewritten for a member of a mixture: the keys of a member are set below `with.NAME`."""
    if part is component or not isinstance(part, LearnedConfig):
        return problem

    def with_member(text: str | None) -> str | None:
        return text and re.sub(rf"\b{section}\.(?!with\.|members)(?=[a-z_]+=)", f"{section}.with.{part.title}.", text)

    message = f"{section}.members: {with_member(problem.message)}"
    return Problem(f"{section}.members", message, with_member(problem.hint))


def _nearest_hint(component: Component, part: Component, others: JsonObject) -> str | None:
    """Returns a hint that names the nearest legal override; None if there is none."""
    overrides: list[str] = []
    if isinstance(component, ObjectiveConfig):
        overrides = [*_other_objective(component, others["model"], None), *_other_model(component, None)]
    elif isinstance(part, TaskConfig):
        overrides = [f"model={model.name}" for model in _defaults("model") if fits(part, model, None)][:1]
    return f"set {' or '.join(overrides)}" if overrides else None


def _conflicts(section: str, command: type[Config]) -> None:
    """Registers a rule that checks a section, or every member of a mixture, for contradictions within it."""

    def check(component: Component) -> Iterator[Problem]:
        parts = component.member_configs() if isinstance(component, LearnedConfig) else (component,)
        for part in (component, *(part for part in parts if part is not component)):
            yield from (_reword(section, component, part, problem) for problem in part.conflicts())

    check.__qualname__ = f"conflicts of {section}"
    rule(command, section)(check)


def _learned_and_model(learned: LearnedConfig, model: ModelConfig) -> JsonObject:
    """Names the sections that a distillation method is compared with: `learned` is the objective or the task."""
    return {"learned": learned, "model": model}


# The sections that are compared.

match(PretrainConfig, "objective", "model")
match(PretrainConfig, "objective", "parallel")
match(FinetuneConfig, "task", "model")
match(FinetuneConfig, "task", "parallel")
match(FinetuneConfig, "tuning", "model", "task", others=components_by_section)
match(FinetuneConfig, "tuning", "parallel")
match(PretrainConfig, "distill", "objective", "model", others=_learned_and_model)
match(FinetuneConfig, "distill", "task", "model", others=_learned_and_model)
match(PretrainConfig, "distill", "phases")
match(RunConfig, "distill", "parallel")
for _section, _command in (("task", FinetuneConfig), ("tuning", FinetuneConfig), ("distill", RunConfig)):
    _conflicts(_section, _command)


@rule(RunConfig, "model", "tokenizer")
def require_tokens_of_text_format(model: ModelConfig, tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """The vocabulary has the special tokens of the model's text format."""
    missing = None if tokenizer.roles is None else missing_token(text_format_needs(model), tokenizer.roles)
    if missing is not None:
        yield Problem("tokenizer", f"tokenizer={tokenizer.name} {missing}", "set tokenizer=auto")


@rule(PretrainConfig, "objective", "model", "tokenizer")
def require_tokens_of_objective(
    objective: ObjectiveConfig, model: ModelConfig, tokenizer: TokenizerConfig
) -> Iterator[Problem]:
    """The vocabulary has the special tokens that the objective inserts."""
    roles = tokenizer.roles
    if roles is None or missing_token(text_format_needs(model), roles) is not None:
        return  # reported by require_tokens_of_text_format
    if any(True for member in objective.member_configs() for _ in unmet(member, model=model)):
        return
    for member in objective.member_configs():
        missing = missing_token(member.needs(), roles)
        if missing is not None:
            overrides = ["tokenizer=auto"] if fits(objective, model, _suggested_roles(model)) else []
            overrides += [*_other_objective(objective, model, roles), *_other_model(objective, roles)]
            hint = f"set {' or '.join(overrides)}" if overrides else None
            problem = Problem("objective", f"tokenizer={tokenizer.name} {missing}", hint)
            yield _reword("objective", objective, member, problem)
            return


# --- the nearest legal override -----------------------------------------------------------------------------------


def _defaults(group: str) -> Iterator[Any]:
    """Yields the components of a group with their default values. Components with required values are left out."""
    for entry in entries(group):
        try:
            yield entry.config()
        except ValidationError:
            continue


def _suggested_roles(model: ModelConfig) -> Roles:
    """Returns the special tokens of the tokenizer that a model's recipe names; None if they are unknown."""
    tokenizer = model.recipe().get("tokenizer")
    suggested = Choice("tokenizer").validate(tokenizer) if tokenizer else None
    return suggested.roles if isinstance(suggested, TokenizerConfig) else None


def _published_objective(model: ModelConfig) -> JsonObject:
    """Returns the objective in a model's recipe, which objective=auto selects, as a section."""
    return model.recipe()["pretrain"].get("objective", {})


def fitting_objectives(model: ModelConfig, roles: Roles) -> list[ObjectiveConfig]:
    """Returns the objectives, except mixtures, that are compatible with a model: the one in its recipe first."""
    published = _published_objective(model).get("name")
    fitting = [
        default
        for default in _defaults("objective")
        if not isinstance(default, MixtureConfig) and fits(default, model, roles)
    ]
    return sorted(fitting, key=lambda default: default.name != published)


def _other_objective(objective: ObjectiveConfig, model: ModelConfig, roles: Roles) -> list[str]:
    """Returns the nearest objective that is compatible with a model, as an override; for a mixture, its compatible
    members, and replacements for the others. Empty if there is none."""
    fitting = [other.name for other in fitting_objectives(model, _suggested_roles(model) if roles is None else roles)]
    if not isinstance(objective, MixtureConfig):
        return [f"objective={name}" for name in fitting[:1]]
    compatible = [
        (_to_override(member), part.name)
        for member, part in zip(objective.members, objective.member_configs(), strict=True)
        if fits(part, model, roles)
    ]
    names = {name for _, name in compatible}
    members = [*(member for member, _ in compatible), *(name for name in fitting if name not in names)]
    members = members[: len(objective.members)]
    weights = " objective.weights=null" if objective.weights and len(members) < len(objective.weights) else ""
    return [f"'objective.members=[{','.join(members)}]'{weights}"] if members else []


def _other_model(objective: ObjectiveConfig, roles: Roles) -> list[str]:
    """Returns the nearest model that is compatible with an objective, as an override: preferably one whose recipe has
    this objective with at most one changed value. Empty if there is none."""
    candidates: list[tuple[bool, bool, str]] = []
    for model in _defaults("model"):
        if fits(objective, model, _suggested_roles(model)):
            tokenizer = "" if roles is None or fits(objective, model, roles) else " tokenizer=auto"
            recipe = _published_objective(model)
            changed = len(recipe) > 2  # more than `name` and one value
            candidates.append((recipe.get("name") != objective.name, changed, f"model={model.name}{tokenizer}"))
    return [override for *_, override in sorted(candidates, key=lambda candidate: candidate[:2])[:1]]


def _to_override(member: str | JsonObject) -> str:
    """Returns a member of a mixture in the syntax of the command line."""
    if isinstance(member, str):
        return member
    return "{" + ",".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in member.items()) + "}"


# --- recurrent memory ---------------------------------------------------------------------------------------------
#
# A recurrent model, or one with a memory, carries state from batch to batch along parallel streams of joined text
# (data/loader.py). One process must therefore read all streams from the beginning of an epoch to its end.

_OR_SEPARATE = "or data.documents=separate, which carries no state"


def reads_lanes(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> bool:
    """Whether a run reads its text as parallel streams along which state is carried."""
    return bool(model.carries_state and objective.reads_lanes and data.name != "mixture" and data.documents == "joined")


@rule(PretrainConfig, "model", "objective", "data")
def require_reuse_for_memory(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> Iterator[Problem]:
    """XLNet's memory holds the states of reused tokens, so it stays empty with objective.reuse=0."""
    if objective.reuses_nothing and fits(objective, model, None) and reads_lanes(model, objective, data):
        yield Problem(
            "model.memory_length",
            f"model.memory_length={model.max_memory_length} caches the states of reused tokens, but objective.reuse=0",
            "set objective.reuse=256 for windows of 512, or model.memory_length=0",
        )


def _interrupting_phase(phases: Phases) -> str | None:
    """Returns a sentence about the first phase that changes the streams or their number, which would lose their state;
    None if no phase does."""
    for number, phase in enumerate(phases):
        phase_settings = {key: phase[key] for key in EPOCH_KEYS if key in phase}
        if phase_settings:
            return f"phases.{number} sets {words_of(phase_settings)}"
    return None


_WORDING = "{lacking}: {reason}"  # unlike the default of Offer, the value that the user typed comes first
ONE_PROCESS: Offer[int] = Offer(
    "devices", lambda processes: processes == 1, lambda processes: f"devices={processes}", _OR_SEPARATE, _WORDING
)
ONE_MODEL: Offer[DistillConfig] = Offer(
    "distill", lambda distill: distill.name == "none", lambda distill: f"distill={distill.name}", _OR_SEPARATE, _WORDING
)
SAME_STREAMS: Offer[Phases] = Offer(
    "phases",
    lambda phases: _interrupting_phase(phases) is None,
    lambda phases: _interrupting_phase(phases) or "",
    _OR_SEPARATE,
    _WORDING,
)


def _needs_of_state(model: ModelConfig) -> Iterator[Requirement]:
    """Yields the requirements of a model that carries state."""
    carries = f"model={model.name} carries state from batch to batch"
    yield Requirement(ONE_PROCESS, "devices", f"{carries}, which stays within one process", "set devices=1")
    yield Requirement(ONE_MODEL, "distill", f"{carries}, but the other model does not", "set distill=none")
    reason = f"model={model.name} carries state along streams of text, which these keys interrupt"
    yield Requirement(SAME_STREAMS, "phases", reason, "set them for the whole run instead")


def _match_state(key: str) -> None:
    """Registers a rule that compares the requirements of carried state with a key."""

    def check(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig, value: object) -> Iterator[Problem]:
        if not reads_lanes(model, objective, data):
            return
        actual = value or int(os.environ.get("WORLD_SIZE", "1")) if key == "devices" else value
        for need in _needs_of_state(model):
            if need.offer.section == key and not need.offer.holds(actual):
                yield need.problem(actual)

    check.__qualname__ = f"carried state with {key}"
    rule(PretrainConfig, "model", "objective", "data", key)(check)


for _key in ("devices", "distill", "phases"):
    _match_state(_key)


# --- phases -------------------------------------------------------------------------------------------------------


@rule(PretrainConfig, "phases", "max_epochs", "max_steps")
def refuse_epochs_of_unequal_phases(
    phases: Phases, max_epochs: float | None, max_steps: int | None
) -> Iterator[Problem]:
    """max_epochs is refused if the length of an epoch differs between phases."""
    differing = [key for key in EPOCH_KEYS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        hint = "set max_epochs=null max_steps=10000"
        if max_steps is not None:
            hint = f"set max_epochs=null; max_steps={max_steps} ends the run"
        yield Problem(
            "max_epochs",
            f"max_epochs={max_epochs:g}: the length of an epoch changes between phases, which differ in "
            f"{', '.join(differing)}",
            hint,
        )


@rule(PretrainConfig, "phases", "max_length")
def refuse_unused_length(phases: Phases, max_length: int) -> Iterator[Problem]:
    """max_length of the run is refused if every phase sets its own, because nothing would use it."""
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        yield Problem(
            "max_length",
            f"max_length={max_length} is not used: every phase sets its own max_length",
            f"set phases.0.max_length={max_length}, or omit max_length=",
        )
