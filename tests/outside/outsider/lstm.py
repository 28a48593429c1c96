"""A language model without attention: each layer is a residual long short-term memory (Hochreiter and Schmidhuber
1997)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lmtool.models.base import Decoder
from lmtool.nn.attention import only
from lmtool.nn.cache import Cache
from lmtool.nn.context import Context
from lmtool.nn.embeddings import Embeddings
from lmtool.nn.initialization import Draw, normal
from lmtool.nn.positions import Position
from outsider.configs import LstmConfig


class Memory:
    """State of a layer after earlier tokens: hidden and cell state of each document."""

    state: tuple[Tensor, Tensor] | None = None

    def __init__(self, cache: Cache):
        self.cache = cache

    def select(self, rows_R: Tensor) -> None:
        if self.state is not None:
            self.state = (self.state[0][rows_R], self.state[1][rows_R])


class LstmLayer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.read = nn.Linear(width, 4 * width)
        self.recur = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        lengths = context.packed.lengths
        gates_NLG = pad_sequence(self.read(x_TH).split(list(lengths)), batch_first=True)
        real_NL = torch.arange(gates_NLG.shape[1]) < torch.tensor(lengths)[:, None]
        memory = context.cache
        if memory is not None and memory.state is not None:
            h_NH, c_NH = memory.state
        else:
            h_NH = c_NH = x_TH.new_zeros(len(lengths), x_TH.shape[1])
        states = []
        for step in range(gates_NLG.shape[1]):
            i, f, g, o = (gates_NLG[:, step] + self.recur(h_NH)).chunk(4, -1)
            c_new = torch.sigmoid(f + 1) * c_NH + torch.sigmoid(i) * torch.tanh(g)
            h_new = torch.sigmoid(o) * torch.tanh(c_new)
            # A finished document keeps its state.
            goes_on = real_NL[:, step, None].to(x_TH.device)
            h_NH, c_NH = torch.where(goes_on, h_new, h_NH), torch.where(goes_on, c_new, c_NH)
            states.append(h_NH)
        if memory is not None:
            memory.state = (h_NH, c_NH)
        return only(x_TH + torch.stack(states, 1)[real_NL.to(x_TH.device)], context.read_M)


class Lstm(Decoder):
    def __init__(self, config: LstmConfig):
        width = config.hidden_size
        embed = Embeddings(config.vocab_size, width, Position(), config.dropout)
        super().__init__(config, embed, [LstmLayer(width) for _ in range(config.num_layers)], nn.LayerNorm(width))

    def new_cache(self, documents: int, capacity: int) -> Cache:
        return Cache(self.config.num_layers, documents, capacity, Memory)

    def initial_draw(self) -> Draw:
        return normal(5 * self.config.initializer_std)
