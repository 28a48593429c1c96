"""Windows of a stream of documents: their text, and that they hold every token."""

from __future__ import annotations

import numpy as np

from lmtool.data.assembly import ragged_ranges
from lmtool.learners.inspection import Drawn, Inspector
from lmtool.learners.tally import Tally


class StreamInspector(Inspector):
    """Of examples with a `stream` that their plan's rows cut.

    drops_lone_tokens: whether a window needs two tokens, so that one left alone at the end of a text is in none.
    """

    drops_lone_tokens = False

    def texts(self, drawn: Drawn) -> list[list[str]]:
        """The documents of each window; the tokens that separate them are left out."""
        return [self._documents(int(row["start"]), int(row["length"])) for row in drawn.rows]

    def _documents(self, start: int, length: int) -> list[str]:
        stream = self.examples.stream
        ids = stream.read(np.array([start]), np.array([length]))
        within = stream.borders[(stream.borders > start) & (stream.borders < start + length)] - start
        return [self.tokenizer.decode(part.tolist()) for part in np.split(ids, within)]

    def check_plan(self, tally: Tally) -> None:
        """What of the text is in no window."""
        rows, borders = self.examples.plan(0).rows, self.examples.stream.borders
        rows = rows[np.argsort(rows["start"], kind="stable")]  # lanes go by steps
        start = rows["start"]
        ends = np.maximum.accumulate(start + rows["length"])
        gaps = np.maximum(np.append(start, borders[-1]) - np.append(0, ends), 0)
        left = ragged_ranges(np.append(0, ends), gaps)
        lone = np.isin(left + 1, borders).sum() if self.drops_lone_tokens else 0
        tally.exact("left out share of text", len(left), lone, borders[-1])
        super().check_plan(tally)
