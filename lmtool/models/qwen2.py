"""Qwen2: Yang, Yang, Hui et al., "Qwen2 Technical Report", 2024; Qwen2.5: Qwen Team, "Qwen2.5 Technical Report", 2024.

Llama's layers (llama.py) with biases in the projections of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lmtool.config.base import JsonObject
from lmtool.models.decoder_configs import LlamaConfig
from lmtool.models.llama import FIELDS, KEYS, TIED, Llama, LlamaFormat, classes
from lmtool.nn.attention import SelfAttention


class Qwen2(Llama):
    """The decoder without its head."""

    def attention(self, config: LlamaConfig) -> SelfAttention:
        attention = super().attention(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            without_bias: Any = getattr(attention, name)
            setattr(attention, name, nn.Linear(without_bias.in_features, without_bias.out_features))
        return attention


class _Qwen2Format(LlamaFormat):
    def head_size_entry(self, config: LlamaConfig) -> dict[str, int]:
        return {}  # config.json of Qwen2 has no head_dim

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        for key in ("sliding_window", "max_window_layers"):
            data.get(key)  # marks the key as read, because without use_sliding_window it has no effect
        return super().from_hf_config(data)


HF_FORMAT = _Qwen2Format(
    model="qwen2",
    title="Qwen2",
    keys=KEYS,
    tied=TIED,
    classes=classes("Qwen2"),
    prefix="model.",
    outside_prefixes=("lm_head.", "score.", "qa_outputs."),
    fields={
        **FIELDS,
        "vocab_size": ("vocab_size", 151936),
        "num_key_value_heads": ("num_key_value_heads", 32),
        "intermediate_size": ("feedforward_size", 22016),
        "max_position_embeddings": ("max_positions", 32768),
    },
    required_values={"hidden_act": "silu"},
    supported_values={"use_sliding_window": (False,), "use_mrope": (False,)},
    lmtool_constants={"dropout": 0.0},
    positions="rotary",
)
