"""How an objective masks assembled examples, and what is predicted there.

Shape letters: T tokens of a batch, N examples in it, M masked places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled
from lmtool.objectives.corruption.masking import Masked, Vocabulary, mask_tokens
from lmtool.objectives.corruption.permutation import Permuted, permute
from lmtool.objectives.corruption.spans import MaskedSpans, mask_spans
from lmtool.types import Packed, Target


class TokenMasks:
    """Masks over single tokens or words; the term `mlm` predicts every masked place.

    config: says how many, and what stands in their place.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.config, self.vocabulary = config, vocabulary

    def masked(self, whole: Assembled, examples_N: np.ndarray, seed: int, epoch: int) -> Masked:
        """The assembled examples with masks, which are keyed by (seed, epoch, example, position)."""
        numbers_N = np.asarray(examples_N)
        return mask_tokens(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def packed(self, whole: Assembled, masked: Masked) -> Packed:
        """What the model reads."""
        return whole.packed(masked.tokens)

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        """By term, what is predicted of the examples."""
        return {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}


class SpanMasks(TokenMasks):
    """Masks over runs of words. The term `sbo`, of a configuration with the boundary objective, predicts the places of
    the spans whose neighbours are text, each with the flat indices of these neighbours."""

    def masked(self, whole: Assembled, examples_N: np.ndarray, seed: int, epoch: int) -> MaskedSpans:
        numbers_N = np.asarray(examples_N)
        return mask_spans(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        targets = super().targets(whole, masked)
        if self.config.boundary:
            assert isinstance(masked, MaskedSpans)
            borders = masked.spans[masked.span_of] + np.array([-1, 1])
            within = masked.at - borders[:, 0] - 1
            kept = masked.bordered[masked.span_of] & (within < self.config.boundary_targets)
            labels, at, span = (torch.from_numpy(values[kept]) for values in (masked.labels, masked.at, borders))
            targets["sbo"] = Target(labels, at=at, span=span)
        return targets


class Permutations(TokenMasks):
    """Nothing is hidden: the column "rank" says which tokens see which, and the term `plm` predicts some of them."""

    def masked(self, whole: Assembled, examples_N: np.ndarray, seed: int, epoch: int) -> Permuted:
        numbers_N = np.asarray(examples_N)
        return permute(self.config, self.vocabulary, whole.tokens, whole.lengths, numbers_N, seed, epoch)

    def packed(self, whole: Assembled, masked: Masked) -> Packed:
        assert isinstance(masked, Permuted)
        packed = whole.packed()
        return replace(packed, columns={**packed.columns, "rank": torch.from_numpy(masked.ranks)})

    def targets(self, whole: Assembled, masked: Masked) -> dict[str, Target]:
        return {"plm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}
