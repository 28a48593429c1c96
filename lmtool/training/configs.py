"""How the weights move: optimizers and learning-rate schedules as configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component

Beta = Annotated[float, Field(ge=0, lt=1)]

_CLIP_NORM = "Largest norm of all gradients together; a longer one is shortened. Null: never."
_BETAS = "Decay a step of the two running means: of gradients, and of their squares."
_WARMUP_STEPS = "Steps until the full learning rate, rising linearly; counts before warmup_fraction. Null: see there."
_WARMUP_FRACTION = "Share of all steps until the full learning rate, rising linearly. Null or 0: no warm-up."
_FINAL_FRACTION = "Share of the full learning rate that is left at the end."
_FLOOR = "Share of the full learning rate that it never falls below."


class OptimizerConfig(Config):
    """How gradients become steps."""

    name: str = Field(description="The optimizer.")
    lr: float = Field(1e-4, gt=0, description="Full learning rate, before the schedule.")
    clip_norm: float | None = Field(1.0, gt=0, description=_CLIP_NORM)


@component("optimizer", "adamw", builder="lmtool.training.optimizers:build_adamw")
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); norms and biases do not decay."""

    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description=_BETAS)
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the mean square; BERT published 1e-6.")
    weight_decay: float = Field(0.01, ge=0, description="Share of a weight lost a step, times the learning rate.")


class ScheduleConfig(Config):
    """The learning rate over the steps, as a factor of the optimizer's `lr`."""

    name: str = Field(description="The schedule.")
    warmup_steps: int | None = Field(None, ge=0, description=_WARMUP_STEPS)
    warmup_fraction: float | None = Field(None, ge=0, le=1, description=_WARMUP_FRACTION)


@component("schedule", "linear", builder="lmtool.training.schedules:build_linear")
class LinearConfig(ScheduleConfig):
    """Up, then down in a straight line: BERT's."""

    name: Literal["linear"] = Field("linear", description="Warm-up, then a straight line down.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1, description=_WARMUP_FRACTION)
    final_fraction: float = Field(0.0, ge=0, le=1, description=_FINAL_FRACTION)


@component("schedule", "cosine", builder="lmtool.training.schedules:build_cosine")
class CosineConfig(ScheduleConfig):
    """Up, then down along half a cosine (Loshchilov and Hutter 2017): GPT-3's."""

    name: Literal["cosine"] = Field("cosine", description="Warm-up, then half a cosine down.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1, description=_WARMUP_FRACTION)
    final_fraction: float = Field(0.0, ge=0, le=1, description=_FINAL_FRACTION)


@component("schedule", "constant", builder="lmtool.training.schedules:build_constant")
class ConstantConfig(ScheduleConfig):
    """Up, then level."""

    name: Literal["constant"] = Field("constant", description="Warm-up, then level.")


@component("schedule", "inverse_sqrt", builder="lmtool.training.schedules:build_inverse_sqrt")
class InverseSqrtConfig(ScheduleConfig):
    """Up, then down with the root of the step (Vaswani et al. 2017): needs no end to be known."""

    name: Literal["inverse_sqrt"] = Field("inverse_sqrt", description="Warm-up, then down with the root of the step.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1, description=_WARMUP_FRACTION)
    final_fraction: float = Field(0.0, ge=0, le=1, description=_FLOOR)
