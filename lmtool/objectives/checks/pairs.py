"""Pairs of segments: their classes, where their segments come from, and what is cut of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.objectives.checks.masking import MaskingInspector

# Class 0 and class 1, in words.
_CLASSES = {"nsp": ("the second follows", "the second is random"), "sop": ("in order", "swapped")}


class MaskedPairsInspector(MaskingInspector):
    """Of `MaskedPairs`."""

    def label(self, value: Any, of_place: bool) -> Any:
        return super().label(value, True) if of_place else _CLASSES[self.examples.config.pairs][value]

    def texts(self, drawn: Drawn) -> list[list[str]]:
        """The two segments of each pair."""
        tokens = self.examples.store.tokens
        spans = [[(int(row[f"{side}_start"]), int(row[f"{side}_length"])) for side in "ab"] for row in drawn.rows]
        return [[self.tokenizer.decode(tokens[at : at + length].tolist()) for at, length in pair] for pair in spans]

    def fact(self, tally: Tally) -> str:
        """Further: how many pairs are of the second class."""
        names = {"nsp": "random second segments in all", "sop": "pairs that are swapped"}
        share = tally.measured(names[self.examples.config.pairs])
        pairs = {"nsp": "the second text of {} of the pairs is a random one", "sop": "{} of the pairs are swapped"}
        words = "" if share is None else pairs[self.examples.config.pairs].format(f"{share:.1%}")
        return "; ".join(filter(None, (super().fact(tally), words)))

    def check(self, tally: Tally, drawn: Drawn) -> None:
        super().check(tally, drawn)
        self.check_pairs(tally, drawn)

    def check_pairs(self, tally: Tally, drawn: Drawn) -> None:
        """Enter where segments come from, and what is cut."""
        self._check_cut(tally, drawn.rows)
        self._check_classes(tally, drawn.rows)
        if self.config.pair_of == "segments":
            share = self.config.short_sequence_probability
            tally.share("pairs that aim at a shorter length", drawn.rows["short"].sum(), len(drawn.rows), share)

    def _check_classes(self, tally: Tally, rows: np.ndarray) -> None:
        label, choice = rows["label"] == 1, rows["choice"] == 1
        offsets = self.examples.store.document_offsets
        a, b = (np.searchsorted(offsets, rows[f"{side}_start"], side="right") for side in "ab")
        if self.examples.config.pairs == "sop":
            tally.share("pairs that are swapped", label.sum(), len(rows), 0.5)
            tally.none("pairs of two documents", (a != b).sum())
            first, second = (
                np.where(label, rows["b_start"], rows["a_start"]),
                np.where(label, rows["a_start"], rows["b_start"]),
            )
            tally.none("pairs in another order than their class says", (first >= second).sum())
            return
        tally.share("random second segments where there is a choice", (label & choice).sum(), choice.sum(), 0.5)
        tally.note("random second segments in all", label.sum(), len(rows), is_share=True)
        tally.none("pairs without a choice that follow", (~choice & ~label).sum())
        tally.none("random segments of the same document", (label & (a == b)).sum())
        tally.none("following segments of another document", (~label & (a != b)).sum())

    def _check_cut(self, tally: Tally, rows: np.ndarray) -> None:
        """Pairs too long for an example lose tokens."""
        cut = self.examples.cut(rows)
        length = rows["a_length"].astype(np.int64) + rows["b_length"]
        tally.note("truncated fraction", cut.sum(), len(rows))
        tally.none("pairs cut although they fit", (cut & (length != self.examples.limit)).sum())
