"""RoBERTa: Liu, Ott, Goyal, Du, Joshi, Chen, Levy, Lewis, Zettlemoyer, Stoyanov, "RoBERTa: A Robustly Optimized BERT
Pretraining Approach", 2019. The sizes are those of https://github.com/facebookresearch/fairseq (examples/roberta).

    token + position + the one segment
             |
           norm, dropout
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden

Its table of positions begins behind the number of the padding token, 1: two rows that no token reads stand before
that of position 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.models.base import positions_of
from lmtool.models.encoder import Encoder, post_norm_layer
from lmtool.models.encoder_configs import RobertaConfig
from lmtool.models.keymap import KeyMap, encoder_pairs
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import materialize

OFFSET = 2
"""Rows of the table of positions before that of position 0."""


class Roberta(Encoder):
    """The encoder, without its heads."""

    def __init__(self, config: RobertaConfig):
        width, position = config.hidden_size, positions_of(config, causal=False, offset=OFFSET)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: RobertaConfig, seed: int) -> Roberta:
    """A new encoder on the default device."""
    model = materialize(lambda: Roberta(config))
    model.initialize(model, seed, "backbone.")
    return model


KEYS = KeyMap(
    (
        *encoder_pairs("roberta"),
        ("heads.pooler.dense", "roberta.pooler.dense"),
        ("heads.masked_lm.dense", "lm_head.dense"),
        ("heads.masked_lm.norm", "lm_head.layer_norm"),
        ("heads.masked_lm.bias", "lm_head.bias"),
    )
)
_DERIVED = ("lm_head.decoder.weight", "lm_head.decoder.bias", "roberta.embeddings.position_ids")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face RobertaForMaskedLM (with its pooler where there is
    one). Tied copies are not written."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; also for a bare RobertaModel, whose names lack `roberta.`."""
    renamed = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(("roberta.", "lm_head.", "classifier.")) else "roberta." + name
        if full not in _DERIVED:
            renamed[KEYS.from_published(full) or name] = tensor
    return renamed
