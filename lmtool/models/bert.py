"""BERT: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", NAACL 2019. Sizes: https://github.com/google-research/bert.

    token + position + segment
             |
           norm, dropout
             |
    +--------+--------+
    |    self_attn    |   every token attends to its whole document
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

from torch import Tensor, nn

from lmtool.models.base import Encoder, positions_of
from lmtool.models.configs import SegmentedConfig, TransformerConfig
from lmtool.models.family import (
    ENCODER_ALLOWED,
    ENCODER_CONSTANT,
    ENCODER_FIELDS,
    HFClass,
    HFFormat,
    multiple_choice,
    question_answering,
    token_classifier,
)
from lmtool.models.keymap import EMPTY, KeyMap, Tied, encoder_pairs
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import Activation, FeedForward
from lmtool.nn.initialization import Draw, truncated_normal


class BertLike(Encoder):
    """Base class of encoders with BERT's post-norm layers and initial weights."""

    def initial_draw(self) -> Draw:
        return truncated_normal(self.config.initializer_std)


def post_norm_layer(
    config: TransformerConfig, activation: Activation = "gelu", activation_dropout: float = 0.0
) -> PostNormLayer:
    """Returns a transformer layer as in BERT."""
    width = config.hidden_size
    return PostNormLayer(
        SelfAttention(width, config.num_heads, config.attention_dropout),
        FeedForward(width, config.feedforward_size, activation, dropout=activation_dropout),
        nn.LayerNorm(width, config.norm_epsilon),
        nn.LayerNorm(width, config.norm_epsilon),
        config.dropout,
    )


class Bert(BertLike):
    """The encoder without heads; the pooler is one of the heads."""

    def __init__(self, config: SegmentedConfig):
        width, position = config.hidden_size, positions_of(config, causal=False)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


MASKED_LM_PAIRS = (
    ("heads.masked_lm.dense", "cls.predictions.transform.dense"),
    ("heads.masked_lm.norm", "cls.predictions.transform.LayerNorm"),
    ("heads.masked_lm.bias", "cls.predictions.bias"),
    ("heads.masked_lm.output", "cls.predictions.decoder"),
)
KEYS = KeyMap(
    (
        *encoder_pairs("bert"),
        *MASKED_LM_PAIRS,
        ("heads.pooler.dense", "bert.pooler.dense"),
        ("heads.next_sentence.output", "cls.seq_relationship"),
        ("heads.classifier.output", "classifier"),
    )
)
TIED = Tied(
    token="bert.embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    head="cls.predictions.",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)


class _BertFormat(HFFormat):
    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        """Also accepts old files, in which the parameters of norms are named gamma and beta."""
        renamed = {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): tensor
            for name, tensor in tensors.items()
        }
        return super().from_hf(renamed, config)


HF_FORMAT = _BertFormat(
    model="bert",
    title="BERT",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("BertForTokenClassification"),
        HFClass("BertForSequenceClassification", ("pooler", "classifier")),
        question_answering("BertForQuestionAnswering"),
        multiple_choice("BertForMultipleChoice"),
        HFClass("BertForPreTraining", ("masked_lm", "pooler", "next_sentence"), predicts=True),
        HFClass("BertForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("BertModel", ("pooler",), prefix=""),
        HFClass("BertModel", prefix=""),
    ),
    prefix="bert.",
    outside_prefixes=("cls.", "classifier.", "qa_outputs."),
    # Old files contain this constant.
    unread_suffixes=("position_ids",),
    fields=ENCODER_FIELDS,
    required_values=ENCODER_CONSTANT,
    supported_values=ENCODER_ALLOWED,
)
