"""Llama's layers (llama.py) as an encoder: every token attends to the whole text (BehnamGhader et al. 2024, "LLM2Vec:
Large Language Models Are Secretly Powerful Text Encoders", section 2.1). `lmtool import model=` converts a
decoder's weights, and back.
"""

from __future__ import annotations

from lmtool.models.base import new
from lmtool.models.decoder_configs import LlamaEncoderConfig
from lmtool.models.llama import Llama


class LlamaEncoder(Llama):
    """The encoder without heads."""

    head_biases = False


def build(config: LlamaEncoderConfig, seed: int) -> LlamaEncoder:
    """Returns a new encoder on the default device."""
    return new(LlamaEncoder, config, seed)
