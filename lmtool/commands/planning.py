"""The plan of a run, from its learner and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import nn

from lmtool.commands.configs import FinetuneConfig, PretrainConfig, RunConfig
from lmtool.commands.peers import model_of_peers
from lmtool.commands.phases import words_of
from lmtool.commands.teachers import Known, saved_teacher
from lmtool.config.tables import build
from lmtool.costs.memory import available_bytes
from lmtool.costs.plan import VALUE_BYTES, Work, plan
from lmtool.costs.rate import measure_rate
from lmtool.costs.work import shapes_of, works_of
from lmtool.data.phases import Shares
from lmtool.distillation.configs import CodistillationConfig
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.model import ModelWithHeads
from lmtool.reporting.plan import PhasePlan, RunPlan
from lmtool.reporting.text import size
from lmtool.training.budgets import MOST_STEPS, kept_checkpoints
from lmtool.training.precision import Precision
from lmtool.types import part_of
from lmtool.weights.assemble import assemble
from lmtool.weights.loading import by_part

TrainingConfig = PretrainConfig | FinetuneConfig


def parameters_by_part(learner: nn.Module) -> dict[str, int]:
    """Parameters of a learner by part ("backbone", "heads.pooler", ...), tied ones once."""
    return {
        part: sum(tensor.numel() for tensor in tensors.values())
        for part, tensors in by_part(dict(learner.named_parameters())).items()
    }


def learning_by_role(learner: ModelWithHeads) -> dict[str, dict[str, int]]:
    """Parameters that learn, be it later in the run (`trainable`), and that are there (`total`), tied ones once: of the
    backbone, of what the tuning method added (`method`), of the heads (`head`), and of what an objective has besides.
    """
    roles = {role: {"trainable": 0, "total": 0} for role in ("backbone", "method", "head")}
    for name, parameter in learner.named_parameters():
        part = part_of(name)
        role = "method" if name in learner.added else "head" if part.startswith("heads.") else part
        counts = roles.setdefault(role, {"trainable": 0, "total": 0})
        counts["total"] += parameter.numel()
        counts["trainable"] += parameter.numel() * (name in learner.learning)
    return roles


def planned_teachers(config: RunConfig) -> list[Any]:
    """The learners of a run's teachers by their sizes, as their configurations have them. Nothing is allocated."""
    models = [Known(path, saved_teacher(path, config.offline)).model for path in config.distill.checkpoints]
    learned: Any = cast(TrainingConfig, config).learns
    with torch.device("meta"):
        return [learned.learner(build(model, config.seed), None, config.seed) for model in models if model is not None]


def _beside(config: RunConfig, teachers: Sequence[Any], *how: Any) -> Iterator[Work]:
    """The work of what runs beside the student: of teachers without gradients, of peers that learn too. how: as of the
    student."""
    for teacher in teachers if config.distill.same_batches else ():
        yield from (replace(work, passes=1) for work in works_of(teacher, *how))
    if isinstance(config.distill, CodistillationConfig):
        works = list(works_of(_planned(_of_peers(cast(TrainingConfig, config), config.distill)), *how))
        yield from works * (config.distill.learners - 1)


def _of_peers(config: TrainingConfig, distill: CodistillationConfig) -> TrainingConfig:
    return config.model_copy(update={"model": model_of_peers(config, distill)})


def _planned(config: TrainingConfig) -> BaseLearner:
    """The learner of a run by its sizes. Nothing is allocated."""
    with torch.device("meta"):
        return assemble(config, None)[0]


def require_memory(config: TrainingConfig, precision: Precision) -> None:
    """UserError where a run does not fit into memory, before any of it is there: see `too_large`."""
    problem = too_large(config, precision)
    if problem is not None:
        raise problem


def too_large(config: TrainingConfig, precision: Precision) -> UserError | None:
    """What to say where the weights of a run, their gradients and the optimizer's state do not fit into the memory that
    is available. What a step keeps beside them is not counted: it depends on the batch, which can be split."""
    cpu = torch.device("cpu")
    # Weights are made on the host, and trained on the device.
    for device, trained in {cpu: False, precision.device: True}.items():
        available = available_bytes(device)
        needed = _needed_bytes(config, trained)
        if available is not None and needed > available:
            parts = "weights, gradients and optimizer" if trained else "weights"
            sizes = f"{parts} need {size(needed)}, {size(available)} are available"
            hint = _smaller(config, partial(_fits, trained=trained, available=available))
            return UserError(f"model={config.model.name} is too large for {device}: {sizes}", hint)
    return None


def _fits(config: TrainingConfig, trained: bool, available: int) -> bool:
    return _needed_bytes(config, trained) <= available


def _needed_bytes(config: TrainingConfig, trained: bool) -> int:
    """Bytes of all that a run holds together: its own learner, its teachers, and its peers with their copies."""
    needed, distill = _bytes_of_learner(config, trained), config.distill
    needed += VALUE_BYTES * sum(map(_values_of, planned_teachers(config)))
    if not isinstance(distill, CodistillationConfig):
        return needed
    peers = _of_peers(config, distill)
    needed += (distill.learners - 1) * _bytes_of_learner(peers, trained)
    if distill.refresh_steps is not None:
        needed += _bytes_of_learner(config, False) + (distill.learners - 1) * _bytes_of_learner(peers, False)
    return needed


def _bytes_of_learner(config: TrainingConfig, trained: bool) -> int:
    """Bytes of a run's weights; trained: with their gradients and the optimizer's state."""
    learner = _planned(config)
    weights = VALUE_BYTES * sum(parameter.numel() for parameter in learner.parameters())
    weights += sum(buffer.nbytes for buffer in learner.buffers())
    tuned_by = config.tuned_by
    if tuned_by is not None and tuned_by.needs_start:
        weights += VALUE_BYTES * sum(tensor.numel() for tensor in learner.backbone.parameters() if tensor.requires_grad)
    if not trained:
        return weights
    learned = {
        name: tuple(parameter.shape) for name, parameter in learner.named_parameters() if parameter.requires_grad
    }
    moments = sum(config.optimizer.state_size(name, shape) for name, shape in learned.items())
    return weights + VALUE_BYTES * (sum(prod(shape) for shape in learned.values()) + moments)


def _values_of(learner: nn.Module) -> int:
    return sum(parameter.numel() for parameter in learner.parameters())


def _smaller(config: TrainingConfig, fits: Callable[[TrainingConfig], bool]) -> str:
    """The overrides with which a model fits: one size at its default, all that are larger than theirs at it, or as many
    layers as there is room for."""
    model = config.model
    fields = type(model).model_fields
    larger = {
        key: field.default
        for key, field in fields.items()
        if isinstance(field.default, int) and getattr(model, key) > field.default
    }

    def changed(sizes: Mapping[str, Any]) -> TrainingConfig | None:
        try:
            return config.model_copy(
                update={"model": type(model)(**{key: getattr(model, key) for key in fields} | dict(sizes))}
            )
        except ValidationError:  # a width that the other sizes do not divide
            return None

    for sizes in [*({key: default} for key, default in larger.items()), larger]:
        other = changed(sizes)
        if other is not None and fits(other):
            return "give " + " ".join(f"model.{key}={value}" for key, value in sizes.items())
    low, high = 0, model.num_layers
    while high - low > 1:
        middle = (low + high) // 2
        other = changed({"num_layers": middle})
        low, high = (middle, high) if other is not None and fits(other) else (low, middle)
    return f"give model.num_layers={low}, or a smaller model" if low else "take a smaller model: `lmtool list model`"


def saved_values(config: RunConfig, learner: nn.Module) -> int | None:
    """Parameters in a checkpoint of a run; None for all of them: a tuned run leaves some to what it starts from."""
    tuning = getattr(learner, "tuning", None)
    if tuning is None or config.checkpoint in (None, "none"):
        return None
    delta = tuning.delta(learner)
    return sum(parameter.numel() for name, parameter in learner.named_parameters() if name in delta)


def plan_of(
    config: RunConfig, learner: nn.Module, facts: Mapping[str, Any], precision: Precision
) -> tuple[RunPlan, float]:
    """The plan of a run and the epochs it makes. facts: the training loader's. Measures the machine for a third of a
    second at most."""
    single = _of_one_step(config, learner, facts, precision, _rate(config, precision))
    limits = _limits(config, single, facts["steps_per_epoch"])
    steps = max(1, round(min(*limits.values(), MOST_STEPS)))
    return _of_steps(config, single, steps), steps / facts["steps_per_epoch"]


def plan_in_phases(
    config: PretrainConfig, learner: nn.Module, facts: Sequence[Mapping[str, Any]], precision: Precision
) -> tuple[RunPlan, Shares]:
    """The plan of a run in phases, and the phases as numbers. facts: those of their loaders."""
    rate = _rate(config, precision)
    singles = [_of_one_step(form, learner, own, precision, rate) for form, own in zip(config.forms, facts, strict=True)]
    shares = Shares(
        tuple(phase["share"] for phase in config.phases),
        tuple(single.tokens_per_step for single in singles),
        tuple(single.flops_per_step for single in singles),
        tuple(form.optimizer.lr / config.optimizer.lr for form in config.forms),
    )

    def mean(budget: str) -> RunPlan:
        """A step, mean over a run that this budget ends."""
        tokens, flops = (shares.mean(values, budget) for values in (shares.tokens, shares.flops))
        largest = max(singles, key=lambda single: sum(single.memory_bytes.values()))
        return replace(largest, tokens_per_step=tokens, flops_per_token=flops / tokens)

    limits = {
        budget: _limits(config, mean(budget), facts[0]["steps_per_epoch"])[budget]
        for budget in _limits(config, singles[0], facts[0]["steps_per_epoch"])
    }
    budget = min(limits, key=lambda name: limits[name])
    steps = max(1, round(min(limits[budget], MOST_STEPS)))
    lasts = shares.last_steps(steps, budget)
    phases = tuple(
        PhasePlan(words_of(phase), phase["share"], before + 1, last, single.tokens_per_step)
        for phase, before, last, single in zip(config.phases, [0, *lasts], lasts, singles, strict=False)
    )
    whole = _of_steps(config, mean(budget), steps)
    notes = (*whole.notes, f"held-out text is read and scored as in phase {len(phases)}, the last, over the whole run")
    return replace(whole, phases=phases, notes=notes), shares


def _rate(config: RunConfig, precision: Precision) -> float:
    return measure_rate(config.model.hidden_size, config.model.inner_size, precision.name, str(precision.device))


def _of_one_step(
    config: RunConfig, learner: nn.Module, facts: Mapping[str, Any], precision: Precision, rate: float
) -> RunPlan:
    """The plan of a run of one step."""
    trained = {
        name: tuple(parameter.shape) for name, parameter in learner.named_parameters() if parameter.requires_grad
    }
    predicted = facts.get("predicted_fraction", 0.0)
    places = config.objective.places if isinstance(config, PretrainConfig) else {}
    # A task's encoder-decoder reads its text on both sides.
    how = places, predicted, facts["mean_length"], predicted or 0.5
    teachers = planned_teachers(config)
    return plan(
        shapes_of(learner, facts["mean_length"]),
        [*works_of(learner, *how), *_beside(config, teachers, *how)],
        steps=1,
        tokens_per_step=facts["tokens_per_epoch"] / facts["steps_per_epoch"],
        predicted_fraction=predicted,
        parameters=parameters_by_part(learner),
        trainable_parameters=sum(prod(shape) for shape in trained.values()),
        optimizer_values=sum(config.optimizer.state_size(*parameter) for parameter in trained.items()),
        saved_values=saved_values(config, learner),
        micro_batch_tokens=config.micro_batch_tokens,
        half=precision.name != "fp32",
        recomputes=config.gradient_checkpointing,
        body_trains=any(name.startswith("backbone.") for name in trained),
        flops_per_second=rate,
        teacher_values=sum(map(_values_of, teachers)),
    )


def _limits(config: RunConfig, single: RunPlan, steps_per_epoch: float) -> dict[str, float]:
    """The steps of a run within each of its budgets. single: the plan of one."""
    limits = {"max_steps": float(config.max_steps or "inf")}
    if config.max_epochs is not None:
        limits["max_epochs"] = config.max_epochs * steps_per_epoch
    if config.max_tokens is not None:
        limits["max_tokens"] = config.max_tokens / single.tokens_per_step
    if config.max_flops is not None:
        limits["max_flops"] = config.max_flops / single.flops_per_step
    if config.max_minutes is not None and single.seconds:
        limits["max_minutes"] = 60 * config.max_minutes / single.seconds
    return limits


def _of_steps(config: RunConfig, single: RunPlan, steps: int) -> RunPlan:
    """The plan of so many steps. single: that of one."""
    warmup = config.schedule.warmup_steps or 0
    notes = []
    if warmup >= steps:
        notes.append(f"schedule.warmup_steps={warmup:,}: in {steps:,} steps the learning rate only rises")
    return replace(single, steps=steps, checkpoints=kept_checkpoints(config, steps), notes=tuple(notes))
