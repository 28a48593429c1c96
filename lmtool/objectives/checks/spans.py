"""Masked spans: their lengths as drawn, what stands in their place, and where they begin.

Shape letters: M masked places, D draws of a length.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from lmtool.learners.tally import Tally
from lmtool.objectives.checks.masking import (
    MaskedWindowsInspector,
    MaskingInspector,
    Masks,
    check_branches,
    check_budget,
)
from lmtool.objectives.checks.pairs import MaskedPairsInspector
from lmtool.objectives.corruption.spans import MaskedSpans, length_shares


class SpanInspector(MaskingInspector):
    """Of examples with masks over runs of words."""

    def fact(self, tally: Tally) -> str:
        mean = tally.measured("words of a span as drawn")
        return super().fact(tally) + ("" if mean is None else f"; in spans of {mean:.1f} words on average")

    def check_masks(self, tally: Tally, masks: Masks) -> None:
        spans = cast(MaskedSpans, masks.masked)
        self._check_lengths(tally, spans.drawn)
        self._check_branches(tally, spans, masks.shown[spans.at])
        starts = self.vocabulary.starts_word[spans.labels[np.searchsorted(spans.at, spans.spans[:, 0])]]
        # A window may begin within a word, and so may a span that begins with the window.
        within = ~starts & masks.text[spans.spans[:, 0] - 1]
        tally.none("spans that begin within a word", within.sum())
        wanted = np.ceil(masks.eligible * self.config.probability - 1e-9)
        check_budget(tally, masks.selected, wanted, masks.eligible)

    def _check_lengths(self, tally: Tally, drawn_D: np.ndarray) -> None:
        """The (D,) lengths as drawn follow the configuration's shares."""
        shares = length_shares(self.config)
        lengths, count = np.arange(1, len(shares) + 1), len(drawn_D)
        mean = float(shares @ lengths)
        variance = float(shares @ lengths**2 - mean**2)
        tally.mean("words of a span as drawn", drawn_D.sum(), count, count * mean, count * variance, len(shares))
        for length, share in zip(lengths, shares, strict=True):
            tally.share(f"spans of {length} as drawn", (drawn_D == length).sum(), count, float(share))

    def _check_branches(self, tally: Tally, spans: MaskedSpans, shown_M: np.ndarray) -> None:
        """What stands in the masked places is decided for each token, or for each span as a whole."""
        config, mask = self.config, self.vocabulary.mask
        regular = int((~self.vocabulary.special).sum())
        if config.replace == "token":
            check_branches(tally, config.mask, config.random, shown_M, spans.labels, regular, mask)
            return
        count = len(spans.spans)
        sizes = np.bincount(spans.span_of, minlength=count)
        hidden = np.bincount(spans.span_of, shown_M == mask, count)
        same = np.bincount(spans.span_of, shown_M == spans.labels, count)
        tally.none("spans partly [MASK]", ((hidden > 0) & (hidden < sizes)).sum())
        tally.share("spans that are [MASK]", (hidden > 0).sum(), count, config.mask)
        chances = 1 - config.mask - config.random + config.random * float(regular) ** -sizes.astype(float)
        tally.share("spans that are unchanged", ((hidden == 0) & (same == sizes)).sum(), count, chances)


class SpanWindowsInspector(SpanInspector, MaskedWindowsInspector):
    """Of `MaskedWindows`."""


class SpanPairsInspector(SpanInspector, MaskedPairsInspector):
    """Of `MaskedPairs`."""
