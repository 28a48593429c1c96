"""ALBERT: Lan, Chen, Goodman, Gimpel, Sharma, Soricut, "ALBERT: A Lite BERT for Self-supervised Learning of Language
Representations", ICLR 2020. The sizes are those of https://github.com/google-research/albert.

    token + position + segment    embedding_size wide
             |
           norm, dropout
             |
          project                 hidden_size wide
             |
      one of BERT's layers (bert.py), applied num_layers times
             |
          hidden
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from lmtool.models.base import positions_of
from lmtool.models.encoder import Encoder, post_norm_layer
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.keymap import KeyMap
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import materialize


class Albert(Encoder):
    """The encoder, without its heads. `layers` has the one layer."""

    def __init__(self, config: AlbertConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm, project = nn.LayerNorm(narrow, config.norm_epsilon), nn.Linear(narrow, config.hidden_size)
        embed = Embeddings(
            config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project
        )
        super().__init__(config, embed, [post_norm_layer(config, config.activation)])
        self.head_activation = config.activation

    def depth(self) -> Iterator[nn.Module]:
        for _ in range(self.config.num_layers):
            yield self.layers[0]


def build(config: AlbertConfig, seed: int) -> Albert:
    """A new encoder on the default device."""
    model = materialize(lambda: Albert(config))
    model.initialize(model, seed, "backbone.")
    return model


_LAYER = "backbone.layers.0."
_PUBLISHED = "albert.encoder.albert_layer_groups.0.albert_layers.0."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "albert.embeddings.word_embeddings"),
        ("backbone.embed.position", "albert.embeddings.position_embeddings"),
        ("backbone.embed.segment", "albert.embeddings.token_type_embeddings"),
        ("backbone.embed.norm", "albert.embeddings.LayerNorm"),
        ("backbone.embed.project", "albert.encoder.embedding_hidden_mapping_in"),
        (_LAYER + "self_attn.q_proj", _PUBLISHED + "attention.query"),
        (_LAYER + "self_attn.k_proj", _PUBLISHED + "attention.key"),
        (_LAYER + "self_attn.v_proj", _PUBLISHED + "attention.value"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attention.dense"),
        (_LAYER + "norm1", _PUBLISHED + "attention.LayerNorm"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "ffn"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "ffn_output"),
        (_LAYER + "norm2", _PUBLISHED + "full_layer_layer_norm"),
        ("heads.pooler.dense", "albert.pooler"),
        ("heads.masked_lm.dense", "predictions.dense"),
        ("heads.masked_lm.norm", "predictions.LayerNorm"),
        ("heads.masked_lm.bias", "predictions.bias"),
        ("heads.sentence_order.output", "sop_classifier.classifier"),
    )
)
_DERIVED = ("predictions.decoder.weight", "predictions.decoder.bias", "albert.embeddings.position_ids")
_HEADS = ("albert.", "predictions.", "sop_classifier.", "classifier.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face AlbertForPreTraining. Tied copies are not written."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; also for a bare AlbertModel, whose names lack `albert.`."""
    renamed = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(_HEADS) else "albert." + name
        if full not in _DERIVED:
            renamed[KEYS.from_published(full) or name] = tensor
    return renamed
