"""Llama's block, see `llama.py`, in an encoder: every token sees the whole text (BehnamGhader et al. 2024, "LLM2Vec:
Large Language Models Are Secretly Powerful Text Encoders", section 2.1). `lmtool import model=` takes a decoder's
weights into it, and back.
"""

from __future__ import annotations

from lmtool.models.base import new
from lmtool.models.decoder_configs import LlamaEncoderConfig
from lmtool.models.llama import Llama


class LlamaEncoder(Llama):
    """The encoder, without its heads."""

    head_biases = False


def build(config: LlamaEncoderConfig, seed: int) -> LlamaEncoder:
    """A new encoder on the default device."""
    return new(LlamaEncoder, config, seed)
