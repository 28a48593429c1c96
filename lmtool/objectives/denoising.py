"""Denoising on encoder-decoders: the text as it was, from the text with noise (Lewis et al. 2020, section 2.2)."""

from __future__ import annotations

from lmtool.data.split import SplitData
from lmtool.objectives.checks.denoising import NoisyInspector
from lmtool.objectives.configs import DenoisingConfig
from lmtool.objectives.examples.noisy import NoisyWindows
from lmtool.objectives.sequence_to_sequence import SequenceToSequence


class Denoising(SequenceToSequence):
    """The one term `denoising`."""

    config: DenoisingConfig

    def examples(self, data: SplitData, max_length: int) -> NoisyWindows:
        """Neither side is longer than max_length."""
        return NoisyWindows(
            self.config, self.tokenizer, self.sides(), data.text, max_length, data.documents, data.split, self.seed
        )

    def inspector(self, examples: NoisyWindows, max_length: int) -> NoisyInspector:
        return NoisyInspector(self, examples, max_length)
