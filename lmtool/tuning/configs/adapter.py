"""Configuration of adapters and of their fusion. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lmtool.config.base import Config
from lmtool.config.checkpoint import read_checkpoint
from lmtool.config.needs import Offer, Requirement
from lmtool.config.saved import JsonObject
from lmtool.config.tables import Choice, component
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import WHOLE_WEIGHTS
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Activation, AdapterReads
from lmtool.system.terminal import counted
from lmtool.tuning.configs.base import ByDepthConfig, TuningConfig

_GIVE = "use a run of lmtool finetune tuning=adapter"
Placement = Literal["houlsby", "pfeiffer", "parallel"]
Scale = float | Literal["learned"]


@dataclass(frozen=True)
class PlacementSettings:
    """A published placement. slots: in a layer. reads: the adapter's input. bottleneck: its width, or reduction: the
    hidden size over the width. scale: of its output. trains_norms: whether the layers' norms are trained too."""

    slots: tuple[str, ...]
    reads: AdapterReads
    activation: Activation
    bottleneck: int | None = None
    reduction: float | None = None
    scale: float = 1.0
    trains_norms: bool = False


HF_FORMAT: dict[Placement, PlacementSettings] = {
    # Section 2.1, with the middle one of its sizes; activation and norms as in github.com/google-research/adapter-bert.
    "houlsby": PlacementSettings(("attn_adapter", "ffn_adapter"), "output", "gelu", bottleneck=64, trains_norms=True),
    # Section 3.1 and appendix B of "AdapterFusion"; the values of AdapterHub's `seq_bn`.
    "pfeiffer": PlacementSettings(("ffn_adapter",), "sum", "relu", reduction=16.0),
    # Table 1 and section 4.6; the values of AdapterHub's `par_bn`.
    "parallel": PlacementSettings(("ffn_adapter",), "input", "relu", reduction=2.0, scale=4.0),
}


class TrainedAdapter(Config):
    """The adapters of an earlier run: names and training setup. A bare path is completed from the run's configuration,
    so that a checkpoint with them can be rebuilt without that run."""

    path: str = Field(description="The run or checkpoint that holds them.", min_length=1)
    placement: Placement = Field(description="Their placement.")
    bottleneck: int = Field(description="Their width.", ge=1)
    activation: Activation = Field(description="Activation between down and up projection.")
    scale: Scale = Field(description="Scale of their output.")
    hidden_size: int = Field(description="Hidden size of the model they were trained in.", ge=1)
    num_layers: int = Field(description="Layers of the model they were trained in.", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _of_a_path(cls, value: object) -> object:
        return _read(value) if isinstance(value, str) else value


def _read(path: str) -> JsonObject:
    """The adapters in a run's configuration. UserError if it has none that can be reused."""
    try:
        saved = read_checkpoint(path)
    except UserError as error:
        raise UserError(error.message.removeprefix("checkpoint="), _GIVE) from error
    tuning, model = saved.get("tuning") or {}, saved["model"]
    if tuning.get("name") != "adapter":
        raise UserError(f"{path} was trained with tuning={tuning.get('name', 'full')} and has no adapters", _GIVE)
    trained = Choice("tuning").validate(tuning)
    assert isinstance(trained, AdapterConfig)
    if trained.stack_on:
        raise UserError(
            f"{path}: its adapters are stacked on those of {trained.stack_on[0].path}",
            "use a run whose adapters are not stacked",
        )
    if trained.tunes_norms:
        raise UserError(
            f"{path}: its layers' norms were trained too, so its adapters do not fit the model that it started from",
            "train it again with tuning.train_norms=false",
        )
    return {
        "path": path,
        "placement": trained.placement,
        "bottleneck": trained.width_at(model["hidden_size"]),
        "activation": trained.activation_used,
        "scale": trained.scale_used,
        "hidden_size": model["hidden_size"],
        "num_layers": model["num_layers"],
    }


def _same_sizes(key: str, trained: tuple[TrainedAdapter, ...]) -> Iterator[Requirement]:
    """Requires that adapters were trained in a model of the same sizes."""
    for adapter in trained:
        for name in ("hidden_size", "num_layers"):
            hint = "start from the checkpoint that they were trained on"
            size = adapter.hidden_size if name == "hidden_size" else adapter.num_layers
            reason = f"{adapter.path}: its adapters were trained in a model with {name}={size}"
            yield Requirement(_size(name, size), key, reason, hint)


def _size(name: str, size: int) -> Offer[ModelConfig]:
    def size_of(model: ModelConfig) -> int:
        return model.hidden_size if name == "hidden_size" else model.num_layers

    return Offer(
        "model",
        lambda model: size_of(model) == size,
        lambda model: f"this model has {size_of(model)}",
        wording="{reason}, but {lacking}",
    )


def _other_placements(key: str, trained: tuple[TrainedAdapter, ...], placement: Placement) -> Iterator[Problem]:
    """Requires the same placement of all trained adapters."""
    for adapter in trained:
        if adapter.placement != placement:
            message = f"{adapter.path}: its adapters have tuning.placement={adapter.placement}, not {placement}"
            yield Problem(key, message, f"train them with tuning.placement={placement}")


@component("tuning", "adapter", builder="lmtool.tuning.adapter:AdapterTuning")
class AdapterConfig(ByDepthConfig):
    """Small modules between the layers' sublayers are trained, and the head (Houlsby et al. 2019)."""

    name: Literal["adapter"] = Field("adapter", description="Adapters and the head are trained; the model is frozen.")
    placement: Placement = Field(
        "pfeiffer",
        description="houlsby: after attention and FFN; pfeiffer: after FFN; parallel: parallel to FFN. houlsby: two "
        "per layer; pfeiffer and parallel: one per layer",
    )
    bottleneck: int | None = Field(
        None, ge=1, description="width of an adapter; null: published (houlsby 64), or set by reduction"
    )
    reduction: float | None = Field(
        None, ge=1, description="hidden size / adapter width; null: published (pfeiffer 16, parallel 2)"
    )
    activation: Activation | None = Field(
        None, description="relu, gelu or gelu_tanh; null: published (houlsby gelu, the others relu)"
    )
    scale: Scale | None = Field(
        None, description="scale of an adapter's output, or learned; null: published (parallel 4, the others 1)"
    )
    train_norms: bool | None = Field(
        None, description="train the layers' norms as well; null: published (houlsby true, the others false)"
    )
    init_std: float | None = Field(
        None,
        gt=0,
        description="std of both maps (published: houlsby 0.01, pfeiffer 0.02); null: output unchanged at first. "
        "null: the up-projection starts at zero",
    )
    stack_on: tuple[TrainedAdapter, ...] = Field(
        (), description="tuning=adapter runs whose frozen adapters come below the new ones, lowest first (MAD-X)"
    )

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if self.bottleneck is not None and self.reduction is not None:
            raise ValueError(f"bottleneck={self.bottleneck} and reduction={self.reduction:g} both set the width")
        return self

    @property
    def published(self) -> PlacementSettings:
        """The published settings of the placement."""
        return HF_FORMAT[self.placement]

    @property
    def activation_used(self) -> Activation:
        """The activation between down and up projection."""
        return self.activation or self.published.activation

    @property
    def scale_used(self) -> Scale:
        """The scale of the output."""
        return self.published.scale if self.scale is None else self.scale

    @property
    def tunes_norms(self) -> bool:
        """Whether the norms of the layers are trained."""
        return self.published.trains_norms if self.train_norms is None else self.train_norms

    @property
    def recipe_name(self) -> str:
        return f"{self.name}_{self.placement}"

    @property
    def builds_on(self) -> tuple[str, ...]:
        return tuple(adapter.path for adapter in self.stack_on)

    def width_at(self, hidden_size: int) -> int:
        """The width of an adapter for this hidden size; 0 if the reduction is too large."""
        settings = self if self.bottleneck is not None or self.reduction is not None else self.published
        if settings.reduction is not None:
            return int(hidden_size // settings.reduction)
        return settings.bottleneck or 0

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        wide_enough: Offer[ModelConfig] = Offer(
            "model",
            lambda model: self.width_at(model.hidden_size) > 0,
            lambda model: f"model.hidden_size={model.hidden_size} leaves an adapter no width",
            wording="{reason} of {lacking}",
        )
        reduction = f"tuning.reduction={self.reduction or 1:g}"
        yield Requirement(wide_enough, "tuning.reduction", reduction, "set tuning.bottleneck=1 or more")
        yield from _same_sizes("tuning.stack_on", self.stack_on)

    def conflicts(self) -> Iterator[Problem]:
        yield from _other_placements("tuning.stack_on", self.stack_on, self.placement)


@component("tuning", "adapter_fusion", builder="lmtool.tuning.adapter:AdapterFusionTuning")
class AdapterFusionConfig(TuningConfig):
    """Trained adapters are frozen; their mixture is trained, and the head (Pfeiffer et al. 2021, "AdapterFusion")."""

    name: Literal["adapter_fusion"] = Field(
        "adapter_fusion", description="An attention over trained adapters is trained, and the head."
    )
    adapters: tuple[TrainedAdapter, ...] = Field(
        (), description="two or more runs from the same checkpoint, with the same placement"
    )
    value_penalty: float = Field(
        0.01, ge=0, description="weight of the squared distance of the value projection from the identity"
    )

    fewest: ClassVar[int] = 2

    @property
    def builds_on(self) -> tuple[str, ...]:
        return tuple(adapter.path for adapter in self.adapters)

    def needs(self) -> Iterator[Requirement]:
        yield from super().needs()
        reason = f"tuning={self.name} keeps weights close to their initial values"
        yield Requirement(WHOLE_WEIGHTS, "tuning", reason, "set tuning=adapter")
        yield from _same_sizes("tuning.adapters", self.adapters)

    def conflicts(self) -> Iterator[Problem]:
        key, hint = "tuning.adapters", "tuning.adapters=[runs/A,runs/B]"
        if len(self.adapters) < self.fewest:
            message = f"{key} names {counted(len(self.adapters), 'run')}; a fusion mixes {self.fewest} or more"
            yield Problem(key, message, f"train them with tuning=adapter, and set {hint}")
            return
        folders = [Path(adapter.path).expanduser().resolve() for adapter in self.adapters]
        twice = [run.path for run, folder in zip(self.adapters, folders, strict=True) if folders.count(folder) > 1]
        if twice:
            message = f"{key} names a run more than once: {', '.join(twice)}; mixing a run with itself has no effect"
            yield Problem(key, message, f"name each run once, {hint}")
        yield from _other_placements(key, self.adapters, self.adapters[0].placement)
