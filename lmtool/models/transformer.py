"""The transformer: Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin, "Attention Is All You Need",
NeurIPS 2017.

     token sqrt(H) + position             token sqrt(H) + position of the outputs, shifted
             |                                   |
          dropout                             dropout
             |                                   |
    +--------+--------+                 +--------+--------+
    |    self_attn    |                 |    self_attn    |   no token sees what comes after it
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

from lmtool.errors import UserError
from lmtool.models.base import positions_of
from lmtool.models.bart import DERIVED, post_norm_pairs
from lmtool.models.encoder_decoder import DecoderStack, EncoderDecoder, Stack, post_norm_layers
from lmtool.models.encoder_decoder_configs import TransformerConfig
from lmtool.models.keymap import KeyMap
from lmtool.nn.embeddings import Embeddings, Places
from lmtool.nn.initialization import Draw, initialize_each, materialize, normal


class Transformer(EncoderDecoder):
    """Both stacks over one token table, which is the head's too (section 3.4)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.hidden_size = width = config.hidden_size
        positions = [positions_of(config, causal) for causal in (False, True)]
        encoder, decoder = post_norm_layers(config, "relu", config.activation_dropout)
        self.assemble(
            Embeddings(config.vocab_size, width, positions[0], config.dropout, scale=math.sqrt(width)),
            Stack(encoder),
            DecoderStack(decoder, Places(positions[1], config.dropout)),
        )

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Maps with the variance of Glorot and Bengio (2010), tables by 1/sqrt(hidden_size), so that the scaled token
        vectors are as large as the positions."""
        factor = self.config.initializer_std

        def draw_of(name: str, part: nn.Module) -> Draw:
            if isinstance(part, nn.Linear):
                return normal(factor * math.sqrt(2 / (part.in_features + part.out_features)))
            return normal(factor / math.sqrt(self.hidden_size))

        initialize_each(module, seed, draw_of, prefix)


def build(config: TransformerConfig, seed: int) -> Transformer:
    """A new encoder-decoder on the default device."""
    model = materialize(lambda: Transformer(config))
    model.initialize(model, seed, "backbone.")
    return model


KEYS = KeyMap(tuple(pair for pair in post_norm_pairs() if not pair[0].startswith("heads.")))
# Tables of constants, and copies of the shared table.
_DERIVED = (*DERIVED, "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
_READ_BY_LAYERS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc_in.weight")
_WRITTEN_BY_LAYERS = ("out_proj.weight", "out_proj.bias", "fc_out.weight", "fc_out.bias")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face MarianMTModel. Tied copies are not written.

    Marian lays the sines of its positions before the cosines, the paper in turn: the channels of the hidden states are
    put in its order, which changes no output.
    """
    published = {KEYS.to_published(name) or name: _reordered(name, one, True) for name, one in tensors.items()}
    published["final_logits_bias"] = torch.zeros(1, len(published["model.shared.weight"]))
    return published


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse. UserError for a Marian model that adds constants to its logits, which this family has not."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "final_logits_bias":
            if tensor.any():
                raise UserError(
                    "the checkpoint adds constants to its logits (final_logits_bias); model=transformer has none",
                    "give a checkpoint without them",
                )
        elif name not in _DERIVED:
            ours = KEYS.from_published(name) or name
            renamed[ours] = _reordered(ours, tensor, False)
    return renamed


def _reordered(name: str, tensor: Tensor, to_theirs: bool) -> Tensor:
    """A tensor of ours with the channels of the hidden states in the other order. name: ours."""
    if not name.startswith("backbone."):
        return tensor
    if name.endswith(_READ_BY_LAYERS) or name == "backbone.embed.token.weight":
        return tensor.index_select(1, _channels(tensor.shape[1], to_theirs))
    if name.endswith(_WRITTEN_BY_LAYERS) or ".norm" in name:
        return tensor.index_select(0, _channels(tensor.shape[0], to_theirs))
    return tensor


def _channels(width: int, to_theirs: bool) -> Tensor:
    """The channel that comes to each place: even ones first, then the odd ones, or back."""
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return order if to_theirs else order.argsort()
