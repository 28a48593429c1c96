"""The averager: a layer adds to each token a map of its document's mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.models.base import Backbone
from lmtool.nn.attention import only
from lmtool.nn.dropout import Draws
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, materialize, normal
from lmtool.nn.positions import Learned
from lmtool.types import Packed
from outsider.configs import AveragerConfig


class Averager(Backbone):
    def __init__(self, config: AveragerConfig):
        super().__init__()
        self.config = config
        self.hidden_size = width = config.hidden_size
        self.embed = Embeddings(config.vocab_size, width, Learned(config.max_positions, width), config.dropout)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(width, config.norm_epsilon)

    def forward(self, packed: Packed, draws: Draws | None = None, read_M: Tensor | None = None) -> Tensor:
        x_TH = self.embed.finish(self.embed.tokens(packed.tokens), packed, draws)
        lengths_N = torch.tensor(packed.lengths, device=x_TH.device)
        for layer in self.layers:
            sums_NH = x_TH.new_zeros(len(packed.lengths), self.hidden_size).index_add(0, packed.documents, x_TH)
            means_NH = sums_NH / lengths_N[:, None]
            x_TH = x_TH + self.config.pull * layer(means_NH)[packed.documents]
        return self.final_norm(only(x_TH, read_M))

    def initial_draw(self) -> Draw:
        return normal(self.config.initializer_std)


def build(config: AveragerConfig, seed: int) -> Averager:
    model = materialize(lambda: Averager(config))
    model.initialize(model, seed, "backbone.")
    return model
