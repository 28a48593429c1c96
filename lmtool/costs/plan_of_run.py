"""The plan of a run: its steps, FLOPs, memory, disk space and time, estimated from its learner and its data.

A plan is first made for one step and then extended to all steps. This module also finds overrides with which a run fits
into memory (`what_fits`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import cast

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.costs.activations import (
    backbones_of,
    copied_bytes,
    head_bytes,
    layers_of,
    lengthening,
    saved_activations,
)
from lmtool.costs.attention import Formats
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
from lmtool.learners.rules import reads_lanes
from lmtool.models.base import StatefulBackbone
from lmtool.reporting.costs import PhasePlan, RunPlan
from lmtool.reporting.text import size
from lmtool.resolver.commands import PretrainConfig, RunConfig, words_of_phase
from lmtool.resolver.rules import violations
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
    """Yields the work of all models in a step: the learner, teachers without gradients, and trained peers. config: the
    run's configuration. learner: the run's learner. teachers: the run's teachers. works: yields the work of the parts
    of one model."""
    yield from works(learner)
    for teacher in teachers if config.distill.same_batches else ():
        yield from (replace(work, passes=1) for work in works(teacher))
    if isinstance(config.distill, CodistillationConfig):
        peer = planned_learner(configuration_of_peers(cast(TrainingConfig, config), config.distill))
        yield from list(works(peer)) * (config.distill.learners - 1)


def plan_of(
    config: RunConfig, learner: BaseLearner, metadata: JsonMapping, target: Precision | PlannedDevice
) -> RunPlan:
    """Plans a run without phases.

    Args:
        config: The run's configuration.
        learner: The run's learner.
        metadata: The metadata of the training loader.
        target: The device to plan for; or the device and number format of this machine, whose speed is then measured
            for at most a third of a second.
    """
    single = _plan_one_step(config, learner, metadata, _planned_device(config, target))
    limits = _step_limits(config, single, metadata["steps_per_epoch"])
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    return replace(_extend_plan(config, single, steps), ends_by=budget, epochs=steps / metadata["steps_per_epoch"])


def plan_in_phases(
    config: PretrainConfig,
    learner: BaseLearner,
    metadata: Sequence[JsonMapping],
    target: Precision | PlannedDevice,
) -> tuple[RunPlan, PhaseFractions]:
    """Plans a run with phases.

    Args:
        config: The run's configuration.
        learner: The run's learner.
        metadata: The metadata of each phase's loader.
        target: See `plan_of`.

    Returns:
        The plan, and the numbers from which the length of each phase is computed.
    """
    device = _planned_device(config, target)
    singles = [
        _plan_one_step(phase, learner, loader, device)
        for phase, loader in zip(config.phase_configs, metadata, strict=True)
    ]
    fractions = PhaseFractions(
        tuple(phase["share"] for phase in config.phases),
        tuple(single.tokens_per_step for single in singles),
        tuple(single.flops_per_step for single in singles),
        tuple(phase.optimizer.lr / config.optimizer.lr for phase in config.phase_configs),
    )

    def plan_mean_step(budget: str) -> RunPlan:
        """Returns the plan of a mean step of the run if a budget ends it: budgets weight the phases differently."""
        tokens, flops = (fractions.mean(values, budget) for values in (fractions.tokens, fractions.flops))
        largest = max(singles, key=lambda single: single.needed_bytes)
        seconds = largest.step_seconds
        if seconds is not None:
            ratio = flops / largest.flops_per_step
            seconds = seconds[0] * ratio, seconds[1] * ratio
        return replace(largest, tokens_per_step=tokens, flops_per_token=flops / tokens, step_seconds=seconds)

    limits = {
        budget: _step_limits(config, plan_mean_step(budget), metadata[0]["steps_per_epoch"])[budget]
        for budget in _step_limits(config, singles[0], metadata[0]["steps_per_epoch"])
    }
    budget = min(limits, key=lambda name: limits[name])
    steps = _whole_steps(limits[budget])
    last_steps = fractions.last_steps(steps, budget)
    phases = tuple(
        PhasePlan(words_of_phase(phase), phase["share"], before + 1, last, single.tokens_per_step)
        for phase, before, last, single in zip(config.phases, [0, *last_steps], last_steps, singles, strict=False)
    )
    run_plan = _extend_plan(config, plan_mean_step(budget), steps)
    note = f"throughout the run, held-out text is processed with the settings of the last phase, phase {len(phases)}"
    return replace(run_plan, ends_by=budget, phases=phases, notes=(*run_plan.notes, note)), fractions


def _planned_device(config: RunConfig, target: Precision | PlannedDevice) -> PlannedDevice:
    if isinstance(target, PlannedDevice):
        return target
    return this_machine(config.model.hidden_size, config.model.inner_size, target)


def _plan_one_step(config: RunConfig, learner: BaseLearner, metadata: JsonMapping, device: PlannedDevice) -> RunPlan:
    """Plans a single step of a run. metadata: the metadata of the training loader."""
    predicted = metadata.get("predicted_fraction", 0.0)
    fractions = config.objective.token_fractions if isinstance(config, PretrainConfig) else {}
    # In a task without predicted tokens, encoder and decoder read the same text: half of the tokens are the decoder's.
    decoder_fraction, length, teachers = predicted or 0.5, metadata["mean_length"], planned_teachers(config)
    works = list(
        _all_works(
            config, learner, teachers, lambda model: works_of(model, fractions, predicted, length, decoder_fraction)
        )
    )
    tokens, devices = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"], devices_of(config)
    sizes, forward = _sizes(config, learner, teachers, device), _forward(config, learner, metadata, device)
    sharded = config.parallel == "fsdp" and devices > 1
    # Several processes on one CPU share its cores, so a step takes as long as on one device.
    computing_devices = devices if device.cuda else 1
    layers = sum(len(layers_of(backbone)) for backbone in backbones_of(learner))
    forwards = max(1.0, tokens / devices / max(forward.tokens, 1))
    work = StepWork(
        sum(work.flops for work in works) * tokens / computing_devices,
        forward.activation_bytes / max(forward.tokens, 1) * tokens / computing_devices,
        sizes.trainable_parameters,
        layers * forwards,
        computing_devices,
        sharded,
        forwards,
    )
    single = StepCosts(works, tokens, sizes, forward, devices, sharded).plan()
    return replace(
        single,
        step_seconds=device.estimate_seconds(work),
        time_source=device.time_source,
        capacity_bytes=device.capacity_bytes,
    )


def devices_of(config: RunConfig) -> int:
    """Returns the number of training processes: the configured number, or that of the processes that torchrun
    started."""
    return config.devices or int(os.environ.get("WORLD_SIZE", "1"))


def _sizes(config: RunConfig, learner: BaseLearner, teachers: Sequence[BaseLearner], device: PlannedDevice) -> Sizes:
    """Counts the values that a training process of the run holds."""
    trainable_shapes = {
        name: tuple(parameter.shape) for name, parameter in learner.named_parameters() if parameter.requires_grad
    }
    layers = [values_of(layer) for backbone in backbones_of(learner) for layer in set(layers_of(backbone))]
    return Sizes(
        parameters=parameters_by_part(learner),
        trainable_parameters=sum(prod(shape) for shape in trainable_shapes.values()),
        optimizer_values=sum(config.optimizer.state_size(*parameter) for parameter in trainable_shapes.items()),
        layer_parameters=sum(layers),
        largest_layer=max(layers, default=0),
        teacher_parameters=sum(map(values_of, teachers)),
        copied_bytes=copied_bytes(learner, _formats(config, device)),
        saved_parameters=saved_values(config, learner),
        carried_values=_carried_values(config, learner),
    )


def _carried_values(config: RunConfig, learner: BaseLearner) -> int:
    """Counts the values of the state that a run carries from batch to batch, over all streams of text."""
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
    formats, length = _formats(config, device), metadata["mean_length"]
    predicted = metadata.get("predicted_fraction", 0.0)
    tokens = metadata["tokens_per_epoch"] / metadata["steps_per_epoch"] / devices_of(config)
    if config.micro_batch_tokens is not None:
        # The limit of a forward pass includes virtual tokens, but the number of tokens per step does not.
        tokens = min(tokens, config.micro_batch_tokens / lengthening(learner, length))
    if isinstance(config, PretrainConfig):
        memory = config.model.max_memory_length * reads_lanes(config.model, config.objective, config.data)
        head_fractions = [
            value for name, value in config.objective.token_fractions.items() if name.startswith("heads.")
        ]
        read_fraction = min(1.0, max(head_fractions, default=1.0))
    else:
        read_fraction, memory = 1.0 if learner.scores_tokens else 1 / length, 0
    activations = saved_activations(learner, formats, length, predicted or 0.5, read_fraction, memory)
    return Forward(tokens, activations, head_bytes(learner, formats, predicted * tokens), device.cuda)


def _step_limits(config: RunConfig, single: RunPlan, steps_per_epoch: float) -> dict[str, float]:
    """Returns the number of steps after which each budget of a run is exhausted. single: the plan of one step."""
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
    """Rounds a limit up to whole steps; the tolerance keeps rounding errors from adding a step."""
    return max(1, math.ceil(min(limit, MOST_STEPS) - 1e-9))


def _extend_plan(config: RunConfig, single: RunPlan, steps: int) -> RunPlan:
    evaluations = math.ceil(steps / (config.evaluate_every or math.ceil(steps / 10)))
    rows = math.ceil(steps * rows_an_interval(config.log_every, steps) / config.log_every)
    logs = FOLDER_BYTES + ROW_BYTES * (rows + evaluations)
    retained = retained_checkpoints(config, steps)
    set_budgets = budgets(config.model_dump(include=set(BUDGETS)))
    return replace(
        single, steps=steps, checkpoints=retained, log_bytes=logs, evaluations=evaluations, budgets=set_budgets,
        warnings=tuple(config.schedule.remarks(steps)),
    )  # fmt: skip


# Overrides with which a run fits into memory. Each override is verified by a plan of the run that has it.

# The numbers of devices to try.
_DEVICES = (2, 4, 8, 16, 32, 64, 128, 256)
_RECOMPUTE = {"gradient_checkpointing": True}


def what_fits(config: RunConfig, plan_run: Callable[[RunConfig], RunPlan]) -> tuple[str, ...]:
    """Finds overrides with which a run fits into memory.

    It returns the smallest change of each kind that fits. Kinds that cost more than time are only tried if no other
    kind fits. config: the run's configuration. plan_run: plans a configuration. Returns lines for the screen, each with
    the overrides, the memory that the run then needs, and what the overrides cost. Empty if nothing fits.
    """
    lines = []
    for kinds in (_overrides_costing_time(config), _overrides_changing_run(config)):
        for kind in kinds:
            for text, values, costs in kind:
                candidate = config.model_copy(update=dict(values))
                if _is_legal(candidate) and (plan := plan_run(candidate)).fits:
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
"""Overrides as text, their values by key, and what they cost, as text."""


def _overrides_costing_time(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Yields the kinds of overrides that leave the result unchanged: smaller forward passes, and recomputed layers
    without or with smaller forward passes. Within a kind, smaller changes come first."""
    smaller = list(_micro_batches(config))
    yield [(text, values, ", the same result") for text, values in smaller]
    if not config.gradient_checkpointing:
        costs = ", the same result, a third more work"
        yield [
            (f"gradient_checkpointing=true {text}".strip(), {**values, **_RECOMPUTE}, costs)
            for text, values in [("", {}), *smaller]
        ]


def _overrides_changing_run(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Yields the kinds of overrides that need more devices, or another optimizer with less state, each combined with
    the smallest forward passes and recomputed layers."""
    text, smallest = [("", {}), *_micro_batches(config)][-1]
    text, values = f"gradient_checkpointing=true {text}".strip(), {**smallest, **_RECOMPUTE}
    yield [
        (f"devices={number} parallel=fsdp {text}", {**values, "devices": number, "parallel": "fsdp"}, " per device")
        for number in _DEVICES
        if number > devices_of(config)
    ]
    values |= {"optimizer": AdafactorConfig(lr=config.optimizer.lr)}
    yield [(f"optimizer=adafactor {text}", values, ", another optimizer with its own learning rates")]


def _micro_batches(config: RunConfig) -> Iterator[tuple[str, JsonObject]]:
    """Yields overrides for forward passes of half the tokens, a quarter, and so on, down to one sequence."""
    tokens = config.micro_batch_tokens or config.batch_tokens or (config.batch_examples or 1) * config.max_length
    while (tokens := tokens // 2) >= config.max_length:
        yield f"micro_batch_tokens={tokens}", {"micro_batch_tokens": tokens}
