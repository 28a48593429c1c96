"""The plan of a run, from its learner and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from lmtool.commands.configs import PretrainConfig, RunConfig
from lmtool.costs.plan import plan
from lmtool.costs.rate import measure_rate
from lmtool.costs.work import shapes_of, works_of
from lmtool.reporting.plan import Plan
from lmtool.training.precision import Precision
from lmtool.weights.loading import by_part

KEPT_CHECKPOINTS = 3  # two newest and the best


def parameters_by_part(learner: nn.Module) -> dict[str, int]:
    """Parameters of a learner by part ("backbone", "heads.pooler", ...), tied ones once."""
    return {
        part: sum(one.numel() for one in tensors.values())
        for part, tensors in by_part(dict(learner.named_parameters())).items()
    }


def plan_of(
    config: RunConfig, learner: nn.Module, facts: Mapping[str, Any], precision: Precision
) -> tuple[Plan, float]:
    """The plan of a run and the epochs it makes. facts: the training loader's. Measures the machine for about a third
    of a second."""
    steps_per_epoch, tokens = facts["steps_per_epoch"], facts["tokens_per_epoch"]
    model = config.model
    trained = {name: tuple(one.shape) for name, one in learner.named_parameters() if one.requires_grad}
    rate = measure_rate(model.hidden_size, model.inner_size, precision.name, str(precision.device))
    predicted = facts.get("predicted_fraction", 0.0)
    places = config.objective.places if isinstance(config, PretrainConfig) else {}
    # A task's encoder-decoder reads its text on both sides.
    works = list(works_of(learner, places, predicted, facts["mean_length"], predicted or 0.5))

    def of(steps: int) -> Plan:
        return plan(
            shapes_of(learner),
            works,
            steps=steps,
            tokens_per_step=tokens / steps_per_epoch,
            predicted_fraction=predicted,
            parameters=parameters_by_part(learner),
            trainable_parameters=sum(prod(shape) for shape in trained.values()),
            optimizer_values=sum(config.optimizer.state_size(*one) for one in trained.items()),
            micro_batch_tokens=config.micro_batch_tokens,
            half=precision.name != "fp32",
            body_trains=any(name.startswith("backbone.") for name in trained),
            checkpoints=KEPT_CHECKPOINTS,
            flops_per_second=rate,
        )

    one = of(1)
    limits = [config.max_steps or float("inf")]
    if config.max_epochs is not None:
        limits.append(config.max_epochs * steps_per_epoch)
    if config.max_tokens is not None:
        limits.append(config.max_tokens / one.tokens_per_step)
    if config.max_flops is not None:
        limits.append(config.max_flops / one.flops_per_step)
    if config.max_minutes is not None and one.seconds:
        limits.append(60 * config.max_minutes / one.seconds)
    steps = max(1, round(min(limits)))
    warmup = config.schedule.warmup_steps or 0
    notes = []
    if warmup >= steps:
        notes.append(f"schedule.warmup_steps={warmup:,}: in {steps:,} steps the learning rate only rises")
    return replace(of(steps), notes=tuple(notes)), steps / steps_per_epoch
