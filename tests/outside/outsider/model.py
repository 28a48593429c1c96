"""The averager: a layer adds a linear map of the document's mean to each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.models.base import Encoder
from lmtool.nn.attention import only
from lmtool.nn.context import Context
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.positions import Learned
from outsider.configs import AveragerConfig


class AveragingLayer(nn.Module):
    def __init__(self, width: int, pull: float):
        super().__init__()
        self.mean = nn.Linear(width, width)
        self.pull = pull

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        packed = context.packed
        sums_NH = x_TH.new_zeros(len(packed.lengths), x_TH.shape[1]).index_add(0, packed.documents, x_TH)
        means_NH = sums_NH / torch.tensor(packed.lengths, device=x_TH.device)[:, None]
        return only(x_TH + self.pull * self.mean(means_NH)[packed.documents], context.read_M)


class Averager(Encoder):
    def __init__(self, config: AveragerConfig):
        width = config.hidden_size
        super().__init__(
            config,
            Embeddings(config.vocab_size, width, Learned(config.max_positions, width), config.dropout),
            [AveragingLayer(width, config.pull) for _ in range(config.num_layers)],
            nn.LayerNorm(width),
        )
