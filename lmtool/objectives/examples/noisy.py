"""Windows of text with BART's noises on one side and the text as it was on the other.

Shape letters: N examples of a batch, T their tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.assembly import assemble, ragged_ranges
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.objectives.configs import DenoisingConfig
from lmtool.objectives.corruption.masking import Vocabulary
from lmtool.objectives.corruption.noises import Infilled, Texts, delete, infill, mask_each, permute_sentences, rotate
from lmtool.objectives.examples.plans import plan_facts, room_for, some
from lmtool.objectives.examples.sides import Sides
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch


class NoisyWindows:
    """Windows of text, with noise on one side. joined: through documents, nothing between them; separate: of each."""

    def __init__(
        self, config: DenoisingConfig, tokenizer: Tokenizer, sides: Sides, store: TokenStore,
        max_length: int, documents: str, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.sides, self.store, self.split, self.seed = config, sides, store, split, seed
        self.vocabulary = _vocabulary(tokenizer)
        overhead = sides.template.overhead
        self.room = room_for(max_length, overhead, 1)
        # Nothing stands between documents, and none is empty: places of the stream are places of the store.
        self.stream = Stream(store.tokens, store.document_offsets, None)
        rows = windows(self.stream, self.room, documents == "joined")
        lengths = rows["length"].astype(np.int64)
        # A mask put in between may make a short text longer.
        noisy = np.minimum(lengths + np.ceil(lengths * config.text_infilling).astype(np.int64), self.room)
        self._plan = some(Plan(rows, lengths + noisy + 2 * overhead), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def texts(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Texts:
        """Some windows as they are."""
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        return Texts(tokens, lengths, np.asarray(examples), self.seed, epoch)

    def stages(self, texts: Texts, starts: np.ndarray) -> dict[str, Texts]:
        """The texts after each noise of the configuration, by its field, in their order. starts: (N,) where the windows
        begin in the store."""
        config, stages = self.config, {"": texts}
        if config.sentence_permutation:
            sentences = self.sentences(texts, starts)
            stages["sentence_permutation"] = texts = permute_sentences(texts, sentences, config.sentence_permutation)
        if config.text_infilling:
            stages["text_infilling"] = texts = self.infilled(texts).texts
        if config.token_masking:
            texts = mask_each(texts, self.vocabulary, config.token_masking, config.random)
            stages["token_masking"] = texts
        if config.token_deletion:
            stages["token_deletion"] = texts = delete(texts, config.token_deletion)
        if config.document_rotation:
            stages["document_rotation"] = rotate(texts, config.document_rotation)
        return stages

    def sentences(self, texts: Texts, starts: np.ndarray) -> np.ndarray:
        """(T,) the sentence of the store that each token is of."""
        places = ragged_ranges(starts, texts.lengths)
        return np.searchsorted(self.store.sentence_offsets, places, side="right")

    def infilled(self, texts: Texts) -> Infilled:
        """The texts with their spans filled."""
        config = self.config
        return infill(texts, self.vocabulary, config.text_infilling, config.poisson_mean, config.random, self.room)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.texts(rows, examples, epoch)
        noisy = list(self.stages(whole, rows["start"]).values())[-1]
        inputs = assemble(self.sides.template, [(noisy.tokens, noisy.lengths)])
        outputs = assemble(self.sides.template, [(whole.tokens, whole.lengths)])
        return self.sides.batch(inputs.packed(), outputs, self.config.name, examples)

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of its tokens that are predicted."""
        return {**plan_facts(self._plan, self.store, self.split), "predicted_fraction": 0.5}


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The mask is the tokenizer's; of a vocabulary that has none, T5's, its first sentinel."""
    special = np.zeros(tokenizer.vocab_size, dtype=bool)
    special[list(tokenizer.special_ids)] = True
    has_mask = "mask" in tokenizer.roles or not tokenizer.sentinels
    mask = tokenizer.role("mask") if has_mask else tokenizer.sentinels[0]
    return Vocabulary(mask, special, np.asarray(tokenizer.starts_word, dtype=bool))
