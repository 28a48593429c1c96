"""Span corruption on encoder-decoders (Raffel et al. 2020, section 3.1.4)."""

from __future__ import annotations

from lmtool.data.split import SplitData
from lmtool.objectives.checks.span_corruption import CorruptedSpansInspector
from lmtool.objectives.configs import SpanCorruptionConfig
from lmtool.objectives.examples.corrupted_spans import CorruptedSpans
from lmtool.objectives.sequence_to_sequence import SequenceToSequence


class SpanCorruption(SequenceToSequence):
    """The one term `span_corruption`."""

    config: SpanCorruptionConfig

    def examples(self, data: SplitData, max_length: int) -> CorruptedSpans:
        """Neither side is longer than max_length."""
        return CorruptedSpans(
            self.config, self.tokenizer, self.sides(), data.text, max_length, data.documents, data.split, self.seed
        )

    def inspector(self, examples: CorruptedSpans, max_length: int) -> CorruptedSpansInspector:
        return CorruptedSpansInspector(self, examples, max_length)
