"""Configuration of adapters and of adapter fusion. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lmtool.config.base import Config, JsonObject
from lmtool.config.registry import Choice, component
from lmtool.errors import Problem, UserError
from lmtool.learners.configs import LearnedConfig, needs_whole_weights
from lmtool.models.configs import ModelConfig
from lmtool.nn.configs import Activation, AdapterReads
from lmtool.runs.finding import read_checkpoint
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tuning.configs.base import TuningConfig, UnfreezableConfig

_USE_ADAPTER_RUN = "use a run of lmtool finetune tuning=adapter"
Placement = Literal["houlsby", "pfeiffer", "parallel"]
Scale = float | Literal["learned"]


@dataclass(frozen=True)
class PlacementSettings:
    """The published settings of a placement. Either `bottleneck` or `reduction` is set.

    Attributes:
        slots: Attributes of a layer that receive an adapter.
        reads: The input of the adapter: the sublayer's output, its sum with the residual, or the sublayer's input.
        reduction: Hidden size divided by the width of the adapter.
        scale: Factor of the adapter's output.
        trains_norms: Whether the norms of the layers are trained too.
    """

    slots: tuple[str, ...]
    reads: AdapterReads
    activation: Activation
    bottleneck: int | None = None
    reduction: float | None = None
    scale: float = 1.0
    trains_norms: bool = False


PUBLISHED_SETTINGS: dict[Placement, PlacementSettings] = {
    # Section 2.1, with the middle of the published widths; activation and norms as in
    # github.com/google-research/adapter-bert.
    "houlsby": PlacementSettings(("attn_adapter", "ffn_adapter"), "output", "gelu", bottleneck=64, trains_norms=True),
    # Section 3.1 and appendix B of "AdapterFusion"; values as in `seq_bn` of AdapterHub.
    "pfeiffer": PlacementSettings(("ffn_adapter",), "sum", "relu", reduction=16.0),
    # He et al. 2022, table 1 and section 4.6; values as in `par_bn` of AdapterHub.
    "parallel": PlacementSettings(("ffn_adapter",), "input", "relu", reduction=2.0, scale=4.0),
}


class TrainedAdapter(Config):
    """The adapters of an earlier run. A user gives the run's path; all other fields are read from the run's
    configuration and saved with the new run, so that the new run's checkpoints can be loaded without the earlier
    run."""

    path: str = Field(description="The run or checkpoint with the adapters.", min_length=1)
    placement: Placement = Field(description="Placement of the adapters.")
    bottleneck: int = Field(description="Width of an adapter.", ge=1)
    activation: Activation = Field(description="Activation between down and up projection.")
    scale: Scale = Field(description="Scale of an adapter's output.")
    hidden_size: int = Field(description="Hidden size of the model in which the adapters were trained.", ge=1)
    num_layers: int = Field(description="Number of layers of the model in which the adapters were trained.", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _expand_path(cls, value: object) -> object:
        return _read_fields(value) if isinstance(value, str) else value


def _read_fields(path: str) -> JsonObject:
    try:
        saved = read_checkpoint(path)
    except UserError as error:
        raise UserError(error.message.removeprefix("checkpoint="), _USE_ADAPTER_RUN) from error
    tuning, model = saved.get("tuning") or {}, saved["model"]
    if tuning.get("name") != "adapter":
        method = tuning.get("name", "full")
        raise UserError(f"{path} was trained with tuning={method} and has no adapters", _USE_ADAPTER_RUN)
    trained = Choice("tuning").validate(tuning)
    assert isinstance(trained, AdapterConfig)
    if trained.stack_on:
        raise UserError(
            f"{path}: the adapters of this run are stacked on those of {trained.stack_on[0].path}",
            "use a run whose adapters are not stacked",
        )
    if trained.trains_norms:
        raise UserError(
            f"{path}: the layers' norms were trained together with the adapters, so the adapters do not fit the "
            "checkpoint from which the run started",
            "train the run again with tuning.train_norms=false",
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


def _other_sizes(key: str, trained: tuple[TrainedAdapter, ...], model: ModelConfig) -> Iterator[Problem]:
    for adapter in trained:
        sizes = {"hidden_size": (adapter.hidden_size, model.hidden_size)}
        sizes["num_layers"] = (adapter.num_layers, model.num_layers)
        for name, (size, actual) in sizes.items():
            if size != actual:
                reason = f"{adapter.path}: the adapters of this run were trained in a model with {name}={size}"
                hint = "start from the checkpoint that the adapters were trained on"
                yield Problem(key, f"{reason}, but this model has {actual}", hint)


def _other_placements(key: str, trained: tuple[TrainedAdapter, ...], placement: Placement) -> Iterator[Problem]:
    for adapter in trained:
        if adapter.placement != placement:
            message = f"{adapter.path}: this run has tuning.placement={adapter.placement} instead of {placement}"
            yield Problem(key, message, f"train the run again with tuning.placement={placement}")


@component("tuning", "adapter", builder="lmtool.tuning.adapter:AdapterTuning")
class AdapterConfig(UnfreezableConfig):
    """Adapters: small modules after or parallel to the sublayers are trained with the head (Houlsby et al. 2019)."""

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
            raise ValueError(
                f"bottleneck={self.bottleneck} and reduction={self.reduction:g} both set the adapter's width"
            )
        return self

    @property
    def published(self) -> PlacementSettings:
        """The published settings of the placement."""
        return PUBLISHED_SETTINGS[self.placement]

    @property
    def activation_used(self) -> Activation:
        """The configured activation between the down and the up projection, or the published one."""
        return self.activation or self.published.activation

    @property
    def scale_used(self) -> Scale:
        """The configured scale of an adapter's output, or the published one."""
        return self.published.scale if self.scale is None else self.scale

    @property
    def trains_norms(self) -> bool:
        """Whether the norms of the layers are trained."""
        return self.published.trains_norms if self.train_norms is None else self.train_norms

    @property
    def recipe_name(self) -> str:
        return f"{self.name}_{self.placement}"

    @property
    def earlier_runs(self) -> tuple[str, ...]:
        return tuple(adapter.path for adapter in self.stack_on)

    def width_at(self, hidden_size: int) -> int:
        """Returns the width of an adapter in a model of this hidden size; 0 if the reduction exceeds the hidden
        size."""
        settings = self if self.bottleneck is not None or self.reduction is not None else self.published
        if settings.reduction is not None:
            return int(hidden_size // settings.reduction)
        return settings.bottleneck or 0

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        if self.width_at(model.hidden_size) == 0:
            message = (
                f"tuning.reduction={self.reduction or self.published.reduction or 1:g}: "
                f"model.hidden_size={model.hidden_size} is smaller, so an adapter would have no width"
            )
            yield Problem("tuning.reduction", message, "set tuning.bottleneck=1 or more")
        yield from _other_sizes("tuning.stack_on", self.stack_on, model)

    def conflicts(self) -> Iterator[Problem]:
        yield from _other_placements("tuning.stack_on", self.stack_on, self.placement)


@component("tuning", "adapter_fusion", builder="lmtool.tuning.adapter:AdapterFusionTuning")
class AdapterFusionConfig(TuningConfig):
    """Adapter fusion: an attention that mixes the frozen adapters of earlier runs is trained with the head (Pfeiffer et
    al. 2021, "AdapterFusion")."""

    name: Literal["adapter_fusion"] = Field(
        "adapter_fusion", description="An attention over trained adapters is trained, and the head."
    )
    adapters: tuple[TrainedAdapter, ...] = Field(
        (), description="two or more runs from the same checkpoint, with the same placement"
    )
    value_penalty: float = Field(
        0.01, ge=0, description="weight of the squared distance of the value projection from the identity"
    )

    min_adapters: ClassVar[int] = 2

    @property
    def earlier_runs(self) -> tuple[str, ...]:
        return tuple(adapter.path for adapter in self.adapters)

    def conflicts_with_model(self, model: ModelConfig, task: LearnedConfig | None) -> Iterator[Problem]:
        yield from super().conflicts_with_model(model, task)
        yield from _other_sizes("tuning.adapters", self.adapters, model)

    def conflicts_with_fsdp(self) -> Iterator[Problem]:
        reason = f"tuning={self.name} penalizes the distance of whole weight matrices from their initial values"
        yield needs_whole_weights("tuning", reason, "set tuning=adapter")

    def conflicts(self) -> Iterator[Problem]:
        key, hint = "tuning.adapters", "tuning.adapters=[runs/A,runs/B]"
        if len(self.adapters) < self.min_adapters:
            message = f"{key} names {counted(len(self.adapters), 'run')}; a fusion mixes {self.min_adapters} or more"
            yield Problem(key, message, f"train {self.min_adapters} or more runs with tuning=adapter, and set {hint}")
            return
        folders = [user_path(adapter.path).resolve() for adapter in self.adapters]
        repeated = [run.path for run, folder in zip(self.adapters, folders, strict=True) if folders.count(folder) > 1]
        if repeated:
            message = (
                f"{key} names a run more than once ({', '.join(repeated)}); mixing a run with itself has no effect"
            )
            yield Problem(key, message, f"name each run once: {hint}")
        yield from _other_placements(key, self.adapters, self.adapters[0].placement)
