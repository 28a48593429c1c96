"""Windows of text that are split, anew in each epoch: for a decoder, and for an encoder-decoder.

Shape letters: N examples of a batch, T their tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled, assemble, ragged_ranges
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.corruption.prefixes import prefix_lengths
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.examples.sides import Sides
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


class _Splits:
    """Windows of text, split anew in each epoch."""

    def __init__(
        self, stream: Stream, store: TokenStore, size: int, joined: bool, overhead: int, split: str, seed: int
    ):
        self.stream, self.store, self.split, self.seed = stream, store, split, seed
        rows = windows(stream, size, joined)
        rows = rows[rows["length"] >= 2]
        self._plan = some(Plan(rows, rows["length"].astype(np.int64) + overhead), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def prefixes(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) where some windows are split."""
        return prefix_lengths(rows["length"], examples, self.seed, epoch)

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of its tokens that are predicted."""
        return {**plan_facts(self._plan, self.store, self.split), "predicted_fraction": 0.5}


class MaskedPrefixes(_Splits):
    """For a decoder: one text with `Packed.prefixes`; every token behind the split is predicted by the one before it.
    Each document ends with the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, documents: str, split: str, seed: int):
        stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        super().__init__(stream, store, room_for(max_length, 0, 1), documents == "joined", 0, split, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens, prefixes = self.stream.read(rows["start"], lengths), self.prefixes(rows, examples, epoch)
        at = ragged_ranges(np.cumsum(lengths) - lengths + prefixes - 1, lengths - prefixes)
        packed = replace(Assembled(tokens, lengths, {}).packed(), prefixes=tuple(prefixes.tolist()))
        target = Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))
        return Batch(packed, {"prefix_lm": target}, *numbers_of(examples))


class EncodedPrefixes(_Splits):
    """For an encoder-decoder: the prefix on one side, the rest on the other, both in the family's format."""

    def __init__(self, sides: Sides, store: TokenStore, max_length: int, documents: str, split: str, seed: int):
        self.sides = sides
        overhead = sides.template.overhead
        stream = Stream(store.tokens, store.document_offsets, None)
        size = room_for(max_length, overhead, 1)
        super().__init__(stream, store, size, documents == "joined", 2 * overhead, split, seed)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths, prefixes = rows["length"].astype(np.int64), self.prefixes(rows, examples, epoch)
        before = self.stream.read(rows["start"], prefixes)
        behind = self.stream.read(rows["start"] + prefixes, lengths - prefixes)
        inputs = assemble(self.sides.template, [(before, prefixes)])
        outputs = assemble(self.sides.template, [(behind, lengths - prefixes)])
        return self.sides.batch(inputs.packed(), outputs, "prefix_lm", examples)
