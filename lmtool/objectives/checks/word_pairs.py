"""Words that are left out, windows around those that stay, and negatives: each beside its definition.

Shape letters: V vocabulary, T tokens, K of them that are kept, M pairs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.objectives.checks.streams import StreamInspector
from lmtool.objectives.examples.word_pairs import Pairs

# Ranks in which the distribution of negatives is held against its definition: 1, 2 to 10, 11 to 100, ...
_DECADES = 8


class WordPairsInspector(StreamInspector):
    """Of `WordPairs`."""

    def fact(self, tally: Tally) -> str:
        kept, pairs = tally.measured("words kept"), tally.measured("pairs of a word that is kept")
        if kept is None or pairs is None:
            return ""
        negatives = self.examples.config.negatives
        return (
            f"{kept:.1%} of the words are kept; each is to tell the {pairs:.1f} words around it from {negatives} drawn"
        )

    @cached_property
    def _ranks(self) -> np.ndarray:
        """(V,) the decade of each word's rank by its count, the commonest first."""
        counts_V = self.examples.counts.counts
        rank_V = np.empty(len(counts_V), dtype=np.int64)
        rank_V[np.argsort(-counts_V, kind="stable")] = np.arange(len(counts_V))
        return np.searchsorted(10 ** np.arange(_DECADES), rank_V, side="right")

    def check(self, tally: Tally, drawn: Drawn) -> None:
        pairs = self.examples.pairs(drawn.rows, drawn.numbers, drawn.epoch)
        tokens, config = pairs.tokens, self.examples.config
        special = np.isin(tokens, sorted(self.tokenizer.special_ids))
        tally.note("unknown words, left out of the text", special.sum(), len(tokens), is_share=True)
        tally.none("special tokens kept", (special & pairs.kept).sum())
        chance_T = self.examples.counts.kept[tokens[~special]]
        tally.share("words kept", pairs.kept.sum(), len(chance_T), chance_T)
        frequent = chance_T < 1
        tally.share("frequent words kept", pairs.kept[~special][frequent].sum(), frequent.sum(), chance_T[frequent])
        for words in range(1, config.window + 1):
            side = "1 word" if words == 1 else f"{words} words"
            reaches = (pairs.reach == words).sum()
            tally.share(f"windows of {side} on either side", reaches, len(pairs.reach), 1 / config.window)
        self._check_pairs(tally, pairs)
        self._check_negatives(tally, pairs.negatives.reshape(-1))

    def _check_pairs(self, tally: Tally, pairs: Pairs) -> None:
        """They are all words within reach, and no others."""
        row_K = np.repeat(np.arange(len(pairs.lengths)), pairs.lengths)
        place_K = np.arange(len(row_K)) - np.repeat(np.cumsum(pairs.lengths) - pairs.lengths, pairs.lengths)
        distance_M = np.abs(pairs.center - pairs.context)
        tally.note("pairs of a word that is kept", len(pairs.center), len(row_K))
        tally.none("pairs across documents", (row_K[pairs.center] != row_K[pairs.context]).sum())
        tally.none("pairs of a word with itself", (distance_M == 0).sum())
        tally.none("pairs out of reach", (distance_M > pairs.reach[pairs.center]).sum())
        before_K = np.minimum(pairs.reach, place_K)
        behind_K = np.minimum(pairs.reach, pairs.lengths[row_K] - 1 - place_K)
        tally.exact("pairs, of all within reach", len(pairs.center), *[(before_K + behind_K).sum()] * 2)

    def _check_negatives(self, tally: Tally, drawn: np.ndarray) -> None:
        noise_V, ranks_V = self.examples.counts.noise, self._ranks
        hits, shares = np.bincount(ranks_V[drawn], minlength=_DECADES), np.bincount(ranks_V, noise_V, _DECADES)
        for decade in range(_DECADES):
            if shares[decade] > 0:
                ranks = f"rank {10 ** (decade - 1) + 1:,} to {10**decade:,}" if decade else "rank 1"
                tally.share(f"negatives of {ranks}", hits[decade], len(drawn), float(shares[decade]))
