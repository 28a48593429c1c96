"""(IA)3 (`lmtool/tuning/lora.py`) as PEFT's.

Shape letters: O outputs and I inputs of a map.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.weights.peft.maps import PublishedMap
from lmtool.weights.peft.settings import CONFIG, Ia3Settings
from lmtool.weights.peft.tuned import PublishedBase, Restored, Tuned

_SCALE = "ia3"
_OUTPUTS, _INPUTS = ("k_proj", "v_proj"), ("fc_out",)
"""The maps whose outputs are scaled, and those whose inputs are."""
ENDS = (".ia3_l",)


def to_peft(tuned: Tuned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """PEFT's configuration and tensors by module. Of several maps that are one there, those without a vector are
    multiplied by one. UserError where PEFT's vector does not reach what ours does."""
    tensors = tuned.tensors
    targets, feedforward = [], []
    written: dict[str, Tensor] = {}
    for place in tuned.base.maps:
        parts = [part for part in place.parts if f"{part.name}.{_SCALE}" in tensors]
        if not parts:
            continue
        if parts[0].name.endswith(_OUTPUTS) and tuned.base.has_bias_apart(place):
            raise UserError(
                f"in transformers the biases of {parts[0].name.removeprefix('backbone.')} are added behind "
                f"{place.module}, whose outputs alone PEFT scales",
                "format=delta writes what was tuned for lmtool; without format= it is merged",
            )
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
        "fan_in_fan_out": any(place.transposed for place in tuned.base.maps if place.module in targets),
    }
    return config, written


def from_peft(settings: Ia3Settings, tensors: Mapping[str, Tensor], base: PublishedBase) -> Restored:
    """The reverse. Scales of what the method here does not scale are merged into the maps. UserError where the tensors
    are not those that the configuration speaks of."""
    sides = {f".{kind}.weight": 0 for kind in _OUTPUTS} | {f".{kind}.weight": 1 for kind in _INPUTS}
    added = {
        f"{name.removesuffix('.weight')}.{_SCALE}": torch.ones(tensor.shape[side])
        for name, tensor in base.ours.items()
        for end, side in sides.items()
        if ".layers." in name and name.endswith(end)
    }
    changed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(ENDS[0])
        weight_OI, inputs = base.weight_OI(module).clone(), settings.scales_inputs(module)
        wanted = (1, weight_OI.shape[1]) if inputs else (len(weight_OI), 1)
        if not settings.targets(module) or tensor.shape != wanted:
            problem = f"{name} is {tuple(tensor.shape)}, and {wanted} is read"
            if not settings.targets(module):
                problem = f"{module} is none of target_modules"
            raise UserError(
                f"{CONFIG} and the tensors beside it disagree: {problem}",
                "give the base that it was trained on, or save the adapter again",
            )
        scale, place = tensor.flatten(), base.by_module.get(module)
        # A scale of outputs does not reach biases that are added behind the module.
        if place is None or (not inputs and base.has_bias_apart(place)):
            left = scale
        else:
            left = _taken(place, scale, inputs, added)
        if bool((left == 1).all()):
            continue
        changed[f"{module}.weight"] = base.stored(module, weight_OI * (left if inputs else left[:, None]))
        if not inputs and f"{module}.bias" in base.tensors:
            changed[f"{module}.bias"] = base.tensors[f"{module}.bias"] * left
    return Restored({"name": "ia3"}, added, changed)


def _taken(place: PublishedMap, scale: Tensor, inputs: bool, added: dict[str, Tensor]) -> Tensor:
    """Enter what the method here scales too; what is left of a scale, with ones in its place."""
    left = scale.clone()
    for part in place.parts:
        if inputs and part.name.endswith(_INPUTS):
            added[f"{part.name}.{_SCALE}"][part.columns_I] = scale
            return torch.ones_like(left)
        if not inputs and part.name.endswith(_OUTPUTS):
            added[f"{part.name}.{_SCALE}"] = scale[part.rows_O]
            left[part.rows_O] = 1.0
    return left
