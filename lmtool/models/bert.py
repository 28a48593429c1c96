"""BERT: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", NAACL 2019. The sizes are those of https://github.com/google-research/bert.

    token + position + segment
             |
           norm, dropout
             |
    +--------+--------+
    |    self_attn    |   every token sees its whole document
    |        |        |
    +-----> add ------+
             |
           norm1              x num_layers
             |
    +--------+--------+
    |  fc_in gelu fc_out
    |        |        |
    +-----> add ------+
             |
           norm2
             |
          hidden
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lmtool.models.base import new, positions_of
from lmtool.models.configs import BertConfig, SegmentedConfig
from lmtool.models.encoder import BertLike, post_norm_layer
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied, encoder_pairs
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings


class Bert(BertLike):
    """The encoder, without its heads. Pooler and predictions are heads."""

    def __init__(self, config: SegmentedConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


def build(config: BertConfig, seed: int) -> Bert:
    """A new encoder on the default device."""
    return new(Bert, config, seed)


KEYS = KeyMap(
    (
        *encoder_pairs("bert"),
        ("heads.pooler.dense", "bert.pooler.dense"),
        ("heads.masked_lm.dense", "cls.predictions.transform.dense"),
        ("heads.masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        ("heads.masked_lm.bias", "cls.predictions.bias"),
        ("heads.masked_lm.output", "cls.predictions.decoder"),
        ("heads.next_sentence.output", "cls.seq_relationship"),
        ("heads.classifier.output", "classifier"),
        QUESTION_ANSWERING,
    )
)
TIED = Tied(
    token="bert.embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    head="cls.predictions.",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
# A table of constants that old files carry.
_CONSTANT = "bert.embeddings.position_ids"


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face BertForPreTraining. Tied copies are not written."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare BertModel, whose names lack `bert.`, and for the norms of old files (gamma,
    beta)."""
    names = {_path(name): name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    return {
        KEYS.from_published(path) or names.get(path, path): tensor for path, tensor in full.items() if path != _CONSTANT
    }


def _path(name: str) -> str:
    full = name if name.startswith(("bert.", "cls.", "classifier.", "qa_outputs.")) else "bert." + name
    return full.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "BertForQuestionAnswering"),
    (("pooler", "classifier"), "BertForSequenceClassification"),
    (("masked_lm", "pooler", "next_sentence"), "BertForPreTraining"),
    (("masked_lm",), "BertForMaskedLM"),
    ((), "BertModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
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
    "vocab_size": 30522, "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip


def published_config(config: SegmentedConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face BERT. UserError where it has no place in one."""
    require_learned(config, "BERT")
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    return {"model_type": "bert", **ours, "hidden_act": "gelu", "position_embedding_type": "absolute"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(
        data,
        "bert",
        hidden_act=("gelu",),
        position_embedding_type=("absolute",),
        is_decoder=(False,),
        add_cross_attention=(False,),
        tie_word_embeddings=(True, False),
    )
    return {"name": "bert", **sizes(data, _FIELDS, _DEFAULTS)}
