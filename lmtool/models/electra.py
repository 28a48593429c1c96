"""ELECTRA: Clark, Luong, Le, Manning, "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators",
ICLR 2020. Sizes: https://github.com/google-research/electra.

    token + position + segment    embedding_size wide
             |
           norm, dropout
             |
          project                 hidden_size wide; omitted if both are equal
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden

Discriminator and generator have this form. The generator has narrower layers and shares the embeddings of the
discriminator.
"""

from __future__ import annotations

from torch import nn

from lmtool.models.base import positions_of
from lmtool.models.bert import BertLike, post_norm_layer
from lmtool.models.encoder_configs import ElectraConfig
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
from lmtool.models.keymap import KeyMap, Tied, encoder_pairs
from lmtool.nn.embeddings import Embeddings


class Electra(BertLike):
    """The encoder without heads. The dense layer of a classifier is the pooler, with a GELU."""

    pooler_activation = "gelu"

    def __init__(self, config: ElectraConfig):
        narrow, position = config.embedding_size, positions_of(config, causal=False, width=config.embedding_size)
        norm = nn.LayerNorm(narrow, config.norm_epsilon)
        project = nn.Linear(narrow, config.hidden_size) if narrow != config.hidden_size else None
        embed = Embeddings(config.vocab_size, narrow, position, config.dropout, config.segments, norm, project=project)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


KEYS = KeyMap(
    (
        *encoder_pairs("electra"),
        ("backbone.embed.project", "electra.embeddings_project"),
        # Of the discriminator.
        ("heads.replaced_token.dense", "discriminator_predictions.dense"),
        ("heads.replaced_token.output", "discriminator_predictions.dense_prediction"),
        # Of the generator, a masked language model.
        ("heads.masked_lm.dense", "generator_predictions.dense"),
        ("heads.masked_lm.norm", "generator_predictions.LayerNorm"),
        ("heads.masked_lm.output.weight", "generator_lm_head.weight"),
        # The bias of the output layer, whose weight is tied, is the remaining tensor with this prefix.
        ("heads.masked_lm", "generator_lm_head"),
        ("heads.pooler.dense", "classifier.dense"),
        ("heads.classifier.output", "classifier.out_proj"),
    )
)
TIED = Tied("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight", "generator_")
HF_FORMAT = HFFormat(
    model="electra",
    title="ELECTRA",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("ElectraForTokenClassification"),
        HFClass("ElectraForSequenceClassification", ("pooler", "classifier")),
        question_answering("ElectraForQuestionAnswering"),
        multiple_choice("ElectraForMultipleChoice", pooler=(("heads.pooler.dense", "sequence_summary.summary"),)),
        HFClass("ElectraForPreTraining", ("replaced_token",)),
        HFClass("ElectraForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("ElectraModel", prefix=""),
    ),
    prefix="electra.",
    outside_prefixes=("discriminator_predictions.", "generator_", "classifier.", "sequence_summary.", "qa_outputs."),
    unread_suffixes=("position_ids",),
    fields={
        **ENCODER_FIELDS,
        "embedding_size": ("embedding_size", 128),
        "hidden_size": ("hidden_size", 256),
        "num_attention_heads": ("num_heads", 4),
        "intermediate_size": ("feedforward_size", 1024),
    },
    required_values=ENCODER_CONSTANT,
    supported_values=ENCODER_ALLOWED,
)
