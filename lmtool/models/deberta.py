"""DeBERTa: He, Liu, Gao, Chen, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", ICLR 2021. The sizes are
those of https://github.com/microsoft/DeBERTa.

          token
             |
       norm, dropout
             |
      BERT's layers (bert.py), x num_layers, with disentangled attention (disentangled.py)
             |
          hidden

Each layer has separate projections of the relative positions. The key projections of contents and positions have no
bias.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.disentangled import Disentangled, DisentangledAttention, RelativeTable
from lmtool.models.encoder_configs import DebertaConfig, DisentangledConfig
from lmtool.models.family import HFClass, HFFormat, question_answering, token_classifier
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import expect


class SeparateProjections(DisentangledAttention):
    """Attention with separate projections of relative positions: `pos_k_proj`, `pos_q_proj`."""

    table_maps = ("pos_k_proj", "pos_q_proj")

    def __init__(self, config: DisentangledConfig, table_rows: int):
        super().__init__(config, table_rows)
        width = config.hidden_size
        self.k_proj = nn.Linear(width, width, bias=False)
        self.pos_k_proj = nn.Linear(width, width, bias=False) if "c2p" in config.scores else None
        self.pos_q_proj = nn.Linear(width, width) if "p2c" in config.scores else None

    def keys_of(self, rows_PH: Tensor) -> Tensor:
        assert self.pos_k_proj is not None
        return self.pos_k_proj(rows_PH)

    def queries_of(self, rows_PH: Tensor) -> Tensor:
        assert self.pos_q_proj is not None
        return self.pos_q_proj(rows_PH)


class Deberta(Disentangled):
    """The encoder without heads."""

    def __init__(self, config: DebertaConfig):
        super().__init__(config, RelativeTable(config.max_distance, config.hidden_size), SeparateProjections)


_LAYER, _HF = "backbone.layers.*.", "deberta.encoder.layer.*."
SHARED_PAIRS = (
    ("backbone.embed.token", "deberta.embeddings.word_embeddings"),
    ("backbone.embed.position", "deberta.embeddings.position_embeddings"),
    ("backbone.embed.norm", "deberta.embeddings.LayerNorm"),
    ("backbone.relative", "deberta.encoder.rel_embeddings"),
    (_LAYER + "self_attn.out_proj", _HF + "attention.output.dense"),
    (_LAYER + "norm1", _HF + "attention.output.LayerNorm"),
    (_LAYER + "ffn.fc_in", _HF + "intermediate.dense"),
    (_LAYER + "ffn.fc_out", _HF + "output.dense"),
    (_LAYER + "norm2", _HF + "output.LayerNorm"),
    ("heads.pooler.dense", "pooler.dense"),
    ("heads.classifier.output", "classifier"),
    ("heads.masked_lm.dense", "cls.predictions.transform.dense"),
    ("heads.masked_lm.norm", "cls.predictions.transform.LayerNorm"),
    ("heads.masked_lm.output.weight", "cls.predictions.decoder.weight"),
    ("heads.masked_lm", "cls.predictions"),
)
"""Pairs of tensor names that all versions have in common."""
KEYS = KeyMap(
    (
        *SHARED_PAIRS,
        (_LAYER + "self_attn.qkv", _HF + "attention.self.in_proj"),
        (_LAYER + "self_attn.q_bias", _HF + "attention.self.q_bias"),
        (_LAYER + "self_attn.v_bias", _HF + "attention.self.v_bias"),
        (_LAYER + "self_attn.pos_k_proj", _HF + "attention.self.pos_proj"),
        (_LAYER + "self_attn.pos_q_proj", _HF + "attention.self.pos_q_proj"),
    )
)
TIED = Tied(
    token="deberta.embeddings.word_embeddings.weight",
    output="cls.predictions.decoder.weight",
    head="cls.",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
OUTSIDE = ("cls.", "pooler.", "classifier.", "qa_outputs.")
"""Prefixes of tensor names that do not belong to the backbone."""
FIELDS = {
    "vocab_size": ("vocab_size", 50265),
    "num_hidden_layers": ("num_layers", 12),
    "hidden_size": ("hidden_size", 768),
    "num_attention_heads": ("num_heads", 12),
    "intermediate_size": ("feedforward_size", 3072),
    "max_position_embeddings": ("max_positions", 512),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "initializer_range": ("initializer_std", 0.02),
    "layer_norm_eps": ("norm_epsilon", 1e-7),
    "max_relative_positions": ("max_distance", -1),
}
CONSTANT = {
    "hidden_act": "gelu",
    "pooler_hidden_act": "gelu",
    "relative_attention": True,
    "type_vocab_size": 0,
    "legacy": True,
}
ALLOWED = {"conv_kernel_size": (0,), "pooler_dropout": (0, 0.0)}

# lmtool's name of the absolute positions of the enhanced mask decoder until a format converts them.
_ABSOLUTE = "mask_decoder.absolute.weight"


def classes(family: str, *additional: HFClass) -> tuple[HFClass, ...]:
    """Returns the classes in transformers. family: prefix of their names. additional: classes that only this version
    has."""
    return (
        token_classifier(f"{family}ForTokenClassification"),
        HFClass(f"{family}ForSequenceClassification", ("pooler", "classifier")),
        question_answering(f"{family}ForQuestionAnswering"),
        *additional,
        HFClass(f"{family}ForMaskedLM", ("masked_lm",), predicts=True),
        HFClass(f"{family}Model", prefix=""),
    )


class DisentangledFormat(HFFormat):
    """Base class of the formats of all versions, with the keys for relative positions."""

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        assert isinstance(config, DisentangledConfig)
        return {
            **super().to_hf_config(config),
            "position_biased_input": config.positions.name == "learned",
            "pos_att_type": list(config.scores),
            "pooler_hidden_size": config.hidden_size,
        }

    def from_hf(self, tensors: Mapping[str, Tensor], config: JsonMapping = EMPTY) -> dict[str, Tensor]:
        """Also accepts files of the original code with an enhanced mask decoder. Its absolute positions are renamed,
        because the encoder does not use them; its other tensors (`lm_predictions.`) keep their names."""
        ours, table = super().from_hf(tensors, config), "backbone.embed.position.weight"
        if table in ours and not config.get("position_biased_input", True):
            ours[_ABSOLUTE] = ours.pop(table)
        return ours

    def from_hf_config(self, data: JsonMapping) -> JsonObject:
        """Also raises UserError if the model has no relative positions."""
        section = super().from_hf_config(data)
        expect(data, self.model, pooler_hidden_size=(section["hidden_size"],))
        expect({"relative_attention": data.get("relative_attention", False)}, self.model, relative_attention=(True,))
        terms = data.get("pos_att_type") or []
        max_distance = data.get("max_relative_positions") or -1
        return {
            **section,
            "positions": {"name": "learned" if data.get("position_biased_input", True) else "none"},
            "scores": [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else list(terms),
            "max_distance": max_distance if max_distance > 0 else section["max_positions"],
        }


class _DebertaFormat(DisentangledFormat):
    """Version 1: queries, keys and values have a joint projection, ordered by head, and separate biases."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        assert isinstance(config, DebertaConfig)
        renamed = {
            re.sub(r"self_attn\.([qv])_proj\.bias$", r"self_attn.\1_bias", name): tensors[name] for name in tensors
        }
        return super().to_hf(join_projections(renamed, config.num_heads), config)

    def from_hf(self, tensors: Mapping[str, Tensor], config: JsonMapping = EMPTY) -> dict[str, Tensor]:
        """Also converts the enhanced mask decoder (original code, masked_language_model.py). Raises UserError if the
        joint projection does not fit the number of heads."""
        heads = config.get("num_attention_heads") or self.fields["num_attention_heads"][1]
        ours = super().from_hf(tensors, config)
        for name, tensor in ours.items():
            if name.endswith(".qkv.weight") and len(tensor) % (3 * heads):
                raise UserError(
                    f"num_attention_heads={heads} in config.json, but in_proj has {len(tensor)} rows",
                    "copy the checkpoint again",
                )
        return {_our_name(name): tensor for name, tensor in split_projections(ours, heads).items()}


_PREDICTIONS = "lm_predictions.lm_head."


def _our_name(name: str) -> str:
    if name == _ABSOLUTE or name.startswith(_PREDICTIONS):
        path = name.removeprefix(_PREDICTIONS).removeprefix("mask_decoder.")
        return f"heads.enhanced_masked_lm.{path.replace('LayerNorm', 'norm')}"
    return re.sub(r"self_attn\.([qv])_bias$", r"self_attn.\1_proj.bias", name)


HF_FORMAT = _DebertaFormat(
    model="deberta",
    title="DeBERTa",
    keys=KEYS,
    tied=TIED,
    classes=classes("Deberta"),
    prefix="deberta.",
    outside_prefixes=OUTSIDE,
    unread_suffixes=("position_ids",),
    fields=FIELDS,
    required_values=CONSTANT,
    supported_values={**ALLOWED, "talking_head": (False,), "position_buckets": (-1, 0), "share_att_key": (False,)},
    positions=None,
)
