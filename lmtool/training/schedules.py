"""The learning rate over the steps: pure functions (step, total) -> factor.

Steps count from 1. Warm-up: step / warmup_steps (from `warmup_start` up), so that the first step moves. After it the
decay is that of transformers' schedulers (Wolf et al. 2020, optimization.py) whose index is step - 1: the first step
after the warm-up has the full rate, and the final fraction is what a step after the last would have, so that no step
is wasted on zero.
`total` may be infinite while a budget in minutes is being measured: then a fraction of it is never over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lmtool.training.configs import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    PolynomialConfig,
    ScheduleConfig,
    WsdConfig,
)

Schedule = Callable[[int, float], float]


def warmup_steps(config: ScheduleConfig, total: float) -> float:
    """Length of the warm-up in steps, rounded; infinite where a fraction of an unknown total is asked for."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    if not config.warmup_fraction:
        return 0
    steps = config.warmup_fraction * total
    return round(steps) if math.isfinite(steps) else steps


def _rising(config: ScheduleConfig, share: float) -> float:
    """The factor after a share of the warm-up."""
    return config.warmup_start + (1 - config.warmup_start) * share


def _decaying(config: ScheduleConfig, decay: Callable[[float], float]) -> Schedule:
    """Warm-up, then `decay` of the share of the remaining steps that is done, in [0, 1]."""

    def factor(step: int, total: float) -> float:
        warmup = warmup_steps(config, total)
        if step <= warmup:
            return _rising(config, step / warmup)
        done = (step - 1 - warmup) / max(total - warmup, 1)
        return decay(min(done, 1.0))

    return factor


def build_linear(config: LinearConfig) -> Schedule:
    return _decaying(config, lambda done: 1 - (1 - config.final_fraction) * done)


def build_cosine(config: CosineConfig) -> Schedule:
    final = config.final_fraction
    return _decaying(config, lambda done: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def build_polynomial(config: PolynomialConfig) -> Schedule:
    final, power = config.final_fraction, config.power
    return _decaying(config, lambda done: final + (1 - final) * (1 - done) ** power)


def build_constant(config: ConstantConfig) -> Schedule:
    return _decaying(config, lambda done: 1.0)


def build_inverse_sqrt(config: InverseSqrtConfig) -> Schedule:
    """sqrt(warmup / step), 1 at the end of the warm-up; without one, 1 / sqrt(step).

    T5's 1 / sqrt(max(step, 10,000)) is lr 0.01, warmup_steps 10,000, warmup_start 1; the Transformer's is
    lr (H warmup)^-1/2, H its width.
    """

    def factor(step: int, total: float) -> float:
        warmup = warmup_steps(config, total)
        if step <= warmup:
            return _rising(config, step / warmup)
        return max(math.sqrt(max(warmup, 1) / step), config.final_fraction)

    return factor


def build_wsd(config: WsdConfig) -> Schedule:
    """1 between the warm-up and the last steps, which decay: the first of them has the full rate. Where the end is not
    known they have not started."""
    final = config.final_fraction

    def factor(step: int, total: float) -> float:
        warmup = warmup_steps(config, total)
        if step <= warmup:
            return _rising(config, step / warmup)
        if not math.isfinite(total):
            return 1.0
        decay: float = config.decay_steps or max(round(config.decay_fraction * total), 1)
        decay = min(decay, max(total - warmup, 1))
        done = min(max((step - 1 - (total - decay)) / decay, 0.0), 1.0)
        return 1 - (1 - final) * (math.sqrt(done) if config.decay_shape == "sqrt" else done)

    return factor
