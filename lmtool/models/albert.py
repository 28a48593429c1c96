"""ALBERT: Lan, Chen, Goodman, Gimpel, Sharma, Soricut, "ALBERT: A Lite BERT for Self-supervised Learning of Language
Representations", ICLR 2020. Sizes: https://github.com/google-research/albert.

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

from collections.abc import Iterator

from torch import nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.models.base import positions_of
from lmtool.models.bert import BertLike, post_norm_layer
from lmtool.models.configs import TransformerConfig
from lmtool.models.encoder_configs import AlbertConfig
from lmtool.models.family import (
    ENCODER_FIELDS,
    HFClass,
    HFFormat,
    multiple_choice,
    question_answering,
    token_classifier,
)
from lmtool.models.keymap import KeyMap, Tied
from lmtool.nn.embeddings import Embeddings


class Albert(BertLike):
    """The encoder without heads. `layers` contains the shared layer."""

    def __init__(self, config: AlbertConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm, project = nn.LayerNorm(narrow, config.norm_epsilon), nn.Linear(narrow, config.hidden_size)
        embed = Embeddings(config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project)
        super().__init__(config, embed, [post_norm_layer(config, config.activation)])
        self.head_activation = config.activation

    def applied_layers(self) -> Iterator[nn.Module]:
        for _ in range(self.config.num_layers):
            yield self.layers[0]


_LAYER = "backbone.layers.0."
_HF = "albert.encoder.albert_layer_groups.0.albert_layers.0."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "albert.embeddings.word_embeddings"),
        ("backbone.embed.position", "albert.embeddings.position_embeddings"),
        ("backbone.embed.segment", "albert.embeddings.token_type_embeddings"),
        ("backbone.embed.norm", "albert.embeddings.LayerNorm"),
        ("backbone.embed.project", "albert.encoder.embedding_hidden_mapping_in"),
        (_LAYER + "self_attn.q_proj", _HF + "attention.query"),
        (_LAYER + "self_attn.k_proj", _HF + "attention.key"),
        (_LAYER + "self_attn.v_proj", _HF + "attention.value"),
        (_LAYER + "self_attn.out_proj", _HF + "attention.dense"),
        (_LAYER + "norm1", _HF + "attention.LayerNorm"),
        (_LAYER + "ffn.fc_in", _HF + "ffn"),
        (_LAYER + "ffn.fc_out", _HF + "ffn_output"),
        (_LAYER + "norm2", _HF + "full_layer_layer_norm"),
        ("heads.pooler.dense", "albert.pooler"),
        ("heads.masked_lm.dense", "predictions.dense"),
        ("heads.masked_lm.norm", "predictions.LayerNorm"),
        ("heads.masked_lm.bias", "predictions.bias"),
        ("heads.masked_lm.output", "predictions.decoder"),
        ("heads.sentence_order.output", "sop_classifier.classifier"),
        ("heads.classifier.output", "classifier"),
    )
)
TIED = Tied(
    token="albert.embeddings.word_embeddings.weight",
    output="predictions.decoder.weight",
    head="predictions.",
    bias=("predictions.bias", "predictions.decoder.bias"),
)
# Our activation by its name in config.json. The first name is the default, and the one that is written for gelu_tanh.
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class _AlbertFormat(HFFormat):
    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        assert isinstance(config, AlbertConfig)
        activation = next(hf_name for hf_name, name in _ACTIVATIONS.items() if name == config.activation)
        return {**super().to_hf_config(config), "hidden_act": activation}

    def from_hf_config(self, data: JsonMapping) -> JsonObject:
        section = super().from_hf_config(data)
        return {**section, "activation": _ACTIVATIONS[data.get("hidden_act") or "gelu_new"]}


HF_FORMAT = _AlbertFormat(
    model="albert",
    title="ALBERT",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("AlbertForTokenClassification"),
        HFClass("AlbertForSequenceClassification", ("pooler", "classifier")),
        question_answering("AlbertForQuestionAnswering"),
        multiple_choice("AlbertForMultipleChoice"),
        HFClass("AlbertForPreTraining", ("masked_lm", "pooler", "sentence_order"), predicts=True),
        HFClass("AlbertForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("AlbertModel", ("pooler",), prefix=""),
        HFClass("AlbertModel", prefix=""),
    ),
    prefix="albert.",
    outside_prefixes=("predictions.", "sop_classifier.", "classifier.", "qa_outputs."),
    unread_suffixes=("position_ids",),
    fields={
        **ENCODER_FIELDS,
        "embedding_size": ("embedding_size", 128),
        "vocab_size": ("vocab_size", 30000),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_heads", 64),
        "intermediate_size": ("feedforward_size", 16384),
        "hidden_dropout_prob": ("dropout", 0.0),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    required_values={"num_hidden_groups": 1, "inner_group_num": 1, "position_embedding_type": "absolute"},
    supported_values={
        "hidden_act": tuple(_ACTIVATIONS),
        "net_structure_type": (0,),
        "num_memory_blocks": (0,),
        "gap_size": (0,),
        "down_scale_factor": (1,),
        "layers_to_keep": ([],),
    },
)
