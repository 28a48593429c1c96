"""BERT: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", NAACL 2019. The sizes are those of https://github.com/google-research/bert.

    token + position + segment
             |
           norm, dropout
             |
    +--------+--------+
    |    self_attn    |   every token sees its whole document
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

from torch import Tensor, nn

from lmtool.models.base import Backbone, positions_of
from lmtool.models.configs import BertConfig
from lmtool.models.keymap import KeyMap
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import FeedForward
from lmtool.nn.initialization import Draw, materialize, truncated_normal
from lmtool.nn.layout import Full, Layout
from lmtool.types import Packed


class Bert(Backbone):
    """The encoder, without its heads. Pooler and predictions are heads."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.hidden_size = width = config.hidden_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(width, config.norm_epsilon)

        position = positions_of(config, causal=False)
        self.embed = Embeddings(config.vocab_size, width, position, config.dropout, config.segments, norm())
        self.layers = nn.ModuleList(
            PostNormLayer(
                SelfAttention(width, config.num_heads, config.attention_dropout),
                FeedForward(width, config.feedforward_size, "gelu"),
                norm(),
                norm(),
                config.dropout,
            )
            for _ in range(config.num_layers)
        )

    def forward(self, packed: Packed, draws: Draws | None = None) -> Tensor:
        """Hidden states (T, H) of the last layer."""
        layout = Layout.of(packed, Full())
        x_TH = self.embed.finish(self.embed.tokens(packed.tokens), packed, draws)
        for layer in self.layers:
            x_TH = layer(x_TH, layout, draws, self.embed.position)
        return x_TH

    def initial_draw(self) -> Draw:
        return truncated_normal(self.config.initializer_std)


def build(config: BertConfig, seed: int) -> Bert:
    """A new encoder on the default device."""
    model = materialize(lambda: Bert(config))
    model.initialize(model, seed, "backbone.")
    return model


_LAYER = "backbone.layers.*."
_PUBLISHED = "bert.encoder.layer.*."
KEYS = KeyMap(
    (
        ("backbone.embed.token", "bert.embeddings.word_embeddings"),
        ("backbone.embed.position", "bert.embeddings.position_embeddings"),
        ("backbone.embed.segment", "bert.embeddings.token_type_embeddings"),
        ("backbone.embed.norm", "bert.embeddings.LayerNorm"),
        (_LAYER + "self_attn.q_proj", _PUBLISHED + "attention.self.query"),
        (_LAYER + "self_attn.k_proj", _PUBLISHED + "attention.self.key"),
        (_LAYER + "self_attn.v_proj", _PUBLISHED + "attention.self.value"),
        (_LAYER + "self_attn.out_proj", _PUBLISHED + "attention.output.dense"),
        (_LAYER + "norm1", _PUBLISHED + "attention.output.LayerNorm"),
        (_LAYER + "ffn.fc_in", _PUBLISHED + "intermediate.dense"),
        (_LAYER + "ffn.fc_out", _PUBLISHED + "output.dense"),
        (_LAYER + "norm2", _PUBLISHED + "output.LayerNorm"),
        ("heads.pooler.dense", "bert.pooler.dense"),
        ("heads.masked_lm.dense", "cls.predictions.transform.dense"),
        ("heads.masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        ("heads.masked_lm.bias", "cls.predictions.bias"),
        ("heads.next_sentence.output", "cls.seq_relationship"),
    )
)
# Copies of tied tensors, and a table of constants that old files carry.
_DERIVED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "bert.embeddings.position_ids")


def to_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our checkpoint's tensors under the names of a Hugging Face BertForPreTraining. Tied copies are not written."""
    return {KEYS.to_published(name) or name: tensor for name, tensor in tensors.items()}


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse; also for a bare BertModel, whose names lack `bert.`, and for the norms of old files (gamma,
    beta)."""
    renamed = {}
    for name, tensor in tensors.items():
        full = name if name.startswith(("bert.", "cls.", "classifier.")) else "bert." + name
        full = full.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if full not in _DERIVED:
            renamed[KEYS.from_published(full) or name] = tensor
    return renamed
