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
from lmtool.models.family import (
    ENCODER_ALLOWED,
    ENCODER_CONSTANT,
    ENCODER_DEFAULTS,
    ENCODER_FIELDS,
    Published,
    PublishedClass,
    of_answers,
    of_choices,
    over_words,
)
from lmtool.models.keymap import EMPTY, KeyMap, Tied, encoder_pairs
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
    )
)
TIED = Tied(
    token="bert.embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    head="cls.predictions.",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
PUBLISHED = Published(
    model="bert",
    title="BERT",
    keys=KEYS,
    tied=TIED,
    classes=(
        over_words("BertForTokenClassification"),
        PublishedClass("BertForSequenceClassification", ("pooler", "classifier")),
        of_answers("BertForQuestionAnswering"),
        of_choices("BertForMultipleChoice"),
        PublishedClass("BertForPreTraining", ("masked_lm", "pooler", "next_sentence"), predicts=True),
        PublishedClass("BertForMaskedLM", ("masked_lm",), predicts=True),
        PublishedClass("BertModel"),
    ),
    prefix="bert.",
    outside=("cls.", "classifier.", "qa_outputs."),
    # A table of constants that old files carry.
    unread=("position_ids",),
    fields=ENCODER_FIELDS,
    defaults=ENCODER_DEFAULTS,
    constant=ENCODER_CONSTANT,
    allowed=ENCODER_ALLOWED,
)
to_published = PUBLISHED.to_published
published_config, from_published_config = PUBLISHED.published_config, PUBLISHED.from_published_config


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """Also for the norms of old files (gamma, beta)."""
    return PUBLISHED.from_published({_norm(name): tensor for name, tensor in tensors.items()}, config)


def _norm(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
