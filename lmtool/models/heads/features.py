"""Features that combine several layers of a backbone, as the input of heads.

Layers are numbered as in transformers' `output_hidden_states`: 0 is the embedding, the last one follows the final norm.

Shape letters: T tokens, M selected tokens, H hidden width, L selected layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.nn.attention import only
from lmtool.nn.context import AttentionKind, AttentionObserver
from lmtool.nn.stack import Side, Tap, TapPoint

LAYERS = "layers"
"""Name of `LayerFeatures` among the heads of a model."""


class LayerFeatures(nn.Module, ABC):
    """Combines the states of several layers into one vector per token. first, depth: the numbers of the lowest and of
    the highest layer. states: the width of the vector as a multiple of H."""

    states: int = 1

    def __init__(self, first: int, depth: int):
        super().__init__()
        self.first, self.depth = first, depth

    @abstractmethod
    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Combines L tensors (M, H), the lowest layer first, to (M, states * H)."""


class ScalarMix(LayerFeatures):
    """gamma * sum_j softmax(weight)_j h_j over the embedding and all layers (Peters et al. 2018, "Deep Contextualized
    Word Representations", equation 1). Initially, weights are equal and gamma is 1."""

    def __init__(self, depth: int):
        super().__init__(0, depth)
        self.weight = nn.Parameter(torch.ones(depth + 1))
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        weights_L = self.gamma * self.weight.softmax(0)
        return torch.einsum("l,lmh->mh", weights_L.to(states[0].dtype), torch.stack(tuple(states)))


def layer_mix(model: nn.Module) -> JsonObject:
    """Returns the learned mixture of a model's layers under the key `layer_mix`: the `weights` of the embedding and of
    each layer, and `gamma`. Returns {} for a model without a mixture."""
    mix = next((module for module in model.modules() if isinstance(module, ScalarMix)), None)
    if mix is None:
        return {}
    return {"layer_mix": {"weights": mix.weight.detach().softmax(0).tolist(), "gamma": mix.gamma.item()}}


class LastFour(LayerFeatures):
    """The last four layers, concatenated (Devlin et al. 2019, section 5.3)."""

    states = 4

    def __init__(self, depth: int):
        super().__init__(depth - 3, depth)  # the four layers from depth - 3 to depth

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(states), -1)


class LayerRecorder(Tap):
    """Records the states of the selected tokens after each layer that `features` needs, except the last layer. tap:
    another tap, which is called first."""

    def __init__(self, features: LayerFeatures, side: Side, read_M: Tensor | None = None, tap: Tap | None = None):
        self.features, self.side, self.read_M, self.tap = features, side, read_M, tap
        self.states: list[Tensor] = []

    def wants(self, point: TapPoint) -> bool:
        return self._records(point) or (self.tap is not None and self.tap.wants(point))

    def _records(self, point: TapPoint) -> bool:
        return point.side == self.side and self.features.first <= point.layer < self.features.depth

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        if self.tap is not None and self.tap.wants(point):
            x_TH = self.tap(point, x_TH)
        if self._records(point):
            self.states.append(only(x_TH, self.read_M))
        return x_TH

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        return None if self.tap is None else self.tap.attention(point, kind)

    def read(self, last_MH: Tensor) -> Tensor:
        """Returns the features, (M, states * H). last_MH: the output of the forward pass, which is the states after the
        last layer."""
        return self.features([*self.states, last_MH])
