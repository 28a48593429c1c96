"""The parts of a target that an objective made itself, and so are there."""

from __future__ import annotations

from torch import Tensor

from lmtool.types import Batch


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
