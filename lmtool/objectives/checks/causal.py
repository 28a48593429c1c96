"""Next tokens: every token but a window's first is predicted, by the one before it."""

from __future__ import annotations

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of, places_of
from lmtool.objectives.checks.streams import StreamInspector


class CausalInspector(StreamInspector):
    """Of `CausalWindows`."""

    def fact(self, tally: Tally) -> str:
        return "every token is predicted from those before it, all of a text in one pass"

    def check(self, tally: Tally, drawn: Drawn) -> None:
        batch = drawn.batch
        at, labels = places_of(batch, "clm").numpy(), labels_of(batch, "clm").numpy()
        tokens = batch.inputs.tokens.numpy()
        tally.note("predicted share of tokens", len(at), len(tokens))
        tally.none("labels that are not the next token", (tokens[at + 1] != labels).sum())
        tally.none("tokens without a prediction", len(tokens) - len(drawn.rows) - len(np.unique(at)))
