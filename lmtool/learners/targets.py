"""The parts of a target that an objective made itself, and so are there; and the hidden states where terms read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmtool.nn.dropout import DropoutRng
from lmtool.types import Batch, send


def labels_of(batch: Batch, term: str) -> Tensor:
    """(M,) classes of a term."""
    labels = batch.targets[term].labels
    if labels is None:
        raise ValueError(f"the batch has no labels for {term}")
    return labels


def places_of(batch: Batch, term: str) -> Tensor:
    """(M,) flat token indices at which a term predicts."""
    at = batch.targets[term].at
    if at is None:
        raise ValueError(f"the batch has no places for {term}")
    return at


def hidden_at(
    read: Callable[..., Tensor], batch: Batch, places: dict[str, Tensor], rng: DropoutRng | None
) -> dict[str, Tensor]:
    """By term, the hidden states at its places: flat indices (...) give (..., H). One forward, whose last layer works
    on the places alone, on each once. places: those of `batch.host`, since a device would have to be asked how many
    there are. read: a backbone, or what reads its states in another way."""
    read_M, at = torch.cat([indices.flatten() for indices in places.values()]).unique(return_inverse=True)
    device = batch.inputs.tokens.device
    hidden_MH = read(batch.inputs, rng, read_M=send(read_M, device))
    parts = send(at, device).split([indices.numel() for indices in places.values()])
    return {
        term: hidden_MH.index_select(0, part).view(*indices.shape, hidden_MH.shape[-1])
        for (term, indices), part in zip(places.items(), parts, strict=True)
    }
