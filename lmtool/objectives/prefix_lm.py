"""Prefix language modeling: the first part of a text is read with full attention, and the rest is predicted.

Liu et al., "Generating Wikipedia by Summarizing Long Sequences", ICLR 2018; Raffel et al. 2020, section 3.2: the split
is uniform. A decoder reads the prefix with an attention mask, an encoder-decoder with its encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtool.data.examples import SplitData
from lmtool.learners.baseline import Predictor
from lmtool.learners.writing import PerplexityScorer
from lmtool.models.base import Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.objectives.checks.language import EncodedPrefixesInspector, MaskedPrefixesInspector
from lmtool.objectives.clm import CausalLanguageModel, TextWindows
from lmtool.objectives.configs import PrefixLmConfig
from lmtool.objectives.examples.windows import EncodedPrefixes, MaskedPrefixes
from lmtool.objectives.sequence_to_sequence import SequenceToSequence
from lmtool.tokenizers.tokenizer import Tokenizer


class PrefixDecoder(CausalLanguageModel):
    """The one term `prefix_lm`, on a decoder."""

    term = "prefix_lm"
    slides = False

    def examples(self, data: SplitData, max_length: int) -> MaskedPrefixes:
        return MaskedPrefixes(self.tokenizer, data.text, max_length, data.documents, data.split, self.seed)

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        """Scores without words and bytes: tokens of the prefix are not predicted."""
        return PerplexityScorer(self, predictors)

    def inspector(self, examples: TextWindows, max_length: int) -> MaskedPrefixesInspector:
        return MaskedPrefixesInspector(self, examples, max_length)


class PrefixSequenceToSequence(SequenceToSequence):
    """The one term `prefix_lm`, on an encoder-decoder."""

    def examples(self, data: SplitData, max_length: int) -> EncodedPrefixes:
        """Neither side is longer than max_length."""
        return EncodedPrefixes(self.sides(), data.text, max_length, data.documents, data.split, self.seed)

    def scorer(self, data: SplitData, examples: Any, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        return PerplexityScorer(self, predictors)

    def inspector(self, examples: EncodedPrefixes, max_length: int) -> EncodedPrefixesInspector:
        return EncodedPrefixesInspector(self, examples, max_length)


def build(
    config: PrefixLmConfig, backbone: Decoder | EncoderDecoder, tokenizer: Tokenizer, seed: int
) -> PrefixDecoder | PrefixSequenceToSequence:
    """The learner for the backbone's architecture."""
    if isinstance(backbone, EncoderDecoder):
        return PrefixSequenceToSequence(config, backbone, tokenizer, seed)
    return PrefixDecoder(config, backbone, tokenizer, seed)
