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

from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.base import Decoder, positions_of
from lmtool.models.configs import Gpt1Config
from lmtool.models.keymap import EMPTY, KeyMap, Tied, join_projections, split_projections
from lmtool.models.published import expect, require_learned, sizes
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer, each
from lmtool.nn.cache import Cache
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.initialization import Draw, materialize, normal
from lmtool.nn.layout import Layout, left_to_right
from lmtool.types import Packed


class Gpt1(Decoder):
    """The decoder, without its head, which is the token table again."""

    def __init__(self, config: Gpt1Config):
        super().__init__()
        self.config = config
        self.hidden_size = width = config.hidden_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, config.norm_epsilon)

        self.embed = Embeddings(config.vocab_size, width, positions_of(config, causal=True), config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(
                SelfAttention(width, config.num_heads, config.attention_dropout),
                FeedForward(width, config.feedforward_size, "gelu_tanh"),
                norm(),
                norm(),
                config.dropout,
            )
            for _ in range(config.num_layers)
        )

    def forward(
        self,
        packed: Packed,
        draws: Draws | None = None,
        cache: Cache | None = None,
        read_M: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, H) of the last layer. cache: the tokens before these; these are added to it.
        read_M: flat indices of the tokens whose states are wanted, (M, H) then."""
        mask = left_to_right(packed)
        layout = Layout.of(packed, mask) if cache is None else cache.layout(packed, mask)
        positions_T = None if cache is None else layout.query_positions
        x_TH = self.embed.finish(self.embed.tokens(packed.tokens), packed, draws, positions_T)
        for number, layer, own, read in each(self.layers, draws, read_M):
            kept = None if cache is None else cache.layers[number]
            x_TH = layer(x_TH, layout, own, self.embed.position, kept, read)
        return x_TH

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)


def build(config: Gpt1Config, seed: int) -> Gpt1:
    """A new decoder on the default device."""
    model = materialize(lambda: Gpt1(config))
    model.initialize(model, seed, "backbone.")
    return model


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
    published = {KEYS.to_published(name) or name: one for name, one in join_projections(tensors).items()}
    return {name: one.T.contiguous() if name.endswith(_TRANSPOSED) else one for name, one in published.items()}


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
