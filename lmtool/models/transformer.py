"""The transformer: Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin, "Attention Is All You Need",
NeurIPS 2017.

     token * sqrt(H) + position           token * sqrt(H) + position of the outputs, shifted
             |                                   |
          dropout                             dropout
             |                                   |
    +--------+--------+                 +--------+--------+
    |    self_attn    |                 |    self_attn    |   attends to earlier tokens only
    |        |        |                 |        |        |
    +-----> add ------+                 +-----> add ------+
             |                                   |
           norm1                               norm1
             |                                   |
             |                          +--------+--------+
             |                  +-------|--> cross_attn   |
             |                  |       |        |        |
             |                  |       +-----> add ------+
             |                  |                |
             |                  |              norm2           x num_layers
             |                  |                |
    +--------+--------+         |       +--------+--------+
    |  fc_in relu fc_out        |       |  fc_in relu fc_out
    |        |        |         |       |        |        |
    +-----> add ------+         |       +-----> add ------+
             |                  |                |
           norm2                |              norm3
             |                  |                |
             +------------------+             hidden
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models import bart
from lmtool.models.bart import TwoStackFormat, post_norm_pairs
from lmtool.models.base import positions_of
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder, post_norm_layers
from lmtool.models.encoder_decoder_configs import Transformer2017Config
from lmtool.models.family import HFClass
from lmtool.models.keymap import EMPTY, KeyMap
from lmtool.models.published import expect
from lmtool.nn.configs import SinusoidalPositionsConfig
from lmtool.nn.embeddings import Embeddings, StackInput
from lmtool.nn.initialization import Draw, initialize_each, normal
from lmtool.nn.stack import Stack


class Transformer(EncoderDecoder):
    """Encoder and decoder without the head. They share the token embedding, to which the head is tied (section 3.4)."""

    def __init__(self, config: Transformer2017Config):
        width = config.hidden_size
        positions = [positions_of(config, causal) for causal in (False, True)]
        encoder, decoder = post_norm_layers(config, "relu", config.activation_dropout)
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, positions[0], config.dropout).scaled(math.sqrt(width)),
            Stack(encoder),
            DecoderStack(decoder, StackInput(positions[1], config.dropout)),
        )

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Draws linear layers as Glorot and Bengio (2010), and embeddings with the standard deviation
        1/sqrt(hidden_size), so that scaled token embeddings are about as large as the positions."""
        factor = self.config.initializer_std

        def draw_of(name: str, part: nn.Module) -> Draw:
            if isinstance(part, nn.Linear):
                return normal(factor * math.sqrt(2 / (part.in_features + part.out_features)))
            return normal(factor / math.sqrt(self.hidden_size))

        initialize_each(module, seed, draw_of, prefix)


KEYS = KeyMap(tuple(pair for pair in post_norm_pairs() if pair[0] != "heads.lm.bias"))
_BIAS = "final_logits_bias"
# Weights whose inputs are hidden states, and weights and biases whose outputs are added to hidden states.
_READ_BY_LAYERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc_in.weight")
_WRITTEN_BY_LAYERS = ("out_proj.weight", "out_proj.bias", "fc_out.weight", "fc_out.bias")
# The base of the wavelengths in transformers.
_BASE = 10000.0


class _MarianFormat(TwoStackFormat):
    """The format of Marian, whose positions are all sines, then all cosines; the paper and lmtool interleave them.
    Therefore the channels of the hidden states are reordered, which does not change outputs."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        reordered = {name: _reorder(name, tensor, to_marian=True) for name, tensor in tensors.items()}
        hf_tensors = super().to_hf(reordered, config)
        hf_tensors[_BIAS] = torch.zeros(1, len(hf_tensors["model.shared.weight"]))
        return hf_tensors

    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        if _BIAS in tensors and tensors[_BIAS].any():
            raise UserError(
                f"the checkpoint adds constants to its logits ({_BIAS}), which model=transformer does not support",
                "use another checkpoint",
            )
        renamed = super().from_hf({name: tensors[name] for name in tensors if name != _BIAS}, config)
        return {name: _reorder(name, tensor, to_marian=False) for name, tensor in renamed.items()}

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        hf_config = super().to_hf_config(config)
        base = config.positions.base if isinstance(config.positions, SinusoidalPositionsConfig) else _BASE
        if base != _BASE:
            raise UserError(
                f"model.positions.base={base}: Marian in transformers supports only {_BASE}",
                f"use the run with lmtool, or train a new run with model.positions.base={_BASE}",
            )
        if config.hidden_size % 2:
            raise UserError(
                f"model.hidden_size={config.hidden_size}: Marian in transformers supports only even widths",
                "use the run with lmtool, or train a new run with an even model.hidden_size",
            )
        # Our initializer_std is a factor on standard deviations, which Marian lacks; 0.02 is Marian's default.
        return {**hf_config, "init_std": 0.02}

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        if data.get("activation_function") is None or data.get("scale_embedding") is None:
            # Marian's defaults are another activation and unscaled embeddings, so this call raises UserError.
            expect({"activation_function": "gelu"}, "transformer", activation_function=("relu",))
        section = super().from_hf_config(data)
        section.pop("initializer_std")
        return {**section, "positions": {"name": "sinusoidal", "base": _BASE}}


def _reorder(name: str, tensor: Tensor, to_marian: bool) -> Tensor:
    if name.endswith(_READ_BY_LAYERS) or name in ("backbone.embed.token.weight", "heads.lm.output.weight"):
        return tensor.index_select(1, _channels(tensor.shape[1], to_marian))
    if name.endswith(_WRITTEN_BY_LAYERS) or ".norm" in name:
        return tensor.index_select(0, _channels(tensor.shape[0], to_marian))
    return tensor


def _channels(width: int, to_marian: bool) -> Tensor:
    """Returns the indices that reorder channels: first the even channels, then the odd ones; or the inverse."""
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return order if to_marian else order.argsort()


HF_FORMAT = _MarianFormat(
    model="transformer",
    title="Marian",
    keys=KEYS,
    tied=bart.TIED,
    classes=(HFClass("MarianMTModel", predicts=True),),
    prefix=bart.HF_FORMAT.prefix,
    outside_prefixes=bart.HF_FORMAT.outside_prefixes,
    # Position tables are constants.
    unread_suffixes=("embed_positions.weight",),
    fields={**bart.HF_FORMAT.fields, "vocab_size": ("vocab_size", 58101)},
    required_values={"activation_function": "relu", "scale_embedding": True, "share_encoder_decoder_embeddings": True},
    supported_values={
        **bart.HF_FORMAT.supported_values,
        "normalize_embedding": (False,),
        "static_position_embeddings": (True,),
    },
    repeats={**bart.HF_FORMAT.repeats, "decoder_vocab_size": "vocab_size"},
    lmtool_constants=bart.HF_FORMAT.lmtool_constants,
    positions="sinusoidal",
)
