"""Adapters: small modules between the sublayers of a frozen model, trained with its head (Houlsby et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.models.base import Backbone
from lmtool.nn.feedforward import AdapterSlot, BottleneckAdapter, FusedAdapters, StackedAdapters
from lmtool.nn.initialization import Draw, initialize_each, materialize, normal, truncated_normal
from lmtool.tuning.base import BACKBONE, TuningMethod, freeze, layers, norms, replace_module
from lmtool.tuning.configs.adapter import HF_FORMAT, AdapterConfig, AdapterFusionConfig, TrainedAdapter


class AdapterTuning(TuningMethod):
    """Adds an adapter to each slot of its placement, after the trained ones it is stacked on."""

    config: AdapterConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config, size = self.config, learner.backbone.hidden_size
        published = config.published
        width = config.width_at(size)
        scale = None if config.scale_used == "learned" else config.scale_used

        def adapter() -> AdapterSlot:
            top = BottleneckAdapter(size, width, config.activation_used, published.reads, scale)
            below = [trained_adapter(trained) for trained in config.stack_on]
            return StackedAdapters(below, top) if below else top

        for name in slots(learner.backbone, published.slots):
            with torch.device(learner.device):
                module = materialize(adapter)
            initialize_each(module, seed, self._draw_of, f"{name}.")
            if isinstance(module, StackedAdapters):
                module.below.requires_grad_(False)
            replace_module(learner, name, module)
        if config.tunes_norms:
            for norm in norms(learner.backbone):
                norm.requires_grad_(True)

    def _draw_of(self, name: str, part: nn.Module) -> Draw:
        """If the up projection is 0, the down projection is initialized as torch's linear map (He et al. 2022, code),
        which scales with the model's width."""
        std = self.config.init_std
        if std is not None:
            return truncated_normal(std)
        assert isinstance(part, nn.Linear)
        return normal(0.0) if name.endswith("up") else normal((3 * part.in_features) ** -0.5)

    def build_on(self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        for number, (origin, tensors) in enumerate(earlier):
            load_adapters(learner, tensors, f"below.{number}.", origin)

    def merge(self, learner: BaseLearner) -> None:
        raise UserError(
            "its adapters cannot be merged into the weights of the model",
            "lmtool export format=delta writes only the adapters; tuning.stack_on=[RUN] trains others on top of "
            "them, from the same checkpoint",
        )


def trained_adapter(trained: TrainedAdapter) -> BottleneckAdapter:
    """A module with the shape of an earlier run's adapters."""
    scale = None if trained.scale == "learned" else trained.scale
    reads = HF_FORMAT[trained.placement].reads
    return BottleneckAdapter(trained.hidden_size, trained.bottleneck, trained.activation, reads, scale)


def slots(backbone: Backbone, names: Collection[str]) -> Iterator[str]:
    """Checkpoint names of these empty slots in all layers. UserError if a layer has none."""
    for position in layers(backbone):
        for name in names:
            if type(getattr(position.layer, name, None)) is not AdapterSlot:
                raise UserError(
                    f"tuning: the layers of {type(backbone).__name__} have no slot for adapters: "
                    f"{position.name}.{name}",
                    "set tuning=full or tuning=head",
                )
            yield f"{position.name}.{name}"


def load_adapters(learner: BaseLearner, tensors: Mapping[str, Tensor], inside: str, origin: str) -> None:
    """Loads an earlier run's adapters into the matching modules. inside: their location in a slot.

    UserError if the run has other adapters, or another base model: all its frozen tensors in the checkpoint must equal
    the learner's.
    """
    expected = dict(learner.state_dict())
    adapters = {name: tensor for name, tensor in tensors.items() if "_adapter." in name}
    for name, tensor in tensors.items():
        if name.startswith(f"{BACKBONE}.") and name not in adapters and not _equal(expected.get(name), tensor):
            raise UserError(
                f"{origin}: its adapters were trained on another model: {name} differs",
                "start from the checkpoint that they were trained on (checkpoint=), or train them on this one",
            )
    loaded = {name.replace("_adapter.", f"_adapter.{inside}"): tensor for name, tensor in adapters.items()}
    adapter_names = {name for name in expected if f"_adapter.{inside}" in name}
    if loaded.keys() != adapter_names or any(expected[name].shape != tensor.shape for name, tensor in loaded.items()):
        raise UserError(
            f"{origin}: its adapters do not match its configuration",
            "copy the run again, or train it again",
        )
    learner.load_state_dict(loaded, strict=False)


def _equal(expected: Tensor | None, tensor: Tensor) -> bool:
    return expected is not None and expected.shape == tensor.shape and torch.equal(expected.cpu(), tensor.cpu())


# Fusion: trained adapters are frozen; an attention over them is trained with the head (Pfeiffer et al. 2021,
# "AdapterFusion").


PENALTY = "value_penalty"


class AdapterFusionTuning(TuningMethod):
    """Adds all trained adapters of a slot to it, and the attention that mixes them."""

    config: AdapterFusionConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        trained, size = self.config.adapters, learner.backbone.hidden_size

        def fused() -> FusedAdapters:
            return FusedAdapters(size, [trained_adapter(adapter) for adapter in trained])

        for name in slots(learner.backbone, HF_FORMAT[trained[0].placement].slots):
            with torch.device(learner.device):
                module = materialize(fused)
            initialize_each(module, seed, _draw_of, f"{name}.")
            module.adapters.requires_grad_(False)
            replace_module(learner, name, module)

    def build_on(self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        for number, (origin, tensors) in enumerate(earlier):
            load_adapters(learner, tensors, f"adapters.{number}.", origin)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """The distance of the value projections from the identity, see `FusedAdapters.distance`."""
        fusions = [module for module in learner.modules() if isinstance(module, FusedAdapters)]
        if not self.config.value_penalty:
            return {}
        return {PENALTY: self.config.value_penalty * torch.stack([fusion.distance() for fusion in fusions]).sum()}


def _identity(tensor: Tensor, generator: torch.Generator) -> None:
    """As published: 1 on the diagonal, 1e-6 elsewhere."""
    tensor.fill_(1e-6).fill_diagonal_(1.0)


def _draw_of(name: str, part: nn.Module) -> Draw:
    return _identity if name == "value" else normal(0.02)
