"""Where the linear maps of a backbone stand in its published model: several as one, transposed, or with their channels
in another order, as the family has it.

Shape letters: O outputs and I inputs of a map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from lmtool.models.configs import ModelConfig
from lmtool.tuning.configs.methods import Projection
from lmtool.weights.reading import their_names

_WEIGHT = ".weight"
_EDITED = tuple(f".{name}.weight" for name in get_args(Projection))


@dataclass(frozen=True)
class Part:
    """A map of ours in a published one. name: ours. rows_O: the published output that each of its outputs is.
    columns_I: the one of its inputs that each published input is."""

    name: str
    rows_O: Tensor
    columns_I: Tensor


@dataclass(frozen=True)
class PublishedMap:
    """A linear map of a published model. module: its path. transposed: whether it is stored as (inputs, outputs).
    outputs: how many it has."""

    module: str
    transposed: bool
    outputs: int
    parts: tuple[Part, ...]


def published_maps(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[PublishedMap]:
    """The published maps that the maps in the layers are in which tuning methods edit. tensors: of the whole model,
    under our names. config: of the model.

    A family says what becomes of tensors, and of nothing else: numbered rows and columns go the way of the weights. One
    that is no matrix there (XLNet's, a dimension for heads) is in no published map.
    """
    first, rows, columns, total = {}, {}, {}, 0
    edited = [name for name in tensors if ".layers." in name and name.endswith(_EDITED)]
    for name in (name.removesuffix(_WEIGHT) for name in edited):
        outputs, inputs = tensors[name + _WEIGHT].shape
        # Other tensors have another type: what is made of these is known by theirs.
        rows[name + _WEIGHT] = torch.arange(total, total + outputs, dtype=torch.float64)[:, None].repeat(1, inputs)
        columns[name + _WEIGHT] = torch.arange(inputs, dtype=torch.float64).repeat(outputs, 1)
        first[name] = total
        total += outputs
    others = {name: tensor.float() for name, tensor in tensors.items()}
    by_column = their_names(config, {**others, **columns})
    maps = []
    for path, rows_there in their_names(config, {**others, **rows}).items():
        if rows_there.dtype != torch.float64 or rows_there.ndim != 2:
            continue
        columns_there = by_column[path]
        transposed = not torch.equal(rows_there, rows_there[:, :1].expand_as(rows_there))
        if transposed:
            rows_there, columns_there = rows_there.T, columns_there.T
        numbers = rows_there[:, 0].long()
        parts = []
        for name, begin in first.items():
            outputs = len(tensors[name + _WEIGHT])
            places = ((numbers >= begin) & (numbers < begin + outputs)).nonzero()[:, 0]
            if len(places):
                parts.append(Part(name, places[(numbers[places] - begin).argsort()], columns_there[places[0]].long()))
        maps.append(PublishedMap(path.removesuffix(_WEIGHT), transposed, len(numbers), tuple(parts)))
    return maps
