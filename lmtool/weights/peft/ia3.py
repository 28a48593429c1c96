"""(IA)3 (`lmtool/tuning/ia3.py`) as PEFT's.

Shape letters: O outputs and I inputs of a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.weights.peft.maps import PublishedMap
from lmtool.weights.peft.tuned import MERGE, Tuned

_SCALE = "ia3"
_INPUTS = ("fc_out",)
"""The maps whose inputs are scaled; of the others their outputs are."""


def to_peft(tuned: Tuned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """PEFT's configuration and tensors by module. Of several maps that are one there, those without a vector are
    multiplied by one."""
    tensors = tuned.tensors
    targets, feedforward = [], []
    written: dict[str, Tensor] = {}
    for place in tuned.maps:
        parts = [part for part in place.parts if f"{part.name}.{_SCALE}" in tensors]
        if not parts:
            continue
        targets.append(place.module)
        if parts[0].name.endswith(_INPUTS):
            feedforward.append(place.module)
            written[f"{place.module}.ia3_l"] = tensors[f"{parts[0].name}.{_SCALE}"][None, parts[0].columns_I]
            continue
        scale_O = torch.ones(place.outputs)
        for part in parts:
            scale_O[part.rows_O] = tensors[f"{part.name}.{_SCALE}"]
        written[f"{place.module}.ia3_l"] = scale_O[:, None]
    config = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": any(place.transposed for place in tuned.maps if place.module in targets),
    }
    return config, written


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], maps: Sequence[PublishedMap]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The reverse: the `tuning` section, and what the method adds. UserError where other maps are scaled than lmtool
    scales."""
    added: dict[str, Tensor] = {}
    for place in maps:
        scale = tensors.get(f"{place.module}.ia3_l")
        for part in place.parts:
            inputs, kind = part.name.endswith(_INPUTS), part.name.rpartition(".")[2]
            edited = inputs or kind in ("k_proj", "v_proj")
            size = len(part.columns_I if inputs else part.rows_O)
            wanted = (1, size) if inputs else (place.outputs, 1)
            if scale is None:
                if edited:
                    added[f"{part.name}.{_SCALE}"] = torch.ones(size)
                continue
            own = scale.float().flatten()
            if scale.shape != wanted or (not edited and not bool((own[part.rows_O] == 1).all())):
                raise UserError(
                    f"its vector of {place.module} is {tuple(scale.shape)}: lmtool scales the outputs of keys and "
                    "values and the inputs of the last map of each feed-forward part",
                    MERGE,
                )
            if inputs:
                ours = torch.ones(size)
                ours[part.columns_I] = own
                added[f"{part.name}.{_SCALE}"] = ours
            elif edited:
                added[f"{part.name}.{_SCALE}"] = own[part.rows_O]
    return {"name": "ia3"}, added
