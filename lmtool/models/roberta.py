"""RoBERTa: Liu, Ott, Goyal, Du, Joshi, Chen, Levy, Lewis, Zettlemoyer, Stoyanov, "RoBERTa: A Robustly Optimized BERT
Pretraining Approach", 2019. Sizes: https://github.com/facebookresearch/fairseq (examples/roberta).

    token + position + segment (the same for all tokens)
             |
           norm, dropout
             |
      BERT's layers (bert.py), x num_layers
             |
          hidden

As in fairseq, positions start after the id of the padding token, which is 1, so the first two rows of the position
table are unused.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.models.base import positions_of
from lmtool.models.bert import BertLike, post_norm_layer
from lmtool.models.configs import TransformerConfig
from lmtool.models.encoder_configs import RobertaConfig
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
from lmtool.nn.embeddings import Embeddings

OFFSET = 2
"""Number of unused rows of the position table before position 0."""


class Roberta(BertLike):
    """The encoder without heads."""

    def __init__(self, config: RobertaConfig):
        width, position = config.hidden_size, positions_of(config, causal=False, offset=OFFSET)
        norm = nn.LayerNorm(width, config.norm_epsilon)
        embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm)
        super().__init__(config, embed, [post_norm_layer(config) for _ in range(config.num_layers)])


KEYS = KeyMap(
    (
        *encoder_pairs("roberta"),
        ("heads.pooler.dense", "roberta.pooler.dense"),
        # The pooler in the file of a text classifier.
        ("heads.pooler.dense", "classifier.dense"),
        ("heads.classifier.output", "classifier.out_proj"),
        ("heads.masked_lm.dense", "lm_head.dense"),
        ("heads.masked_lm.norm", "lm_head.layer_norm"),
        ("heads.masked_lm.bias", "lm_head.bias"),
        ("heads.masked_lm.output", "lm_head.decoder"),
    )
)
TIED = Tied(
    token="roberta.embeddings.word_embeddings.weight",
    output="lm_head.decoder.weight",
    head="lm_head.",
    bias=("lm_head.bias", "lm_head.decoder.bias"),
)


class _RobertaFormat(HFFormat):
    def from_hf(self, tensors: Mapping[str, Tensor], config: Mapping[str, object] = EMPTY) -> dict[str, Tensor]:
        """Ignores the encoder's own pooler in the file of a text classifier, which does not use it."""
        if "classifier.dense.weight" in tensors:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("roberta.pooler.")}
        return super().from_hf(tensors, config)

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        return {**super().to_hf_config(config), "max_position_embeddings": config.max_positions + OFFSET}

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        return {**section, "max_positions": section["max_positions"] - OFFSET}


HF_FORMAT = _RobertaFormat(
    model="roberta",
    title="RoBERTa",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("RobertaForTokenClassification"),
        HFClass(
            "RobertaForSequenceClassification",
            ("pooler", "classifier"),
            (("heads.pooler.dense", "classifier.dense"), ("heads.classifier.output", "classifier.out_proj")),
        ),
        question_answering("RobertaForQuestionAnswering"),
        multiple_choice("RobertaForMultipleChoice"),
        HFClass("RobertaForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("RobertaModel", ("pooler",), prefix=""),
        HFClass("RobertaModel", prefix=""),
    ),
    prefix="roberta.",
    outside_prefixes=("lm_head.", "classifier.", "qa_outputs."),
    unread_suffixes=("position_ids",),
    fields={**ENCODER_FIELDS, "vocab_size": ("vocab_size", 50265)},
    # Positions start after the id of the padding token, which therefore must be 1.
    required_values={**ENCODER_CONSTANT, "pad_token_id": OFFSET - 1},
    supported_values=ENCODER_ALLOWED,
)
