"""ELECTRA: Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators",
ICLR 2020. The sizes are those of https://github.com/google-research/electra.

    token + position + segment    embedding_size wide
             |
           norm, dropout
             |
          project                 hidden_size wide; left out where the two are equal
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden

Discriminator and generator are of this form. The generator has layers of its own, narrower ones, over the
discriminator's tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.models.base import positions_of
from lmtool.models.encoder import Encoder, post_norm_layer
from lmtool.models.encoder_configs import ElectraConfig
from lmtool.models.keymap import KeyMap, encoder_pairs
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import materialize


class Electra(Encoder):
    """The encoder, without its heads. A classifier's first map is a head and ends in a GELU."""

    pooler_activation = "gelu"

    def __init__(self, config: ElectraConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm = nn.LayerNorm(narrow, config.norm_epsilon)
        project = nn.Linear(narrow, config.hidden_size) if narrow != config.hidden_size else None
        embed = Embeddings(
            config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project
        )
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: ElectraConfig, seed: int) -> Electra:
    """A new encoder on the default device."""
    model = materialize(lambda: Electra(config))
    model.initialize(model, seed, "backbone.")
    return model


KEYS = KeyMap(
    (
        *encoder_pairs("electra"),
        ("backbone.embed.project", "electra.embeddings_project"),
        # The discriminator's.
        ("heads.replaced_token.dense", "discriminator_predictions.dense"),
        ("heads.replaced_token.output", "discriminator_predictions.dense_prediction"),
        # A generator's, which is a masked language model.
        ("heads.masked_lm.dense", "generator_predictions.dense"),
        ("heads.masked_lm.norm", "generator_predictions.LayerNorm"),
        # What is left of the last map without the tied table.
        ("heads.masked_lm", "generator_lm_head"),
        ("heads.pooler.dense", "classifier.dense"),
    )
)
_DERIVED = ("generator_lm_head.weight", "electra.embeddings.position_ids")
_HEADS = ("electra.", "discriminator_predictions.", "generator_", "classifier.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face ElectraForPreTraining (the discriminator), of
    ElectraForMaskedLM (a generator) or of a classifier, as its heads are. The tied table is not written a second
    time."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; also for a bare ElectraModel, whose names lack `electra.`."""
    renamed = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(_HEADS) else "electra." + name
        if full not in _DERIVED:
            renamed[KEYS.from_published(full) or name] = tensor
    return renamed
