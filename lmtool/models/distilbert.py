"""DistilBERT: Sanh, Debut, Chaumond, Wolf, "DistilBERT, a distilled version of BERT: smaller, faster, cheaper and
lighter", 2019.

    token + position
             |
           norm, dropout
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.models.base import positions_of
from lmtool.models.encoder import Encoder, post_norm_layer
from lmtool.models.encoder_configs import DistilbertConfig
from lmtool.models.keymap import KeyMap
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import materialize


class Distilbert(Encoder):
    """The encoder, without its heads. A classifier's first map is a head and ends in a ReLU."""

    pooler_activation = "relu"

    def __init__(self, config: DistilbertConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, norm=norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: DistilbertConfig, seed: int) -> Distilbert:
    """A new encoder on the default device."""
    model = materialize(lambda: Distilbert(config))
    model.initialize(model, seed, "backbone.")
    return model


_LAYER = "backbone.layers.*."
_PUBLISHED = "distilbert.transformer.layer.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "distilbert.embeddings.word_embeddings"),
        ("backbone.embed.position", "distilbert.embeddings.position_embeddings"),
        ("backbone.embed.norm", "distilbert.embeddings.LayerNorm"),
        (_LAYER + "self_attn.q_proj", _PUBLISHED + "attention.q_lin"),
        (_LAYER + "self_attn.k_proj", _PUBLISHED + "attention.k_lin"),
        (_LAYER + "self_attn.v_proj", _PUBLISHED + "attention.v_lin"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attention.out_lin"),
        (_LAYER + "norm1", _PUBLISHED + "sa_layer_norm"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "ffn.lin1"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "ffn.lin2"),
        (_LAYER + "norm2", _PUBLISHED + "output_layer_norm"),
        ("heads.pooler.dense", "pre_classifier"),
        ("heads.masked_lm.dense", "vocab_transform"),
        ("heads.masked_lm.norm", "vocab_layer_norm"),
        # What is left of the last map without the tied table.
        ("heads.masked_lm", "vocab_projector"),
    )
)
_DERIVED = ("vocab_projector.weight", "distilbert.embeddings.position_ids")
_HEADS = ("distilbert.", "vocab_", "pre_classifier.", "classifier.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face DistilBertForMaskedLM, or of its classifier. The tied
    table is not written a second time."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; also for a bare DistilBertModel, whose names lack `distilbert.`."""
    renamed = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(_HEADS) else "distilbert." + name
        if full not in _DERIVED:
            renamed[KEYS.from_published(full) or name] = tensor
    return renamed
