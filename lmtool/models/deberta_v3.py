"""DeBERTa V3: He, Gao, Chen, "DeBERTaV3: Improving DeBERTa using ELECTRA-Style Pre-Training with Gradient-Disentangled
Embedding Sharing", ICLR 2023. The sizes are those of https://github.com/microsoft/DeBERTa.

          token
             |
       norm, dropout
             |
      BERT's layers (bert.py), x num_layers, with disentangled attention (disentangled.py)
             |
          hidden

Relative places stand in buckets, behind a norm, and are read by the maps of the contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lmtool.models.base import new
from lmtool.models.configs import TransformerConfig
from lmtool.models.disentangled import BucketedPlaces, Disentangled, DisentangledAttention
from lmtool.models.encoder_configs import DebertaV3Config
from lmtool.models.family import Published
from lmtool.models.keymap import QUESTION_ANSWERING, KeyMap, Tied
from lmtool.models.published import expect


class DebertaV3(Disentangled):
    """The encoder, without its heads."""

    def __init__(self, config: DebertaV3Config):
        norm = nn.LayerNorm(config.hidden_size, config.norm_epsilon)
        places = BucketedPlaces(config.buckets, config.hidden_size, norm, config.max_distance)
        super().__init__(config, places, DisentangledAttention)


def build(config: DebertaV3Config, seed: int) -> DebertaV3:
    """A new encoder on the default device."""
    return new(DebertaV3, config, seed)


_LAYER, _PUBLISHED = "backbone.layers.*.", "deberta.encoder.layer.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "deberta.embeddings.word_embeddings"),
        ("backbone.embed.position", "deberta.embeddings.position_embeddings"),
        ("backbone.embed.norm", "deberta.embeddings.LayerNorm"),
        ("backbone.relative", "deberta.encoder.rel_embeddings"),
        ("backbone.relative.norm", "deberta.encoder.LayerNorm"),
        (_LAYER + "self_attn.q_proj", _PUBLISHED + "attention.self.query_proj"),
        (_LAYER + "self_attn.k_proj", _PUBLISHED + "attention.self.key_proj"),
        (_LAYER + "self_attn.v_proj", _PUBLISHED + "attention.self.value_proj"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attention.output.dense"),
        (_LAYER + "norm1", _PUBLISHED + "attention.output.LayerNorm"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "intermediate.dense"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "output.dense"),
        (_LAYER + "norm2", _PUBLISHED + "output.LayerNorm"),
        ("heads.pooler.dense", "pooler.dense"),
        ("heads.classifier.output", "classifier"),
        QUESTION_ANSWERING,
        ("heads.masked_lm.dense", "cls.predictions.transform.dense"),
        ("heads.masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        ("heads.masked_lm.output.weight", "cls.predictions.decoder.weight"),
        ("heads.masked_lm", "cls.predictions"),
    )
)
TIED = Tied(
    token="deberta.embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    head="cls.",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)


@dataclass(frozen=True)
class _Published(Published):
    """What it says of places."""

    def published_config(self, config: TransformerConfig) -> dict[str, Any]:
        assert isinstance(config, DebertaV3Config)
        data = replace(self, positions=config.positions.name)._plain(config)
        return {
            **data,
            "position_biased_input": config.positions.name == "learned",
            "pos_att_type": list(config.scores),
            "pooler_hidden_size": config.hidden_size,
        }

    def _plain(self, config: TransformerConfig) -> dict[str, Any]:
        return super().published_config(config)

    def from_published_config(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """UserError besides where places are no buckets, which other maps read."""
        section = super().from_published_config(data)
        expect(data, self.model, pooler_hidden_size=(section["hidden_size"],))
        for key, value in (("relative_attention", True), ("share_att_key", True), ("norm_rel_ebd", "layer_norm")):
            expect({key: data.get(key, False)}, self.model, **{key: (value,)})
        said = data.get("pos_att_type") or []
        farthest = data.get("max_relative_positions") or -1
        return {
            **section,
            "positions": {"name": "learned" if data.get("position_biased_input", True) else "none"},
            "scores": [part.strip() for part in said.lower().split("|")] if isinstance(said, str) else list(said),
            "max_distance": farthest if farthest > 0 else section["max_positions"],
        }


PUBLISHED = _Published(
    model="deberta_v3",
    model_type="deberta-v2",
    title="DeBERTa V3",
    keys=KEYS,
    tied=TIED,
    prefix="deberta.",
    outside=("cls.", "pooler.", "classifier.", "qa_outputs."),
    # Of the pretraining's own decoder and of its discriminator, which transformers does not read either.
    unread=("position_ids",),
    fields={
        "vocab_size": "vocab_size",
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "intermediate_size": "feedforward_size",
        "max_position_embeddings": "max_positions",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_std",
        "layer_norm_eps": "norm_epsilon",
        "position_buckets": "buckets",
        "max_relative_positions": "max_distance",
    },
    defaults={
        "vocab_size": 128100, "num_hidden_layers": 24, "hidden_size": 1536, "num_attention_heads": 24,
        "intermediate_size": 6144, "max_position_embeddings": 512, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
    },
    constant={
        "hidden_act": "gelu", "pooler_hidden_act": "gelu", "relative_attention": True, "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "type_vocab_size": 0, "legacy": True,
    },
    allowed={
        "tie_word_embeddings": (True, False), "conv_kernel_size": (0,), "pooler_dropout": (0, 0.0),
    },
)  # fmt: skip
to_published, from_published = PUBLISHED.to_published, PUBLISHED.from_published
published_config, from_published_config = PUBLISHED.published_config, PUBLISHED.from_published_config
ARCHITECTURES = (
    (("token_classifier",), "DebertaV2ForTokenClassification"),
    (("pooler", "classifier"), "DebertaV2ForSequenceClassification"),
    (("question_answering",), "DebertaV2ForQuestionAnswering"),
    (("masked_lm",), "DebertaV2ForMaskedLM"),
    ((), "DebertaV2Model"),
)
