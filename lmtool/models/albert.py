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
from typing import Any

from torch import Tensor, nn

from lmtool.models.base import new, positions_of
from lmtool.models.encoder import BertLike, post_norm_layer
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings


class Albert(BertLike):
    """The encoder, without its heads. `layers` has the one layer."""

    def __init__(self, config: AlbertConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm, project = nn.LayerNorm(narrow, config.norm_epsilon), nn.Linear(narrow, config.hidden_size)
        embed = Embeddings(config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project)
        super().__init__(config, embed, [post_norm_layer(config, config.activation)])
        self.head_activation = config.activation

    def depth(self) -> Iterator[nn.Module]:
        for _ in range(self.config.num_layers):
            yield self.layers[0]


def build(config: AlbertConfig, seed: int) -> Albert:
    """A new encoder on the default device."""
    return new(Albert, config, seed)


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
        ("heads.masked_lm.output", "predictions.decoder"),
        ("heads.sentence_order.output", "sop_classifier.classifier"),
        ("heads.classifier.output", "classifier"),
        QUESTION_ANSWERING,
    )
)
TIED = Tied(
    token="albert.embeddings.word_embeddings.weight",
    output="predictions.decoder.weight",
    head="predictions.",
    bias=("predictions.bias", "predictions.decoder.bias"),
)
_CONSTANT = "albert.embeddings.position_ids"
_HEADS = ("albert.", "predictions.", "sop_classifier.", "classifier.", "qa_outputs.")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face AlbertForPreTraining. Tied copies are not written."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare AlbertModel, whose names lack `albert.`."""
    names = {name if name.startswith(_HEADS) else "albert." + name: name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    return {
        KEYS.from_published(path) or names.get(path, path): tensor for path, tensor in full.items() if path != _CONSTANT
    }


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "AlbertForQuestionAnswering"),
    (("pooler", "classifier"), "AlbertForSequenceClassification"),
    (("masked_lm", "pooler", "sentence_order"), "AlbertForPreTraining"),
    (("masked_lm",), "AlbertForMaskedLM"),
    ((), "AlbertModel"),
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
    "vocab_size": 30000, "embedding_size": 128, "num_hidden_layers": 12, "hidden_size": 4096,
    "num_attention_heads": 64, "intermediate_size": 16384, "max_position_embeddings": 512, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
}  # fmt: skip
# By their names in a config.json; the first stands for an absent one.
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def published_config(config: AlbertConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face ALBERT. UserError where it has no place in one."""
    require_learned(config, "ALBERT")
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)
    more = {"hidden_act": activation, "num_hidden_groups": 1, "inner_group_num": 1}
    return {"model_type": "albert", **ours, **more, "position_embedding_type": "absolute"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(
        data,
        "albert",
        hidden_act=tuple(_ACTIVATIONS),
        position_embedding_type=("absolute",),
        num_hidden_groups=(1,),
        inner_group_num=(1,),
        net_structure_type=(0,),
        num_memory_blocks=(0,),
        gap_size=(0,),
        down_scale_factor=(1,),
        layers_to_keep=([],),
        tie_word_embeddings=(True, False),
    )
    activation = _ACTIVATIONS[data.get("hidden_act") or "gelu_new"]
    return {"name": "albert", **sizes(data, _FIELDS, _DEFAULTS), "activation": activation}
