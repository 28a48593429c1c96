"""The hidden states of every layer of a model, as transformers' `output_hidden_states` numbers them: 0 behind the
embedding, then one a layer, the last behind the final norm. Of an encoder-decoder those of its encoder.

Shape letters: T tokens, W layers that are wanted, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmtool.errors import NotFinite, UserError
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.stack import Place, Stack, Tap
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed


class _Kept(Tap):
    """Keeps the states of some layers of the inputs."""

    def __init__(self, layers: Sequence[int]):
        self.layers = frozenset(layers)
        self.states: dict[int, Tensor] = {}

    def __call__(self, place: Place, x_TH: Tensor) -> Tensor:
        if place.side == "inputs" and place.layer in self.layers:
            self.states[place.layer] = x_TH
        return x_TH


def depth_of(backbone: Backbone) -> int:
    """The number of layers that read a text. UserError for a model that is no stack of layers."""
    stack = backbone.encoder if isinstance(backbone, EncoderDecoder) else backbone
    if not isinstance(stack, Stack):
        raise UserError(f"model={backbone.config.name} is no stack of layers", "give a checkpoint of another model")
    return len(list(stack.depth()))


class HiddenStates:
    """Reads the states of some layers off a backbone in evaluation mode. layers: their numbers; None: all whose states
    are as wide as the last one's. UserError where those of several layers are not equally wide. width: H."""

    def __init__(self, backbone: Backbone, precision: Precision, layers: Sequence[int] | None = None):
        self.backbone, self.precision, self.depth = backbone, precision, depth_of(backbone)
        widths = backbone.state_widths
        if layers is None:
            layers = [layer for layer in range(self.depth + 1) if widths[layer] == widths[-1]]
        self.layers, self.width = tuple(layers), widths[layers[-1]]
        if any(widths[layer] != self.width for layer in self.layers):
            first = next(layer for layer in self.layers if widths[layer] != self.width)
            message = (
                f"the states of layer {first} are {widths[first]} wide, those of layer {self.layers[-1]} {self.width}"
            )
            raise UserError(f"model={backbone.config.name}: {message}", "give layers=last, or the number of a layer")

    @torch.no_grad()
    def read(self, inputs: Packed) -> Tensor:
        """(W, T, H) float32 of a packed batch on the device. NotFinite where they are no finite numbers."""
        tap = _Kept(self.layers)
        # A model whose last layer alone is wanted runs without a tap.
        watching = None if self.layers == (self.depth,) else tap
        with self.precision.autocast():
            read = self.backbone.read_inputs if isinstance(self.backbone, EncoderDecoder) else self.backbone
            tap.states[self.depth] = read(inputs, tap=watching)
        states_WTH = torch.stack([tap.states[layer].float() for layer in self.layers])
        if not bool(torch.isfinite(states_WTH).all()):
            raise NotFinite("hidden states", Batch(inputs, {}, torch.zeros(0), torch.zeros(0)))
        return states_WTH
