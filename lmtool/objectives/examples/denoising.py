"""Examples of denoising: windows of text with BART's noises or T5's span corruption as inputs, and the original text as
outputs.

Shape letters: N examples of a batch, T tokens of these examples.
"""

from __future__ import annotations

import numpy as np

from lmtool.data.examples import Plan, SplitData, cached_plan
from lmtool.data.formats import ragged_ranges
from lmtool.errors import UserError
from lmtool.objectives.configs import DenoisingConfig, SpanCorruptionConfig
from lmtool.objectives.corruption.masking import PackedTexts, Vocabulary
from lmtool.objectives.corruption.noises import (
    CorruptedTexts,
    InfilledTexts,
    corrupt_spans,
    delete,
    infill,
    mask_each,
    noise_counts,
    permute_sentences,
    rotate,
    text_length,
)
from lmtool.objectives.examples.windows import FixedPlan, Sides, Stream, text_capacity, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch


def noisy_windows(stream: Stream, size: int, joined: bool, infilled_fraction: float, special_count: int) -> Plan:
    """Builds a plan from the windows of `windows`. The length of an example is the maximum of its input tokens plus its
    output tokens. infilled_fraction: of the words. special_count: the special tokens that each side gets."""
    rows = windows(stream, size, joined)
    lengths = rows["length"].astype(np.int64)
    # Text infilling may insert masks, so that the text with noise is longer than the original text.
    max_noisy_lengths = np.minimum(lengths + np.ceil(lengths * infilled_fraction).astype(np.int64), size)
    return Plan(rows, lengths + max_noisy_lengths + 2 * special_count)


class NoisyWindows(FixedPlan):
    """Windows of text with BART's noises as inputs, and the original windows as outputs, each of at most max_length
    tokens. With data.documents=joined, windows continue across documents, without separators. With
    data.documents=separate, a window has tokens of one document."""

    predicted_fraction = 0.5

    def __init__(
        self, config: DenoisingConfig, tokenizer: Tokenizer, sides: Sides, data: SplitData, max_length: int, seed: int
    ):
        self.config, self.sides, self.seed = config, sides, seed
        # If the tokenizer has no mask token (T5), the first sentinel serves as the mask.
        sentinel = next(iter(tokenizer.sentinels), None)
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer, None if "mask" in tokenizer.roles else sentinel)
        special_count = sides.template.special_count
        self.capacity = text_capacity(max_length, special_count, 1)
        # Because there is no separator, positions in the stream are positions in the store, see `sentences`.
        self.stream = Stream.from_store(data.text, None)
        joined, infilled_fraction = data.documents == "joined", config.text_infilling
        plan = cached_plan(noisy_windows, self.stream, self.capacity, joined, infilled_fraction, special_count)
        super().__init__(data.text, data.split, plan)

    def texts(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> PackedTexts:
        """Returns the original windows of examples."""
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        return PackedTexts(tokens, lengths, np.asarray(examples), self.seed, epoch)

    def stages(self, texts: PackedTexts, starts: np.ndarray) -> dict[str, PackedTexts]:
        """Applies the configured noises, one after another. texts: the original texts. starts: (N,) the first position
        of each window in the store. Returns the original texts with the key "", and the texts after each noise with the
        name of the noise's field as the key."""
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
        """Returns the index (T,) of the sentence that each token belongs to. starts: see `stages`."""
        positions = ragged_ranges(starts, texts.lengths)
        return np.searchsorted(self.store.sentence_offsets, positions, side="right")

    def infilled(self, texts: PackedTexts) -> InfilledTexts:
        """Applies text infilling."""
        config = self.config
        return infill(texts, self.vocabulary, config.text_infilling, config.poisson_mean, config.random, self.capacity)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        original = self.texts(rows, examples, epoch)
        noisy = list(self.stages(original, rows["start"]).values())[-1]
        source, target = (noisy.tokens, noisy.lengths), (original.tokens, original.lengths)
        return self.sides.batch(source, target, self.config.name, examples)


def corrupted_windows(
    stream: Stream, size: int, joined: bool, config: SpanCorruptionConfig, special_count: int
) -> Plan:
    """Builds a plan from the windows of `windows` that have at least two tokens. The length of an example is the sum of
    its input and output tokens. special_count: the special tokens that each side gets."""
    rows = windows(stream, size, joined)
    rows = rows[rows["length"] >= 2]
    lengths = rows["length"].astype(np.int64)
    _, spans = noise_counts(lengths, config)
    # Each span adds a sentinel to the inputs and a sentinel to the outputs.
    return Plan(rows, lengths + 2 * spans + 2 * special_count)


class CorruptedSpans(FixedPlan):
    """Windows of text with T5's span corruption, whose inputs and outputs have at most max_length tokens each. With
    data.documents=joined, windows continue across documents, without separators, as in T5's data. With
    data.documents=separate, a window has tokens of one document, and a single token at the end of a document is
    dropped."""

    def __init__(
        self,
        config: SpanCorruptionConfig,
        tokenizer: Tokenizer,
        sides: Sides,
        data: SplitData,
        max_length: int,
        seed: int,
    ):
        self.config, self.sides, self.seed = config, sides, seed
        special_count = sides.template.special_count
        self.text_length = text_length(max_length, special_count, config)
        self.stream = Stream.from_store(data.text, None)
        joined = data.documents == "joined"
        plan = cached_plan(corrupted_windows, self.stream, self.text_length, joined, config, special_count)
        super().__init__(data.text, data.split, plan)
        self.sentinels = np.array(tokenizer.sentinels, dtype=np.int64)
        spans = int((plan.lengths - plan.rows["length"]).max()) // 2 - special_count
        if len(self.sentinels) < spans:
            raise UserError(
                f"span corruption needs {spans} sentinel tokens at max_length={max_length}, but the tokenizer has "
                f"{len(self.sentinels)}",
                "set tokenizer=sentencepiece with a larger tokenizer.sentinels=, or set a smaller max_length=",
            )

    @property
    def predicted_fraction(self) -> float:
        return self.config.predicted_fraction

    def corrupted(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> CorruptedTexts:
        """Returns the inputs and the targets of examples, without special tokens."""
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        texts = PackedTexts(tokens, lengths, np.asarray(examples), self.seed, epoch)
        return corrupt_spans(self.config, self.sentinels, texts)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        corrupted = self.corrupted(rows, examples, epoch)
        source, target = (corrupted.inputs, corrupted.input_lengths), (corrupted.targets, corrupted.target_lengths)
        return self.sides.batch(source, target, self.config.name, examples)
