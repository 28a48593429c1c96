"""What the encoders of BERT's line share: post-norm layers over an embedding, every token seeing its whole document.

Shape letters: T tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.models.configs import ModelConfig
from lmtool.nn.attention import SelfAttention
from lmtool.nn.blocks import PostNormLayer, each
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.feedforward import Activation, FeedForward
from lmtool.nn.initialization import Draw, truncated_normal
from lmtool.nn.layout import Full, Layout
from lmtool.types import Packed


class Encoder(Backbone):
    """An embedding and the layers on it, without heads."""

    def __init__(self, config: ModelConfig, embed: Embeddings, layers: Sequence[nn.Module]):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.embed = embed
        self.layers = nn.ModuleList(layers)

    def forward(self, packed: Packed, draws: Draws | None = None, read_M: Tensor | None = None) -> Tensor:
        """Hidden states (T, H) of the last layer. read_M: flat indices of the tokens whose states are wanted, (M, H)
        then."""
        layout = Layout.of(packed, Full())
        x_TH = self.embed.finish(self.embed.tokens(packed.tokens), packed, draws)
        for _, layer, own, read in each(self.depth(), draws, read_M):
            x_TH = layer(x_TH, layout, own, self.embed.position, read_M=read)
        return x_TH

    def depth(self) -> Iterator[nn.Module]:
        """The layers in the order they are applied."""
        yield from self.layers

    def initial_draw(self) -> Draw:
        return truncated_normal(self.config.initializer_std)


def post_norm_layer(config: ModelConfig, activation: Activation = "gelu") -> PostNormLayer:
    """One layer of BERT's kind."""
    width = config.hidden_size
    return PostNormLayer(
        SelfAttention(width, config.num_heads, config.attention_dropout),
        FeedForward(width, config.feedforward_size, activation),
        nn.LayerNorm(width, config.norm_epsilon),
        nn.LayerNorm(width, config.norm_epsilon),
        config.dropout,
    )
