"""GPT-2: Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019.
The sizes are those of https://github.com/openai/gpt-2 and of its published larger checkpoints.

    token + position
             |
          dropout
             |
    +--------+--------+
    |      norm1      |
    |    self_attn    |   a token sees itself and what is before it
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
from typing import Any

import torch
from torch import Tensor, nn

from lmtool.models.base import Decoder, new, positions_of
from lmtool.models.configs import GptConfig
from lmtool.models.keymap import EMPTY, QUESTION_ANSWERING, KeyMap, Tied
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PreNormLayer
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.initialization import Draw, initialize, normal


class Gpt(Decoder):
    """The decoder, without its head, which is the token table again."""

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

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)

    def initialize(self, module: nn.Module, seed: int, prefix: str) -> None:
        """As published (section 2.3): what writes into the residual stream is scaled down by the square root of the
        number of such layers, two a block."""
        super().initialize(module, seed, prefix)
        residual = normal(self.config.initializer_std / math.sqrt(2 * self.config.num_layers))
        for name, part in module.named_modules():
            if name.endswith(("self_attn.out_proj", "ffn.fc_out")):
                initialize(part, seed, residual, f"{prefix}{name}.")


def build(config: GptConfig, seed: int) -> Gpt:
    """A new decoder on the default device."""
    return new(Gpt, config, seed)


_LAYER = "backbone.layers.*."
_PUBLISHED = "transformer.h.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "transformer.wte"),
        ("backbone.embed.position", "transformer.wpe"),
        (_LAYER + "norm1", _PUBLISHED + "ln_1"),
        (_LAYER + "self_attn.qkv", _PUBLISHED + "attn.c_attn"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attn.c_proj"),
        (_LAYER + "norm2", _PUBLISHED + "ln_2"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "mlp.c_fc"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "mlp.c_proj"),
        ("backbone.final_norm", "transformer.ln_f"),
        ("heads.classifier.output", "score"),
        QUESTION_ANSWERING,
        ("heads.lm.output", "lm_head"),
    )
)
TIED = Tied("transformer.wte.weight", "lm_head.weight")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# GPT-2's linear maps are stored as (inputs, outputs), the transpose of torch's.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_HEADS = ("transformer.", "lm_head.", "score.", "qa_outputs.")
_MASKS = (".attn.bias", ".attn.masked_bias")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face GPT2LMHeadModel or of its classifier. The tied head is
    not written."""
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        owner, _, projection = module.rpartition(".")
        if projection == "q_proj":
            joined[f"{owner}.qkv.{kind}"] = torch.cat([tensors[f"{owner}.{part}.{kind}"] for part in _PROJECTIONS])
        elif projection not in _PROJECTIONS:
            joined[name] = tensor
    published = {KEYS.to_published(name) or name: tensor for name, tensor in joined.items()}
    return {name: tensor.T.contiguous() if name.endswith(_TRANSPOSED) else tensor for name, tensor in published.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare GPT2Model, whose names lack `transformer.`. Masks of old files are dropped."""
    names = {name if name.startswith(_HEADS) else "transformer." + name: name for name in tensors}
    full = TIED.resolve({path: tensors[name] for path, name in names.items()}, config)
    renamed: dict[str, Tensor] = {}
    for path, tensor in full.items():
        if path.endswith(_MASKS):
            continue
        ours = KEYS.from_published(path) or names.get(path, path)
        values = tensor.T.contiguous() if path.endswith(_TRANSPOSED) else tensor
        if ".qkv." in ours:
            for projection, part in zip(_PROJECTIONS, values.chunk(3), strict=True):
                renamed[ours.replace("qkv", projection)] = part.clone()
        else:
            renamed[ours] = values
    return renamed


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("question_answering",), "GPT2ForQuestionAnswering"),
    (("classifier",), "GPT2ForSequenceClassification"),
    ((), "GPT2LMHeadModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_inner": "feedforward_size",
    "n_positions": "max_positions",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "initializer_std",
    "layer_norm_epsilon": "norm_epsilon",
}
# What transformers takes for keys that a file leaves out.
_DEFAULTS = {
    "vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "attn_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def published_config(config: GptConfig) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face GPT-2. UserError where it has no place in one."""
    require_learned(config, "GPT-2")
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    return {"model_type": "gpt2", **ours, "embd_pdrop": config.dropout, "activation_function": "gelu_new"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(
        data,
        "gpt",
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        reorder_and_upcast_attn=(False, True),
        add_cross_attention=(False,),
        tie_word_embeddings=(True, False),
        embd_pdrop=(data.get("resid_pdrop", 0.1),),
    )
    section = {"name": "gpt", **sizes(data, _FIELDS, _DEFAULTS)}
    return {"feedforward_size": 4 * section["hidden_size"], **section}
