"""Masked tokens: how many, what stands in their place, and that nothing else changes.

Shape letters: N examples of a batch, T their tokens, M places that predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtool.learners.inspection import Drawn, Inspector
from lmtool.learners.tally import Tally
from lmtool.objectives.checks.streams import StreamInspector
from lmtool.objectives.corruption.masking import Masked, budget


@dataclass(frozen=True)
class Masks:
    """What was masked of a batch. masked: the masks as they are drawn. tokens, shown: (T,) before and after. text: (T,)
    bool, what may be masked. eligible, selected: (N,) how many tokens of an example may be, and are."""

    masked: Masked
    tokens: np.ndarray
    shown: np.ndarray
    text: np.ndarray
    eligible: np.ndarray
    selected: np.ndarray


BRANCHES = ("of these, [MASK]", "of these, another token", "of these, unchanged")


class MaskingInspector(Inspector):
    """Of examples with masks over single tokens or words. config: what the masks are held against."""

    def __init__(self, learner: Any, examples: Any, max_length: int):
        super().__init__(learner, examples, max_length)
        self.config, self.vocabulary = examples.config, examples.masks.vocabulary

    def fact(self, tally: Tally) -> str:
        shares = [tally.measured(name) for name in BRANCHES]
        words = ("[MASK]", "another token", "what was there")
        read = ", ".join(f"{share:.1%} {word}" for share, word in zip(shares, words, strict=True) if share)
        if not read:
            return super().fact(tally)
        return f"{super().fact(tally)}; of these the model reads {read}"

    def repeats(self, epoch: int) -> bool:
        """Static masks come again."""
        return self.config.drawn_epoch(epoch) != epoch

    def check(self, tally: Tally, drawn: Drawn) -> None:
        whole = self.examples.assemble(drawn.rows)
        masked = self.examples.masked(whole, drawn.numbers, drawn.epoch)
        shown, at = drawn.batch.inputs.tokens.numpy(), masked.at
        documents = np.repeat(np.arange(len(whole.lengths)), whole.lengths)
        text = ~self.vocabulary.special[whole.tokens]
        eligible, selected = (
            np.bincount(documents[places], minlength=len(drawn.rows)) for places in (np.flatnonzero(text), at)
        )
        tally.none("special tokens predicted", (~text[at]).sum())
        tally.none("labels that are not the text", (masked.labels != whole.tokens[at]).sum())
        changed = np.flatnonzero(shown != whole.tokens)
        tally.none("tokens changed but not predicted", (~np.isin(changed, at)).sum())
        self.check_masks(tally, Masks(masked, whole.tokens, shown, text, eligible, selected))

    def check_masks(self, tally: Tally, masks: Masks) -> None:
        """Enter which tokens are masked, and what stands in their place."""
        config, vocabulary, at, text = self.config, self.vocabulary, masks.masked.at, masks.text
        regular = int((~vocabulary.special).sum())
        check_branches(
            tally, config.mask, config.random, masks.shown[at], masks.masked.labels, regular, vocabulary.mask
        )
        if config.whole_word:
            tally.note("predicted share of text", len(at), text.sum())
            opens = text & (vocabulary.starts_word[masks.tokens] | ~np.append(False, text[:-1]))
            word = np.cumsum(opens)[text]
            taken = np.isin(np.flatnonzero(text), at)
            share = np.bincount(word, taken) / np.maximum(np.bincount(word), 1)
            tally.none("words partly predicted", ((share > 0) & (share < 1)).sum())
        elif config.select == "bernoulli":
            tally.share("predicted share of text", len(at), text.sum(), config.probability)
        else:
            check_budget(tally, masks.selected, budget(masks.eligible, config.probability), masks.eligible)


class MaskedWindowsInspector(MaskingInspector, StreamInspector):
    """Of `MaskedWindows`."""

    def check(self, tally: Tally, drawn: Drawn) -> None:
        super().check(tally, drawn)
        share, rows = self.config.short_window_probability, drawn.rows
        if not share:
            return
        short, room = rows["short"] == 1, self.examples.room
        tally.share("windows that aim at a shorter length", short.sum(), len(rows), share)
        ends = np.isin(rows["start"] + rows["length"], self.examples.stream.borders)
        tally.none("windows cut although there is text", (~short & ~ends & (rows["length"] != room)).sum())
        tally.note(
            "length of the shorter ones, as a share of the longest", rows["length"][short].sum(), short.sum() * room
        )


def check_budget(tally: Tally, selected_N: np.ndarray, budget_N: np.ndarray, eligible_N: np.ndarray) -> None:
    """How many of each example's tokens are predicted, where their number is exact."""
    tally.exact("predicted share of text", selected_N.sum(), budget_N.sum(), eligible_N.sum())
    tally.none("examples off their budget", (selected_N != budget_N).sum())


def check_branches(
    tally: Tally, mask: float, random: float, shown_M: np.ndarray, labels_M: np.ndarray, regular: int, mask_id: int
) -> None:
    """What stands in the place of predicted tokens. A random token may be the same one: it looks unchanged then."""
    hidden, same = shown_M == mask_id, shown_M == labels_M
    tally.share(BRANCHES[0], hidden.sum(), len(labels_M), mask)
    tally.share(BRANCHES[1], (~hidden & ~same).sum(), len(labels_M), random * (1 - 1 / regular))
    tally.share(BRANCHES[2], (~hidden & same).sum(), len(labels_M), 1 - mask - random + random / regular)
