"""Finds the linear layers of transformers that correspond to lmtool's, for the conversion of PEFT adapters.

Depending on the family, a linear layer of transformers joins several of lmtool's layers (GPT-2's `c_attn` contains
query, key and value projections), stores the transposed weight, or orders the channels differently.

Shape letters: O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.tuning.configs.methods import Projection
from lmtool.weights.peft.settings import MERGE
from lmtool.weights.reading import to_hf_names

_WEIGHT = ".weight"
_EDITED = tuple(f".{name}.weight" for name in get_args(Projection))


@dataclass(frozen=True)
class LinearSlice:
    """One of lmtool's linear layers, as a slice of a linear layer of transformers. name: checkpoint name of lmtool's
    layer. rows_O: for each output of lmtool's layer, the index of this output in the layer of transformers. columns_I:
    for each input of the layer of transformers, the index of this input in lmtool's layer."""

    name: str
    rows_O: Tensor
    columns_I: Tensor


@dataclass(frozen=True)
class HFLinear:
    """A linear layer of transformers. module: its path. transposed: whether the weight is stored as (inputs, outputs).
    outputs: number of outputs. parts: the layers of lmtool that this layer contains."""

    module: str
    transposed: bool
    outputs: int
    parts: tuple[LinearSlice, ...]


def hf_linears(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[HFLinear]:
    """Returns the linear layers of transformers that contain the layers that tuning methods edit.

    The function replaces the weight of each layer by a matrix of row numbers and by a matrix of column numbers. It
    converts both with the key map of the family, and reads from the results where each row and column is in
    transformers. A layer that is not a matrix in transformers (XLNet's weights have a dimension for heads) is left out.
    config: the model's configuration. tensors: all tensors of the model, under lmtool's names.
    """
    first_row, rows, columns, total = {}, {}, {}, 0
    edited = [name for name in tensors if ".layers." in name and name.endswith(_EDITED)]
    for name in (name.removesuffix(_WEIGHT) for name in edited):
        outputs, inputs = tensors[name + _WEIGHT].shape
        # The numbered matrices are float64 and all other tensors float32, so that they can be told apart after the
        # conversion. Row numbers continue from layer to layer, so that a row number also identifies the layer.
        rows[name + _WEIGHT] = torch.arange(total, total + outputs, dtype=torch.float64)[:, None].repeat(1, inputs)
        columns[name + _WEIGHT] = torch.arange(inputs, dtype=torch.float64).repeat(outputs, 1)
        first_row[name] = total
        total += outputs
    other_tensors = {name: tensor.float() for name, tensor in tensors.items()}
    by_column = to_hf_names(config, {**other_tensors, **columns})
    linears = []
    for path, hf_rows in to_hf_names(config, {**other_tensors, **rows}).items():
        if hf_rows.dtype != torch.float64 or hf_rows.ndim != 2:
            continue
        hf_columns = by_column[path]
        # All values in a row are equal unless the matrix is transposed.
        transposed = not torch.equal(hf_rows, hf_rows[:, :1].expand_as(hf_rows))
        if transposed:
            hf_rows, hf_columns = hf_rows.T, hf_columns.T
        numbers = hf_rows[:, 0].long()
        parts = []
        for name, start in first_row.items():
            outputs = len(tensors[name + _WEIGHT])
            indices = ((numbers >= start) & (numbers < start + outputs)).nonzero()[:, 0]
            if len(indices):
                rows_O = indices[(numbers[indices] - start).argsort()]
                parts.append(LinearSlice(name, rows_O, hf_columns[indices[0]].long()))
        linears.append(HFLinear(path.removesuffix(_WEIGHT), transposed, len(numbers), tuple(parts)))
    return linears


@dataclass(frozen=True)
class TunedModel:
    """A tuned model that is to be written as a PEFT adapter.

    Attributes:
        section: The `tuning` section of its configuration.
        tensors: The tensors that the tuning method added, under lmtool's names, without tensors that only training
            needs.
        base: The model without the added tensors. Other trained tensors, such as heads, have their trained values.
        task_type: PEFT's task type of the model, or None.
        trained: Names, in transformers, of the base's tensors that were trained, such as heads and biases.
    """

    section: JsonMapping
    tensors: Mapping[str, Tensor]
    base: HFBase
    task_type: str | None
    trained: Sequence[str] = ()


@dataclass(frozen=True)
class RestoredAdapter:
    """A PEFT adapter that was converted to a tuning method of lmtool. section: the `tuning` section. added_tensors:
    those of the tuning method, under lmtool's names. changed_tensors: tensors of the base, under transformers' names,
    into which updates were merged because lmtool's method has no counterpart for them."""

    section: JsonObject
    added_tensors: dict[str, Tensor]
    changed_tensors: dict[str, Tensor]


@dataclass(frozen=True)
class HFBase:
    """The base model of a PEFT adapter. lmtool_tensors, tensors: under lmtool's and under transformers' names. linears:
    the linear layers of transformers that tuning methods edit."""

    model: ModelConfig
    lmtool_tensors: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    linears: Sequence[HFLinear]

    @cached_property
    def by_module(self) -> dict[str, HFLinear]:
        """The linear layers by the path of their module."""
        return {linear.module: linear for linear in self.linears}

    def has_separate_bias(self, linear: HFLinear) -> bool:
        """Returns whether transformers adds the bias of a layer outside of its linear module (DeBERTa)."""
        return f"{linear.module}.bias" not in self.tensors and any(
            f"{part.name}.bias" in self.lmtool_tensors for part in linear.parts
        )

    def without_prefix(self, prefix: str) -> HFBase:
        """Returns the same base without this prefix before the names, as in the transformers class without a head."""
        tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        linears = [replace(linear, module=linear.module.removeprefix(prefix)) for linear in self.linears]
        return replace(self, tensors=tensors, linears=linears)

    def weight_OI(self, module: str) -> Tensor:
        """Returns the weight of a linear layer, (O, I). Raises UserError if the base has no linear layer at this
        path."""
        weight = self.tensors.get(f"{module}.weight")
        if weight is None or weight.ndim != 2:
            raise UserError(
                f"the adapter updates {module}, which is not a linear layer of its base with a weight of its own",
                "set base_model_name_or_path in adapter_config.json to the model that the adapter was trained on, or "
                f"{MERGE}",
            )
        return weight.T if self._is_transposed(module) else weight

    def to_stored_layout(self, module: str, weight_OI: Tensor) -> Tensor:
        """Returns an (O, I) weight in the layout in which transformers stores it."""
        return (weight_OI.T if self._is_transposed(module) else weight_OI).contiguous()

    def _is_transposed(self, module: str) -> bool:
        return module in self.by_module and self.by_module[module].transposed
