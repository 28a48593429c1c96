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
from typing import Any

from torch import Tensor, nn

from lmtool.models.base import new, positions_of
from lmtool.models.encoder import BertLike, post_norm_layer
from lmtool.models.encoder_configs import ElectraConfig
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied, encoder_pairs
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings


class Electra(BertLike):
    """The encoder, without its heads. A classifier's first map is a head and ends in a GELU."""

    pooler_activation = "gelu"

    def __init__(self, config: ElectraConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm = nn.LayerNorm(narrow, config.norm_epsilon)
        project = nn.Linear(narrow, config.hidden_size) if narrow != config.hidden_size else None
        embed = Embeddings(config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: ElectraConfig, seed: int) -> Electra:
    """A new encoder on the default device."""
    return new(Electra, config, seed)


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
        ("heads.masked_lm.output.weight", "generator_lm_head.weight"),
        # What is left of the last map without its table.
        ("heads.masked_lm", "generator_lm_head"),
        ("heads.pooler.dense", "classifier.dense"),
        ("heads.classifier.output", "classifier.out_proj"),
        QUESTION_ANSWERING,
    )
)
TIED = Tied("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight", "generator_")
_CONSTANT = "electra.embeddings.position_ids"
_HEADS = ("electra.", "discriminator_predictions.", "generator_", "classifier.", "qa_outputs.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face ElectraForPreTraining (the discriminator), of
    ElectraForMaskedLM (a generator) or of a classifier, as its heads are. The tied table is not written a second
    time."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare ElectraModel, whose names lack `electra.`."""
    names = {name if name.startswith(_HEADS) else "electra." + name: name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    return {
        KEYS.from_published(path) or names.get(path, path): tensor for path, tensor in full.items() if path != _CONSTANT
    }


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "ElectraForQuestionAnswering"),
    (("pooler", "classifier"), "ElectraForSequenceClassification"),
    (("replaced_token",), "ElectraForPreTraining"),
    (("masked_lm",), "ElectraForMaskedLM"),
    ((), "ElectraModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
    "embedding_size": "embedding_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "feedforward_size",
    "max_position_embeddings": "max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "segments",
    "initializer_range": "initializer_std",
    "layer_norm_eps": "norm_epsilon",
}
# What transformers takes for keys that a file leaves out.
_DEFAULTS = {
    "vocab_size": 30522, "embedding_size": 128, "num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4,
    "intermediate_size": 1024, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip


def published_config(config: ElectraConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face ELECTRA. UserError where it has no place in one."""
    require_learned(config, "ELECTRA")
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    return {"model_type": "electra", **ours, "hidden_act": "gelu", "position_embedding_type": "absolute"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(
        data,
        "electra",
        hidden_act=("gelu",),
        position_embedding_type=("absolute",),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True, False),
    )
    return {"name": "electra", **sizes(data, _FIELDS, _DEFAULTS)}
