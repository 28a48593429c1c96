"""How the weights move: optimizers and learning-rate schedules as configuration."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.system.terminal import counted

Beta = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
"""How several processes train one model."""

# In these optimizers a step moves a weight by about the rate, or by the rate times its size.
_MOST = 100
_CLIP_NORM = "maximum global gradient norm; null: no clipping"
_BETAS = "decay rates of the running means of gradients and of their squares"
_WEIGHT_DECAY = "decoupled weight decay, scaled by the learning rate"
_WARMUP_FRACTION = "warmup as a share of all steps; null or 0: no warmup"
_FINAL_FRACTION = "final learning rate as a share of the peak rate"


class OptimizerConfig(Config):
    """How gradients become steps."""

    name: str = Field(description="The optimizer.")
    lr: float = Field(1e-4, gt=0, le=_MOST, description="peak learning rate")
    clip_norm: float | None = Field(1.0, gt=0, description="maximum global gradient norm; null: no clipping")
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="factor on the learning rate from each layer to the one below it; 1: none; ELECTRA 0.8. The head "
        "has the full rate, the embeddings the lowest; ULMFiT 0.385",
    )

    def state_size(self, name: str, shape: tuple[int, ...]) -> int:
        """Values that are kept of a parameter between steps: two running means of its shape."""
        return 2 * prod(shape)


@component("optimizer", "adamw", builder="lmtool.training.update_rules:build_adamw")
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); norms and biases do not decay.

    With `scale_parameter` it is the optimizer of nanoT5 (Nawrot 2023), whose learning rate is 0.02.
    """

    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the running means of gradients and of their squares"
    )
    epsilon: float = Field(1e-8, gt=0, le=1, description="added to the root of the second moment; BERT published 1e-6")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, scaled by the learning rate")
    scale_parameter: bool = Field(
        False,
        description="multiply lr by the root mean square of each parameter (nanoT5, with lr=0.02). The root mean "
        "square is at least 1e-3",
    )


@component("optimizer", "adam", builder="lmtool.training.update_rules:build_adam")
class AdamConfig(OptimizerConfig):
    """Adam (Kingma and Ba 2015) with an L2 penalty: it is part of the gradient, so it is averaged and scaled with it.

    The Transformer's optimizer (Vaswani et al. 2017: betas 0.9 and 0.98, epsilon 1e-9, no penalty). What GPT-1's and
    fairseq's code call Adam decays decoupled from the gradient: that is `adamw`.
    """

    name: Literal["adam"] = Field("adam", description="Adam with an L2 penalty.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the running means of gradients and of their squares"
    )
    epsilon: float = Field(1e-8, gt=0, le=1, description="added to the root of the second moment")
    l2: float = Field(0.0, ge=0, description="L2 penalty, added to the gradient; not applied to norms and biases")


@component("optimizer", "adafactor", builder="lmtool.training.update_rules:build_adafactor")
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018), T5's: of a matrix's squared gradients it keeps row and column means only.

    The paper's step sizes min(1e-2, 1/sqrt(step)) are a schedule: `schedule=inverse_sqrt schedule.warmup_steps=10000
    schedule.warmup_start=1` at the default learning rate (with warmup_start=0, its warm-up).
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
        """The means of squares, of a matrix a row and a column of them; and with beta1 the mean of the updates."""
        means = prod(shape[:-1]) + prod((*shape[:-2], shape[-1])) if len(shape) > 1 else prod(shape)
        return means + (0 if self.beta1 is None else prod(shape))


@component("optimizer", "stable_adamw", builder="lmtool.training.update_rules:build_stable_adamw")
class StableAdamWConfig(OptimizerConfig):
    """StableAdamW (Wortsman et al. 2023): AdamW with Adafactor's clipping of the update; ModernBERT's."""

    name: Literal["stable_adamw"] = Field("stable_adamw", description="AdamW with clipped updates.")
    lr: float = Field(8e-4, gt=0, le=_MOST, description="peak learning rate; ModernBERT's")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.98), description="decay rates of the running means of gradients and of their squares"
    )
    epsilon: float = Field(1e-6, gt=0, le=1, description="added to the root of the second moment")
    weight_decay: float = Field(0.0125, ge=0, description="decoupled weight decay, scaled by the learning rate")
    clip_norm: float | None = Field(None, gt=0)


@component("optimizer", "lamb", builder="lmtool.training.update_rules:build_lamb")
class LambConfig(OptimizerConfig):
    """LAMB (You et al. 2020), for very large batches: each matrix moves by the learning rate times its own norm.

    What does not decay (norms and biases) takes plain Adam steps, as in the published code.
    """

    name: Literal["lamb"] = Field("lamb", description="Adam with steps in proportion to each matrix's norm.")
    # Table of the paper's appendix: 6.25e-4 at 512 examples, times the root of 2 with every doubling.
    lr: float = Field(
        6.25e-4, gt=0, le=_MOST, description="peak learning rate; the paper's at 512 examples, x1.41 with each doubling"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the running means of gradients and of their squares"
    )
    epsilon: float = Field(1e-6, gt=0, le=1, description="added to the root of the second moment")
    weight_decay: float = Field(
        0.01, ge=0, description="share of a weight added to its update, before the update is scaled"
    )


@component("optimizer", "muon", builder="lmtool.training.update_rules:build_muon")
class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) on the matrices of the layers, AdamW on everything else.

    A matrix's mean gradient is made nearly orthogonal before the step, and the step is as large as AdamW's usual one
    (Liu et al. 2025), so that learning rate and weight decay are those of AdamW.
    """

    name: Literal["muon"] = Field("muon", description="Orthogonal steps for the matrices of the layers.")
    lr: float = Field(6e-4, gt=0, le=_MOST, description="peak learning rate of both parts; the one tuned for AdamW")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay of the running mean of gradients")
    nesterov: bool = Field(True, description="Nesterov momentum")
    newton_schulz_steps: int = Field(
        5, ge=1, lt=100, description="Newton-Schulz iterations that orthogonalize an update"
    )
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, scaled by the learning rate")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="AdamW: decay rates of the running means of gradients and of their squares"
    )
    epsilon: float = Field(1e-8, gt=0, le=1, description="AdamW: added to the root of the second moment")

    def state_size(self, name: str, shape: tuple[int, ...]) -> int:
        """The mean gradient of a matrix of the layers; AdamW's two means of the rest."""
        return prod(shape) if is_hidden_matrix(name, len(shape)) else super().state_size(name, shape)


def is_hidden_matrix(name: str, dimensions: int) -> bool:
    """Whether a parameter is a matrix between two hidden states: two-dimensional, in a layer, and no table of vectors
    (relative positions)."""
    path = name.split(".")
    return dimensions == 2 and "layers" in path and not {"embed", "position"} & set(path)


class ScheduleConfig(Config):
    """The learning rate over the steps, as a factor of the optimizer's `lr`."""

    name: str = Field(description="The schedule.")
    warmup_steps: int | None = Field(None, ge=0, description="warmup steps; takes precedence over warmup_fraction")
    warmup_fraction: float | None = Field(
        None, ge=0, le=1, description="warmup as a share of all steps; null or 0: no warmup"
    )
    warmup_start: float = Field(
        0.0, ge=0, le=1, description="share of the peak rate at which warmup starts; 1: constant rate until its end"
    )

    def remarks(self, steps: int) -> Iterator[str]:
        """What of it a run of so many steps is too short for."""
        warmup = self.warmup_steps or 0
        if warmup >= steps and self.warmup_start < 1:
            share = self.warmup_start + (1 - self.warmup_start) * steps / warmup
            yield (
                f"schedule.warmup_steps={warmup}: in a run of {counted(steps, 'step')} the learning rate only rises, "
                f"to {share:.2g} of optimizer.lr"
            )


@component("schedule", "linear", builder="lmtool.training.schedules:build_linear")
class LinearConfig(ScheduleConfig):
    """Up, then down in a straight line: BERT's."""

    name: Literal["linear"] = Field("linear", description="Warm-up, then a straight line down.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak rate")


@component("schedule", "cosine", builder="lmtool.training.schedules:build_cosine")
class CosineConfig(ScheduleConfig):
    """Up, then down along half a cosine (Loshchilov and Hutter 2017): GPT-3's."""

    name: Literal["cosine"] = Field("cosine", description="Warm-up, then half a cosine down.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak rate")


@component("schedule", "polynomial", builder="lmtool.training.schedules:build_polynomial")
class PolynomialConfig(ScheduleConfig):
    """Up, then down with a power of the share of the steps that is left: fairseq's and transformers'."""

    name: Literal["polynomial"] = Field("polynomial", description="Warm-up, then down with a power of what is left.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1)
    power: float = Field(
        1.0,
        gt=0,
        description="exponent applied to the remaining share of the steps; 1: linear; above 1: steep at first",
    )
    final_fraction: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak rate")


@component("schedule", "constant", builder="lmtool.training.schedules:build_constant")
class ConstantConfig(ScheduleConfig):
    """Up, then level."""

    name: Literal["constant"] = Field("constant", description="Warm-up, then level.")


@component("schedule", "inverse_sqrt", builder="lmtool.training.schedules:build_inverse_sqrt")
class InverseSqrtConfig(ScheduleConfig):
    """Up, then down with the root of the step (Vaswani et al. 2017): needs no end to be known."""

    name: Literal["inverse_sqrt"] = Field("inverse_sqrt", description="Warm-up, then down with the root of the step.")
    warmup_fraction: float | None = Field(0.1, ge=0, le=1)
    final_fraction: float = Field(0.0, ge=0, le=1, description="minimum learning rate as a share of the peak rate")


@component("schedule", "wsd", builder="lmtool.training.schedules:build_wsd")
class WsdConfig(ScheduleConfig):
    """Warm up, stay, decay (Hu et al. 2024, MiniCPM, section 4): level until the last steps, which alone depend on the
    end. From any checkpoint of its level part a branch decays, or trains further.

    With a straight line down it is the trapezoidal schedule of ModernBERT (Warner et al. 2024); `sqrt` is the
    1-sqrt of Hägele et al. 2024 (section 3.2), which they found better than the line.
    """

    name: Literal["wsd"] = Field("wsd", description="Warm-up, level, then down in the last steps.")
    warmup_fraction: float | None = Field(
        None, ge=0, le=1, description="warmup as a share of all steps; such a run cannot be extended"
    )
    decay_steps: int | None = Field(
        None, ge=1, description="decay steps at the end; takes precedence over decay_fraction"
    )
    decay_fraction: float = Field(0.1, gt=0, le=1, description="decay as a share of all steps")
    decay_shape: Literal["linear", "sqrt"] = Field(
        "linear", description="linear, or sqrt: 1 - the square root of the completed share of the decay"
    )
    final_fraction: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak rate")

    def remarks(self, steps: int) -> Iterator[str]:
        yield from super().remarks(steps)
        warmup = self.warmup_steps if self.warmup_steps is not None else round((self.warmup_fraction or 0) * steps)
        if warmup < steps < warmup + (self.decay_steps or 0):
            yield (
                f"schedule.decay_steps={self.decay_steps}: its way down has only {counted(steps - warmup, 'step')}, "
                "what the run has after the warm-up"
            )
