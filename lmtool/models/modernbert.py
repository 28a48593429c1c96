"""ModernBERT: Warner, Chaffin, Clavié et al., "Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder for
Fast, Memory Efficient, and Long Context Finetuning and Inference", 2024. Ettin (Weller et al. 2025) has
other sizes.

          token
             |
           norm
             |
    +--------+--------+
    |      norm1      |   not in the first layer
    |    self_attn    |   global in every third layer, otherwise local
    |     dropout     |
    |        |        |
    +-----> add ------+
             |                 x num_layers
    +--------+--------+
    |      norm2      |
    |   gelu(fc_gate) |
    |     * fc_in     |
    |      fc_out     |
    |        |        |
    +-----> add ------+
             |
         final_norm
             |
          hidden

There are no biases. Local and global layers have different bases of rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.models.base import Encoder, positions_of
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_configs import ModernbertConfig
from lmtool.models.family import HFClass, HFFormat, multiple_choice, question_answering, token_classifier
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import expect, require_half_split
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.nn.dropout import Dropout
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import GatedFeedForward
from lmtool.nn.initialization import Draw, initialize_each, truncated_normal
from lmtool.nn.layout import Full, Mask, Window
from lmtool.nn.positions import Position, Rotary
from lmtool.nn.stack import StackState
from lmtool.types import Packed


class Modernbert(Encoder):
    """The encoder without heads."""

    config: ModernbertConfig
    pooler_activation = "gelu"
    pooler_norm = True
    pooler_on_tokens = True
    head_biases = False

    def __init__(self, config: ModernbertConfig):
        width = config.hidden_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, config.norm_epsilon, bias=False)

        layers = [
            PreNormLayer(
                SelfAttention(width, config.num_heads, config.attention_dropout, bias=False),
                GatedFeedForward(width, config.feedforward_size, "gelu", bias=False),
                norm() if number else nn.Identity(),  # the first layer follows the embedding's norm
                norm(),
                config.dropout,
            )
            for number in range(config.num_layers)
        ]
        for layer in layers:
            layer.dropout2 = Dropout(0.0)
        embed = Embeddings(config.vocab_size, width, positions_of(config, causal=False), 0.0, norm=norm())
        super().__init__(config, embed, layers, norm())
        positions = config.positions
        self.local_position: Position | None = (
            Rotary(config.width_of_head, config.local_rotary_base, positions.layout)
            if isinstance(positions, RotaryPositionsConfig)
            else None
        )

    def is_local(self, number: int) -> bool:
        """Whether a layer, counted from 0, has local attention."""
        return number % self.config.global_every != 0

    def mask(self, number: int, packed: Packed) -> Mask:
        return Window(self.config.local_window, self.ahead) if self.is_local(number) else Full()

    def attended_tokens(self, number: int, length: float) -> float:
        """Returns the mean number of attended tokens. Near the ends of a text, windows contain fewer tokens."""
        window = self.config.local_window
        if not self.is_local(number) or length <= window + 1:
            return length
        return min(length, 2 * window + 1 - window * (window + 1) / length)

    def position(self, number: int, state: StackState) -> Position:
        return state.position if self.local_position is None or not self.is_local(number) else self.local_position

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initializes as in appendix A: the standard deviation is divided by sqrt(2 num_layers) in layers that write to
        the residual stream and in a head's dense layer, and is 1/sqrt(hidden_size) in a task's output layer."""
        std = self.config.initializer_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)

        def draw_of(name: str, part: nn.Module) -> Draw:
            if name.endswith(("self_attn.out_proj", "ffn.fc_out")) or name == "dense":
                return truncated_normal(residual_std)
            if prefix.startswith("heads.") and name == "output":
                return truncated_normal(self.hidden_size**-0.5)
            return truncated_normal(std)

        initialize_each(module, seed, draw_of, prefix)


_LAYER, _HF = "backbone.layers.*.", "model.layers.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "model.embeddings.tok_embeddings"),
        ("backbone.embed.norm", "model.embeddings.norm"),
        (_LAYER + "norm1", _HF + "attn_norm"),
        (_LAYER + "self_attn.qkv", _HF + "attn.Wqkv"),
        (_LAYER + "self_attn.out_proj", _HF + "attn.Wo"),
        (_LAYER + "norm2", _HF + "mlp_norm"),
        (_LAYER + "ffn.gated", _HF + "mlp.Wi"),
        (_LAYER + "ffn.fc_out", _HF + "mlp.Wo"),
        ("backbone.final_norm", "model.final_norm"),
        ("heads.masked_lm.dense", "head.dense"),
        ("heads.masked_lm.norm", "head.norm"),
        ("heads.masked_lm.output.weight", "decoder.weight"),
        # The bias of the tied output layer.
        ("heads.masked_lm", "decoder"),
        ("heads.classifier.output", "classifier"),
    )
)
# In transformers, the pooler of a task's head has the names of layers in the language model's head.
_POOLER = (("heads.pooler.dense", "head.dense"), ("heads.pooler.norm", "head.norm"))
TIED = Tied("model.embeddings.tok_embeddings.weight", "decoder.weight", "head.")
_FULL, _LOCAL = "full_attention", "sliding_attention"
# The key for the rotary base in older config.json files, by its kind of layers and its default value.
_BASES = {"global_rope_theta": (_FULL, 160_000.0), "local_rope_theta": (_LOCAL, 10_000.0)}


class _ModernBertFormat(HFFormat):
    """Joint projections: one for queries, keys and values, and one for `fc_gate` and `fc_in`."""

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for name, tensor in join_projections(tensors).items():
            if ".ffn.fc_gate." in name:
                merged[name.replace("fc_gate", "gated")] = torch.cat(
                    [tensor, tensors[name.replace("fc_gate", "fc_in")]]
                )
            elif ".ffn.fc_in." not in name:
                merged[name] = tensor
        return super().to_hf(merged, config)

    def from_hf(self, tensors: Mapping[str, Tensor], config: JsonMapping = EMPTY) -> dict[str, Tensor]:
        """In a file of an unknown class with tensors `classifier.`, the tensors `head.` belong to the pooler."""
        is_classifier = self.named_class(config) is None and any(name.startswith("classifier.") for name in tensors)
        split: dict[str, Tensor] = {}
        for name, tensor in split_projections(super().from_hf(tensors, config)).items():
            if ".ffn.gated." in name:
                gate, inner = tensor.chunk(2)
                split |= {name.replace("gated", "fc_gate"): gate.clone(), name.replace("gated", "fc_in"): inner.clone()}
            else:
                split[name.replace("heads.masked_lm.", "heads.pooler.") if is_classifier else name] = tensor
        return split

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        hf_config, positions = super().to_hf_config(config), config.positions
        assert isinstance(config, ModernbertConfig) and isinstance(positions, RotaryPositionsConfig)
        require_half_split(positions, self.title)
        bases = {_FULL: positions.base, _LOCAL: config.local_rotary_base}
        return {
            **hf_config,
            "local_attention": 2 * config.local_window,
            "layer_types": [_LOCAL if number % config.global_every else _FULL for number in range(config.num_layers)],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        }

    def from_hf_config(self, data: JsonMapping) -> JsonObject:
        section = super().from_hf_config(data)
        global_interval = data.get("global_attn_every_n_layers") or 3
        kinds = data.get("layer_types")
        if kinds:
            global_interval = next((number for number in range(1, len(kinds)) if kinds[number] == _FULL), len(kinds))
            regular = [_LOCAL if number % global_interval else _FULL for number in range(section["num_layers"])]
            expect({"layer_types": list(kinds)}, self.model, layer_types=(regular,))
        bases, rope_by_kind = {}, data.get("rope_parameters") or {}
        expect(rope_by_kind, self.model, **{key: (None,) for key in rope_by_kind if key not in (_FULL, _LOCAL)})
        for key, (kind, default) in _BASES.items():
            rotary = rope_by_kind.get(kind) or {}
            expect(rotary, self.model, rope_type=("default",))
            bases[kind] = float(rotary.get("rope_theta") or data.get(key) or default)
        return {
            **section,
            "global_every": global_interval,
            "local_window": (data.get("local_attention") or 128) // 2,
            "local_rotary_base": bases[_LOCAL],
            "positions": {"name": "rotary", "base": bases[_FULL], "layout": "half_split"},
        }


HF_FORMAT = _ModernBertFormat(
    model="modernbert",
    title="ModernBERT",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("ModernBertForTokenClassification", pooler=_POOLER),
        HFClass("ModernBertForSequenceClassification", ("pooler", "classifier"), _POOLER),
        question_answering("ModernBertForQuestionAnswering", "classifier", _POOLER),
        multiple_choice("ModernBertForMultipleChoice", pooler=_POOLER),
        HFClass("ModernBertForMaskedLM", ("masked_lm",), predicts=True),
        HFClass("ModernBertModel", prefix=""),
    ),
    prefix="model.",
    outside_prefixes=("head.", "decoder.", "classifier."),
    fields={
        "vocab_size": ("vocab_size", 50368),
        "num_hidden_layers": ("num_layers", 22),
        "hidden_size": ("hidden_size", 768),
        "num_attention_heads": ("num_heads", 12),
        "intermediate_size": ("feedforward_size", 1152),
        "max_position_embeddings": ("max_positions", 8192),
        "attention_dropout": ("attention_dropout", 0.0),
        "initializer_range": ("initializer_std", 0.02),
        "norm_eps": ("norm_epsilon", 1e-5),
        "classifier_pooling": ("classifier_pooling", None),
    },
    required_values={"hidden_activation": "gelu", "classifier_activation": "gelu"},
    supported_values={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_bias": (False,),
        "classifier_bias": (False,),
        "decoder_bias": (True,),
        # Keys that only concern transformers' implementation.
        "sparse_prediction": (False, True),
        "deterministic_flash_attn": (False, True),
        "embedding_dropout": (0.0,),
        "mlp_dropout": (0.0,),
        "reference_compile": (None, True, False),
        "repad_logits_with_grad": (False, True),
        "sparse_pred_ignore_index": (-100,),
        "initializer_cutoff_factor": (2.0,),
        "rope_scaling": (None,),
        "position_embedding_type": ("absolute",),
        "layer_norm_eps": (1e-5,),
    },
    positions="rotary",
)
