"""Converts LoRA, DoRA and (IA)3 (`lmtool/tuning/lora.py`) to PEFT's format and back.

Shape letters: O outputs and I inputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.weights.peft.maps import HFBase, HFLinear, LinearSlice, RestoredAdapter, TunedModel
from lmtool.weights.peft.settings import (
    CONFIG,
    DELTA,
    DISAGREE,
    MERGE,
    SAVE_AGAIN,
    WEIGHTS,
    Ia3Settings,
    LoraSettings,
)

_A, _B, _MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
_NAMES = {
    "a_RI": "lora_A.weight",
    "b_OR": "lora_B.weight",
    "magnitude_O": "lora_magnitude_vector",
    "bias_O": "lora_B.bias",
}
"""PEFT's names for the tensors of an update, by the attribute of `_Update`."""
LORA_SUFFIXES = tuple(f".{name}" for name in _NAMES.values())
LORA_EMBEDDING = ".lora_embedding_"
"""What follows the name of an embedding in the tensors of its update, which lmtool does not support."""


def lora_to_peft(tuned: TunedModel) -> tuple[JsonObject, dict[str, Tensor]]:
    """Converts LoRA or DoRA to PEFT's configuration and tensors.

    If transformers joins several edited layers in one, their updates become one block-diagonal update, whose rank is
    the sum of their ranks. Outputs without an update have zeros in B, and with DoRA the magnitude of the base's weight.
    """
    section, tensors = tuned.section, tuned.tensors
    rank, rank_stabilized = section["rank"], bool(section["rank_stabilised"])
    ranks: dict[str, int] = {}
    peft_tensors: dict[str, Tensor] = {}
    for linear in tuned.base.linears:
        parts = [part for part in linear.parts if f"{part.name}.{_A}" in tensors]
        if not parts:
            continue
        ranks[linear.module] = rank * len(parts)
        first_b_OR = tensors[f"{parts[0].name}.{_B}"]
        b_OR = first_b_OR.new_zeros(linear.outputs, rank * len(parts))
        for number, part in enumerate(parts):
            b_OR[part.rows_O, rank * number : rank * (number + 1)] = tensors[f"{part.name}.{_B}"]
        rows = [tensors[f"{part.name}.{_A}"][:, part.columns_I] for part in parts]
        update = {"a_RI": torch.cat(rows), "b_OR": b_OR}
        if section["dora"]:
            update["magnitude_O"] = torch.linalg.vector_norm(tuned.base.weight_OI(linear.module), dim=1)
            for part in parts:
                update["magnitude_O"][part.rows_O] = tensors[f"{part.name}.{_MAGNITUDE}"]
        peft_tensors |= {f"{linear.module}.{_NAMES[kind]}": tensor for kind, tensor in update.items()}
    other_ranks = {module: number for module, number in ranks.items() if number != rank}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _integer_if_integral(section["alpha"]),
        "lora_dropout": section["dropout"],
        "use_rslora": rank_stabilized,
        "use_dora": section["dora"],
        "bias": section["bias"],
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.linears if linear.module in ranks),
        "target_modules": list(ranks),
        "rank_pattern": other_ranks,
        # Joined updates have a larger rank. The scale, alpha / rank or alpha / sqrt(rank), must not change with it.
        "alpha_pattern": {
            module: _integer_if_integral(section["alpha"] * (number / rank) ** (0.5 if rank_stabilized else 1))
            for module, number in other_ranks.items()
        },
    }
    return config, peft_tensors


@dataclass(frozen=True)
class _Update:
    """The update of a linear layer of transformers, or of one of lmtool's layers in it: the matrix scale * B @ A, which
    is added to the weight. a_RI: A. b_OR: B. scale: the factor. magnitude_O: DoRA's magnitudes of the outputs; None
    without DoRA. bias_O: PEFT's bias of B; None without such a bias."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None
    bias_O: Tensor | None = None

    def select(self, layer: LinearSlice) -> _Update:
        """Returns the update of one of lmtool's layers that the layer of transformers contains."""
        a_RI = self.a_RI.new_zeros(self.a_RI.shape)
        a_RI[:, layer.columns_I] = self.a_RI  # a permutation of the inputs
        magnitude_O = None if self.magnitude_O is None else self.magnitude_O[layer.rows_O]
        return _Update(a_RI, self.b_OR[layer.rows_O], self.scale, magnitude_O)

    def changes(self, norm_O: Tensor) -> bool:
        """Returns whether the update changes a layer. norm_O: the norms of the rows of the layer's weight."""
        return bool(self.b_OR.any()) or (self.magnitude_O is not None and not self.magnitude_O.allclose(norm_O))

    def merge(self, weight_OI: Tensor) -> Tensor:
        """Returns the weight of the layer with the update, (O, I)."""
        updated_OI = torch.addmm(weight_OI, self.b_OR, self.a_RI, alpha=self.scale)
        if self.magnitude_O is None:
            return updated_OI
        return updated_OI * (self.magnitude_O / torch.linalg.vector_norm(updated_OI, dim=1))[:, None]


def lora_from_peft(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> RestoredAdapter:
    """Converts LoRA or DoRA from PEFT; `READERS` of adapter.py describes the parameters.

    lmtool uses one rank and one scale for all layers: updates of a smaller rank are padded with zeros, and differences
    in scale are multiplied into B. Updates of layers that lmtool's method does not edit are merged into the base.
    """
    updates = dict(_updates(settings, tensors, base))
    modules = (linear.module for linear in base.linears)
    missing = [module for module in modules if module not in updates and settings.targets(module)]
    if missing and settings.target_modules != "all-linear":
        raise UserError(f"{CONFIG} targets {missing[0]}, but the adapter has no tensors for it", SAVE_AGAIN)
    changed_tensors: dict[str, Tensor] = {}
    lmtool_updates: dict[str, _Update] = {}
    for module, update in updates.items():
        if update.bias_O is not None:
            changed_tensors[f"{module}.bias"] = base.tensors[f"{module}.bias"] + update.scale * update.bias_O
        linear, weight_OI = base.by_module.get(module), base.weight_OI(module)
        if linear is None:
            changed_tensors[f"{module}.weight"] = base.to_stored_layout(module, update.merge(weight_OI))
            continue
        norm_O = torch.linalg.vector_norm(weight_OI, dim=1)
        for part in linear.parts:
            part_update = update.select(part)
            # A part of a joined layer gets an update only if the joined update changes it.
            if len(linear.parts) == 1 or part_update.changes(norm_O[part.rows_O]):
                lmtool_updates[part.name] = part_update
    if not lmtool_updates:
        raise UserError(f"{WEIGHTS} contains only updates of layers that lmtool's tuning methods do not edit", MERGE)
    return _with_one_rank(settings, lmtool_updates, base, changed_tensors)


def _with_one_rank(
    settings: LoraSettings, updates: Mapping[str, _Update], base: HFBase, changed_tensors: dict[str, Tensor]
) -> RestoredAdapter:
    """Combines updates into one tuning method with the same rank and scale in all layers. A layer without an update
    gets an update of zero if its projection (q_proj, ...) occurs in `updates`. settings: the adapter's settings.
    updates: the updates by lmtool's names. base: the base model. changed_tensors: tensors of the base into which other
    updates were merged, under transformers' names."""
    rank = max(len(update.a_RI) for update in updates.values())
    scale = max(update.scale for update in updates.values())
    projections = sorted({name.rpartition(".")[2] for name in updates})
    added_tensors: dict[str, Tensor] = {}
    parts = [(linear.module, part) for linear in base.linears for part in linear.parts]
    for module, part in (pair for pair in parts if pair[1].name.rpartition(".")[2] in projections):
        weight_OI = base.weight_OI(module)[part.rows_O]
        zero_update = _Update(weight_OI.new_zeros(0, weight_OI.shape[1]), weight_OI.new_zeros(len(weight_OI), 0), scale)
        update = updates.get(part.name, zero_update)
        missing_rank = rank - len(update.a_RI)
        added_tensors[f"{part.name}.{_A}"] = torch.cat(
            [update.a_RI, update.a_RI.new_zeros(missing_rank, update.a_RI.shape[1])]
        )
        scaled_OR = update.b_OR if update.scale == scale else update.b_OR * (update.scale / scale)
        added_tensors[f"{part.name}.{_B}"] = torch.cat(
            [scaled_OR, scaled_OR.new_zeros(len(scaled_OR), missing_rank)], dim=1
        )
        if settings.use_dora:
            norm_O = torch.linalg.vector_norm(weight_OI, dim=1)
            added_tensors[f"{part.name}.{_MAGNITUDE}"] = norm_O if update.magnitude_O is None else update.magnitude_O
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
    return RestoredAdapter(section, added_tensors, changed_tensors)


def _updates(settings: LoraSettings, tensors: Mapping[str, Tensor], base: HFBase) -> Iterator[tuple[str, _Update]]:
    """Yields the path of each edited module with its update. Raises UserError if an update does not match the settings
    or its module."""
    modules = dict.fromkeys(name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end))
    expected = {
        "a_RI",
        "b_OR",
        *(["magnitude_O"] if settings.use_dora else []),
        *(["bias_O"] if settings.lora_bias else []),
    }
    for module in modules:
        update = {kind: tensors[f"{module}.{name}"] for kind, name in _NAMES.items() if f"{module}.{name}" in tensors}
        outputs, inputs = base.weight_OI(module).shape
        reason, rank = None, settings.rank(module)
        if update.keys() != expected:
            kinds = sorted(_NAMES[kind] for kind in expected ^ update.keys())
            reason = f"the adapter has {module} with{'' if update.keys() > expected else 'out'} {', '.join(kinds)}"
        elif not settings.targets(module):
            reason = f"the adapter updates {module}, which is not in target_modules"
        elif bool(update["a_RI"].shape != (rank, inputs)) or bool(update["b_OR"].shape != (outputs, rank)):
            shapes = f"{tuple(update['b_OR'].shape)} x {tuple(update['a_RI'].shape)}"
            reason = f"the update of {module} is {shapes}; expected {outputs} outputs, {inputs} inputs, rank {rank}"
        elif any(update[kind].shape != (outputs,) for kind in expected - {"a_RI", "b_OR"}):
            reason = f"the update of {module} has a magnitude or bias of another size than {outputs} outputs"
        elif settings.lora_bias and f"{module}.bias" not in base.tensors:
            raise UserError(
                f"lora_bias=true: the update of {module} has a bias, which the layer lacks", "use the adapter with PEFT"
            )
        if reason is not None:
            raise UserError(f"{CONFIG} and {WEIGHTS} disagree: {reason}", DISAGREE)
        yield module, _Update(scale=settings.scale(module), **update)


def _integer_if_integral(value: float) -> float:
    """Returns the value, as an integer if it is integral, because PEFT declares alpha as an integer."""
    return int(value) if float(value).is_integer() else value


_SCALE = "ia3"
_OUTPUTS, _INPUTS = ("k_proj", "v_proj"), ("fc_out",)
"""Names of the layers whose outputs (IA)3 scales, and of the layers whose inputs it scales."""
IA3_SUFFIXES = (".ia3_l",)


def ia3_to_peft(tuned: TunedModel) -> tuple[JsonObject, dict[str, Tensor]]:
    """Converts (IA)3 to PEFT's configuration and tensors.

    If transformers joins several layers in one, the outputs of layers that (IA)3 does not edit are scaled by 1. Raises
    UserError if PEFT would not scale a bias that lmtool scales.
    """
    tensors = tuned.tensors
    targets, feedforward = [], []
    peft_tensors: dict[str, Tensor] = {}
    for linear in tuned.base.linears:
        parts = [part for part in linear.parts if f"{part.name}.{_SCALE}" in tensors]
        if not parts:
            continue
        if parts[0].name.endswith(_OUTPUTS) and tuned.base.has_separate_bias(linear):
            raise UserError(
                f"transformers adds the biases of {parts[0].name.removeprefix('backbone.')} after {linear.module}, so "
                "PEFT does not scale them",
                f"{DELTA}; omit format= to export merged weights",
            )
        targets.append(linear.module)
        if parts[0].name.endswith(_INPUTS):
            feedforward.append(linear.module)
            peft_tensors[f"{linear.module}.ia3_l"] = tensors[f"{parts[0].name}.{_SCALE}"][None, parts[0].columns_I]
            continue
        scale_O = torch.ones(linear.outputs)
        for part in parts:
            scale_O[part.rows_O] = tensors[f"{part.name}.{_SCALE}"]
        peft_tensors[f"{linear.module}.ia3_l"] = scale_O[:, None]
    config = {
        "peft_type": "IA3",
        "target_modules": targets,
        "feedforward_modules": feedforward,
        "fan_in_fan_out": any(linear.transposed for linear in tuned.base.linears if linear.module in targets),
    }
    return config, peft_tensors


def ia3_from_peft(settings: Ia3Settings, tensors: Mapping[str, Tensor], base: HFBase) -> RestoredAdapter:
    """Converts (IA)3 from PEFT; `READERS` of adapter.py describes the parameters. Scales that lmtool's method does not
    have are merged into the base."""
    dims = {f".{kind}.weight": 0 for kind in _OUTPUTS} | {f".{kind}.weight": 1 for kind in _INPUTS}
    added_tensors = {
        f"{name.removesuffix('.weight')}.{_SCALE}": torch.ones(tensor.shape[dim])
        for name, tensor in base.lmtool_tensors.items()
        for suffix, dim in dims.items()
        if ".layers." in name and name.endswith(suffix)
    }
    changed_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(IA3_SUFFIXES[0])
        weight_OI, inputs = base.weight_OI(module).clone(), settings.scales_inputs(module)
        expected = (1, weight_OI.shape[1]) if inputs else (len(weight_OI), 1)
        if not settings.targets(module) or tensor.shape != expected:
            reason = f"{name} has the shape {tuple(tensor.shape)}, not {expected}"
            if not settings.targets(module):
                reason = f"{module} is not in target_modules"
            raise UserError(f"{CONFIG} and {WEIGHTS} disagree: {reason}", DISAGREE)
        scale, linear = tensor.flatten(), base.by_module.get(module)
        # A scale of outputs does not apply to biases that are added after the module.
        if linear is None or (not inputs and base.has_separate_bias(linear)):
            merged_scale = scale
        else:
            merged_scale = _take_scales(linear, scale, inputs, added_tensors)
        if bool((merged_scale == 1).all()):
            continue
        factor = merged_scale if inputs else merged_scale[:, None]
        changed_tensors[f"{module}.weight"] = base.to_stored_layout(module, weight_OI * factor)
        if not inputs and f"{module}.bias" in base.tensors:
            changed_tensors[f"{module}.bias"] = base.tensors[f"{module}.bias"] * merged_scale
    return RestoredAdapter({"name": "ia3"}, added_tensors, changed_tensors)


def _take_scales(linear: HFLinear, scale: Tensor, inputs: bool, added_tensors: dict[str, Tensor]) -> Tensor:
    """Copies the scales that lmtool's method can represent. linear: the layer of transformers. scale: one scale per
    input or output of the layer. inputs: whether the inputs are scaled, and not the outputs. added_tensors: receives
    the scales, under lmtool's names. Returns the scales that must be merged into the base: `scale`, with 1 where a
    scale was copied."""
    merged_scale = scale.clone()
    for part in linear.parts:
        if inputs and part.name.endswith(_INPUTS):
            added_tensors[f"{part.name}.{_SCALE}"][part.columns_I] = scale
            return torch.ones_like(merged_scale)
        if not inputs and part.name.endswith(_OUTPUTS):
            added_tensors[f"{part.name}.{_SCALE}"] = scale[part.rows_O]
            merged_scale[part.rows_O] = 1.0
    return merged_scale
