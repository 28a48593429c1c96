"""Windows of text with BART's noises or T5's span corruption, with the original text."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtool.data.examples import Plan, SplitData, planned
from lmtool.data.formats import assemble, ragged_ranges
from lmtool.errors import UserError
from lmtool.objectives.configs import DenoisingConfig, SpanCorruptionConfig
from lmtool.objectives.corruption.masking import Vocabulary
from lmtool.objectives.corruption.noises import (
    Corrupted,
    Infilled,
    PackedTexts,
    corrupt_spans,
    delete,
    infill,
    mask_each,
    noise_counts,
    permute_sentences,
    rotate,
    text_length,
)
from lmtool.objectives.examples.windows import Sides, Stream, plan_metadata, some, text_capacity, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch

# Windows with BART's noises on the input side and the original text on the output side.
# Shape letters: N examples of a batch, T their tokens.


def noisy_windows(stream: Stream, size: int, joined: bool, infilling: float, special_count: int) -> Plan:
    """Windows as of `windows`, and their lengths on both sides. infilling: fraction of the words in spans."""
    rows = windows(stream, size, joined)
    lengths = rows["length"].astype(np.int64)
    # An inserted mask may lengthen a short text.
    noisy = np.minimum(lengths + np.ceil(lengths * infilling).astype(np.int64), size)
    return Plan(rows, lengths + noisy + 2 * special_count)


class NoisyWindows:
    """Windows of text, with noise on the input side. joined: across documents, without separators; separate: within
    each document."""

    def __init__(
        self, config: DenoisingConfig, tokenizer: Tokenizer, sides: Sides, data: SplitData, max_length: int, seed: int
    ):
        self.config, self.sides, self.store, self.split, self.seed = config, sides, data.text, data.split, seed
        self.vocabulary = _vocabulary(tokenizer)
        special_count = sides.template.special_count
        self.room = text_capacity(max_length, special_count, 1)
        # Without separators or empty documents, stream positions are store positions.
        self.stream = Stream.of(self.store, None)
        joined, infilling = data.documents == "joined", config.text_infilling
        self._plan = some(planned(noisy_windows, self.stream, self.room, joined, infilling, special_count), data.split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def texts(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> PackedTexts:
        """The original windows."""
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        return PackedTexts(tokens, lengths, np.asarray(examples), self.seed, epoch)

    def stages(self, texts: PackedTexts, starts: np.ndarray) -> dict[str, PackedTexts]:
        """The texts after each configured noise, by its field, in order. starts: (N,) first positions of the windows in
        the store."""
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

    def sentences(self, texts: PackedTexts, starts: np.ndarray) -> np.ndarray:
        """(T,) the sentence of each token in the store."""
        places = ragged_ranges(starts, texts.lengths)
        return np.searchsorted(self.store.sentence_offsets, places, side="right")

    def infilled(self, texts: PackedTexts) -> Infilled:
        """The texts after infilling."""
        config = self.config
        return infill(texts, self.vocabulary, config.text_infilling, config.poisson_mean, config.random, self.room)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.texts(rows, examples, epoch)
        noisy = list(self.stages(whole, rows["start"]).values())[-1]
        inputs = assemble(self.sides.template, [(noisy.tokens, noisy.lengths)])
        outputs = assemble(self.sides.template, [(whole.tokens, whole.lengths)])
        return self.sides.batch(inputs.packed(), outputs, self.config.name, examples)

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, and the fraction of its tokens that are predicted."""
        return {**plan_metadata(self._plan, self.store, self.split), "predicted_fraction": 0.5}


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The mask is the tokenizer's; without one (T5), its first sentinel."""
    special = np.zeros(tokenizer.vocab_size, dtype=bool)
    special[list(tokenizer.special_ids)] = True
    has_mask = "mask" in tokenizer.roles or not tokenizer.sentinels
    mask = tokenizer.role("mask") if has_mask else tokenizer.sentinels[0]
    return Vocabulary(mask, special, np.asarray(tokenizer.starts_word, dtype=bool))


# Windows with T5's span corruption.
# Shape letters: N examples of a batch.


def corrupted_windows(
    stream: Stream, size: int, joined: bool, config: SpanCorruptionConfig, special_count: int
) -> Plan:
    """Windows as of `windows` with two tokens or more, and their lengths on both sides."""
    rows = windows(stream, size, joined)
    rows = rows[rows["length"] >= 2]
    lengths = rows["length"].astype(np.int64)
    _, spans = noise_counts(lengths, config)
    # Each span has a sentinel on both sides.
    return Plan(rows, lengths + 2 * spans + 2 * special_count)


class CorruptedSpans:
    """Windows of text with corrupted spans. joined: across documents, without separators, as in T5's data; separate:
    within each document, without a single last token."""

    def __init__(
        self,
        config: SpanCorruptionConfig,
        tokenizer: Tokenizer,
        sides: Sides,
        data: SplitData,
        max_length: int,
        seed: int,
    ):
        self.config, self.sides, self.store, self.split, self.seed = config, sides, data.text, data.split, seed
        special_count = sides.template.special_count
        self.text_length = text_length(max_length, special_count, config)
        self.stream = Stream.of(self.store, None)
        joined = data.documents == "joined"
        plan = planned(corrupted_windows, self.stream, self.text_length, joined, config, special_count)
        self._plan = some(plan, data.split)
        self.sentinels = np.array(tokenizer.sentinels, dtype=np.int64)
        spans = int((plan.lengths - plan.rows["length"]).max()) // 2 - special_count
        if len(self.sentinels) < spans:
            raise UserError(
                f"span corruption needs {spans} sentinel tokens at max_length={max_length}; the tokenizer has "
                f"{len(self.sentinels)}",
                "set tokenizer=sentencepiece with a larger tokenizer.sentinels=, or a smaller max_length=",
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

    def metadata(self) -> dict[str, Any]:
        """Size of an epoch, and the fraction of its tokens that are predicted."""
        return {
            **plan_metadata(self._plan, self.store, self.split), "predicted_fraction": self.config.predicted_fraction
        }  # fmt: skip
