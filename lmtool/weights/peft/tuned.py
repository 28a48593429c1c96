"""What was tuned, as the files of this package take it, and what they make of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.weights.peft.maps import PublishedMap


@dataclass(frozen=True)
class Tuned:
    """section: the `tuning` of a configuration. tensors: what the method added, without what training alone needs.
    base: the model it was added to, with what learned of it. task_type: PEFT's name for what the model is used for;
    None where it has none. learned: names of the base's published tensors that learned, heads and biases."""

    section: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    base: PublishedBase
    task_type: str | None
    learned: Sequence[str] = ()


@dataclass(frozen=True)
class Restored:
    """An adapter as lmtool has it. section: the `tuning` of a configuration. added: what that method adds, under our
    names. changed: published tensors of the base that the adapter gives other values: what it edits where the method
    here edits nothing."""

    section: dict[str, Any]
    added: dict[str, Tensor]
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class PublishedBase:
    """The model that an adapter stands on. ours: its tensors under our names; tensors: under the published ones. maps:
    those in its layers that tuning methods edit."""

    model: ModelConfig
    ours: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    maps: Sequence[PublishedMap]

    @cached_property
    def by_module(self) -> dict[str, PublishedMap]:
        """The maps by their paths."""
        return {place.module: place for place in self.maps}

    def has_bias_apart(self, place: PublishedMap) -> bool:
        """Whether what is a bias of these maps here is added behind the published module (DeBERTa's)."""
        return f"{place.module}.bias" not in self.tensors and any(
            f"{part.name}.bias" in self.ours for part in place.parts
        )

    def bare(self, prefix: str) -> PublishedBase:
        """The same as the model without a head calls its tensors. prefix: what its names lack."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        maps = [replace(place, module=place.module.removeprefix(prefix)) for place in self.maps]
        return replace(self, tensors=tensors, maps=maps)

    def with_values(self, changed: Mapping[str, Tensor]) -> PublishedBase:
        """The same with other values."""
        return replace(self, tensors={**self.tensors, **changed})

    def weight_OI(self, module: str) -> Tensor:
        """(O, I) of a linear map. UserError where the base has none of this path."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None or weight.ndim != 2:
            raise UserError(
                f"its update of {module} is of no linear map in its base",
                "write the base that it was trained on into its adapter_config.json, or merge it with PEFT "
                "(merge_and_unload), save the model, and import that",
            )
        return weight.T if module in self.by_module and self.by_module[module].transposed else weight

    def stored(self, module: str, weight_OI: Tensor) -> Tensor:
        """A weight as the published model holds it."""
        return (
            weight_OI.T if module in self.by_module and self.by_module[module].transposed else weight_OI
        ).contiguous()
