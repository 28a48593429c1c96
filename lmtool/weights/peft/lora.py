"""LoRA, DoRA and (IA)3 (`lmtool/tuning/lora.py`) in PEFT's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.weights.peft.maps import HFBase, HFLinear, LinearSlice, Restored, Tuned
from lmtool.weights.peft.settings import CONFIG, MERGE, Ia3Settings, LoraSettings

# LoRA and DoRA (`lmtool/tuning/lora.py`) as PEFT's.
#
# Shape letters: O outputs and I inputs of a map, R rank.


_A, _B, _MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
_NAMES = {
    "a_RI": "lora_A.weight",
    "b_OR": "lora_B.weight",
    "magnitude_O": "lora_magnitude_vector",
    "bias_O": "lora_B.bias",
}
"""What PEFT calls the tensors of an update."""
LORA_SUFFIXES = tuple(f".{name}" for name in _NAMES.values())


def lora_to_peft(tuned: Tuned) -> tuple[JsonObject, dict[str, Tensor]]:
    """PEFT's configuration and tensors by module. Updates of several maps that are one there become one of as many
    ranks, block by block; outputs without an update keep their length."""
    section, tensors = tuned.section, tuned.tensors
    rank, root = section["rank"], bool(section["rank_stabilised"])
    ranks: dict[str, int] = {}
    written: dict[str, Tensor] = {}
    for linear in tuned.base.maps:
        parts = [part for part in linear.parts if f"{part.name}.{_A}" in tensors]
        if not parts:
            continue
        ranks[linear.module] = rank * len(parts)
        first = tensors[f"{parts[0].name}.{_B}"]
        b_OR = first.new_zeros(linear.outputs, rank * len(parts))
        for number, part in enumerate(parts):
            b_OR[part.rows_O, rank * number : rank * (number + 1)] = tensors[f"{part.name}.{_B}"]
        rows = [tensors[f"{part.name}.{_A}"][:, part.columns_I] for part in parts]
        update = {"a_RI": torch.cat(rows), "b_OR": b_OR}
        if section["dora"]:
            update["magnitude_O"] = torch.linalg.vector_norm(tuned.base.weight_OI(linear.module), dim=1)
            for part in parts:
                update["magnitude_O"][part.rows_O] = tensors[f"{part.name}.{_MAGNITUDE}"]
        written |= {f"{linear.module}.{_NAMES[kind]}": tensor for kind, tensor in update.items()}
    merged = {module: number for module, number in ranks.items() if number != rank}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _number(section["alpha"]),
        "lora_dropout": section["dropout"],
        "use_rslora": root,
        "use_dora": section["dora"],
        "bias": section["bias"],
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.maps if linear.module in ranks),
        "target_modules": list(ranks),
        "rank_pattern": merged,
        # The scale is alpha over the rank, or over its root.
        "alpha_pattern": {
            module: _number(section["alpha"] * (number / rank) ** (0.5 if root else 1))
            for module, number in merged.items()
        },
    }
    return config, written


@dataclass(frozen=True)
class _Update:
    """Of a map, or of a part of one: scale B A, and with DoRA the lengths of its outputs."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None

    def of(self, part: LinearSlice) -> _Update:
        """That of a map of ours that is in a published one."""
        inputs_RI = self.a_RI.new_zeros(self.a_RI.shape)
        inputs_RI[:, part.columns_I] = self.a_RI
        lengths = None if self.magnitude_O is None else self.magnitude_O[part.rows_O]
        return _Update(inputs_RI, self.b_OR[part.rows_O], self.scale, lengths)

    def changes(self, length_O: Tensor) -> bool:
        """Whether it gives another map. length_O: of the rows that it is added to."""
        return bool(self.b_OR.any()) or (self.magnitude_O is not None and not self.magnitude_O.allclose(length_O))

    def merged(self, weight_OI: Tensor) -> Tensor:
        """(O, I) of the map with it."""
        updated_OI = torch.addmm(weight_OI, self.b_OR, self.a_RI, alpha=self.scale)
        if self.magnitude_O is None:
            return updated_OI
        return updated_OI * (self.magnitude_O / torch.linalg.vector_norm(updated_OI, dim=1))[:, None]


def lora_from_peft(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> Restored:
    """The reverse. Maps of another rank or scale than the largest are filled with zeros, and their scale is put into B.
    Updates of maps that the method here does not edit are merged into these. UserError where the tensors are not those
    that the configuration speaks of."""
    updates = dict(_updates(settings, tensors, base))
    missing = [
        linear.module for linear in base.maps if linear.module not in updates and settings.targets(linear.module)
    ]
    if missing and settings.target_modules != "all-linear":
        raise UserError(
            f"{CONFIG} has an update of {missing[0]}, and there are no tensors of one", "save the adapter again, whole"
        )
    changed: dict[str, Tensor] = {}
    ours: dict[str, _Update] = {}
    for module, update in updates.items():
        if update.bias_O is not None:
            changed[f"{module}.bias"] = base.tensors[f"{module}.bias"] + update.scale * update.bias_O
        linear, weight_OI = base.by_module.get(module), base.weight_OI(module)
        if linear is None:
            changed[f"{module}.weight"] = base.stored(module, update.merged(weight_OI))
            continue
        parts = {part.name: update.of(part) for part in linear.parts}
        length_O = torch.linalg.vector_norm(weight_OI, dim=1)
        # Of maps that are one there, those that the update leaves alone have none here.
        ours |= {
            part.name: parts[part.name]
            for part in linear.parts
            if len(parts) == 1 or parts[part.name].changes(length_O[part.rows_O])
        }
    if not ours:
        raise UserError("its adapter_model.safetensors has no update of a map that lmtool edits", MERGE)
    return _of_one_rank(settings, ours, base, changed)


def _of_one_rank(
    settings: LoraSettings, updates: Mapping[str, _Update], base: HFBase, changed: dict[str, Tensor]
) -> Restored:
    """Updates by our maps as those of one method."""
    rank = max(len(update.a_RI) for update in updates.values())
    scale = max(update.scale for update in updates.values())
    projections = sorted({name.rpartition(".")[2] for name in updates})
    added: dict[str, Tensor] = {}
    parts = [(linear.module, part) for linear in base.maps for part in linear.parts]
    for module, part in (pair for pair in parts if pair[1].name.rpartition(".")[2] in projections):
        weight_OI = base.weight_OI(module)[part.rows_O]
        empty = _Update(weight_OI.new_zeros(0, weight_OI.shape[1]), weight_OI.new_zeros(len(weight_OI), 0), scale)
        update = updates.get(part.name, empty)
        missing = rank - len(update.a_RI)
        added[f"{part.name}.{_A}"] = torch.cat([update.a_RI, update.a_RI.new_zeros(missing, update.a_RI.shape[1])])
        scaled_OR = update.b_OR if update.scale == scale else update.b_OR * (update.scale / scale)
        added[f"{part.name}.{_B}"] = torch.cat([scaled_OR, scaled_OR.new_zeros(len(scaled_OR), missing)], dim=1)
        if settings.use_dora:
            length_O = torch.linalg.vector_norm(weight_OI, dim=1)
            added[f"{part.name}.{_MAGNITUDE}"] = length_O if update.magnitude_O is None else update.magnitude_O
    section = {
        "name": "lora",
        "rank": rank,
        "alpha": scale * (rank**0.5 if settings.use_rslora else rank),
        "dropout": settings.lora_dropout,
        "projections": projections,
        "rank_stabilised": settings.use_rslora,
        "dora": settings.use_dora,
        "bias": settings.bias,
    }
    return Restored(section, added, changed)


def _updates(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> Iterator[tuple[str, _Update]]:
    """The updates by module. UserError where one is not what the configuration says, or does not fit its map."""
    modules = dict.fromkeys(name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end))
    expected = {
        "a_RI",
        "b_OR",
        *(["magnitude_O"] if settings.use_dora else []),
        *(["bias_O"] if settings.lora_bias else []),
    }
    for module in modules:
        linears = {kind: tensors[f"{module}.{name}"] for kind, name in _NAMES.items() if f"{module}.{name}" in tensors}
        outputs, inputs = base.weight_OI(module).shape
        reason, rank = None, settings.rank(module)
        if linears.keys() != expected:
            kinds = sorted(_NAMES[kind] for kind in expected ^ linears.keys())
            reason = f"it has {module} with{'' if linears.keys() > expected else 'out'} {', '.join(kinds)}"
        elif not settings.targets(module):
            reason = f"it updates {module}, which is none of target_modules"
        elif bool(linears["a_RI"].shape != (rank, inputs)) or bool(linears["b_OR"].shape != (outputs, rank)):
            shapes = f"{tuple(linears['b_OR'].shape)} x {tuple(linears['a_RI'].shape)}"
            reason = (
                f"its update of {module} is {shapes}; the map has {outputs} outputs and {inputs} inputs, rank {rank}"
            )
        elif any(linears[kind].shape != (outputs,) for kind in expected - {"a_RI", "b_OR"}):
            reason = f"its update of {module} has other lengths or biases than the map's {outputs} outputs"
        elif settings.lora_bias and f"{module}.bias" not in base.tensors:
            raise UserError(
                f"lora_bias=true: its update of {module} has a bias, which the map lacks", "use it with PEFT"
            )
        if reason is not None:
            raise UserError(
                f"{CONFIG} and the tensors beside it disagree: {reason}",
                "give the base that it was trained on, or save the adapter again",
            )
        yield module, _Update(scale=settings.scale(module), **linears)


def _number(value: float) -> float:
    """PEFT's alpha is a whole number where it can be."""
    return int(value) if float(value).is_integer() else value


# (IA)3 (`lmtool/tuning/lora.py`) as PEFT's.
#
# Shape letters: O outputs and I inputs of a map.


_SCALE = "ia3"
_OUTPUTS, _INPUTS = ("k_proj", "v_proj"), ("fc_out",)
"""The maps whose outputs are scaled, and those whose inputs are."""
IA3_SUFFIXES = (".ia3_l",)


def ia3_to_peft(tuned: Tuned) -> tuple[JsonObject, dict[str, Tensor]]:
    """PEFT's configuration and tensors by module. Of several maps that are one there, those without a vector are
    multiplied by one. UserError where PEFT's vector does not reach what ours does."""
    tensors = tuned.tensors
    targets, feedforward = [], []
    written: dict[str, Tensor] = {}
    for linear in tuned.base.maps:
        parts = [part for part in linear.parts if f"{part.name}.{_SCALE}" in tensors]
        if not parts:
            continue
        if parts[0].name.endswith(_OUTPUTS) and tuned.base.has_separate_bias(linear):
            raise UserError(
                f"in transformers the biases of {parts[0].name.removeprefix('backbone.')} are added behind "
                f"{linear.module}, whose outputs alone PEFT scales",
                "format=delta writes what was tuned for lmtool; without format= it is merged",
            )
        targets.append(linear.module)
        if parts[0].name.endswith(_INPUTS):
            feedforward.append(linear.module)
            written[f"{linear.module}.ia3_l"] = tensors[f"{parts[0].name}.{_SCALE}"][None, parts[0].columns_I]
            continue
        scale_O = torch.ones(linear.outputs)
        for part in parts:
            scale_O[part.rows_O] = tensors[f"{part.name}.{_SCALE}"]
        written[f"{linear.module}.ia3_l"] = scale_O[:, None]
    config = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.maps if linear.module in targets),
    }
    return config, written


def ia3_from_peft(settings: Ia3Settings, tensors: Mapping[str, Tensor], base: HFBase) -> Restored:
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
        module = name.removesuffix(IA3_SUFFIXES[0])
        weight_OI, inputs = base.weight_OI(module).clone(), settings.scales_inputs(module)
        expected = (1, weight_OI.shape[1]) if inputs else (len(weight_OI), 1)
        if not settings.targets(module) or tensor.shape != expected:
            reason = f"{name} is {tuple(tensor.shape)}, and {expected} is read"
            if not settings.targets(module):
                reason = f"{module} is none of target_modules"
            raise UserError(
                f"{CONFIG} and the tensors beside it disagree: {reason}",
                "give the base that it was trained on, or save the adapter again",
            )
        scale, linear = tensor.flatten(), base.by_module.get(module)
        # A scale of outputs does not reach biases that are added behind the module.
        if linear is None or (not inputs and base.has_separate_bias(linear)):
            left = scale
        else:
            left = _layer_tensors(linear, scale, inputs, added)
        if bool((left == 1).all()):
            continue
        changed[f"{module}.weight"] = base.stored(module, weight_OI * (left if inputs else left[:, None]))
        if not inputs and f"{module}.bias" in base.tensors:
            changed[f"{module}.bias"] = base.tensors[f"{module}.bias"] * left
    return Restored({"name": "ia3"}, added, changed)


def _layer_tensors(linear: HFLinear, scale: Tensor, inputs: bool, added: dict[str, Tensor]) -> Tensor:
    """Enter what the method here scales too; what is left of a scale, with ones in its place."""
    left = scale.clone()
    for part in linear.parts:
        if inputs and part.name.endswith(_INPUTS):
            added[f"{part.name}.{_SCALE}"][part.columns_I] = scale
            return torch.ones_like(left)
        if not inputs and part.name.endswith(_OUTPUTS):
            added[f"{part.name}.{_SCALE}"] = scale[part.rows_O]
            left[part.rows_O] = 1.0
    return left
