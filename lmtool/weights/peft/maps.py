"""The linear layers of a backbone in its transformers format: joined, transposed, or with reordered channels, depending
on the family.

Shape letters: O outputs and I inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.tuning.configs.methods import Projection
from lmtool.weights.reading import their_names

_WEIGHT = ".weight"
_EDITED = tuple(f".{name}.weight" for name in get_args(Projection))


@dataclass(frozen=True)
class LinearSlice:
    """A map of ours in a published one. name: ours. rows_O: the published output that each of its outputs is.
    columns_I: the one of its inputs that each published input is."""

    name: str
    rows_O: Tensor
    columns_I: Tensor


@dataclass(frozen=True)
class HFLinear:
    """A linear layer in transformers. module: its path. transposed: whether it is stored as (inputs, outputs). outputs:
    number of outputs."""

    module: str
    transposed: bool
    outputs: int
    parts: tuple[LinearSlice, ...]


def hf_linears(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[HFLinear]:
    """The published maps that the maps in the layers are in which tuning methods edit. tensors: of the whole model,
    under our names. config: of the model.

    A family says what becomes of tensors, and of nothing else: numbered rows and columns go the way of the weights. One
    that is no matrix there (XLNet's, a dimension for heads) is in no published map.
    """
    first, rows, columns, total = {}, {}, {}, 0
    edited = [name for name in tensors if ".layers." in name and name.endswith(_EDITED)]
    for name in (name.removesuffix(_WEIGHT) for name in edited):
        outputs, inputs = tensors[name + _WEIGHT].shape
        # Other tensors have another dtype, which identifies the results.
        rows[name + _WEIGHT] = torch.arange(total, total + outputs, dtype=torch.float64)[:, None].repeat(1, inputs)
        columns[name + _WEIGHT] = torch.arange(inputs, dtype=torch.float64).repeat(outputs, 1)
        first[name] = total
        total += outputs
    other_tensors = {name: tensor.float() for name, tensor in tensors.items()}
    by_column = their_names(config, {**other_tensors, **columns})
    maps = []
    for path, hf_rows in their_names(config, {**other_tensors, **rows}).items():
        if hf_rows.dtype != torch.float64 or hf_rows.ndim != 2:
            continue
        hf_columns = by_column[path]
        transposed = not torch.equal(hf_rows, hf_rows[:, :1].expand_as(hf_rows))
        if transposed:
            hf_rows, hf_columns = hf_rows.T, hf_columns.T
        numbers = hf_rows[:, 0].long()
        parts = []
        for name, begin in first.items():
            outputs = len(tensors[name + _WEIGHT])
            rows_here = ((numbers >= begin) & (numbers < begin + outputs)).nonzero()[:, 0]
            if len(rows_here):
                parts.append(
                    LinearSlice(
                        name, rows_here[(numbers[rows_here] - begin).argsort()], hf_columns[rows_here[0]].long()
                    )
                )
        maps.append(HFLinear(path.removesuffix(_WEIGHT), transposed, len(numbers), tuple(parts)))
    return maps


# A tuned model and a restored adapter, as the modules of this package exchange them.


@dataclass(frozen=True)
class Tuned:
    """section: the `tuning` of a configuration. tensors: added by the method, without what only training needs. base:
    the model it was added to, with its tuned values. task_type: PEFT's name for the model's use, or None. learned:
    transformers' names of the base's tensors that were trained, such as heads and biases."""

    section: JsonMapping
    tensors: Mapping[str, Tensor]
    base: HFBase
    task_type: str | None
    learned: Sequence[str] = ()


@dataclass(frozen=True)
class Restored:
    """An adapter in lmtool's form. section: the `tuning` of a configuration. added: tensors of that method, under our
    names. changed: tensors of the base, under transformers' names, that the adapter changes where our method has no
    edit."""

    section: JsonObject
    added: dict[str, Tensor]
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class HFBase:
    """The model that an adapter stands on. ours: its tensors under our names; tensors: under the published ones. maps:
    those in its layers that tuning methods edit."""

    model: ModelConfig
    ours: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    maps: Sequence[HFLinear]

    @cached_property
    def by_module(self) -> dict[str, HFLinear]:
        """The maps by their paths."""
        return {linear.module: linear for linear in self.maps}

    def has_separate_bias(self, linear: HFLinear) -> bool:
        """Whether the bias of these layers is added after the module in transformers (DeBERTa)."""
        return f"{linear.module}.bias" not in self.tensors and any(
            f"{part.name}.bias" in self.ours for part in linear.parts
        )

    def bare(self, prefix: str) -> HFBase:
        """The same base under the names of the model without a head. prefix: removed from the names."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        maps = [replace(linear, module=linear.module.removeprefix(prefix)) for linear in self.maps]
        return replace(self, tensors=tensors, maps=maps)

    def with_values(self, changed: Mapping[str, Tensor]) -> HFBase:
        """The same base with changed values."""
        return replace(self, tensors={**self.tensors, **changed})

    def weight_OI(self, module: str) -> Tensor:
        """(O, I) of a linear layer. UserError if the base has none at this path."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None or weight.ndim != 2:
            raise UserError(
                f"its update of {module} is of no linear map in its base",
                "write the base that it was trained on into its adapter_config.json, or merge it with PEFT "
                "(merge_and_unload), save the model, and import that",
            )
        return weight.T if module in self.by_module and self.by_module[module].transposed else weight

    def stored(self, module: str, weight_OI: Tensor) -> Tensor:
        """A weight as transformers stores it."""
        return (
            weight_OI.T if module in self.by_module and self.by_module[module].transposed else weight_OI
        ).contiguous()
