"""A published sentence encoder's modules behind its model: one vector of a text from the states of its tokens.

Shape letters: T tokens of a packed batch, N texts, H hidden width, M pooling modes, D numbers of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtool.errors import UserError
from lmtool.models.heads.sequence import summary
from lmtool.types import Packed
from lmtool.weights.folders import HFFolder
from lmtool.weights.reading import read_file
from lmtool.weights.sentence_encoders import Dense, SentenceEncoder, dense_file

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Identity": nn.Identity,
}


class SentenceModules(nn.Module):
    """Pooling, and what stands behind it (Reimers and Gurevych 2019; sentence-transformers' Pooling, Dense, Normalize).
    width: D. UserError where the files of a linear map do not fit."""

    def __init__(self, encoder: SentenceEncoder, folder: HFFolder, hidden_size: int, offline: bool):
        super().__init__()
        self.modes = encoder.modes
        self.behind = nn.ModuleList()
        width = len(self.modes) * hidden_size
        for module in encoder.behind:
            if not isinstance(module, Dense):
                self.behind.append(_Normalize())
                continue
            path = dense_file(folder, module, offline)
            dense = _Dense(module)
            tensors = {name: tensor.float() for name, tensor in read_file(path).items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            wanted = {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
            if shapes != wanted or width != module.inputs:
                raise UserError(
                    f"{path}: it has {shapes}; of {width} inputs are read {wanted}", "copy the folder again"
                )
            dense.load_state_dict(tensors)
            self.behind.append(dense)
            width = module.outputs
        self.width = width if encoder.dimensions is None else min(width, encoder.dimensions)

    @torch.no_grad()
    def forward(self, states_TH: Tensor, inputs: Packed) -> Tensor:
        """(N, D) float32."""
        vectors = torch.cat([_pooled(mode, states_TH, inputs) for mode in self.modes], dim=-1)
        for module in self.behind:
            vectors = module(vectors)
        return vectors[:, : self.width]


def _pooled(mode: str, states_TH: Tensor, inputs: Packed) -> Tensor:
    """(N, H) of a mode, special tokens included."""
    if mode in ("cls", "lasttoken"):
        return summary(states_TH, inputs, "first" if mode == "cls" else "last")
    if mode == "max":
        return summary(states_TH, inputs, "max")
    if mode == "mean":
        return summary(states_TH, inputs, "mean")
    lengths_N = inputs.segments.cu_lengths.diff().to(states_TH.dtype)
    if mode == "mean_sqrt_len_tokens":
        return summary(states_TH, inputs, "mean") * lengths_N[:, None].sqrt()
    # A token weighs as much as its place, counted from 1.
    weights_T = (inputs.positions + 1).to(states_TH.dtype)
    mean_NH = summary(states_TH * weights_T[:, None], inputs, "mean")
    return mean_NH * (2 / (lengths_N + 1))[:, None]


class _Normalize(nn.Module):
    def forward(self, vectors_ND: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_ND, dim=-1)


class _Dense(nn.Module):
    """A linear map with its activation; its names are those of the file."""

    def __init__(self, module: Dense):
        super().__init__()
        self.linear = nn.Linear(module.inputs, module.outputs, module.bias)
        self.activation, self.adds_input = _ACTIVATIONS[module.activation](), module.residual
        widens = module.residual and module.inputs != module.outputs
        self.residual = nn.Linear(module.inputs, module.outputs, bias=False) if widens else nn.Identity()

    def forward(self, vectors_ND: Tensor) -> Tensor:
        mapped_ND = self.activation(self.linear(vectors_ND))
        return mapped_ND + self.residual(vectors_ND) if self.adds_input else mapped_ND
