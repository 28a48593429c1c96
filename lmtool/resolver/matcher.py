"""Which sections go together: what each needs is matched with what the others offer (config/needs.py), and the refusal
names the nearest override that is legal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from lmtool.config.base import Config
from lmtool.config.needs import Component, Offer, Requirement, unmet
from lmtool.config.rules import rule
from lmtool.config.tables import Choice, entries
from lmtool.data.configs import FORMATS, DataConfig
from lmtool.distillation.configs import DistillConfig
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig, MixtureConfig, ObjectiveConfig, special_token
from lmtool.models.configs import ModelConfig
from lmtool.resolver.schema.phases import OF_A_PASS, words_of
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tuning.configs.base import offered

Roles = frozenset[str] | None
"""The roles of a vocabulary's special tokens; None where they are not known yet."""


def tokens_around(model: ModelConfig, text_format: str | None = None) -> Iterator[Requirement]:
    """The special tokens that stand around a model's texts. text_format: of another layout than the model's."""
    layout, start = FORMATS.get(text_format or model.text_format), model.start_role
    for role in (*(layout.roles if layout is not None else ()), *([start] if start else [])):
        yield Requirement(
            special_token(role), "tokenizer", f"model={model.name} puts around its texts", "give tokenizer=auto"
        )


def missing_token(needs: Iterable[Requirement], roles: Iterable[str]) -> str | None:
    """The special token that a vocabulary lacks, and what needs it: "has no mask token, which objective=mlm needs"."""
    known = frozenset(roles)
    lacking = (need for need in needs if need.offer.section == "roles" and not need.offer.holds(known))
    return next((need.problem(known).message for need in lacking), None)


def fits(learned: LearnedConfig, model: ModelConfig, roles: Roles) -> bool:
    """Whether an objective or a task goes with a model and a vocabulary."""
    if roles is not None and missing_token(tokens_around(model), roles) is not None:
        return False
    return not any(True for part in learned.parts() for _ in unmet(part, model=model, roles=roles))


# What is matched with what. Of each pair the first refusal is told.


Phases = tuple[dict[str, Any], ...]
Others = Callable[..., dict[str, Any]]


def match(command: type[Config], section: str, *keys: str, others: Others | None = None) -> None:
    """Match a section of a command, and of a mixture every member, with other keys of it. others: what the needs are
    about, from the values of the keys; as they are where it is None."""

    def check(component: Component, *values: Any) -> Iterator[Problem]:
        beside = dict(zip(keys, values, strict=True)) if others is None else others(*values)
        yield from _matched(section, component, beside)

    check.__qualname__ = f"{section} with {' and '.join(keys)}"
    rule(command, section, *keys)(check)


def _matched(section: str, component: Component, beside: dict[str, Any]) -> Iterator[Problem]:
    parts = component.parts() if isinstance(component, LearnedConfig) else (component,)
    for part in (component, *(part for part in parts if part is not component)):
        for need, other in unmet(part, **beside):
            problem = _worded(section, component, part, need.problem(other))
            replaced = part is not component and isinstance(component, ObjectiveConfig)
            if need.instead is not None and not replaced:
                yield problem
                break
            yield replace(problem, hint=_nearest(component, part, beside))
            if isinstance(component, ObjectiveConfig):
                return  # the hint replaces every member that does not go with the model
            break


def _worded(section: str, component: Component, part: Component, problem: Problem) -> Problem:
    """A member's refusal: its keys stand below `with` and its name."""
    if part is component or not isinstance(part, LearnedConfig):
        return problem

    def moved(text: str | None) -> str | None:
        return text and re.sub(rf"\b{section}\.(?!with\.|members)(?=[a-z_]+=)", f"{section}.with.{part.title}.", text)

    message = f"{section}.members: {moved(problem.message)}"
    return Problem(f"{section}.members", message, moved(problem.hint))


def _nearest(component: Component, part: Component, beside: dict[str, Any]) -> str | None:
    """The nearest legal override, looked for where a need names none."""
    overrides: list[str] = []
    if isinstance(component, ObjectiveConfig):
        overrides = [*_other_objective(component, beside["model"], None), *_other_model(component, None)]
    elif isinstance(part, TaskConfig):
        overrides = [f"model={model.name}" for model in _defaults("model") if fits(part, model, None)][:1]
    return f"give {' or '.join(overrides)}" if overrides else None


def _conflicts(section: str, command: type[Config]) -> None:
    """Match a section with itself."""

    def check(component: Component) -> Iterator[Problem]:
        parts = component.parts() if isinstance(component, LearnedConfig) else (component,)
        for part in dict.fromkeys((id(component), *map(id, parts))):
            own = component if part == id(component) else next(each for each in parts if id(each) == part)
            yield from (_worded(section, component, own, problem) for problem in own.conflicts())

    check.__qualname__ = f"conflicts of {section}"
    rule(command, section)(check)


def _learned(learned: LearnedConfig, model: ModelConfig) -> dict[str, Any]:
    return {"learned": learned, "model": model}


match(PretrainConfig, "objective", "model")
match(PretrainConfig, "objective", "parallel")
match(FinetuneConfig, "task", "model")
match(FinetuneConfig, "task", "parallel")
match(FinetuneConfig, "tuning", "model", "task", others=offered)
match(FinetuneConfig, "tuning", "parallel")
match(PretrainConfig, "distill", "objective", "model", others=_learned)
match(FinetuneConfig, "distill", "task", "model", others=_learned)
match(PretrainConfig, "distill", "phases")
match(RunConfig, "distill", "parallel")
for _section, _command in (("task", FinetuneConfig), ("tuning", FinetuneConfig), ("distill", RunConfig)):
    _conflicts(_section, _command)


@rule(RunConfig, "model", "tokenizer")
def tokenizer_fits_model(model: ModelConfig, tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """The vocabulary has the special tokens that stand around the model's texts."""
    missing = None if tokenizer.roles is None else missing_token(tokens_around(model), tokenizer.roles)
    if missing is not None:
        yield Problem("tokenizer", f"tokenizer={tokenizer.name} {missing}", "give tokenizer=auto")


@rule(PretrainConfig, "objective", "model", "tokenizer")
def tokenizer_fits_objective(
    objective: ObjectiveConfig, model: ModelConfig, tokenizer: TokenizerConfig
) -> Iterator[Problem]:
    """The vocabulary has the special tokens that the objective puts into texts."""
    roles = tokenizer.roles
    if roles is None or missing_token(tokens_around(model), roles) is not None:
        return  # told already
    if any(True for part in objective.parts() for _ in unmet(part, model=model)):
        return
    for part in objective.parts():
        missing = missing_token(part.needs(), roles)
        if missing is not None:
            overrides = ["tokenizer=auto"] if fits(objective, model, _suggested_roles(model)) else []
            overrides += [*_other_objective(objective, model, roles), *_other_model(objective, roles)]
            hint = f"give {' or '.join(overrides)}" if overrides else None
            problem = Problem("objective", f"tokenizer={tokenizer.name} {missing}", hint)
            yield _worded("objective", objective, part, problem)
            return


# The nearest override that is legal.


def _defaults(group: str) -> Iterator[Any]:
    """The components of a group with their defaults, by name; those that need a value are left out."""
    for entry in entries(group):
        try:
            yield entry.config()
        except ValidationError:
            continue


def _suggested_roles(model: ModelConfig) -> Roles:
    """The special tokens of the vocabulary that a model's recipe names; None, unknown, where it names none."""
    named = model.recipe().get("tokenizer")
    suggested = Choice("tokenizer").validate(named) if named else None
    return suggested.roles if isinstance(suggested, TokenizerConfig) else None


def _published_objective(model: ModelConfig) -> dict[str, Any]:
    """What objective=auto stands for."""
    return model.recipe()["pretrain"].get("objective", {})


def fitting_objectives(model: ModelConfig, roles: Roles) -> list[ObjectiveConfig]:
    """The objectives, mixtures aside, that go with a model: the published one first."""
    published = _published_objective(model).get("name")
    fitting = [
        default
        for default in _defaults("objective")
        if not isinstance(default, MixtureConfig) and fits(default, model, roles)
    ]
    return sorted(fitting, key=lambda default: default.name != published)


def _other_objective(objective: ObjectiveConfig, model: ModelConfig, roles: Roles) -> list[str]:
    """The nearest objective that goes with a model, as an override; of a mixture the members that do, and others in
    the place of those that do not."""
    fitting = [other.name for other in fitting_objectives(model, _suggested_roles(model) if roles is None else roles)]
    if not isinstance(objective, MixtureConfig):
        return [f"objective={name}" for name in fitting[:1]]
    legal = [
        (_written(typed), part.name)
        for typed, part in zip(objective.members, objective.parts(), strict=True)
        if fits(part, model, roles)
    ]
    names = {name for _, name in legal}
    members = [*(typed for typed, _ in legal), *(name for name in fitting if name not in names)]
    members = members[: len(objective.members)]
    weights = " objective.weights=null" if objective.weights and len(members) < len(objective.weights) else ""
    return [f"'objective.members=[{','.join(members)}]'{weights}"] if members else []


def _other_model(objective: ObjectiveConfig, roles: Roles) -> list[str]:
    """The nearest model that an objective goes with, as an override: one that was published with it, with one value
    changed at most, else the first."""
    candidates: list[tuple[bool, bool, str]] = []
    for model in _defaults("model"):
        if fits(objective, model, _suggested_roles(model)):
            more = "" if roles is None or fits(objective, model, roles) else " tokenizer=auto"
            own = _published_objective(model)
            candidates.append((own.get("name") != objective.name, len(own) > 2, f"model={model.name}{more}"))
    return [override for *_, override in sorted(candidates, key=lambda candidate: candidate[:2])[:1]]


def _written(member: str | dict[str, Any]) -> str:
    """A member of a mixture as it is typed."""
    if isinstance(member, str):
        return member
    return "{" + ",".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in member.items()) + "}"


# What goes with state that a model carries from batch to batch along streams of joined text (data/loader.py): one
# process reads all streams from the beginning of an epoch to its end.


_OTHERWISE = "or data.documents=separate, with which no state is carried"


def reads_lanes(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> bool:
    """Whether a run of these sections reads its text in lanes."""
    return bool(model.carries_state and objective.reads_lanes and data.name != "mixture" and data.documents == "joined")


@rule(PretrainConfig, "model", "objective", "data")
def something_is_remembered(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig) -> Iterator[Problem]:
    """What a memory keeps is of the tokens that an objective reuses, where it reuses some and reads on from there."""
    if objective.reuses_nothing and fits(objective, model, None) and reads_lanes(model, objective, data):
        yield Problem(
            "model.memory_length",
            f"model.memory_length={model.remembers} keeps states of reused tokens, and objective.reuse=0",
            "give objective.reuse=256 for windows of 512, or model.memory_length=0",
        )


def _phase_that_cuts(phases: Phases) -> str | None:
    """The keys of a phase by which streams would be others, or of another number, and have no state."""
    for number, phase in enumerate(phases):
        changed = {key: phase[key] for key in OF_A_PASS if key in phase}
        if changed:
            return f"phases.{number} gives {words_of(changed)}"
    return None


_WORDING = "{lacking}: {reason}"
ONE_PROCESS: Offer[int] = Offer(
    "devices", lambda processes: processes == 1, lambda processes: f"devices={processes}", _OTHERWISE, _WORDING
)
ONE_MODEL: Offer[DistillConfig] = Offer(
    "distill", lambda distill: distill.name == "none", lambda distill: f"distill={distill.name}", _OTHERWISE, _WORDING
)
SAME_STREAMS: Offer[Phases] = Offer(
    "phases",
    lambda phases: _phase_that_cuts(phases) is None,
    lambda phases: _phase_that_cuts(phases) or "",
    _OTHERWISE,
    _WORDING,
)


def _needs_of_state(model: ModelConfig) -> Iterator[Requirement]:
    """What a model needs of a run in which it carries state."""
    carries = f"model={model.name} carries state from batch to batch"
    yield Requirement(ONE_PROCESS, "devices", f"{carries}, which stays in a process", "give devices=1")
    yield Requirement(ONE_MODEL, "distill", f"{carries}, and no other model does", "give distill=none")
    reason = f"model={model.name} carries the state of lanes of text, which these keys cut"
    yield Requirement(SAME_STREAMS, "phases", reason, "leave them to the run")


def _match_state(key: str) -> None:
    def check(model: ModelConfig, objective: ObjectiveConfig, data: DataConfig, value: Any) -> Iterator[Problem]:
        if not reads_lanes(model, objective, data):
            return
        other = value or int(os.environ.get("WORLD_SIZE", "1")) if key == "devices" else value
        for need in _needs_of_state(model):
            if need.offer.section == key and not need.offer.holds(other):
                yield need.problem(other)

    check.__qualname__ = f"carried state with {key}"
    rule(PretrainConfig, "model", "objective", "data", key)(check)


for _key in ("devices", "distill", "phases"):
    _match_state(_key)


# Rules for a run in phases: what goes with them, and that none of its keys is read by nobody.


@rule(PretrainConfig, "phases", "max_epochs", "max_steps")
def passes_are_alike(phases: Phases, max_epochs: float | None, max_steps: int | None) -> Iterator[Problem]:
    """A number of passes says how long a run is where all phases have passes of one length."""
    differing = [key for key in OF_A_PASS if len({json.dumps(phase.get(key), sort_keys=True) for phase in phases}) > 1]
    if max_epochs is not None and differing:
        other = f"max_steps={max_steps} is a budget" if max_steps is not None else "with max_steps=10000 or max_tokens="
        yield Problem(
            "max_epochs",
            f"max_epochs={max_epochs:g}: a pass is not of one length in phases that differ in {', '.join(differing)}",
            f"give max_epochs=null: {other}" if max_steps is not None else f"give max_epochs=null {other}",
        )


@rule(PretrainConfig, "phases", "max_length")
def length_is_read(phases: Phases, max_length: int) -> Iterator[Problem]:
    """The run's own length is that of the phases that give none."""
    lengths = [phase.get("max_length") for phase in phases]
    default = PretrainConfig.model_fields["max_length"].default
    if phases and None not in lengths and max_length not in (default, *lengths):
        yield Problem(
            "max_length",
            f"max_length={max_length} is read by no phase: each has its own",
            f"give phases.0.max_length={max_length}, or leave max_length= out",
        )
