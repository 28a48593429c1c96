"""Running text in lanes: every lane one piece of the text, every token but the first predicted once, and where a
segment stands behind what is carried to it.

Shape letters: E segments of all lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import labels_of
from lmtool.objectives.checks.streams import StreamInspector

# Segments that are drawn.
_DRAWN = 24


class LanesInspector(StreamInspector):
    """Of `CausalSegments`. The first examples are those of one lane, one after the other."""

    def fact(self, tally: Tally) -> str:
        return (
            f"every token is predicted from those before it; the text is read in {self.examples.lanes} lanes, each "
            "behind what it has read before"
        )

    def first(self, n: int) -> np.ndarray:
        return np.flatnonzero(self.examples.plan(0).rows["lane"] == 0)[:n]

    def entries(self, drawn: Drawn) -> Iterator[dict[str, Any]]:
        memory = getattr(self.learner.backbone.config, "memory_length", None)
        for entry, row in zip(super().entries(drawn), drawn.rows, strict=True):
            read = int(row["before"])
            lane = {"number": int(row["lane"]) + 1, "of": self.examples.lanes, "read": read}
            kept = "the state" if memory is None else f"{min(read, memory)} tokens of memory"
            place = f"{lane['number']} of {lane['of']}, {read:,} tokens read before, sees {kept}"
            drawing = [("lane", f"{place}  {self._drawing(row, memory)}")]
            yield {**entry, "lane": lane, "drawing": drawing}

    def _drawing(self, row: np.void, memory: int | None) -> str:
        """A lane up to a segment, a letter for as many tokens: read before (.), of these in the memory (m), read now
        (x). A state that is no memory knows all before it in part (~)."""
        before, unit = int(row["before"]), max(1, self.max_length // 4)
        places = np.arange(0, before + int(row["length"]), unit)[-_DRAWN:]
        kept = "~" if memory is None else "m"
        start = 0 if memory is None else max(0, before - memory)
        return "".join("x" if at >= before else kept if at >= start else "." for at in places)

    def check_plan(self, tally: Tally) -> None:
        """What of the text is read by no segment, or twice, and whether each stands right behind the one before it."""
        rows, places = self.examples.plan(0).rows, len(self.examples.stream) - 1
        ordered = rows[np.argsort(rows["start"], kind="stable")]
        ends = ordered["start"] + ordered["length"]
        gaps = np.append(ordered["start"], places) - np.append(0, ends)
        tally.exact("left out share of text", np.maximum(gaps, 0).sum() + np.maximum(-gaps, 0).sum(), 0, places)
        follows = ordered["lane"][1:] == ordered["lane"][:-1]
        carried = ordered["before"][1:] == np.where(follows, ordered["before"][:-1] + ordered["length"][:-1], 0)
        tally.none("segments that do not follow the one before in their lane", (~carried).sum())
        tally.note("lanes", self.examples.lanes, 0)
        super(StreamInspector, self).check_plan(tally)

    def check(self, tally: Tally, drawn: Drawn) -> None:
        rows, labels = drawn.rows, labels_of(drawn.batch, "clm").numpy()
        tally.note("predicted share of tokens", len(labels), drawn.batch.tokens)
        after = self.examples.stream.read(rows["start"] + 1, rows["length"].astype(np.int64))
        tally.none("labels that are not the next token", (after != labels).sum())
        lanes = drawn.batch.lanes
        said = () if lanes is None else lanes.read
        tally.none("tokens read before of which a batch knows nothing", rows["before"].sum() - sum(said))
