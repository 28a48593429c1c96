"""Windows of text with spans cut out, as T5 reads and predicts them.

Shape letters: N examples of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.assembly import assemble
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import SpanCorruptionConfig
from lmtool.objectives.corruption.sentinels import Corrupted, corrupt_spans, noise_counts, text_length
from lmtool.objectives.examples.plans import plan_facts, some
from lmtool.objectives.examples.sides import Sides
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch


class CorruptedSpans:
    """Windows of text with spans cut out. joined: through documents, nothing between them, as T5's data were made;
    separate: of each document, of which a last token alone is left out."""

    def __init__(
        self, config: SpanCorruptionConfig, tokenizer: Tokenizer, sides: Sides, store: TokenStore,
        max_length: int, documents: str, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.sides, self.store, self.split, self.seed = config, sides, store, split, seed
        overhead = sides.template.overhead
        self.text_length = text_length(max_length, overhead, config)
        self.stream = Stream(store.tokens, store.document_offsets, None)
        rows = windows(self.stream, self.text_length, documents == "joined")
        rows = rows[rows["length"] >= 2]
        lengths = rows["length"].astype(np.int64)
        _, spans = noise_counts(lengths, config)
        # Each span has a sentinel on both sides.
        self._plan = some(Plan(rows, lengths + 2 * spans + 2 * overhead), split)
        self.sentinels = np.array(tokenizer.sentinels, dtype=np.int64)
        if len(self.sentinels) < spans.max():
            raise UserError(
                f"span corruption needs {spans.max()} sentinel tokens at max_length={max_length}; the tokenizer has "
                f"{len(self.sentinels)}",
                "give tokenizer=sentencepiece, whose tokenizer.sentinels= is their number, or a smaller max_length=",
            )

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def corrupted(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Corrupted:
        """Both sides of some windows."""
        tokens = self.stream.read(rows["start"], rows["length"])
        return corrupt_spans(self.config, self.sentinels, tokens, rows["length"], examples, self.seed, epoch)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        corrupted = self.corrupted(rows, examples, epoch)
        inputs = assemble(self.sides.template, [(corrupted.inputs, corrupted.input_lengths)])
        outputs = assemble(self.sides.template, [(corrupted.targets, corrupted.target_lengths)])
        return self.sides.batch(inputs.packed(), outputs, self.config.name, examples)

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of its tokens that are predicted."""
        return {
            **plan_facts(self._plan, self.store, self.split), "predicted_fraction": self.config.predicted_fraction
        }  # fmt: skip
