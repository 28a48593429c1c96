"""The two sides of an example of an encoder-decoder."""

from __future__ import annotations

import numpy as np
import torch

from lmtool.data.assembly import Assembled, Template
from lmtool.data.formats import text_format
from lmtool.models.encoder_decoder import EncoderDecoder, shifted
from lmtool.objectives.examples.plans import numbers_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Target


class Sides:
    """How a family lays out the two sides: both in its text format, and the outputs shifted behind its start token."""

    def __init__(self, backbone: EncoderDecoder, tokenizer: Tokenizer):
        self.template = Template.of(text_format(backbone.config.text_format, tokenizer), 1)
        self.start = tokenizer.role(backbone.config.start_role)

    def batch(self, inputs: Packed, outputs: Assembled, term: str, examples_N: np.ndarray) -> Batch:
        """Inputs as the encoder reads them, and the whole outputs as they are to be predicted."""
        labels = torch.from_numpy(outputs.tokens)
        target = Target(labels, at=torch.arange(len(labels)), side="outputs")
        return Batch(inputs, {term: target}, *numbers_of(examples_N), shifted(outputs.packed(), self.start))
