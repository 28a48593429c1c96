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
from typing import Any

from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import new, positions_of
from lmtool.models.encoder import BertLike, post_norm_layer
from lmtool.models.encoder_configs import DistilbertConfig
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings


class Distilbert(BertLike):
    """The encoder, without its heads. A classifier's first map is a head and ends in a ReLU."""

    pooler_activation = "relu"

    def __init__(self, config: DistilbertConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, norm=norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: DistilbertConfig, seed: int) -> Distilbert:
    """A new encoder on the default device."""
    return new(Distilbert, config, seed)


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
        ("heads.classifier.output", "classifier"),
        QUESTION_ANSWERING,
        ("heads.masked_lm.dense", "vocab_transform"),
        ("heads.masked_lm.norm", "vocab_layer_norm"),
        ("heads.masked_lm.output.weight", "vocab_projector.weight"),
        # What is left of the last map without its table.
        ("heads.masked_lm", "vocab_projector"),
    )
)
TIED = Tied("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight", "vocab_")
_CONSTANT = "distilbert.embeddings.position_ids"
_HEADS = ("distilbert.", "vocab_", "pre_classifier.", "classifier.", "qa_outputs.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face DistilBertForMaskedLM, or of its classifier. The tied
    table is not written a second time."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare DistilBertModel, whose names lack `distilbert.`."""
    names = {name if name.startswith(_HEADS) else "distilbert." + name: name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    return {
        KEYS.from_published(path) or names.get(path, path): tensor for path, tensor in full.items() if path != _CONSTANT
    }


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "DistilBertForQuestionAnswering"),
    (("pooler", "classifier"), "DistilBertForSequenceClassification"),
    (("masked_lm",), "DistilBertForMaskedLM"),
    ((), "DistilBertModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layers": "num_layers",
    "dim": "hidden_size",
    "n_heads": "num_heads",
    "hidden_dim": "feedforward_size",
    "max_position_embeddings": "max_positions",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_std",
}
# What transformers takes for keys that a file leaves out.
_DEFAULTS = {
    "vocab_size": 30522, "n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072, "max_position_embeddings": 512,
    "dropout": 0.1, "attention_dropout": 0.1, "initializer_range": 0.02,
}  # fmt: skip
_EPSILON = 1e-12
"""Of the norms; the published code knows no other."""


def published_config(config: DistilbertConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face DistilBERT. UserError where it has no place in one."""
    require_learned(config, "DistilBERT")
    if config.norm_epsilon != _EPSILON:
        raise UserError(
            f"model.norm_epsilon={config.norm_epsilon} has no place in a published DistilBERT, which has {_EPSILON}",
            "use the run with lmtool",
        )
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    return {"model_type": "distilbert", **ours, "activation": "gelu"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    # A sinusoidal table is written out in the file like a learned one.
    expect(
        data, "distilbert", activation=("gelu",), sinusoidal_pos_embds=(False, True), tie_word_embeddings=(True, False)
    )
    return {"name": "distilbert", **sizes(data, _FIELDS, _DEFAULTS), "norm_epsilon": _EPSILON}
