"""Objectives whose texts have a source and a target: denoising (BART), span corruption (T5), and prefix language
modeling, for encoder-decoders and for decoders.

Shape letters: T tokens of the outputs, M of them text, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from lmtool.config.saved import JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.model import labels_of
from lmtool.learners.writing import AnswerWriter, PerplexityScorer
from lmtool.models.base import Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.lm import lm_head
from lmtool.objectives.checks.denoising import CorruptedSpansInspector, NoisyInspector
from lmtool.objectives.checks.language import EncodedPrefixesInspector, MaskedPrefixesInspector
from lmtool.objectives.clm import SAMPLED, CausalLanguageModel, TextObjective, TextWindows, unigram
from lmtool.objectives.configs import DenoisingConfig, NextTokenConfig, PrefixLmConfig, SpanCorruptionConfig
from lmtool.objectives.examples.denoising import CorruptedSpans, NoisyWindows
from lmtool.objectives.examples.windows import EncodedPrefixes, MaskedPrefixes, Sides
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, send


class SequenceToSequence(TextObjective):
    """One term with the objective's name: the cross entropy of every output token, special ones included. Evaluation
    scores text only: the positions of sentinels and ends say little about the language."""

    backbone: EncoderDecoder
    extra_training_targets = "special tokens (sentinels, ends)"

    def __init__(self, config: NextTokenConfig, backbone: EncoderDecoder, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.term = config.name
        self.weights = {self.term: 1.0}
        self.add_head("lm", lm_head(backbone))

    def sides(self) -> Sides:
        """The layout of the backbone's family. UserError if the tokenizer lacks one of its special tokens."""
        return Sides(self.backbone, self.tokenizer)

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        return {self.term: unigram(train, self.tokenizer)}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden_TH = self.backbone(batch.inputs, self.dropout_rng(batch, step), batch.outputs)
        labels = labels_of(batch, self.term)
        total = self.lm.loss_sum(hidden_TH, self.table_VH, labels, self.config.label_smoothing)
        return StepOutput({self.term: total}, self.weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Each text token's loss and best prediction, in evaluation."""
        outputs = cast(Packed, batch.outputs)
        labels, special = labels_of(batch, self.term), torch.tensor(sorted(self.tokenizer.special_ids))
        at = send((~torch.isin(labels_of(batch.host, self.term), special)).nonzero()[:, 0], labels.device)
        hidden_MH = self.backbone(batch.inputs, None, outputs, at)
        each, best = self.lm.scores(hidden_MH, self.table_VH, labels[at])
        return {self.term: Scores(each, labels[at], best, outputs.documents[at])}

    def writer(self) -> AnswerWriter:
        return AnswerWriter(self.backbone, self.lm, self.tokenizer)

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """The first n examples of a batch as plain data: the encoder's `prompt`, and the generated `text`; special
        tokens are written out."""
        inputs = [ids.tolist() for ids in batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]]
        new = self.writer().write(inputs, SAMPLED, self.seed)
        return [
            {
                "prompt": self.tokenizer.decode(ids, skip_special=False),
                "text": self.tokenizer.decode(text, skip_special=False),
            }
            for ids, text in zip(inputs, new, strict=True)
        ]


class Denoising(SequenceToSequence):
    """Predicts the original text from the text with noise (Lewis et al. 2020, section 2.2)."""

    config: DenoisingConfig

    def examples(self, data: SplitData, max_length: int) -> NoisyWindows:
        """Neither side is longer than max_length."""
        return NoisyWindows(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)

    def inspector(self, examples: NoisyWindows, max_length: int) -> NoisyInspector:
        return NoisyInspector(self, examples, max_length)


class SpanCorruption(SequenceToSequence):
    """Predicts masked spans, each after its sentinel (Raffel et al. 2020, section 3.1.4)."""

    config: SpanCorruptionConfig

    def examples(self, data: SplitData, max_length: int) -> CorruptedSpans:
        """Neither side is longer than max_length."""
        return CorruptedSpans(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)

    def inspector(self, examples: CorruptedSpans, max_length: int) -> CorruptedSpansInspector:
        return CorruptedSpansInspector(self, examples, max_length)


# Prefix language modeling: the first part of a text is read with full attention, and the rest is predicted.
# Liu et al., "Generating Wikipedia by Summarizing Long Sequences", ICLR 2018; Raffel et al. 2020, section 3.2: the
# position of the split is uniform. A decoder reads the prefix with an attention mask, an encoder-decoder with its
# encoder.


class PrefixDecoder(CausalLanguageModel):
    """The one term `prefix_lm`, on a decoder."""

    term = "prefix_lm"
    slides = False

    def examples(self, data: SplitData, max_length: int) -> MaskedPrefixes:
        return MaskedPrefixes(self.tokenizer, data, max_length, self.seed)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        """Scores without words and bytes: tokens of the prefix are not predicted."""
        return PerplexityScorer(self, predictors)

    def inspector(self, examples: TextWindows, max_length: int) -> MaskedPrefixesInspector:
        return MaskedPrefixesInspector(self, examples, max_length)


class PrefixSequenceToSequence(SequenceToSequence):
    """The one term `prefix_lm`, on an encoder-decoder."""

    def examples(self, data: SplitData, max_length: int) -> EncodedPrefixes:
        """Neither side is longer than max_length."""
        return EncodedPrefixes(self.sides(), data, max_length, self.seed)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        return PerplexityScorer(self, predictors)

    def inspector(self, examples: EncodedPrefixes, max_length: int) -> EncodedPrefixesInspector:
        return EncodedPrefixesInspector(self, examples, max_length)


def build_prefix_lm(
    config: PrefixLmConfig, backbone: Decoder | EncoderDecoder, tokenizer: Tokenizer, seed: int
) -> PrefixDecoder | PrefixSequenceToSequence:
    """The prefix language model for the backbone's architecture."""
    if isinstance(backbone, EncoderDecoder):
        return PrefixSequenceToSequence(config, backbone, tokenizer, seed)
    return PrefixDecoder(config, backbone, tokenizer, seed)
