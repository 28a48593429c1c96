"""The plan of a run, from its learner and its data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import cast

from lmtool.config.rules import violations
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.costs.activations import (
    Formats,
    backbones_of,
    copied_bytes,
    head_bytes,
    layers_of,
    lengthening,
    saved_activations,
)
from lmtool.costs.memory_of_run import (
    TrainingConfig,
    configuration_of_peers,
    parameters_by_part,
    planned_learner,
    planned_teachers,
    saved_values,
    values_of,
)
from lmtool.costs.plan import FOLDER_BYTES, ROW_BYTES, Forward, Sizes, StepCosts, Work, works_of
from lmtool.costs.rate import PlannedDevice, StepWork, this_machine
from lmtool.data.phases import PhaseFractions
from lmtool.distillation.configs import CodistillationConfig
from lmtool.learners.base import BaseLearner
from lmtool.models.base import StatefulBackbone
from lmtool.reporting.costs import PhasePlan, RunPlan
from lmtool.reporting.text import size
from lmtool.resolver.matcher import reads_lanes
from lmtool.resolver.schema.phases import words_of
from lmtool.resolver.schema.run import PretrainConfig, RunConfig
from lmtool.runs.identity import BUDGETS, budgets
from lmtool.training.budgets import MOST_STEPS, retained_checkpoints, rows_an_interval
from lmtool.training.configs import AdafactorConfig
from lmtool.training.precision import Precision


def _all_works(
    config: RunConfig,
    learner: BaseLearner,
    teachers: Sequence[BaseLearner],
    works: Callable[[BaseLearner], Iterator[Work]],
) -> Iterator[Work]:
    """The work of all models: the learner, teachers without gradients, and trained peers."""
    yield from works(learner)
    for teacher in teachers if config.distill.same_batches else ():
        yield from (replace(work, passes=1) for work in works(teacher))
    if isinstance(config.distill, CodistillationConfig):
        peer = planned_learner(configuration_of_peers(cast(TrainingConfig, config), config.distill))
        yield from list(works(peer)) * (config.distill.learners - 1)


def plan_of(
    config: RunConfig, learner: BaseLearner, metadata: JsonMapping, where: Precision | PlannedDevice
) -> RunPlan:
    """The plan of a run. metadata: the training loader's. where: a planned device, or one of this machine, which is
    measured for at most a third of a second."""
    single = _of_one_step(config, learner, metadata, _planned_device(config, where))
    limits = _limits(config, single, metadata["steps_per_epoch"])
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    return replace(_of_steps(config, single, steps), ends_by=budget, epochs=steps / metadata["steps_per_epoch"])


def plan_in_phases(
    config: PretrainConfig,
    learner: BaseLearner,
    metadata: Sequence[JsonMapping],
    where: Precision | PlannedDevice,
) -> tuple[RunPlan, PhaseFractions]:
    """The plan of a run in phases, and its phases as numbers. metadata: of the loader of each phase."""
    device = _planned_device(config, where)
    singles = [
        _of_one_step(phase, learner, loader, device) for phase, loader in zip(config.forms, metadata, strict=True)
    ]
    fractions = PhaseFractions(
        tuple(phase["share"] for phase in config.phases),
        tuple(single.tokens_per_step for single in singles),
        tuple(single.flops_per_step for single in singles),
        tuple(phase.optimizer.lr / config.optimizer.lr for phase in config.forms),
    )

    def mean(budget: str) -> RunPlan:
        """A mean step of a run that this budget ends."""
        tokens, flops = (fractions.mean(values, budget) for values in (fractions.tokens, fractions.flops))
        largest = max(singles, key=lambda single: single.needed_bytes)
        seconds = largest.step_seconds
        if seconds is not None:
            longer = flops / largest.flops_per_step
            seconds = seconds[0] * longer, seconds[1] * longer
        return replace(largest, tokens_per_step=tokens, flops_per_token=flops / tokens, step_seconds=seconds)

    limits = {
        budget: _limits(config, mean(budget), metadata[0]["steps_per_epoch"])[budget]
        for budget in _limits(config, singles[0], metadata[0]["steps_per_epoch"])
    }
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    lasts = fractions.last_steps(steps, budget)
    phases = tuple(
        PhasePlan(words_of(phase), phase["share"], before + 1, last, single.tokens_per_step)
        for phase, before, last, single in zip(config.phases, [0, *lasts], lasts, singles, strict=False)
    )
    run_plan = _of_steps(config, mean(budget), steps)
    note = f"held-out text is read and scored as in phase {len(phases)}, the last, over the whole run"
    return replace(run_plan, ends_by=budget, phases=phases, notes=(*run_plan.notes, note)), fractions


def _planned_device(config: RunConfig, where: Precision | PlannedDevice) -> PlannedDevice:
    return where if isinstance(where, PlannedDevice) else this_machine(config, where)


def _of_one_step(config: RunConfig, learner: BaseLearner, metadata: JsonMapping, device: PlannedDevice) -> RunPlan:
    """The plan of a single step."""
    predicted = metadata.get("predicted_fraction", 0.0)
    fractions = config.objective.token_fractions if isinstance(config, PretrainConfig) else {}
    # In a task, encoder and decoder read the same text: half of the tokens are outputs.
    outputs, length, teachers = predicted or 0.5, metadata["mean_length"], planned_teachers(config)
    works = list(
        _all_works(config, learner, teachers, lambda model: works_of(model, fractions, predicted, length, outputs))
    )
    tokens, devices = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"], devices_of(config)
    sizes, forward = _sizes(config, learner, teachers, device), _forward(config, learner, metadata, device)
    sharded = config.parallel == "fsdp" and devices > 1
    # Several processes on one CPU share its cores.
    share = devices if device.cuda else 1
    layers = sum(len(layers_of(backbone)) for backbone in backbones_of(learner))
    forwards = max(1.0, tokens / devices / max(forward.tokens, 1))
    work = StepWork(
        sum(work.flops for work in works) * tokens / share,
        forward.activation_bytes / max(forward.tokens, 1) * tokens / share,
        sizes.learning,
        layers * forwards,
        share,
        sharded,
        forwards,
    )
    single = StepCosts(works, tokens, sizes, forward, devices, sharded).plan()
    return replace(single, step_seconds=device.seconds(work), rate=device.rate, capacity_bytes=device.capacity_bytes)


def devices_of(config: RunConfig) -> int:
    """The number of training processes: configured, or started by torchrun."""
    return config.devices or int(os.environ.get("WORLD_SIZE", "1"))


def _sizes(config: RunConfig, learner: BaseLearner, teachers: Sequence[BaseLearner], device: PlannedDevice) -> Sizes:
    learned = {
        name: tuple(parameter.shape) for name, parameter in learner.named_parameters() if parameter.requires_grad
    }
    layers = [values_of(layer) for backbone in backbones_of(learner) for layer in set(layers_of(backbone))]
    return Sizes(
        parameters=parameters_by_part(learner),
        learning=sum(prod(shape) for shape in learned.values()),
        optimizer=sum(config.optimizer.state_size(*parameter) for parameter in learned.items()),
        in_layers=sum(layers),
        layer=max(layers, default=0),
        teachers=sum(map(values_of, teachers)),
        copied_bytes=copied_bytes(learner, _formats(config, device)),
        saved=saved_values(config, learner),
        carried=_carried(config, learner),
    )


def _carried(config: RunConfig, learner: BaseLearner) -> int:
    """Values of the state that a run carries from batch to batch, of all streams."""
    backbone = learner.backbone
    if not isinstance(config, PretrainConfig) or not isinstance(backbone, StatefulBackbone):
        return 0
    if not reads_lanes(config.model, config.objective, config.data):
        return 0
    streams = config.batch_examples or max(1, (config.batch_tokens or 0) // config.max_length)
    return streams * sum(tensor.numel() for tensor in backbone.initial_state(1).values())


def _formats(config: RunConfig, device: PlannedDevice) -> Formats:
    return Formats(device.precision.name != "fp32", device.cuda, config.gradient_checkpointing)


def _forward(config: RunConfig, learner: BaseLearner, metadata: JsonMapping, device: PlannedDevice) -> Forward:
    """The activations of one forward on a device."""
    formats, length = _formats(config, device), metadata["mean_length"]
    predicted = metadata.get("predicted_fraction", 0.0)
    tokens = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"] / devices_of(config)
    if config.micro_batch_tokens is not None:
        # The limit of a forward includes virtual tokens, the size of a step does not.
        tokens = min(tokens, config.micro_batch_tokens / lengthening(learner, length))
    if isinstance(config, PretrainConfig):
        memory = config.model.remembers * reads_lanes(config.model, config.objective, config.data)
        of_heads = [share for name, share in config.objective.token_fractions.items() if name.startswith("heads.")]
        read = min(1.0, max(of_heads, default=1.0))
    else:
        read, memory = 1.0 if learner.scores_tokens else 1 / length, 0
    activations = saved_activations(learner, formats, length, predicted or 0.5, read, memory)
    return Forward(tokens, activations, head_bytes(learner, formats, predicted * tokens), device.cuda)


def _limits(config: RunConfig, single: RunPlan, steps_per_epoch: float) -> dict[str, float]:
    """The steps of a run under each of its budgets. single: the plan of one step."""
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


def _whole_steps(limit: float) -> int:
    """The step that exhausts a budget."""
    return max(1, math.ceil(min(limit, MOST_STEPS) - 1e-9))


def _of_steps(config: RunConfig, single: RunPlan, steps: int) -> RunPlan:
    """The plan of this many steps. single: that of one."""
    evaluations = math.ceil(steps / (config.evaluate_every or math.ceil(steps / 10)))
    rows = math.ceil(steps * rows_an_interval(config.log_every, steps) / config.log_every)
    logs = FOLDER_BYTES + ROW_BYTES * (rows + evaluations)
    retained = retained_checkpoints(config, steps)
    set_budgets = budgets(config.model_dump(include=set(BUDGETS)))
    return replace(
        single, steps=steps, checkpoints=retained, log_bytes=logs, evaluations=evaluations, budgets=set_budgets,
        warnings=tuple(config.schedule.remarks(steps)),
    )  # fmt: skip


# Overrides that make a run fit into memory. Each is verified by planning the run with it.

# Numbers of devices to try.
_DEVICES = (2, 4, 8, 16, 32, 64, 128, 256)
_RECOMPUTE = {"gradient_checkpointing": True}


def what_fits(config: RunConfig, planned: Callable[[RunConfig], RunPlan]) -> tuple[str, ...]:
    """Lines of overrides with which the run fits, with their costs and memory: the smallest of each kind; kinds with
    other costs than time only if nothing else fits. planned: the plan of a configuration. Empty if nothing fits."""
    lines = []
    for kinds in (_cheap(config), _dear(config)):
        for kind in kinds:
            for text, values, costs in kind:
                changed = config.model_copy(update=dict(values))
                if _is_legal(changed) and (plan := planned(changed)).fits:
                    lines.append(f"{text}: {size(plan.needed_bytes)}{costs}")
                    break
        if lines:
            break
    return tuple(lines)


def _is_legal(config: RunConfig) -> bool:
    """Whether the rules over several keys accept the configuration."""
    values = {key: getattr(config, key) for key in type(config).model_fields}
    return not list(violations(type(config), values, running=False))


Override = tuple[str, JsonMapping, str]
"""The override as text, its values, and its costs."""


def _cheap(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Smaller forwards, recomputed layers, both: each in increasing order."""
    smaller = list(_micro_batches(config))
    yield [(text, values, ", the same result") for text, values in smaller]
    if not config.gradient_checkpointing:
        costs = ", the same result, a third more work"
        yield [
            (f"gradient_checkpointing=true {text}".strip(), {**values, **_RECOMPUTE}, costs)
            for text, values in [("", {}), *smaller]
        ]


def _dear(config: RunConfig) -> Iterator[Iterable[Override]]:
    """More devices, or an optimizer with less state, combined with the smallest forwards."""
    text, smallest = [("", {}), *_micro_batches(config)][-1]
    text, values = f"gradient_checkpointing=true {text}".strip(), {**smallest, **_RECOMPUTE}
    yield [
        (f"devices={number} parallel=fsdp {text}", {**values, "devices": number, "parallel": "fsdp"}, " a device")
        for number in _DEVICES
        if number > devices_of(config)
    ]
    values |= {"optimizer": AdafactorConfig(lr=config.optimizer.lr)}
    yield [(f"optimizer=adafactor {text}", values, ", another optimizer with its own learning rates")]


def _micro_batches(config: RunConfig) -> Iterator[tuple[str, JsonObject]]:
    """Forwards of half the tokens, a quarter, and so on, down to one sequence."""
    tokens = config.micro_batch_tokens or config.batch_tokens or (config.batch_examples or 1) * config.max_length
    while (tokens := tokens // 2) >= config.max_length:
        yield f"micro_batch_tokens={tokens}", {"micro_batch_tokens": tokens}
