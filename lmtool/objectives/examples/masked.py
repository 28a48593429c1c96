"""Masked windows of text, in the format of the backbone.

Shape letters: N examples of a batch, T their tokens, M masked places.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.assembly import Assembled, Template, assemble
from lmtool.data.formats import text_format
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.configs import MaskingConfig
from lmtool.objectives.corruption.masking import Masked, Vocabulary
from lmtool.objectives.examples.masks import TokenMasks
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.examples.windows import Stream, drawn_windows, windows
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch


class MaskedWindows:
    """Masked language modelling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows of one running stream, with the separator after each document (RoBERTa's full sentences);
    separate: of each document by itself. Where some are shorter by chance, those are drawn anew each epoch.
    """

    def __init__(
        self, config: MaskingConfig | PlmConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, documents: str, split: str, seed: int, masks: type[TokenMasks] = TokenMasks,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.masks = masks(config, Vocabulary.of(tokenizer))
        self.template = Template.of(text_format(format_name, tokenizer), 1)
        joined = documents == "joined"
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("sep") if joined else None)
        self.room, self.joined = room_for(max_length, self.template.overhead, 1), joined
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        short = self.config.short_window_probability
        drawn = self.config.drawn_epoch(epoch) if short else 0
        if drawn not in self._plans:
            rows = (
                drawn_windows(self.stream, self.room, self.joined, short, self.seed, drawn)
                if short
                else windows(self.stream, self.room, self.joined)
            )
            plan = some(Plan(rows, rows["length"].astype(np.int64) + self.template.overhead), self.split)
            # The epoch before and the one ahead: a prefetching loader looks over the border.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: plan}
        return self._plans[drawn]

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The windows as they are before masking."""
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])

    def masked(self, whole: Assembled, examples: np.ndarray, epoch: int) -> Masked:
        """Their masks, in an epoch."""
        return self.masks.masked(whole, examples, self.seed, epoch)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        return Batch(
            self.masks.packed(whole, masked),
            self.masks.targets(whole, masked),
            *numbers_of(examples),
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that is predicted."""
        return {
            **plan_facts(self.plan(0), self.store, self.split),
            "predicted_fraction": self.config.predicted_fraction,
        }
