"""LoRA (`lmtool/tuning/lora.py`) as PEFT's.

Shape letters: O outputs and I inputs of a map, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.weights.peft.maps import PublishedMap
from lmtool.weights.peft.tuned import MERGE, Tuned

_A, _B = "lora_a", "lora_b"
_REFUSED = {
    "use_dora": "DoRA", "use_qalora": "QALoRA", "lora_bias": "biases in B", "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens", "target_parameters": "targets that are no maps",
    "alora_invocation_tokens": "activated LoRA", "use_bdlora": "block-diagonal LoRA", "arrow_config": "Arrow",
    "kasa_config": "KaSA", "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA",
}  # fmt: skip


def to_peft(tuned: Tuned) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """PEFT's configuration and tensors by module. Updates of several maps that are one there become one of as many
    ranks, block by block."""
    section, tensors = tuned.section, tuned.tensors
    rank, root = section["rank"], bool(section["rank_stabilised"])
    ranks: dict[str, int] = {}
    written: dict[str, Tensor] = {}
    for place in tuned.maps:
        parts = [part for part in place.parts if f"{part.name}.{_A}" in tensors]
        if not parts:
            continue
        ranks[place.module] = rank * len(parts)
        first = tensors[f"{parts[0].name}.{_B}"]
        b_OR = first.new_zeros(place.outputs, rank * len(parts))
        for number, part in enumerate(parts):
            b_OR[part.rows_O, rank * number : rank * (number + 1)] = tensors[f"{part.name}.{_B}"]
        rows = [tensors[f"{part.name}.{_A}"][:, part.columns_I] for part in parts]
        written[f"{place.module}.lora_A.weight"] = torch.cat(rows)
        written[f"{place.module}.lora_B.weight"] = b_OR
    joined = {module: number for module, number in ranks.items() if number != rank}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _number(section["alpha"]),
        "lora_dropout": section["dropout"],
        "use_rslora": root,
        "bias": "none",
        "fan_in_fan_out": any(place.transposed for place in tuned.maps if place.module in ranks),
        "target_modules": list(ranks),
        "rank_pattern": joined,
        # The scale is alpha over the rank, or over its root.
        "alpha_pattern": {
            module: _number(section["alpha"] * (number / rank) ** (0.5 if root else 1))
            for module, number in joined.items()
        },
    }
    return config, written


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], maps: Sequence[PublishedMap]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The reverse: the `tuning` section, and what the method adds. Maps of another rank or scale than the largest are
    filled with zeros, and their scale is put into B. UserError for a variant of LoRA that lmtool does not have."""
    for key, variant in _REFUSED.items():
        if config.get(key):
            raise UserError(f"{key}={config[key]!r} in its adapter_config.json: lmtool has no {variant}", MERGE)
    if config.get("bias", "none") != "none":
        raise UserError(f"bias={config['bias']!r} in its adapter_config.json: lmtool reads bias=none", MERGE)
    root, updates = bool(config.get("use_rslora")), {}
    for place in maps:
        a_RI, b_OR = (tensors.get(f"{place.module}.lora_{kind}.weight") for kind in "AB")
        if a_RI is None or b_OR is None:
            continue
        if b_OR.shape != (place.outputs, len(a_RI)) or a_RI.shape[1] != len(place.parts[0].columns_I):
            raise UserError(
                f"its update of {place.module} is {tuple(b_OR.shape)} x {tuple(a_RI.shape)}; the map has "
                f"{place.outputs} outputs and {len(place.parts[0].columns_I)} inputs",
                "give the base that it was trained on",
            )
        rank = _of(config.get("rank_pattern"), place.module, config.get("r", 8))
        alpha = _of(config.get("alpha_pattern"), place.module, config.get("lora_alpha", 8))
        scale = alpha / (rank**0.5 if root else rank)
        for part in place.parts:
            own_OR, inputs = b_OR[part.rows_O], a_RI.new_zeros(a_RI.shape)
            inputs[:, part.columns_I] = a_RI
            # Of maps that are one there, those that the update leaves alone have none here.
            if len(place.parts) == 1 or own_OR.any():
                updates[part.name] = (inputs, own_OR, scale)
    if not updates:
        raise UserError("its adapter_model.safetensors has no update of a map that lmtool edits", MERGE)
    rank = max(len(a_RI) for a_RI, _, _ in updates.values())
    scale = max(scale for _, _, scale in updates.values())
    projections = sorted({name.rpartition(".")[2] for name in updates})
    added: dict[str, Tensor] = {}
    for part in (part for place in maps for part in place.parts if part.name.rpartition(".")[2] in projections):
        empty = torch.zeros(0, len(part.columns_I)), torch.zeros(len(part.rows_O), 0), scale
        a_RI, b_OR, own_scale = updates.get(part.name, empty)
        missing = rank - len(a_RI)
        added[f"{part.name}.{_A}"] = torch.cat([a_RI.float(), torch.zeros(missing, a_RI.shape[1])])
        scaled = b_OR.float() if own_scale == scale else b_OR.float() * (own_scale / scale)
        added[f"{part.name}.{_B}"] = torch.cat([scaled, torch.zeros(len(b_OR), missing)], dim=1)
    section = {
        "name": "lora",
        "rank": rank,
        "alpha": scale * (rank**0.5 if root else rank),
        "dropout": config.get("lora_dropout") or 0.0,
        "projections": projections,
        "rank_stabilised": root,
    }
    return section, added


def _of(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """What a pattern says of a module: its keys are paths, or their ends."""
    for key, value in (pattern or {}).items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _number(value: float) -> float:
    """PEFT's alpha is a whole number where it can be."""
    return int(value) if float(value).is_integer() else value
