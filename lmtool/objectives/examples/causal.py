"""Windows of a running stream of documents, each token to be predicted by the ones before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled, ragged_ranges
from lmtool.data.lanes import segments
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.examples.windows import WINDOW, Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Lanes, Target

# A window, and how many of its first places are not predicted in it: those of windows before it, or the very first.
_CAUSAL = np.dtype([*WINDOW.descr, ("known", "i4")])


class CausalWindows:
    """Next-token prediction over the stream of documents, each closed by the end-of-text token.

    Every token but the first of a document (separate) or of the whole stream (joined) is predicted exactly once.
    Consecutive windows share one token, the last of one being the first of the next. stride: places between the starts
    of windows, so that they share max_length - stride and a token is predicted from that many before it at least, but
    near the beginning (Baevski and Auli 2019); None: max_length - 1.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        store: TokenStore,
        max_length: int,
        documents: str,
        split: str,
        stride: int | None = None,
    ):
        self.store, self.split = store, split
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        size = room_for(max_length, 0, 1)
        overlap = 1 if stride is None else size - stride
        if overlap < 1:
            raise UserError(
                f"stride={stride} is too long: windows of max_length={max_length} would not follow each other",
                f"stride={size - 1} at most",
            )
        cut = windows(self.stream, size, documents == "joined", overlap)
        rows = np.empty(len(cut), dtype=_CAUSAL)
        for name in WINDOW.names or ():
            rows[name] = cut[name]
        borders = self.stream.borders[:1] if documents == "joined" else self.stream.borders
        rows["known"] = np.where(np.isin(cut["start"], borders), 1, overlap)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, known = rows["length"].astype(np.int64), rows["known"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        starts = np.cumsum(lengths) - lengths
        at = ragged_ranges(starts + known - 1, lengths - known)
        packed = Assembled(tokens, lengths, {}).packed()
        return Batch(
            packed, {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}, *numbers_of(examples)
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that predict."""
        facts, rows = plan_facts(self._plan, self.store, self.split), self._plan.rows
        predicted = int(rows["length"].sum(dtype=np.int64) - rows["known"].sum(dtype=np.int64))
        return {**facts, "predicted_fraction": predicted / facts["tokens"]}


class CausalSegments:
    """The same prediction in lanes, for a model that carries state: every token that is read predicts the one after it,
    which of a segment's last token stands in the next segment. So every token of the text but its first is predicted
    exactly once, as in joined windows."""

    def __init__(self, windows: CausalWindows, size: int, lanes: int):
        self._windows, self.stream = windows, windows.stream
        places = len(self.stream) - 1
        self.lanes = min(lanes, places)
        rows = segments(places, self.lanes, size)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), windows.split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, labels = (self.stream.read(rows["start"] + ahead, lengths) for ahead in (0, 1))
        return Batch(
            Assembled(tokens, lengths, {}).packed(),
            {"clm": Target(torch.from_numpy(labels), at=torch.arange(len(tokens)))},
            *numbers_of(examples),
            lanes=Lanes(tuple(rows["lane"].tolist()), tuple(rows["before"].tolist()), self.lanes),
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, the lanes, and how many segments follow each other in one."""
        facts = plan_facts(self._plan, self._windows.store, self._windows.split)
        along = -(-len(self._plan) // self.lanes)
        return {**facts, "predicted_fraction": 1.0, "lanes": self.lanes, "segments_per_lane": along}


class CarriedWindows(CausalWindows):
    """Joined windows of a model that carries state: a loader reads them in lanes."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, split: str):
        super().__init__(tokenizer, store, max_length, "joined", split)
        self._size = max_length

    def in_lanes(self, lanes: int) -> CausalSegments:
        """See `data.lanes.CutInLanes`."""
        return CausalSegments(self, self._size, lanes)
