"""What the encoders of BERT's line share: their layer, and how their weights are drawn."""

from __future__ import annotations

from torch import nn

from lmtool.models.base import Encoder
from lmtool.models.configs import TransformerConfig
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer
from lmtool.nn.feedforward import Activation, FeedForward
from lmtool.nn.initialization import Draw, truncated_normal


class BertLike(Encoder):
    """An embedding and post-norm layers on it."""

    def initial_draw(self) -> Draw:
        return truncated_normal(self.config.initializer_std)


def post_norm_layer(
    config: TransformerConfig, activation: Activation = "gelu", activation_dropout: float = 0.0
) -> PostNormLayer:
    """One layer of BERT's kind."""
    width = config.hidden_size
    return PostNormLayer(
        SelfAttention(width, config.num_heads, config.attention_dropout),
        FeedForward(width, config.feedforward_size, activation, dropout=activation_dropout),
        nn.LayerNorm(width, config.norm_epsilon),
        nn.LayerNorm(width, config.norm_epsilon),
        config.dropout,
    )
