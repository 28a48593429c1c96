"""Optimizers and learning-rate schedules as configuration, and the schedules themselves. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from math import prod
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.registry import component
from lmtool.system.terminal import counted

Beta = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
"""How several processes train one model."""

Schedule = Callable[[int, float], float]
"""A function (step, total) -> factor of the learning rate. Steps count from 1. `total` is the number of steps of the
run; infinite while a budget in minutes is being measured."""

# A step of these optimizers moves a weight by about the rate, or by the rate times the weight's size.
_MAX_LR = 100
_BETAS = "decay rates of the running means of gradients and of their squares"
_EPSILON = "added to the root of the second moment"
_WEIGHT_DECAY = "decoupled weight decay, scaled by the learning rate"
_FINAL_FRACTION = "final learning rate as a fraction of the peak rate"


_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMB]?)(w?)")
_UNITS = {"B": 10**9, "M": 10**6, "K": 10**3}


class Amount(NamedTuple):
    """An amount of training text. number: of tokens or words. words: whether it counts words."""

    number: int
    words: bool

    @classmethod
    def of(cls, text: int | str) -> Amount:
        """Reads 500K, 1.5M, 2B or a whole number, in tokens; with w at the end in words. Raises ValueError for any
        other text."""
        match = _AMOUNT.fullmatch(str(text))
        number = Decimal(match[1]) * _UNITS.get(match[2], 1) if match else Decimal(0)
        if match is None or number < 1 or number != int(number):
            raise ValueError(f"{text} is not an amount of text")
        return cls(int(number), bool(match[3]))

    @property
    def name(self) -> str:
        """The amount as 500K, 1.5M or 2Bw: never a plain number, which is a step in RUN@STEP."""
        unit = next((unit for unit, size in _UNITS.items() if self.number >= size), "K")
        value = f"{Decimal(self.number) / _UNITS[unit]:f}"
        return f"{value.rstrip('0').rstrip('.') if '.' in value else value}{unit}{'w' if self.words else ''}"


def amounts_of(texts: Sequence[int | str] | None) -> tuple[Amount, ...]:
    """Returns the amounts of `checkpoint_at`, see `Amount.of`."""
    return tuple(map(Amount.of, texts or ()))


class BatchScaling(Config):
    """How the learning rate follows the batch, from the batch that `optimizer.lr` is for: in proportion (Goyal et al.
    2017), or with the square root (Krizhevsky 2014; Hoffer et al. 2017; You et al. 2020 for LAMB)."""

    rule: Literal["linear", "sqrt"] = Field(description="linear: in proportion; sqrt: with the square root")
    examples: int | None = Field(None, ge=1, description="the batch of optimizer.lr, for batch_examples=")
    tokens: int | None = Field(None, ge=1, description="the same in tokens, for batch_tokens=")

    def factor(self, batch_examples: int | None, batch_tokens: int | None) -> float:
        """Returns the factor of the learning rate for a batch. Raises ValueError if its unit is not the reference's."""
        batch, reference = (batch_tokens, self.tokens) if self.examples is None else (batch_examples, self.examples)
        if batch is None or reference is None:
            raise ValueError("the batch and the reference have different units")
        return math.sqrt(batch / reference) if self.rule == "sqrt" else batch / reference

    @model_validator(mode="after")
    def _has_one_reference(self) -> BatchScaling:
        if (self.examples is None) == (self.tokens is None):
            raise ValueError("write {rule: " + self.rule + ", examples: 256}, or tokens: instead of examples:")
        return self


class OptimizerConfig(Config):
    """Base class of optimizers."""

    name: str = Field(description="The optimizer.")
    lr: float = Field(1e-4, gt=0, le=_MAX_LR, description="peak learning rate")
    batch_scaling: BatchScaling | None = Field(
        None,
        description="how the learning rate follows the batch: {rule: linear, examples: 256}; null: not at all. rule: "
        "linear (Goyal et al. 2017) or sqrt (LAMB: You et al. 2020); examples or tokens: the batch that lr is for",
    )
    clip_norm: float | None = Field(1.0, gt=0, description="maximum global gradient norm; null: no clipping")
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="factor on the learning rate from each layer to the one below it; 1: none; ELECTRA 0.8. The head "
        "has the full rate, the embeddings the lowest; ULMFiT 0.385",
    )

    def state_size(self, name: str, shape: tuple[int, ...]) -> int:
        """Returns the number of values stored for a parameter between steps: two running means of its shape."""
        return 2 * prod(shape)

    def scaled(self, batch_examples: int | None, batch_tokens: int | None) -> OptimizerConfig:
        """Returns the same optimizer with the learning rate for a batch, which no longer follows it."""
        if self.batch_scaling is None:
            return self
        rate = self.lr * self.batch_scaling.factor(batch_examples, batch_tokens)
        return self.model_copy(update={"lr": rate, "batch_scaling": None})

    def remarks(self, batch_examples: int | None, batch_tokens: int | None) -> Iterator[str]:
        """The learning rate for a batch, if it follows the batch."""
        if self.batch_scaling is not None:
            rule, batch = self.batch_scaling, self.batch_scaling.examples or self.batch_scaling.tokens
            unit = "examples" if rule.tokens is None else "tokens"
            yield (
                f"learning rate {self.scaled(batch_examples, batch_tokens).lr:.3g}: optimizer.lr={self.lr:g} is for "
                f"{batch:,} {unit} (optimizer.batch_scaling, {rule.rule})"
            )


@component("optimizer", "adamw", builder="lmtool.training.update_rules:build_adamw")
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); norms and biases do not decay.

    With `scale_parameter` it is the optimizer of nanoT5 (Nawrot 2023), whose learning rate is 0.02.
    """

    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description=_BETAS)
    epsilon: float = Field(1e-8, gt=0, le=1, description="added to the root of the second moment; BERT published 1e-6")
    weight_decay: float = Field(0.01, ge=0, description=_WEIGHT_DECAY)
    scale_parameter: bool = Field(
        False,
        description="multiply lr by the root mean square of each parameter (nanoT5, with lr=0.02). The root mean "
        "square is at least 1e-3",
    )


@component("optimizer", "adam", builder="lmtool.training.update_rules:build_adam")
class AdamConfig(OptimizerConfig):
    """Adam (Kingma and Ba 2015) with an L2 penalty, which is part of the gradient and so averaged and scaled with it.

    The Transformer's optimizer (Vaswani et al. 2017: betas 0.9 and 0.98, epsilon 1e-9, no penalty). The Adam in the
    code of GPT-1 and fairseq has decoupled weight decay: that is `adamw`.
    """

    name: Literal["adam"] = Field("adam", description="Adam with an L2 penalty.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description=_BETAS)
    epsilon: float = Field(1e-8, gt=0, le=1, description=_EPSILON)
    l2: float = Field(0.0, ge=0, description="L2 penalty, added to the gradient; not applied to norms and biases")


@component("optimizer", "adafactor", builder="lmtool.training.update_rules:Adafactor")
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018), T5's optimizer: it stores only row and column means of squared gradients.

    The paper's step sizes min(1e-2, 1/sqrt(step)) are a schedule: `schedule=inverse_sqrt schedule.warmup_steps=10000
    schedule.warmup_start=1` at the default learning rate. With warmup_start=0 this is the paper's schedule with a
    warm-up.
    """

    name: Literal["adafactor"] = Field("adafactor", description="Adam with a factored second moment.")
    lr: float = Field(
        1e-2, gt=0, le=100, description="peak learning rate; relative to the weights with scale_parameter"
    )
    clip_norm: float | None = Field(None, gt=0)
    scale_parameter: bool = Field(
        True,
        description="multiply lr by the root mean square of each parameter, at least 1e-3. Updates are then relative "
        "to the size of the parameter",
    )
    clip_threshold: float = Field(
        1.0, gt=0, description="maximum root mean square of one parameter's update, before lr"
    )
    decay_rate: float = Field(0.8, gt=0, description="decay of the squared-gradient mean: 1 - step^-decay_rate")
    beta1: Beta | None = Field(None, description="momentum: decay of the running mean of updates; null: no momentum")
    epsilon: float = Field(1e-30, gt=0, le=1, description="added to the squared gradients")
    weight_decay: float = Field(
        0.0, ge=0, description="decoupled weight decay, scaled by the parameter's learning rate"
    )

    def state_size(self, name: str, shape: tuple[int, ...]) -> int:
        """Counts the means of squares, for a matrix by row and by column; with beta1 also the mean of the updates."""
        means = prod(shape[:-1]) + prod((*shape[:-2], shape[-1])) if len(shape) > 1 else prod(shape)
        return means + (0 if self.beta1 is None else prod(shape))


@component("optimizer", "stable_adamw", builder="lmtool.training.update_rules:StableAdamW")
class StableAdamWConfig(OptimizerConfig):
    """StableAdamW (Wortsman et al. 2023): AdamW with Adafactor's update clipping; ModernBERT's optimizer."""

    name: Literal["stable_adamw"] = Field("stable_adamw", description="AdamW with clipped updates.")
    lr: float = Field(8e-4, gt=0, le=_MAX_LR, description="peak learning rate; ModernBERT's")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description=_BETAS)
    epsilon: float = Field(1e-6, gt=0, le=1, description=_EPSILON)
    weight_decay: float = Field(0.0125, ge=0, description=_WEIGHT_DECAY)
    clip_norm: float | None = Field(None, gt=0)


@component("optimizer", "lamb", builder="lmtool.training.update_rules:Lamb")
class LambConfig(OptimizerConfig):
    """LAMB (You et al. 2020), for very large batches: each matrix moves by the learning rate times its own norm.

    Norms and biases, which do not decay, take plain Adam steps, as in the published code.
    """

    name: Literal["lamb"] = Field("lamb", description="Adam with steps in proportion to each matrix's norm.")
    # Table in the paper's appendix: 6.25e-4 for 512 examples, times the root of 2 for every doubling.
    lr: float = Field(
        6.25e-4,
        gt=0,
        le=_MAX_LR,
        description="peak learning rate; the paper's at 512 examples, x1.41 with each doubling",
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description=_BETAS)
    epsilon: float = Field(1e-6, gt=0, le=1, description=_EPSILON)
    weight_decay: float = Field(
        0.01, ge=0, description="fraction of a weight added to its update, before the update is scaled"
    )


@component("optimizer", "muon", builder="lmtool.training.update_rules:build_muon")
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) on the matrices of the layers, AdamW on everything else.

    The mean gradient of a matrix is made nearly orthogonal. Steps are as large as those of AdamW (Liu et al. 2025), so
    it uses AdamW's learning rate and weight decay.
    """

    name: Literal["muon"] = Field("muon", description="Orthogonal steps for the matrices of the layers.")
    lr: float = Field(6e-4, gt=0, le=_MAX_LR, description="peak learning rate of both parts; the one tuned for AdamW")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay of the running mean of gradients")
    nesterov: bool = Field(True, description="Nesterov momentum")
    newton_schulz_steps: int = Field(
        5, ge=1, lt=100, description="Newton-Schulz iterations that orthogonalize an update"
    )
    weight_decay: float = Field(0.1, ge=0, description=_WEIGHT_DECAY)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description=f"AdamW: {_BETAS}")
    epsilon: float = Field(1e-8, gt=0, le=1, description="AdamW: added to the root of the second moment")

    def state_size(self, name: str, shape: tuple[int, ...]) -> int:
        """Counts the mean gradient of a matrix in a layer, and AdamW's two means of any other parameter."""
        return prod(shape) if is_hidden_matrix(name, len(shape)) else super().state_size(name, shape)


def is_hidden_matrix(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix between two hidden states: two-dimensional, in a layer, and not a table such as
    that of relative positions."""
    path = name.split(".")
    return dimensions == 2 and "layers" in path and not {"embed", "position"} & set(path)


class ScheduleConfig(Config):
    """Base class of learning-rate schedules: a warm-up, then a decay.

    The warm-up rises from `warmup_start` to the full rate at its last step. The first step after the warm-up has the
    full rate too. The final rate would be reached one step after the last one, so that no step has a rate of zero
    (transformers' schedulers at step - 1; Wolf et al. 2020, optimization.py).
    """

    name: str = Field(description="The schedule.")
    warmup_steps: int | None = Field(None, ge=0, description="warmup steps; takes precedence over warmup_fraction")
    warmup_fraction: float | None = Field(
        None, ge=0, le=1, description="warmup as a fraction of all steps; null or 0: no warmup"
    )
    warmup_start: float = Field(
        0.0, ge=0, le=1, description="fraction of the peak rate at which warmup starts; 1: constant rate until its end"
    )

    def remarks(self, steps: int) -> Iterator[str]:
        """Warnings about a run of `steps` steps that is too short for the schedule."""
        warmup = self.warmup_steps or 0
        if warmup >= steps and self.warmup_start < 1:
            fraction = self.warmup_start + (1 - self.warmup_start) * steps / warmup
            yield (
                f"schedule.warmup_steps={warmup}: in a run of {counted(steps, 'step')} the learning rate only rises, "
                f"to {fraction:.2g} of optimizer.lr"
            )

    def factor(self, step: int, total: float) -> float:
        """Returns the factor of the learning rate at a step (see `Schedule`)."""
        warmup: float = self.warmup_steps or 0
        if self.warmup_steps is None and self.warmup_fraction:
            warmup = self.warmup_fraction * total
            warmup = round(warmup) if math.isfinite(warmup) else warmup
        if step <= warmup:
            return self.warmup_start + (1 - self.warmup_start) * (step / warmup)
        return self.after_warmup(step, warmup, total)

    def after_warmup(self, step: int, warmup: float, total: float) -> float:
        """Returns the factor of a step after `warmup` steps."""
        return self.decayed(min((step - 1 - warmup) / max(total - warmup, 1), 1.0))

    def decayed(self, progress: float) -> float:
        """Returns the factor when a fraction of the steps after the warm-up is done, in [0, 1]."""
        return 1.0


def schedule(config: ScheduleConfig) -> Schedule:
    """Returns the function that a configuration describes."""
    return config.factor


class FinalFractionConfig(ScheduleConfig):
    """Base class of schedules that decay to a final rate; by default with a warm-up of a tenth of the steps."""

    warmup_fraction: float | None = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1, description=_FINAL_FRACTION)


@component("schedule", "linear", builder="lmtool.training.configs:schedule")
class LinearConfig(FinalFractionConfig):
    """Warm-up, then a straight line down: BERT's schedule."""

    name: Literal["linear"] = Field("linear", description="Warm-up, then a straight line down.")

    def decayed(self, progress: float) -> float:
        return 1 - (1 - self.final_fraction) * progress


@component("schedule", "cosine", builder="lmtool.training.configs:schedule")
class CosineConfig(FinalFractionConfig):
    """Warm-up, then half a cosine down (Loshchilov and Hutter 2017): GPT-3's schedule."""

    name: Literal["cosine"] = Field("cosine", description="Warm-up, then half a cosine down.")

    def decayed(self, progress: float) -> float:
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@component("schedule", "polynomial", builder="lmtool.training.configs:schedule")
class PolynomialConfig(FinalFractionConfig):
    """Warm-up, then down with a power of the remaining fraction of the steps: fairseq's and transformers'."""

    name: Literal["polynomial"] = Field("polynomial", description="Warm-up, then down with a power of what is left.")
    power: float = Field(
        1.0,
        gt=0,
        description="exponent applied to the remaining fraction of the steps; 1: linear; above 1: steep at first",
    )

    def decayed(self, progress: float) -> float:
        return self.final_fraction + (1 - self.final_fraction) * (1 - progress) ** self.power


@component("schedule", "constant", builder="lmtool.training.configs:schedule")
class ConstantConfig(ScheduleConfig):
    """Warm-up, then a constant rate."""

    name: Literal["constant"] = Field("constant", description="Warm-up, then level.")


@component("schedule", "inverse_sqrt", builder="lmtool.training.configs:schedule")
class InverseSqrtConfig(FinalFractionConfig):
    """Warm-up, then down with the square root of the step (Vaswani et al. 2017), independent of the run's length.

    The factor is sqrt(warmup / step), or 1 / sqrt(step) without a warm-up. T5's 1 / sqrt(max(step, 10,000)) is lr 0.01,
    warmup_steps 10,000, warmup_start 1; the Transformer's is lr (H warmup)^-1/2 for the width H.
    """

    name: Literal["inverse_sqrt"] = Field("inverse_sqrt", description="Warm-up, then down with the root of the step.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="minimum learning rate as a fraction of the peak rate")

    def after_warmup(self, step: int, warmup: float, total: float) -> float:
        return max(math.sqrt(max(warmup, 1) / step), self.final_fraction)


@component("schedule", "wsd", builder="lmtool.training.configs:schedule")
class WsdConfig(ScheduleConfig):
    """Warm up, stay, decay (Hu et al. 2024, MiniCPM, section 4): only the decay in the last steps depends on the run's
    length, so a branch from any checkpoint before it can decay or train further.

    With a linear decay it is the trapezoidal schedule of ModernBERT (Warner et al. 2024); `sqrt` is the 1-sqrt of
    Hägele et al. 2024 (section 3.2), which they found to be better than linear.
    """

    name: Literal["wsd"] = Field("wsd", description="Warm-up, level, then down in the last steps.")
    warmup_fraction: float | None = Field(
        None, ge=0, le=1, description="warmup as a fraction of all steps; such a run cannot be extended"
    )
    decay_steps: int | None = Field(
        None, ge=1, description="decay steps at the end; takes precedence over decay_fraction"
    )
    decay_fraction: float = Field(0.1, gt=0, le=1, description="decay as a fraction of all steps")
    decay_shape: Literal["linear", "sqrt"] = Field(
        "linear", description="linear, or sqrt: 1 - the square root of the completed fraction of the decay"
    )
    final_fraction: float = Field(0.0, ge=0, le=1, description=_FINAL_FRACTION)

    def remarks(self, steps: int) -> Iterator[str]:
        yield from super().remarks(steps)
        warmup = self.warmup_steps if self.warmup_steps is not None else round((self.warmup_fraction or 0) * steps)
        if warmup < steps < warmup + (self.decay_steps or 0):
            yield (
                f"schedule.decay_steps={self.decay_steps}: the run has only {counted(steps - warmup, 'step')} after "
                "the warm-up for the decay"
            )

    def after_warmup(self, step: int, warmup: float, total: float) -> float:
        """Returns 1 until the last steps, the first of which has the full rate too."""
        if not math.isfinite(total):
            return 1.0
        decay: float = self.decay_steps or max(round(self.decay_fraction * total), 1)
        decay = min(decay, max(total - warmup, 1))
        fraction = min(max((step - 1 - (total - decay)) / decay, 0.0), 1.0)
        return 1 - (1 - self.final_fraction) * (math.sqrt(fraction) if self.decay_shape == "sqrt" else fraction)
