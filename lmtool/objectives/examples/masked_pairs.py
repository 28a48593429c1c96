"""Masked pairs of segments, drawn anew each epoch.

Shape letters: D documents, N examples of a batch, T their tokens, M masked places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled, Template, assemble, ragged_ranges
from lmtool.data.formats import text_format
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import PairsConfig
from lmtool.objectives.corruption.masking import Masked, Vocabulary
from lmtool.objectives.examples.masks import TokenMasks
from lmtool.objectives.examples.pairs import sentence_pairs
from lmtool.objectives.examples.plans import numbers_of, plan_facts, room_for, some
from lmtool.objectives.permutation_configs import PlmConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# The second segment is a random one half of the time, and wherever a document has run out of sentences: together 52%
# for documents of a hundred, 60% for those of five and 68% for those of two.
_MOSTLY_RANDOM = 0.7


class MaskedPairs:
    """Masked pairs of segments, `[CLS] a [SEP] b [SEP]` in the backbone's format, drawn anew each epoch; with a loss
    over them, or without."""

    def __init__(
        self, config: PairsConfig | PlmConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, split: str, seed: int, masks: type[TokenMasks] = TokenMasks,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.masks = masks(config, Vocabulary.of(tokenizer))
        self.template = Template.of(text_format(format_name, tokenizer), 2)
        self.limit = room_for(max_length, self.template.overhead, 2)
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        drawn = self.config.drawn_epoch(epoch)
        if drawn not in self._plans:
            self._require_choices()
            rows = sentence_pairs(
                self.store.sentence_offsets, self.store.document_sentences, self.limit,
                self.config.short_sequence_probability, self.seed, drawn,
                "sop" if self.config.pairs == "sop" else "nsp", self.config.pair_of == "sentences",
            )  # fmt: skip
            lengths = rows["a_length"].astype(np.int64) + rows["b_length"] + self.template.overhead
            plan = some(Plan(rows, lengths), self.split)
            # The epoch before and the one ahead: a prefetching loader looks over the border.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: plan}
        return self._plans[drawn]

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The pairs as they are before masking."""
        texts = []
        for side in ("a", "b"):
            lengths = rows[f"{side}_length"]
            ids = np.asarray(self.store.tokens[ragged_ranges(rows[f"{side}_start"], lengths)], dtype=np.int64)
            texts.append((ids, lengths))
        return assemble(self.template, texts)

    def masked(self, whole: Assembled, examples: np.ndarray, epoch: int) -> Masked:
        """Their masks, in an epoch."""
        return self.masks.masked(whole, examples, self.seed, epoch)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = self.masked(whole, examples, epoch)
        targets = self.masks.targets(whole, masked)
        if self.config.pairs != "unscored":
            targets[self.config.pairs] = Target(torch.from_numpy(rows["label"].astype(np.int64)))
        return Batch(self.masks.packed(whole, masked), targets, *numbers_of(examples))

    def cut(self, rows: np.ndarray) -> np.ndarray:
        """(N,) bool: which pairs were too long for an example and have lost tokens at the ends of their segments: one
        does not begin and end with a sentence. Where order is learned a lone sentence is cut in two, and its halves
        meet."""
        starts, lengths = (
            np.stack([rows[f"{side}_{field}"].astype(np.int64) for side in "ab"]) for field in ("start", "length")
        )
        ends, offsets = starts + lengths, self.store.sentence_offsets
        opens, closes = (offsets[np.searchsorted(offsets, places)] == places for places in (starts, ends))
        if self.config.pairs == "sop":
            opens |= starts == ends[::-1]
            closes |= ends == starts[::-1]
        return ~(opens & closes).all(0)

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and the shares of tokens predicted and of pairs with a random (nsp) or an earlier
        (sop) second segment."""
        plan = self.plan(0)
        share = float(plan.rows["label"].mean())
        full = plan.rows[plan.lengths == self.limit + self.template.overhead]
        facts = {
            **plan_facts(plan, self.store, self.split),
            "predicted_fraction": self.config.predicted_fraction,
            "truncated_fraction": int(self.cut(full).sum()) / len(plan),
        }
        if self.config.pairs == "sop":
            return {**facts, "swapped_fraction": share}
        lone = self._lone
        facts |= {"random_next_fraction": share, "documents_of_one_sentence": int(lone.sum())}
        if share > _MOSTLY_RANDOM and self.config.pairs == "nsp":
            facts["warnings"] = [
                f"{share:.0%} of the second segments are random ones, where next-sentence prediction means half: "
                f"{lone.mean():.0%} of the {self.split} documents are one sentence, which none follows; "
                "data.document=file makes longer ones, objective.pairs=none does without"
            ]
        return facts

    @property
    def _lone(self) -> np.ndarray:
        """(D,) bool: documents of one sentence, whose next one can only be random."""
        return np.diff(self.store.document_sentences) == 1

    def _require_choices(self) -> None:
        """UserError where next-sentence prediction has nothing to tell apart."""
        hint = f"or take objective.pairs=none{' or sop' if self.config.pairs == 'nsp' else ''}"
        if self.config.pairs != "sop" and len(self.store) < 2:
            more = "" if self.split == "train" else ", data.validation_fraction= a larger share, or data.validation="
            learned = "next-sentence prediction needs" if self.config.pairs == "nsp" else "random pairs need"
            raise UserError(
                f"{learned} two documents with text; the {self.split} text is one",
                f"split the text into more of them (of text files: data.document=block or line){more}, {hint}",
            )
        if self.config.pairs == "nsp" and self.split == "train" and self._lone.all():
            raise UserError(
                "next-sentence prediction has nothing to learn: no document has two sentences, so every second segment "
                "is a random one",
                f"make longer documents (of text files: data.document=block or file), {hint}",
            )
