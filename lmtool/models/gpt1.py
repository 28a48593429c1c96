"""GPT: Radford, Narasimhan, Salimans, Sutskever, "Improving Language Understanding by Generative Pre-Training", 2018.
Sizes: https://github.com/openai/finetune-transformer-lm.

    token + position
             |
          dropout
             |
    +--------+--------+
    |    self_attn    |   attends to the token itself and earlier ones
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

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.models.base import Decoder, positions_of
from lmtool.models.bert import post_norm_layer
from lmtool.models.configs import Gpt1Config, TransformerConfig
from lmtool.models.family import DECODER_FIELDS, HFClass, JointProjectionFormat
from lmtool.models.keymap import KeyMap, Tied
from lmtool.nn.embeddings import Embeddings


class Gpt1(Decoder):
    """The decoder without its head, which is tied to the token embedding."""

    def __init__(self, config: Gpt1Config):
        embed = Embeddings(config.vocab_size, config.hidden_size, positions_of(config, causal=True), config.dropout)
        super().__init__(config, embed, [post_norm_layer(config, "gelu_tanh") for _ in range(config.num_layers)])


_LAYER = "backbone.layers.*."
_HF = "transformer.h.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "transformer.tokens_embed"),
        ("backbone.embed.position", "transformer.positions_embed"),
        (_LAYER + "self_attn.qkv", _HF + "attn.c_attn"),
        (_LAYER + "self_attn.out_proj", _HF + "attn.c_proj"),
        (_LAYER + "norm1", _HF + "ln_1"),
        (_LAYER + "ffn.fc_in", _HF + "mlp.c_fc"),
        (_LAYER + "ffn.fc_out", _HF + "mlp.c_proj"),
        ("heads.classifier.output", "score"),
        (_LAYER + "norm2", _HF + "ln_2"),
        ("heads.lm.output", "lm_head"),
    )
)
TIED = Tied("transformer.tokens_embed.weight", "lm_head.weight")


class _Gpt1Format(JointProjectionFormat):
    def to_hf_config(self, config: TransformerConfig) -> JsonObject:
        if config.feedforward_size != 4 * config.hidden_size:
            raise UserError(
                f"model.feedforward_size={config.feedforward_size}: GPT in transformers always has 4 * hidden_size",
                f"use the run with lmtool, or train a new run with model.feedforward_size={4 * config.hidden_size}",
            )
        return super().to_hf_config(config)

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        return {**section, "feedforward_size": 4 * section["hidden_size"]}


HF_FORMAT = _Gpt1Format(
    model="gpt1",
    title="GPT",
    keys=KEYS,
    tied=TIED,
    classes=(
        HFClass("OpenAIGPTForSequenceClassification", ("classifier",)),
        HFClass("OpenAIGPTLMHeadModel", predicts=True),
    ),
    prefix="transformer.",
    outside_prefixes=("lm_head.", "score."),
    # Attention masks and position ids in old files.
    unread_suffixes=(".attn.bias", "position_ids"),
    fields={**DECODER_FIELDS, "vocab_size": ("vocab_size", 40478), "n_positions": ("max_positions", 512)},
    required_values={"afn": "gelu"},
    repeats={"embd_pdrop": "resid_pdrop"},
)
