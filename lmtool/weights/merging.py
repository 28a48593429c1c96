"""Weights of a tuned checkpoint as those of a plain model, what its method added folded in; or as those of a tuned one
without what its method needs in training alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads
from lmtool.system.terminal import counted
from lmtool.weights.assemble import assemble
from lmtool.weights.exporting import Folded
from lmtool.weights.load import saved_model
from lmtool.weights.reading import Weights


def merged(weights: Weights, saved: Mapping[str, Any]) -> Weights:
    """The weights with what a tuning method added merged into the others; the same ones where it added nothing.

    saved: the configuration of their checkpoint. UserError where the method cannot be merged.
    """
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuned_by is None:
        return weights
    with torch.device("meta"):
        planned, _ = assemble(model, None)
    if not planned.added:
        _merge(planned, weights.origin)
        return weights
    parts, _ = assemble(model, None, trained=weights)
    # Heads that stand for nothing outside of their training are in no model of a checkpoint.
    rest = {name: tensor for name, tensor in weights.tensors.items() if name not in parts.state_dict()}
    _merge(parts, weights.origin)
    tensors = {name: tensor.detach() for name, tensor in parts.state_dict().items()}
    left = [name for name in tensors if name in planned.added]
    if left:
        more = f" and {counted(len(left) - 1, 'more tensor')}" if len(left) > 1 else ""
        raise UserError(
            f"checkpoint={weights.origin}: {left[0]}{more}, which its tuning method added, cannot be merged into "
            f"model={model.model.name}",
            "format=delta exports them beside their base; start from that base, or from a run whose method merges "
            "(tuning=lora)",
        )
    return replace(weights, tensors={**rest, **tensors}, merged=True)


def _merge(parts: ModelWithHeads, origin: str) -> None:
    assert parts.tuning is not None
    try:
        parts.tuning.merge(parts)
    except UserError as error:
        raise UserError(f"checkpoint={origin}: {error.message}", error.hint) from error


def folded(weights: Weights, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> Folded | None:
    """A tuned checkpoint with what training alone needs (the map of a prefix) replaced by what it computes; None where
    there is no such thing.

    weights: complete. own: of these the ones that the checkpoint holds. saved: its configuration.
    """
    model = saved_model(weights.origin, saved, weights.tensors)
    if model.tuned_by is None:
        return None
    parts, _ = assemble(model, None, trained=weights)
    assert parts.tuning is not None
    before, config = parts.added, parts.tuning.fold(parts)
    if config == model.tuned_by:
        return None
    state = parts.state_dict()
    tensors = {name: tensor for name, tensor in own.items() if name not in before}
    tensors |= {name: state[name] for name in sorted(parts.added)}
    return Folded(tensors, {**saved, "tuning": config.model_dump(mode="json")})
