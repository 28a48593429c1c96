"""GPT-2: Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019.
The sizes are those of the released checkpoints, https://github.com/openai/gpt-2.

    token + position
             |
          dropout
             |
    +--------+--------+
    |      norm1      |
    |    self_attn    |   attends to the token itself and earlier ones
    |        |        |
    +-----> add ------+
             |                 x num_layers
    +--------+--------+
    |      norm2      |
    | fc_in gelu fc_out
    |        |        |
    +-----> add ------+
             |
         final_norm
             |
          hidden
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from lmtool.config.base import JsonObject
from lmtool.models.base import Decoder, positions_of
from lmtool.models.configs import GptConfig
from lmtool.models.family import DECODER_FIELDS, HFClass, JointProjectionFormat, question_answering, token_classifier
from lmtool.models.keymap import KeyMap, Tied
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.initialization import initialize, normal


class Gpt(Decoder):
    """The decoder without its head, which is tied to the token embedding."""

    def __init__(self, config: GptConfig):
        width, position = config.hidden_size, positions_of(config, causal=True)

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, config.norm_epsilon)

        layers = [
            PreNormLayer(
                SelfAttention(width, config.num_heads, config.attention_dropout),
                FeedForward(width, config.feedforward_size, "gelu_tanh"),
                norm(),
                norm(),
                config.dropout,
            )
            for _ in range(config.num_layers)
        ]
        super().__init__(config, Embeddings(config.vocab_size, width, position, config.dropout), layers, norm())

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """Initializes as in section 2.3: the weights of layers that write to the residual stream are divided by the
        square root of the number of these layers, which is two per block."""
        super().initialize(module, seed, prefix)
        residual = normal(self.config.initializer_std / math.sqrt(2 * self.config.num_layers))
        for name, part in module.named_modules():
            if name.endswith(("self_attn.out_proj", "ffn.fc_out")):
                initialize(part, seed, residual, f"{prefix}{name}.")


_LAYER = "backbone.layers.*."
_HF = "transformer.h.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "transformer.wte"),
        ("backbone.embed.position", "transformer.wpe"),
        (_LAYER + "norm1", _HF + "ln_1"),
        (_LAYER + "self_attn.qkv", _HF + "attn.c_attn"),
        (_LAYER + "self_attn.out_proj", _HF + "attn.c_proj"),
        (_LAYER + "norm2", _HF + "ln_2"),
        (_LAYER + "ffn.fc_in", _HF + "mlp.c_fc"),
        (_LAYER + "ffn.fc_out", _HF + "mlp.c_proj"),
        ("backbone.final_norm", "transformer.ln_f"),
        ("heads.classifier.output", "score"),
        ("heads.lm.output", "lm_head"),
    )
)
TIED = Tied("transformer.wte.weight", "lm_head.weight")


class _GptFormat(JointProjectionFormat):
    """`n_inner` is optional in config.json."""

    def from_hf_config(self, data: Mapping[str, object]) -> JsonObject:
        section = super().from_hf_config(data)
        return {"feedforward_size": 4 * section["hidden_size"], **section}


HF_FORMAT = _GptFormat(
    model="gpt",
    title="GPT-2",
    keys=KEYS,
    tied=TIED,
    classes=(
        token_classifier("GPT2ForTokenClassification"),
        HFClass("GPT2ForSequenceClassification", ("classifier",)),
        question_answering("GPT2ForQuestionAnswering"),
        HFClass("GPT2LMHeadModel", predicts=True),
    ),
    prefix="transformer.",
    outside_prefixes=("lm_head.", "score.", "classifier.", "qa_outputs."),
    # Attention masks in old files.
    unread_suffixes=(".attn.bias", ".attn.masked_bias"),
    fields={**DECODER_FIELDS, "n_inner": ("feedforward_size", None)},
    required_values={"activation_function": "gelu_new"},
    supported_values={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False, True),
        "add_cross_attention": (False,),
    },
    repeats={"embd_pdrop": "resid_pdrop"},
)
