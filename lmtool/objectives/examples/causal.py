"""Windows of a running stream of documents, each token to be predicted by the ones before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


class CausalWindows:
    """Next-token prediction over the stream of documents, each closed by the end-of-text token.

    Consecutive windows share one token, the last of one being the first of the next, so that every token but the
    first of a document (separate) or of the whole stream (joined) is predicted exactly once.
    """

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, documents: str, split: str):
        self.store, self.split = store, split
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        rows = windows(self.stream, room_for(max_length, 0, 1), documents == "joined", overlap=1)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        predicts = np.ones(len(tokens), dtype=bool)
        predicts[np.cumsum(lengths) - 1] = False
        at = np.flatnonzero(predicts)
        packed = Assembled(tokens, lengths, {}).packed()
        return Batch(
            packed, {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}, *numbers_of(examples)
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that predict."""
        facts = plan_facts(self._plan, self.store, self.split)
        return {**facts, "predicted_fraction": 1 - facts["examples"] / facts["tokens"]}
