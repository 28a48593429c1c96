"""Objectives whose examples have a source and a target: denoising (BART) and span corruption (T5) for encoder-decoders,
and prefix language modeling for encoder-decoders and decoders.

Shape letters: T output tokens, M output tokens that are not special, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Examples, SplitData
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.model import labels_of
from lmtool.learners.writing import AnswerWriter, PerplexityScorer
from lmtool.models.base import Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.dropout import DropoutRng
from lmtool.objectives.checks.denoising import CorruptedSpansInspector, NoisyInspector
from lmtool.objectives.checks.language import EncodedPrefixesInspector, MaskedPrefixesInspector
from lmtool.objectives.clm import SAMPLING, CausalLanguageModel, LanguageModelLearner, unigram
from lmtool.objectives.configs import DenoisingConfig, PrefixLmConfig, SpanCorruptionConfig
from lmtool.objectives.examples.denoising import CorruptedSpans, NoisyWindows
from lmtool.objectives.examples.language import EncodedPrefixes, MaskedPrefixes
from lmtool.objectives.examples.windows import Sides
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, send


class SequenceToSequence(LanguageModelLearner):
    """The base class of objectives for encoder-decoders. The loss is the cross entropy of all output tokens, including
    special tokens. Evaluation ignores special tokens, because the positions of sentinels and ends are easy to
    predict."""

    backbone: EncoderDecoder

    def sides(self) -> Sides:
        """Returns the text format of inputs and outputs. Raises UserError if the tokenizer lacks a special token of
        this format."""
        return Sides(self.backbone, self.tokenizer)

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, ConstantPredictor]:
        return {self.term: unigram(train, self.tokenizer)}

    def states(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        return cast(Tensor, self.backbone(batch.inputs, rng, batch.outputs))

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each output token that is not special, in evaluation mode."""
        outputs = cast(Packed, batch.outputs)
        labels, special = labels_of(batch, self.term), torch.tensor(sorted(self.tokenizer.special_ids))
        indices = send((~torch.isin(labels_of(batch.host, self.term), special)).nonzero()[:, 0], labels.device)
        hidden_MH = self.backbone(batch.inputs, None, outputs, indices)
        losses, best = self.lm.scores(hidden_MH, self.table_VW, labels[indices])
        return {self.term: Scores(losses, labels[indices], best, outputs.documents[indices])}

    def writer(self) -> AnswerWriter:
        return AnswerWriter(self.backbone, self.lm, self.tokenizer)

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns the `prompt`, the encoder's input, and the generated `text`, both with their special tokens."""
        inputs = [ids.tolist() for ids in batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]]
        outputs = self.writer().write(inputs, SAMPLING, self.seed)
        return [
            {
                "prompt": self.tokenizer.decode(ids, skip_special=False),
                "text": self.tokenizer.decode(output, skip_special=False),
            }
            for ids, output in zip(inputs, outputs, strict=True)
        ]


class Denoising(SequenceToSequence):
    """Denoising: predicts a text from the same text with noise (Lewis et al. 2020, section 2.2)."""

    config: DenoisingConfig
    inspector_class = NoisyInspector

    def examples(self, data: SplitData, max_length: int) -> NoisyWindows:
        """Returns the examples. Neither inputs nor outputs are longer than max_length."""
        return NoisyWindows(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)


class SpanCorruption(SequenceToSequence):
    """Span corruption: predicts the replaced spans, each after its sentinel (Raffel et al. 2020, section 3.1.4)."""

    config: SpanCorruptionConfig
    inspector_class = CorruptedSpansInspector

    def examples(self, data: SplitData, max_length: int) -> CorruptedSpans:
        """Returns the examples. Neither inputs nor outputs are longer than max_length."""
        return CorruptedSpans(self.config, self.tokenizer, self.sides(), data, max_length, self.seed)


# Prefix language modeling splits a text in two. Attention within the first part, the prefix, is bidirectional; the
# second part is predicted (Liu et al., "Generating Wikipedia by Summarizing Long Sequences", ICLR 2018; Raffel et al.
# 2020, section 3.2). The position of the split is uniformly distributed. In a decoder, an attention mask makes the
# prefix bidirectional; in an encoder-decoder, the encoder reads the prefix.


class PrefixDecoder(CausalLanguageModel):
    """Prefix language modeling with a decoder."""

    term = "prefix_lm"
    inspector_class = MaskedPrefixesInspector

    def examples(self, data: SplitData, max_length: int) -> MaskedPrefixes:
        return MaskedPrefixes(self.tokenizer, data, max_length, self.seed)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        """Returns a scorer without perplexity per word and bits per byte: the words of the prefix are not predicted."""
        return PerplexityScorer(self, predictors)


class PrefixSequenceToSequence(SequenceToSequence):
    """Prefix language modeling with an encoder-decoder."""

    term = "prefix_lm"
    inspector_class = EncodedPrefixesInspector

    def examples(self, data: SplitData, max_length: int) -> EncodedPrefixes:
        """Returns the examples. Neither inputs nor outputs are longer than max_length."""
        return EncodedPrefixes(self.sides(), data, max_length, self.seed)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        return PerplexityScorer(self, predictors)


def build_prefix_lm(
    config: PrefixLmConfig, backbone: Decoder | EncoderDecoder, tokenizer: Tokenizer, seed: int
) -> PrefixDecoder | PrefixSequenceToSequence:
    """Builds the prefix language model for the architecture of the backbone."""
    if isinstance(backbone, EncoderDecoder):
        return PrefixSequenceToSequence(config, backbone, tokenizer, seed)
    return PrefixDecoder(config, backbone, tokenizer, seed)
