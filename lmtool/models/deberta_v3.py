"""DeBERTa V3: He, Gao, Chen, "DeBERTaV3: Improving DeBERTa using ELECTRA-Style Pre-Training with Gradient-Disentangled
Embedding Sharing", ICLR 2023. Sizes: https://github.com/microsoft/DeBERTa.

          token
             |
       norm, dropout
             |
      BERT's layers (bert.py), x num_layers, with disentangled attention (disentangled.py)
             |
          hidden

Distances share buckets, the table of relative positions is normalized, and contents and relative positions have the
same projections.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lmtool.config.base import JsonObject
from lmtool.models.deberta import ALLOWED, CONSTANT, FIELDS, OUTSIDE, SHARED_PAIRS, TIED, DisentangledFormat, classes
from lmtool.models.disentangled import BucketedTable, Disentangled, DisentangledAttention
from lmtool.models.encoder_configs import DebertaV3Config
from lmtool.models.family import multiple_choice
from lmtool.models.keymap import KeyMap
from lmtool.models.published import expect


class DebertaV3(Disentangled):
    """The encoder without heads."""

    def __init__(self, config: DebertaV3Config):
        norm = nn.LayerNorm(config.hidden_size, config.norm_epsilon)
        table = BucketedTable(config.buckets, config.hidden_size, norm, config.max_distance)
        super().__init__(config, table, DisentangledAttention)


_LAYER, _HF = "backbone.layers.*.self_attn.", "deberta.encoder.layer.*.attention.self."
KEYS = KeyMap(
    (
        *SHARED_PAIRS,
        ("backbone.relative.norm", "deberta.encoder.LayerNorm"),
        (_LAYER + "q_proj", _HF + "query_proj"),
        (_LAYER + "k_proj", _HF + "key_proj"),
        (_LAYER + "v_proj", _HF + "value_proj"),
    )
)


class _DebertaV3Format(DisentangledFormat):
    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        """Also raises UserError for separate projections of positions, and for a table without a norm."""
        section = super().from_hf_config(data)
        for key, value in (("share_att_key", True), ("norm_rel_ebd", "layer_norm")):
            expect({key: data.get(key, False)}, self.model, **{key: (value,)})
        return section


HF_FORMAT = _DebertaV3Format(
    model="deberta_v3",
    title="DeBERTa V3",
    keys=KEYS,
    tied=TIED,
    classes=classes("DebertaV2", multiple_choice("DebertaV2ForMultipleChoice")),
    prefix="deberta.",
    outside_prefixes=OUTSIDE,
    unread_suffixes=("position_ids",),
    fields={
        **FIELDS,
        "position_buckets": ("buckets", None),
        "vocab_size": ("vocab_size", 128100),
        "num_hidden_layers": ("num_layers", 24),
        "hidden_size": ("hidden_size", 1536),
        "num_attention_heads": ("num_heads", 24),
        "intermediate_size": ("feedforward_size", 6144),
    },
    required_values={**CONSTANT, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    supported_values=ALLOWED,
    positions=None,
)
