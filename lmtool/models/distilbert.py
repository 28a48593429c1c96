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

from torch import nn

from lmtool.models.base import positions_of
from lmtool.models.bert import BertLike, post_norm_layer
from lmtool.models.encoder_configs import DistilbertConfig
from lmtool.models.family import HFClass, HFFormat, multiple_choice, question_answering, token_classifier
from lmtool.models.keymap import KeyMap, Tied
from lmtool.nn.embeddings import Embeddings


class Distilbert(BertLike):
    """The encoder without heads. The dense layer of a classifier is the pooler, with a ReLU."""

    pooler_activation = "relu"

    def __init__(self, config: DistilbertConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, norm=norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


_LAYER = "backbone.layers.*."
_HF = "distilbert.transformer.layer.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "distilbert.embeddings.word_embeddings"),
        ("backbone.embed.position", "distilbert.embeddings.position_embeddings"),
        ("backbone.embed.norm", "distilbert.embeddings.LayerNorm"),
        (_LAYER + "self_attn.q_proj", _HF + "attention.q_lin"),
        (_LAYER + "self_attn.k_proj", _HF + "attention.k_lin"),
        (_LAYER + "self_attn.v_proj", _HF + "attention.v_lin"),
        (_LAYER + "self_attn.out_proj", _HF + "attention.out_lin"),
        (_LAYER + "norm1", _HF + "sa_layer_norm"),
        (_LAYER + "ffn.fc_in", _HF + "ffn.lin1"),
        (_LAYER + "ffn.fc_out", _HF + "ffn.lin2"),
        (_LAYER + "norm2", _HF + "output_layer_norm"),
        ("heads.pooler.dense", "pre_classifier"),
        ("heads.classifier.output", "classifier"),
        ("heads.masked_lm.dense", "vocab_transform"),
        ("heads.masked_lm.norm", "vocab_layer_norm"),
        ("heads.masked_lm.output.weight", "vocab_projector.weight"),
        # The bias of the tied output layer.
        ("heads.masked_lm", "vocab_projector"),
    )
)
TIED = Tied("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight", "vocab_")
HF_FORMAT = HFFormat(
    model="distilbert",
    title="DistilBERT",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("DistilBertForTokenClassification"),
        HFClass("DistilBertForSequenceClassification", ("pooler", "classifier")),
        question_answering("DistilBertForQuestionAnswering"),
        multiple_choice("DistilBertForMultipleChoice"),
        HFClass("DistilBertForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("DistilBertModel", prefix=""),
    ),
    prefix="distilbert.",
    outside_prefixes=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    unread_suffixes=("position_ids",),
    fields={
        "vocab_size": ("vocab_size", 30522),
        "n_layers": ("num_layers", 6),
        "dim": ("hidden_size", 768),
        "n_heads": ("num_heads", 12),
        "hidden_dim": ("feedforward_size", 3072),
        "max_position_embeddings": ("max_positions", 512),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "initializer_range": ("initializer_std", 0.02),
    },
    required_values={"activation": "gelu"},
    # Sinusoidal positions are stored in the same way as learned ones.
    supported_values={"sinusoidal_pos_embds": (False, True)},
    # Hard-coded in transformers.
    lmtool_constants={"norm_epsilon": 1e-12},
)
