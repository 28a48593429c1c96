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
from lmtool.tuning.base import BACKBONE, TuningMethod, freeze, layers, norms
from lmtool.tuning.configs.adapter import PUBLISHED_SETTINGS, AdapterConfig, AdapterFusionConfig, TrainedAdapter


class AdapterTuning(TuningMethod):
    """Adds a new adapter to each adapter slot that `placement` uses. With `stack_on`, the frozen adapters of earlier
    runs are applied first, and the new adapter reads their output (MAD-X, Pfeiffer et al. 2020)."""

    config: AdapterConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        config, size = self.config, learner.backbone.hidden_size
        published = config.published
        width = config.width_at(size)
        scale = None if config.scale_used == "learned" else config.scale_used

        def new_adapter() -> AdapterSlot:
            top = BottleneckAdapter(size, width, config.activation_used, published.reads, scale)
            below = [empty_adapter(trained) for trained in config.stack_on]
            return StackedAdapters(below, top) if below else top

        for name in empty_slots(learner.backbone, published.slots):
            with torch.device(learner.device):
                module = materialize(new_adapter)
            initialize_each(module, seed, self._initializer, f"{name}.")
            if isinstance(module, StackedAdapters):
                module.below.requires_grad_(False)
            learner.set_submodule(name, module)
        if config.trains_norms:
            for norm in norms(learner.backbone):
                norm.requires_grad_(True)

    def _initializer(self, name: str, module: nn.Module) -> Draw:
        """Without `init_std`, as in the code of He et al. (2022): the up projection is zero, the down projection
        torch's."""
        std = self.config.init_std
        if std is not None:
            return truncated_normal(std)
        assert isinstance(module, nn.Linear)
        # torch's default is uniform within 1 / sqrt(inputs), whose standard deviation is 1 / sqrt(3 * inputs).
        return normal(0.0) if name.endswith("up") else normal((3 * module.in_features) ** -0.5)

    def build_on(self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        for number, (origin, tensors) in enumerate(earlier):
            load_adapters(learner, tensors, f"below.{number}.", origin)

    def merge(self, learner: BaseLearner) -> None:
        raise UserError(
            "adapters are nonlinear, so they cannot be merged into the weights of the model",
            "use lmtool export format=delta to write only the tuned weights, or tuning.stack_on=[RUN] to train new "
            "adapters on top of them, from the same checkpoint",
        )


def empty_adapter(trained: TrainedAdapter) -> BottleneckAdapter:
    """Builds a module with the shape of an earlier run's adapter; `load_adapters` fills in the trained weights."""
    scale = None if trained.scale == "learned" else trained.scale
    reads = PUBLISHED_SETTINGS[trained.placement].reads
    return BottleneckAdapter(trained.hidden_size, trained.bottleneck, trained.activation, reads, scale)


def empty_slots(backbone: Backbone, names: Collection[str]) -> Iterator[str]:
    """Yields the checkpoint names of the empty adapter slots, layer by layer. backbone: the backbone that receives
    adapters. names: the attributes of a layer that are slots, such as "ffn_adapter". Raises UserError if a layer has no
    slot of this name, or if the slot already holds an adapter."""
    for named_layer in layers(backbone):
        for name in names:
            if type(getattr(named_layer.layer, name, None)) is not AdapterSlot:
                raise UserError(
                    f"{type(backbone).__name__} has no empty slot for an adapter at {named_layer.name}.{name}",
                    "set tuning=full or tuning=head",
                )
            yield f"{named_layer.name}.{name}"


def load_adapters(learner: BaseLearner, tensors: Mapping[str, Tensor], submodule: str, origin: str) -> None:
    """Copies the adapters of an earlier run into one submodule, such as "below.0.", of every adapter slot of a learner;
    the slots already hold modules of the right shape. tensors: all of the earlier run, by checkpoint name. Raises
    UserError if the adapters were trained on another model, so that another tensor of the backbone differs from the
    learner's; or if the names or shapes of the adapters' tensors differ from the expected ones."""
    expected = dict(learner.state_dict())
    adapters = {name: tensor for name, tensor in tensors.items() if "_adapter." in name}
    for name, tensor in tensors.items():
        if name.startswith(f"{BACKBONE}.") and name not in adapters and not _equal(expected.get(name), tensor):
            raise UserError(
                f"{origin}: the adapters of this run were trained on a model with other weights: {name} differs",
                "start from the checkpoint that the adapters were trained on (checkpoint=), or train the adapters on "
                "this checkpoint",
            )
    renamed = {name.replace("_adapter.", f"_adapter.{submodule}"): tensor for name, tensor in adapters.items()}
    expected_names = {name for name in expected if f"_adapter.{submodule}" in name}
    if renamed.keys() != expected_names or any(
        expected[name].shape != tensor.shape for name, tensor in renamed.items()
    ):
        raise UserError(
            f"{origin}: the adapter weights of this run do not have the names and shapes that its configuration "
            "describes",
            "copy the run again, or train it again",
        )
    learner.load_state_dict(renamed, strict=False)


def _equal(expected: Tensor | None, tensor: Tensor) -> bool:
    return expected is not None and expected.shape == tensor.shape and torch.equal(expected.cpu(), tensor.cpu())


# Fusion: an attention over frozen adapters of earlier runs is trained with the head (Pfeiffer et al. 2021,
# "AdapterFusion").


PENALTY_NAME = "value_penalty"
"""Name of the fusion's loss term in logs."""


class AdapterFusionTuning(TuningMethod):
    """Fills each adapter slot with the frozen adapters of all earlier runs and a trainable attention that mixes
    them."""

    config: AdapterFusionConfig

    def edit(self, learner: BaseLearner, seed: int, new: Collection[str] | None = None) -> None:
        freeze(learner, new)
        trained, size = self.config.adapters, learner.backbone.hidden_size

        def new_fusion() -> FusedAdapters:
            return FusedAdapters(size, [empty_adapter(adapter) for adapter in trained])

        for name in empty_slots(learner.backbone, PUBLISHED_SETTINGS[trained[0].placement].slots):
            with torch.device(learner.device):
                module = materialize(new_fusion)
            initialize_each(module, seed, _fusion_initializer, f"{name}.")
            module.adapters.requires_grad_(False)
            learner.set_submodule(name, module)

    def build_on(self, learner: BaseLearner, earlier: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
        for number, (origin, tensors) in enumerate(earlier):
            load_adapters(learner, tensors, f"adapters.{number}.", origin)

    def penalties(self, learner: BaseLearner) -> dict[str, Tensor]:
        """Returns the weighted sum of `FusedAdapters.distance` over all slots; {} if the weight is 0."""
        fusions = [module for module in learner.modules() if isinstance(module, FusedAdapters)]
        if not self.config.value_penalty:
            return {}
        return {PENALTY_NAME: self.config.value_penalty * torch.stack([fusion.distance() for fusion in fusions]).sum()}


def _identity(tensor: Tensor, generator: torch.Generator) -> None:
    """As published."""
    tensor.fill_(1e-6).fill_diagonal_(1.0)


def _fusion_initializer(name: str, module: nn.Module) -> Draw:
    return _identity if name == "value" else normal(0.02)
