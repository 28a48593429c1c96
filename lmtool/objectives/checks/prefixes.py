"""Texts that are split: the place of the split is uniform, and what is behind it is predicted."""

from __future__ import annotations

from typing import cast

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of, places_of
from lmtool.objectives.checks.sides import within
from lmtool.objectives.checks.streams import StreamInspector
from lmtool.types import Packed


class PrefixesInspector(StreamInspector):
    """What both kinds of examples share."""

    drops_lone_tokens = True

    def fact(self, tally: Tally) -> str:
        return "a text is split at a random place: what is before it is read, what is behind it is predicted"

    def check(self, tally: Tally, drawn: Drawn) -> None:
        lengths = drawn.rows["length"].astype(np.int64)
        prefixes = self.examples.prefixes(drawn.rows, drawn.numbers, drawn.epoch)
        tally.none("splits that leave a side empty", ((prefixes < 1) | (prefixes >= lengths)).sum())
        free = lengths > 2
        places = (prefixes[free] - 1) / (lengths[free] - 2)
        variance = float((lengths[free] / (12 * (lengths[free] - 2))).sum())
        tally.mean("place of the split, 0 to 1", places.sum(), free.sum(), free.sum() / 2, variance, 0.5)
        self.check_sides(tally, drawn, lengths, prefixes)

    def check_sides(self, tally: Tally, drawn: Drawn, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Enter what holds of both sides of the splits, of texts of `lengths` (N,) behind their `prefixes` (N,)."""


class MaskedPrefixesInspector(PrefixesInspector):
    """Of `MaskedPrefixes`."""

    def check_sides(self, tally: Tally, drawn: Drawn, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        batch = drawn.batch
        at, labels = places_of(batch, "prefix_lm").numpy(), labels_of(batch, "prefix_lm").numpy()
        tokens = batch.inputs.tokens.numpy()
        positions, documents = batch.inputs.positions.numpy()[at], batch.inputs.documents.numpy()[at]
        tally.none("labels that are not the next token", (tokens[at + 1] != labels).sum())
        tally.none("labels within the prefix", (positions + 1 < prefixes[documents]).sum())
        tally.none("tokens behind the split without a prediction", (lengths - prefixes).sum() - len(at))


class EncodedPrefixesInspector(PrefixesInspector):
    """Of `EncodedPrefixes`."""

    def check_sides(self, tally: Tally, drawn: Drawn, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        batch, examples, start = drawn.batch, self.examples, drawn.rows["start"]
        template, outputs = examples.sides.template, cast(Packed, batch.outputs)
        before = within(template, batch.inputs, batch.inputs.tokens)
        behind = within(template, outputs, labels_of(batch, "prefix_lm"))
        both = np.array_equal(before, examples.stream.read(start, prefixes))
        both = both and np.array_equal(behind, examples.stream.read(start + prefixes, lengths - prefixes))
        tally.none("batches whose sides do not give back the text", not both)
