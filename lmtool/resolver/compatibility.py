"""Which parts go together: objective, model and tokenizer, and what parallel=fsdp needs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from lmtool.config.rules import rule
from lmtool.config.tables import Choice, entries
from lmtool.data.configs import FORMATS
from lmtool.errors import Problem
from lmtool.learners.configs import MixtureConfig, ObjectiveConfig
from lmtool.models.configs import ModelConfig
from lmtool.resolver.schema.run import SHORTEST, FinetuneConfig, PretrainConfig, RunConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tuning.configs import TuningConfig

# Which objective goes with which model and tokenizer; what does not names the nearest that does.


Roles = Collection[str] | None
"""The roles of a vocabulary's special tokens; None where they are not known yet."""


def wrong_architecture(learned: Any, model: ModelConfig) -> str | None:
    """Why an objective or a task does not train a model of this architecture, if it does not."""
    # A task among the objectives asks for what the task itself does.
    asks = getattr(learned, "task", learned)
    takes, contextual = getattr(asks, "architectures", ()), getattr(asks, "contextual", model.contextual)
    if model.architecture in takes and contextual != model.contextual:
        trains = "models that read context" if contextual else "vectors of single tokens"
        reads = "each token by itself" if contextual else "the tokens around each"
        return f"{learned.name} trains {trains}; model={model.name} reads {reads}"
    if model.architecture in takes:
        if model.architecture == "decoder" and not model.sees_prefixes and getattr(learned, "prefixes", False):
            return f"{learned.name} lets the first tokens of a text see each other; model={model.name} reads in turn"
        if getattr(learned, "query_stream", False) and not model.query_stream:
            return f"{learned.name} trains a model with a query stream; model={model.name} has none"
        return None
    kinds = " or ".join(_article(architecture) for architecture in takes) or "no known architecture"
    return f"{learned.name} trains {kinds}; model={model.name} is {_article(model.architecture)}"


def lacks_segments(objective: ObjectiveConfig, model: ModelConfig) -> str | None:
    """Why a loss over pairs of segments has no ground in this model, if it has none."""
    pairs, layout = getattr(objective, "pairs", "none"), FORMATS.get(model.text_format)
    if pairs == "none" or (getattr(model, "segments", 0) > 1 and (layout is None or layout.segments)):
        return None
    needs = "a model that tells two segments apart by a table"
    return f"objective.pairs={pairs} needs {needs}; model={model.name} does not"


def lacks_around(model: ModelConfig, roles: Roles, text_format: str | None = None) -> str | None:
    """Why a model's texts cannot be laid out with a vocabulary, if they cannot. text_format: another one than the
    model's."""
    layout, start = FORMATS.get(text_format or model.text_format), getattr(model, "start_role", None)
    needed = [*(layout.roles if layout is not None else ()), *([start] if start else [])]
    missing = [role for role in needed if roles is not None and role not in roles]
    return f"has no {missing[0]} token, which model={model.name} puts around its texts" if missing else None


def lacks_tokens(objective: ObjectiveConfig, roles: Roles) -> str | None:
    """Why an objective cannot be built on a vocabulary, if it cannot."""
    groups = [(role,) if isinstance(role, str) else role for role in objective.roles]
    missing = [group for group in groups if roles is not None and not set(group) & set(roles)]
    return f"has no {' or '.join(missing[0])} token, which objective={objective.name} needs" if missing else None


def fits(objective: ObjectiveConfig, model: ModelConfig, roles: Roles) -> bool:
    """Whether the three go together."""
    problems = [lacks_around(model, roles)]
    for part in objective.parts():
        problems += [wrong_architecture(part, model), lacks_segments(part, model), lacks_tokens(part, roles)]
    return not any(problems)


@rule(PretrainConfig, "objective", "model")
def objective_fits_model(objective: ObjectiveConfig, model: ModelConfig) -> Iterator[Problem]:
    """An objective, and each member of a mixture, names the architectures it trains; a loss over pairs needs segments
    too."""
    for part in objective.parts():
        inside = "" if part is objective else "objective.members: "
        architecture, segments = wrong_architecture(part, model), lacks_segments(part, model)
        if architecture is not None:
            hint = _hint([*_other_objective(objective, model, None), *_other_model(objective, None)])
            yield Problem(_key(objective, part), f"{inside}objective={architecture}", hint)
        elif segments is not None:
            without = ["objective.pairs=none"] if part is objective else _other_objective(objective, model, None)
            yield Problem(_key(objective, part, ".pairs"), f"{inside or 'objective.'}{segments}", _hint(without))
        if architecture is not None or segments is not None:
            return


@rule(FinetuneConfig, "task", "model")
def task_fits_model(task: Any, model: ModelConfig) -> Iterator[Problem]:
    """A task names the architectures it can stand on."""
    for part in task.parts():
        problem = wrong_architecture(part, model)
        if problem is not None:
            inside = "task.members: " if part is not task else ""
            models = [
                f"model={default.name}" for default in _defaults("model") if default.architecture in part.architectures
            ]
            yield Problem("task", f"{inside}task={problem}", _hint(models[:1]))
            return
    if (misfit := task.misfit(model)) is not None:
        yield misfit


@rule(FinetuneConfig, "tuning", "model", "task")
def tuning_fits(tuning: TuningConfig, model: ModelConfig, task: Any) -> Iterator[Problem]:
    """A tuning method has something to edit, and to train."""
    misfit = tuning.misfit(model, task)
    if misfit is not None:
        yield misfit


@rule(FinetuneConfig, "tuning", "model", "max_length")
def virtual_tokens_fit_positions(tuning: TuningConfig, model: ModelConfig, max_length: int) -> Iterator[Problem]:
    """A text and what a tuning method puts into it have a position each, where there is a last one."""
    taken = tuning.reserved_positions(model)
    room = model.max_positions - taken
    if taken and room < max_length <= model.max_positions:  # more is another rule's
        fewer = f"a smaller tuning.length={max(1, model.max_positions - max_length)}"
        yield Problem(
            "max_length",
            f"max_length={max_length} and the {taken} virtual tokens of tuning={tuning.name} are more than "
            f"model.max_positions={model.max_positions}",
            f"give max_length={room}" if room >= SHORTEST else f"give {fewer}",
        )


@rule(FinetuneConfig, "tuning", "checkpoint", running=True)
def pretrained_weights_are_there(tuning: TuningConfig, checkpoint: str | None) -> Iterator[Problem]:
    """What holds weights at the pretrained ones has some. A trained checkpoint is read without what it started from."""
    if tuning.needs_start and checkpoint in (None, "none"):
        held: Any = getattr(tuning, "regularization", tuning)
        yield Problem(
            "tuning.regularization",
            f"tuning/regularization={held.name} holds weights at pretrained ones, and checkpoint=none has none",
            "give checkpoint=RUN, or tuning/regularization=none",
        )


@rule(FinetuneConfig, "forgetting", "checkpoint", running=True)
def something_to_forget(forgetting: str | None, checkpoint: str | None) -> Iterator[Problem]:
    """What is measured before finetuning was learned before."""
    if forgetting is not None and checkpoint in (None, "none"):
        message = f"forgetting={forgetting} measures what was pretrained, and checkpoint=none has nothing"
        yield Problem("forgetting", message, "give checkpoint=RUN, or leave forgetting= out")


@rule(RunConfig, "model", "tokenizer")
def tokenizer_fits_model(model: ModelConfig, tokenizer: TokenizerConfig) -> Iterator[Problem]:
    """The vocabulary has the special tokens that stand around the model's texts."""
    problem = lacks_around(model, tokenizer.roles)
    if problem is not None:
        yield Problem("tokenizer", f"tokenizer={tokenizer.name} {problem}", "give tokenizer=auto")


@rule(PretrainConfig, "objective", "model", "tokenizer")
def tokenizer_fits_objective(
    objective: ObjectiveConfig, model: ModelConfig, tokenizer: TokenizerConfig
) -> Iterator[Problem]:
    """The vocabulary has the special tokens that the objective puts into texts."""
    if lacks_around(model, tokenizer.roles) or any(wrong_architecture(part, model) for part in objective.parts()):
        return  # told already
    for part in objective.parts():
        problem = lacks_tokens(part, tokenizer.roles)
        if problem is not None:
            hints = ["tokenizer=auto"] if fits(objective, model, _suggested_roles(model)) else []
            hints += [*_other_objective(objective, model, tokenizer.roles), *_other_model(objective, tokenizer.roles)]
            inside = "" if part is objective else "objective.members: "
            yield Problem(_key(objective, part), f"{inside}tokenizer={tokenizer.name} {problem}", _hint(hints))
            return


def _article(architecture: str) -> str:
    return f"{'an' if architecture.startswith('enc') else 'a'} {architecture.replace('_', '-')}"


def _key(objective: ObjectiveConfig, part: ObjectiveConfig, field: str = "") -> str:
    return f"objective{field}" if part is objective else "objective.members"


def _hint(overrides: list[str]) -> str | None:
    return f"give {' or '.join(overrides)}" if overrides else None


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
    suggested: Any = Choice("tokenizer").validate(named) if named else None
    return None if suggested is None else suggested.roles


def _published_objective(model: ModelConfig) -> dict[str, Any]:
    """What objective=auto stands for."""
    return model.recipe()["pretrain"].get("objective", {})


def fitting_objectives(model: ModelConfig, roles: Roles) -> list[str]:
    """Names of the objectives, mixtures aside, that go with a model: the published one first."""
    published = _published_objective(model).get("name")
    fitting = [
        default
        for default in _defaults("objective")
        if not isinstance(default, MixtureConfig) and fits(default, model, roles)
    ]
    return [default.name for default in sorted(fitting, key=lambda default: default.name != published)]


def _other_objective(objective: ObjectiveConfig, model: ModelConfig, roles: Roles) -> list[str]:
    """The nearest objective that goes with a model, as an override; of a mixture the members that do, and others in
    the place of those that do not."""
    fitting = fitting_objectives(model, _suggested_roles(model) if roles is None else roles)
    if not isinstance(objective, MixtureConfig):
        return [f"objective={name}" for name in fitting[:1]]
    kept = [
        _written(given)
        for given, part in zip(objective.members, objective.parts(), strict=True)
        if fits(part, model, roles)
    ]
    names = {part.name for part in objective.parts() if fits(part, model, roles)}
    members = [*kept, *(name for name in fitting if name not in names)][: len(objective.members)]
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


def _written(member: Any) -> str:
    """A member of a mixture as it is typed."""
    if not isinstance(member, dict):
        return str(member)
    return "{" + ",".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in member.items()) + "}"


# What goes with parallel=fsdp: every process must run the same layers in the same order, and no process has all of a
# weight outside a forward. Each rule names the key that asks for something else, and the nearest that does not.


_OTHERWISE = "or parallel=ddp, with which each process holds all weights"


@rule(RunConfig, "parallel", "precision")
def sharded_gradients_need_no_scaler(parallel: str, precision: str) -> Iterator[Problem]:
    """The scaler of fp16 judges the gradients of one process."""
    if parallel == "fsdp" and precision == "fp16":
        yield Problem(
            "precision",
            "precision=fp16 scales the loss by what the gradients of one process are; parallel=fsdp cuts them",
            f"give precision=bf16, {_OTHERWISE}",
        )


@rule(RunConfig, "parallel", "distill")
def sharded_students_run_alike(parallel: str, distill: Any) -> Iterator[Problem]:
    """Frozen teachers read what their student reads; other modes train several models, or run parts of one."""
    if parallel != "fsdp":
        return
    if distill.name not in ("none", "standard"):
        message = f"distill={distill.name} runs models, or parts of one, by themselves, which parallel=fsdp cannot"
        yield Problem("distill", message, f"give distill=soft, {_OTHERWISE}")
    interchange = getattr(distill, "terms", {}).get("interchange")
    if interchange is not None and interchange.weight > 0:
        message = "distill.terms.interchange computes some layers of some texts again, which parallel=fsdp cannot"
        yield Problem("distill.terms", message, f"give distill.terms.interchange=null, {_OTHERWISE}")


@rule(PretrainConfig, "parallel", "objective")
def sharded_runs_have_one_objective(parallel: str, objective: Any) -> Iterator[Problem]:
    """A batch of a mixture runs the model once for each member that is in it: that differs from process to process."""
    if parallel == "fsdp" and len(objective.parts()) > 1:
        yield _mixture("objective", [part.title for part in objective.parts()])


@rule(FinetuneConfig, "parallel", "task")
def sharded_runs_have_one_task(parallel: str, task: Any) -> Iterator[Problem]:
    """As with objectives; and texts that are written have lengths of their own."""
    if parallel != "fsdp":
        return
    if len(task.parts()) > 1:
        yield _mixture("task", [part.name for part in task.parts()])
    elif task.writes_text:
        message = f"task={task.name} is scored by what the model writes, text by text; parallel=fsdp runs all in step"
        yield Problem("task", message, f"give another task or head, {_OTHERWISE}")


@rule(FinetuneConfig, "parallel", "tuning", "forgetting")
def sharded_weights_are_not_compared(parallel: str, tuning: Any, forgetting: str | None) -> Iterator[Problem]:
    """What reads weights beside a forward needs all of them."""
    if parallel != "fsdp":
        return
    schemes = [scheme.name for scheme in tuning.schemes if scheme.name != "none"]
    if schemes:
        message = f"tuning with {schemes[0]} follows single weights from step to step, which parallel=fsdp cuts"
        yield Problem("tuning", message, f"give none in its place, {_OTHERWISE}")
    if tuning.name == "adapter_fusion":
        message = f"tuning={tuning.name} holds weights close to a start, which parallel=fsdp cuts"
        yield Problem("tuning", message, f"give tuning=adapter, {_OTHERWISE}")
    if forgetting is not None:
        message = "forgetting= compares weights before and after, which parallel=fsdp cuts"
        yield Problem("forgetting", message, f"give forgetting=null, {_OTHERWISE}")


def _mixture(key: str, members: list[str]) -> Problem:
    message = f"{key} mixes {', '.join(members)}, of which a batch has some; parallel=fsdp runs all processes in step"
    return Problem(key, message, f"give one {key}, {_OTHERWISE}")
