"""The linear layers of a backbone in transformers: joined, transposed, or with reordered channels, depending on the
family.

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
from lmtool.weights.peft.settings import MERGE
from lmtool.weights.reading import their_names

_WEIGHT = ".weight"
_EDITED = tuple(f".{name}.weight" for name in get_args(Projection))


@dataclass(frozen=True)
class LinearSlice:
    """One of our linear layers as part of a linear layer of transformers. name: our name. rows_O: for each of our
    outputs, its index in transformers. columns_I: for each input in transformers, its index in ours."""

    name: str
    rows_O: Tensor
    columns_I: Tensor


@dataclass(frozen=True)
class HFLinear:
    """A linear layer in transformers. module: its path. transposed: whether it is stored as (inputs, outputs). outputs:
    number of outputs. parts: our layers that it contains."""

    module: str
    transposed: bool
    outputs: int
    parts: tuple[LinearSlice, ...]


def hf_linears(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[HFLinear]:
    """The linear layers of transformers that contain the layers that tuning methods edit.

    Found by converting matrices of row and column numbers with the family's key map. A layer that is not a matrix in
    transformers (XLNet's has a dimension for heads) is in none. config: the model's configuration. tensors: all tensors
    of the model, under our names.
    """
    first, rows, columns, total = {}, {}, {}, 0
    edited = [name for name in tensors if ".layers." in name and name.endswith(_EDITED)]
    for name in (name.removesuffix(_WEIGHT) for name in edited):
        outputs, inputs = tensors[name + _WEIGHT].shape
        # float64 identifies the numbered matrices in the result; all other tensors are float32.
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
        for name, start in first.items():
            outputs = len(tensors[name + _WEIGHT])
            indices = ((numbers >= start) & (numbers < start + outputs)).nonzero()[:, 0]
            if len(indices):
                rows_O = indices[(numbers[indices] - start).argsort()]
                parts.append(LinearSlice(name, rows_O, hf_columns[indices[0]].long()))
        maps.append(HFLinear(path.removesuffix(_WEIGHT), transposed, len(numbers), tuple(parts)))
    return maps


@dataclass(frozen=True)
class Tuned:
    """A tuned model.

    Attributes:
        section: The `tuning` section of its configuration.
        tensors: The tensors that the method added, except those needed only for training.
        base: The model without them, with tuned values.
        task_type: PEFT's task type of the model, or None.
        trained: transformers' names of the base's tensors that were trained, such as heads and biases.
    """

    section: JsonMapping
    tensors: Mapping[str, Tensor]
    base: HFBase
    task_type: str | None
    trained: Sequence[str] = ()


@dataclass(frozen=True)
class Restored:
    """An adapter in lmtool's form. section: the `tuning` section. added: tensors of the tuning method, under our names.
    changed: tensors of the base, under transformers' names, with updates merged that our method does not have."""

    section: JsonObject
    added: dict[str, Tensor]
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class HFBase:
    """The base of an adapter. ours: its tensors under our names. tensors: under transformers' names. linears: layers
    that tuning methods edit."""

    model: ModelConfig
    ours: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    linears: Sequence[HFLinear]

    @cached_property
    def by_module(self) -> dict[str, HFLinear]:
        """The linear layers by path."""
        return {linear.module: linear for linear in self.linears}

    def has_separate_bias(self, linear: HFLinear) -> bool:
        """Whether the bias is not in the linear module but added afterwards in transformers (DeBERTa)."""
        return f"{linear.module}.bias" not in self.tensors and any(
            f"{part.name}.bias" in self.ours for part in linear.parts
        )

    def bare(self, prefix: str) -> HFBase:
        """The same base under the names of the class without a head. prefix: removed from the names."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        linears = [replace(linear, module=linear.module.removeprefix(prefix)) for linear in self.linears]
        return replace(self, tensors=tensors, linears=linears)

    def with_values(self, changed: Mapping[str, Tensor]) -> HFBase:
        """The same base with changed values."""
        return replace(self, tensors={**self.tensors, **changed})

    def weight_OI(self, module: str) -> Tensor:
        """(O, I) weight of a linear layer. UserError if the base has none at this path."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None or weight.ndim != 2:
            raise UserError(
                f"it updates {module}, which is not a linear layer of its base",
                f"set base_model_name_or_path in adapter_config.json to the base that it was trained on, or {MERGE}",
            )
        return weight.T if self._is_transposed(module) else weight

    def stored(self, module: str, weight_OI: Tensor) -> Tensor:
        """A weight as transformers stores it."""
        return (weight_OI.T if self._is_transposed(module) else weight_OI).contiguous()

    def _is_transposed(self, module: str) -> bool:
        return module in self.by_module and self.by_module[module].transposed
