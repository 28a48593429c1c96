"""Llama: Touvron, Lavril, Izacard et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, with the
grouped-query attention of Ainslie et al. 2023, as in SmolLM2 (Ben Allal et al. 2025).

          token
             |
    +--------+--------+
    |      norm1      |
    |    self_attn    |   attends to the token itself and earlier ones; query heads share key heads
    |        |        |
    +-----> add ------+
             |                          x num_layers
    +--------+--------+
    |      norm2      |
    |   silu(fc_gate) |
    |     * fc_in     |
    |      fc_out     |
    |        |        |
    +-----> add ------+
             |
         final_norm
             |
          hidden

Norms are RMS norms, and there are no biases.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.models.base import Decoder, VocabularyHead, positions_of
from lmtool.models.configs import TransformerConfig
from lmtool.models.decoder_configs import LlamaConfig
from lmtool.models.family import HFClass, HFFormat, question_answering, token_classifier
from lmtool.models.keymap import EMPTY, KeyMap, Tied
from lmtool.models.published import expect, require_half_split
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.configs import RotaryPositionsConfig
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import GatedFeedForward


class Llama(Decoder):
    """The decoder without its head."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig):
        width = config.hidden_size

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(width, config.norm_epsilon)

        layers = [
            PreNormLayer(
                self.attention(config),
                GatedFeedForward(width, config.feedforward_size, "silu", bias=False),
                norm(),
                norm(),
                config.dropout,
            )
            for _ in range(config.num_layers)
        ]
        causal = config.architecture == "decoder"
        embed = Embeddings(config.vocab_size, width, positions_of(config, causal), config.dropout)
        super().__init__(config, embed, layers, norm())
        self.causal = causal
        self.vocabulary_head = VocabularyHead(config.tied)

    def attention(self, config: LlamaConfig) -> SelfAttention:
        """Returns the attention of a layer."""
        size, heads, dropout = config.hidden_size, config.num_heads, config.attention_dropout
        return SelfAttention(size, heads, dropout, bias=False, key_value_heads=config.num_key_value_heads)


class LlamaEncoder(Llama):
    """Llama's layers as an encoder without heads: every token attends to the whole text (BehnamGhader et al. 2024,
    "LLM2Vec: Large Language Models Are Secretly Powerful Text Encoders", section 2.1). `lmtool import model=` converts
    the weights of a decoder to those of an encoder, or back."""

    head_biases = False


_LAYER, _HF = "backbone.layers.*.", "model.layers.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "model.embed_tokens"),
        (_LAYER + "norm1", _HF + "input_layernorm"),
        (_LAYER + "self_attn.q_proj", _HF + "self_attn.q_proj"),
        (_LAYER + "self_attn.k_proj", _HF + "self_attn.k_proj"),
        (_LAYER + "self_attn.v_proj", _HF + "self_attn.v_proj"),
        (_LAYER + "self_attn.out_proj", _HF + "self_attn.o_proj"),
        (_LAYER + "norm2", _HF + "post_attention_layernorm"),
        (_LAYER + "ffn.fc_gate", _HF + "mlp.gate_proj"),
        (_LAYER + "ffn.fc_in", _HF + "mlp.up_proj"),
        (_LAYER + "ffn.fc_out", _HF + "mlp.down_proj"),
        ("backbone.final_norm", "model.norm"),
        ("heads.classifier.output", "score"),
        ("heads.lm.output", "lm_head"),
    )
)
TIED = Tied("model.embed_tokens.weight", "lm_head.weight")


_BASE = 10_000.0
"""Base of rotary positions if config.json has none."""


class LlamaFormat(HFFormat):
    """The format of Llama and families derived from it."""

    def from_hf(self, tensors: Mapping[str, Tensor], config: JsonMapping = EMPTY) -> dict[str, Tensor]:
        """Without `tie_word_embeddings` in config.json, the output layer is untied. An empty `config` declares
        nothing."""
        declared = {**config, "tie_word_embeddings": _ties(config)} if config else config
        return super().from_hf(tensors, declared)

    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        """Also raises UserError for interleaved rotary positions."""
        data, positions = super().to_hf_config(config), config.positions
        assert isinstance(config, LlamaConfig) and isinstance(positions, RotaryPositionsConfig)
        require_half_split(positions, self.title)
        rotary = {"rope_type": "default", "rope_theta": positions.base}
        return {**data, **self.head_size_entry(config), "rope_parameters": rotary, "tie_word_embeddings": config.tied}

    def head_size_entry(self, config: LlamaConfig) -> dict[str, int]:
        """Returns the key for the width of a head, if the family has one."""
        return {"head_dim": config.width_of_head}

    def from_hf_config(self, data: JsonMapping) -> JsonObject:
        """Also raises UserError for a separate head width, sliding windows and scaled positions."""
        section = super().from_hf_config(data)
        heads, layers = section["num_heads"], section["num_layers"]
        section.setdefault("num_key_value_heads", heads)
        kinds = data.get("layer_types")
        expect(
            {"head_dim": data.get("head_dim"), "layer_types": kinds and list(kinds)},
            self.model,
            head_dim=(section["hidden_size"] // heads,),
            layer_types=(["full_attention"] * layers,),
        )
        positions = {"name": "rotary", "base": _rotary_base(data, self.model), "layout": "half_split"}
        return {**section, "tied": _ties(data), "positions": positions}


def _ties(config: JsonMapping) -> bool:
    return bool(config.get("tie_word_embeddings"))


def _rotary_base(data: JsonMapping, model: str) -> float:
    base = data.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rotary = data.get(key) or {}
        expect(rotary, model, rope_type=("default",), type=("default",))
        base = rotary.get("rope_theta") or base
    return float(base or _BASE)


FIELDS = {
    "vocab_size": ("vocab_size", 32000),
    "num_hidden_layers": ("num_layers", 32),
    "hidden_size": ("hidden_size", 4096),
    "num_attention_heads": ("num_heads", 32),
    "num_key_value_heads": ("num_key_value_heads", None),
    "intermediate_size": ("feedforward_size", 11008),
    "max_position_embeddings": ("max_positions", 2048),
    "attention_dropout": ("attention_dropout", 0.0),
    "initializer_range": ("initializer_std", 0.02),
    "rms_norm_eps": ("norm_epsilon", 1e-6),
}


def classes(family: str) -> tuple[HFClass, ...]:
    """Returns the classes in transformers with Llama's tensors. family: prefix of their names."""
    return (
        token_classifier(f"{family}ForTokenClassification", "score"),
        HFClass(f"{family}ForSequenceClassification", ("classifier",)),
        question_answering(f"{family}ForQuestionAnswering", prefix="transformer."),
        HFClass(f"{family}ForCausalLM", predicts=True),
    )


HF_FORMAT = LlamaFormat(
    model="llama",
    title="Llama",
    keys=KEYS,
    tied=TIED,
    classes=classes("Llama"),
    prefix="model.",
    outside_prefixes=("lm_head.", "score.", "qa_outputs."),
    # Computed buffers in old files.
    unread_suffixes=("rotary_emb.inv_freq",),
    fields=FIELDS,
    required_values={"hidden_act": "silu"},
    supported_values={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "rope_interleaved": (False,),
        "is_llama_config": (True,),
    },
    lmtool_constants={"dropout": 0.0},
    positions="rotary",
)
