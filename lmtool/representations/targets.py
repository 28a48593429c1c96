"""What a probe predicts of text: the token at a place, the one before it or the one after it (Voita et al. 2019), among
the most frequent types of the vocabulary.

Shape letters: V vocabulary, D windows of text, N of them in a batch, T tokens of the batch, M places that predict.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Template, assemble, ragged_ranges
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

TERM = "target"
OFFSETS = {"token": 0, "previous": -1, "next": 1}


def windows_of(store: TokenStore, room: int) -> np.ndarray:
    """(D,) records `start`, `length`: consecutive windows of at most `room` tokens, each within one document."""
    return windows(Stream(store.tokens, store.document_offsets, None), room, joined=False)


def frequent_types(store: TokenStore, windows_D: np.ndarray, tokenizer: Tokenizer, count: int) -> np.ndarray:
    """(V,) int64: the class of each token, 0 for the most frequent of these windows; -1 where it is none of the `count`
    most frequent, or is no text."""
    tokens = store.tokens[ragged_ranges(windows_D["start"], windows_D["length"].astype(np.int64))]
    counts_V = np.bincount(tokens, minlength=tokenizer.vocab_size)
    counts_V[[number for number in tokenizer.special_ids if number < len(counts_V)]] = 0
    chosen = np.argsort(-counts_V, kind="stable")[:count]
    chosen = chosen[counts_V[chosen] > 0]
    classes_V = np.full(len(counts_V), -1, dtype=np.int64)
    classes_V[chosen] = np.arange(len(chosen))
    return classes_V


class TokenTargets:
    """Windows of text in the layout of a model. Nothing of it is masked.

    template: the layout. offset: of the token that is predicted from the place that predicts. classes_V: as
    `frequent_types` gives them.
    """

    def __init__(
        self,
        store: TokenStore,
        windows_D: np.ndarray,
        tokenizer: Tokenizer,
        template: Template,
        offset: int,
        classes_V: np.ndarray,
    ):
        self.store, self.template, self.offset, self.classes_V = store, template, offset, classes_V
        self.text_V = np.ones(len(classes_V), dtype=bool)
        self.text_V[[number for number in tokenizer.special_ids if number < len(classes_V)]] = False
        self._plan = Plan(windows_D, windows_D["length"].astype(np.int64) + template.overhead)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """The batch with the term `target`: classes at the (M,) places that have one to predict."""
        lengths_N = rows["length"].astype(np.int64)
        ids = np.asarray(self.store.tokens[ragged_ranges(rows["start"], lengths_N)], dtype=np.int64)
        assembled = assemble(self.template, [(ids, lengths_N)])
        document_T = np.repeat(np.arange(len(rows)), assembled.lengths)
        other_T = np.arange(len(document_T)) + self.offset
        inside_T = (other_T >= 0) & (other_T < len(document_T))
        other_T = np.where(inside_T, other_T, 0)
        inside_T &= document_T[other_T] == document_T
        class_T = np.where(inside_T, self.classes_V[assembled.tokens[other_T]], -1)
        at_M = np.flatnonzero((class_T >= 0) & self.text_V[assembled.tokens])
        target = Target(torch.from_numpy(class_T[at_M]), at=torch.from_numpy(at_M))
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        return Batch(assembled.packed(), {TERM: target}, numbers, torch.zeros(len(numbers), dtype=torch.int32))

    def facts(self) -> dict[str, Any]:
        return {"windows": len(self._plan)}
