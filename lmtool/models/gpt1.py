"""GPT: Radford, Narasimhan, Salimans, Sutskever, "Improving Language Understanding by Generative Pre-Training", 2018.
The sizes are those of https://github.com/openai/finetune-transformer-lm.

    token + position
             |
          dropout
             |
    +--------+--------+
    |    self_attn    |   a token sees itself and what is before it
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
from typing import Any

from torch import Tensor

from lmtool.errors import UserError
from lmtool.models.base import Decoder, new, positions_of
from lmtool.models.configs import Gpt1Config
from lmtool.models.encoder import post_norm_layer
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, normal


class Gpt1(Decoder):
    """The decoder, without its head, which is the token table again."""

    def __init__(self, config: Gpt1Config):
        embed = Embeddings(config.vocab_size, config.hidden_size, positions_of(config, causal=True), config.dropout)
        super().__init__(config, embed, [post_norm_layer(config, "gelu_tanh") for _ in range(config.num_layers)])

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)


def build(config: Gpt1Config, seed: int) -> Gpt1:
    """A new decoder on the default device."""
    return new(Gpt1, config, seed)


_LAYER = "backbone.layers.*."
_PUBLISHED = "transformer.h.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "transformer.tokens_embed"),
        ("backbone.embed.position", "transformer.positions_embed"),
        (_LAYER + "self_attn.qkv", _PUBLISHED + "attn.c_attn"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attn.c_proj"),
        (_LAYER + "norm1", _PUBLISHED + "ln_1"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "mlp.c_fc"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "mlp.c_proj"),
        ("heads.classifier.output", "score"),
        (_LAYER + "norm2", _PUBLISHED + "ln_2"),
        ("heads.lm.output", "lm_head"),
    )
)
TIED = Tied("transformer.tokens_embed.weight", "lm_head.weight")
_BARE = ("h.", "tokens_embed.", "positions_embed.")
# Linear maps are stored as (inputs, outputs), the transpose of torch's.
_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face OpenAIGPTLMHeadModel, or of its classifier. The tied
    head is not written."""
    published = {KEYS.to_published(name) or name: tensor for name, tensor in join_projections(tensors).items()}
    return {name: tensor.T.contiguous() if name.endswith(_TRANSPOSED) else tensor for name, tensor in published.items()}


def from_published(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = EMPTY) -> dict[str, Tensor]:
    """The reverse; also for a bare OpenAIGPTModel, whose names lack `transformer.`. Masks and numbers of positions in
    old files are dropped."""
    full = {"transformer." + name if name.startswith(_BARE) else name: tensor for name, tensor in tensors.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in TIED.resolve(full, config).items():
        if not name.endswith((".attn.bias", "position_ids")):
            ours = KEYS.from_published(name) or name
            renamed[ours] = tensor.T.contiguous() if name.endswith(_TRANSPOSED) else tensor
    return split_projections(renamed)


# The class of transformers that holds these heads; the first that fits.
ARCHITECTURES = (
    (("classifier",), "OpenAIGPTForSequenceClassification"),
    ((), "OpenAIGPTLMHeadModel"),
)
_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "resid_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "initializer_std",
    "layer_norm_epsilon": "norm_epsilon",
}
# What transformers takes for keys that a file leaves out.
_DEFAULTS = {
    "vocab_size": 40478, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 512, "resid_pdrop": 0.1,
    "attn_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def published_config(config: Gpt1Config) -> dict[str, Any]:
    """Our configuration as the config.json of a Hugging Face OpenAI GPT. UserError where it has no place in one."""
    require_learned(config, "GPT")
    if config.feedforward_size != 4 * config.hidden_size:
        raise UserError(
            f"model.feedforward_size={config.feedforward_size} has no place in a published GPT: 4 hidden_size has",
            f"use the run with lmtool, or train one with model.feedforward_size={4 * config.hidden_size}",
        )
    ours = {key: getattr(config, field) for key, field in _FIELDS.items()}
    return {"model_type": "openai-gpt", **ours, "embd_pdrop": config.dropout, "afn": "gelu"}


def from_published_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of a config.json. UserError where it is a variant that this family does not compute."""
    expect(data, "gpt1", afn=("gelu",), tie_word_embeddings=(True, False), embd_pdrop=(data.get("resid_pdrop", 0.1),))
    section = sizes(data, _FIELDS, _DEFAULTS)
    return {"name": "gpt1", **section, "feedforward_size": 4 * section["hidden_size"]}
