"""Words in windows: each is predicted from both sides, and is read by its characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of, places_of
from lmtool.models.characters import FILL, TEXT_BEGINS, TEXT_ENDS, WORD_BEGINS, WORD_ENDS
from lmtool.objectives.checks.streams import StreamInspector
from lmtool.objectives.examples.words import BACKWARD, FORWARD

_SIGNS = {TEXT_BEGINS: "<S>", TEXT_ENDS: "</S>", WORD_BEGINS: "<W>", WORD_ENDS: "</W>"}
# Words that are drawn.
_DRAWN = 12


class WordInspector(StreamInspector):
    """Of `WordWindows`."""

    def fact(self, tally: Tally) -> str:
        return "every word is predicted twice: from the words before it (→), and from those behind it (←)"

    def check(self, tally: Tally, drawn: Drawn) -> None:
        inputs = drawn.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, number_W = self.examples.words(tokens, starts)
        unknown = self.examples.unknown
        texts = len(inputs.lengths)
        tally.note("tokens a word", len(tokens), len(first_W))
        tally.note("share of words predicted as unknown", (number_W == unknown).sum(), len(first_W))
        reader = self.learner.backbone.reader
        bytes_W = np.add.reduceat(reader.spelled_lengths()[tokens], first_W)
        tally.note(f"share of words cut to {reader.longest} bytes", (bytes_W > reader.longest).sum(), len(first_W))
        for term, ahead in ((FORWARD, 1), (BACKWARD, -1)):
            at, labels = places_of(drawn.batch, term).numpy(), labels_of(drawn.batch, term).numpy()
            word_M = np.searchsorted(first_W, at)
            tally.none(
                f"{term} labels that are not the next word on its way", (number_W[word_M + ahead] != labels).sum()
            )
            tally.none(f"words that {term} lacks", len(first_W) - texts - len(np.unique(word_M + ahead)))

    def entries(self, drawn: Drawn) -> Iterator[dict[str, Any]]:
        """With the words of each example drawn: their symbols, and what each direction predicts there."""
        inputs = drawn.batch.inputs
        tokens, starts = inputs.tokens.numpy(), np.array(inputs.starts)
        first_W, _ = self.examples.words(tokens, starts)
        reader = self.learner.backbone.reader
        symbols_UL, number_W = reader.symbols(inputs, reader.words(inputs))
        symbols_WL = symbols_UL[number_W].tolist()
        targets = {
            term: dict(zip(places_of(drawn.batch, term).tolist(), labels_of(drawn.batch, term).tolist(), strict=True))
            for term in (FORWARD, BACKWARD)
        }
        for number, entry in enumerate(super().entries(drawn)):
            start, length = starts[number], inputs.lengths[number]
            own = np.flatnonzero((first_W >= start) & (first_W < start + length))[:_DRAWN]
            entry["drawing"] = [
                [_word(symbols_WL[word]), self._predicted(targets, at)]
                for word, at in zip(own.tolist(), first_W[own].tolist(), strict=True)
            ]
            yield entry

    def _predicted(self, targets: Mapping[str, Mapping[int, int]], at: int) -> str:
        """What each direction predicts at a place, by its arrow."""
        arrows = ((FORWARD, "→"), (BACKWARD, "←"))
        there = [(arrow, targets[term][at]) for term, arrow in arrows if at in targets[term]]
        return "  ".join(f"{arrow} {self.tokenizer.readable([label])[0]}" for arrow, label in there)


def _word(symbols: list[int]) -> str:
    """The symbols of a word for a person, what fills it up left out."""
    shown, run = [], bytearray()
    for symbol in [*symbols, FILL]:
        if 1 <= symbol <= 256:
            run.append(symbol - 1)
            continue
        if run:
            shown.append(" ".join(run.decode("utf-8", "backslashreplace")))
            run.clear()
        if symbol in _SIGNS:
            shown.append(_SIGNS[symbol])
    return " ".join(shown)
