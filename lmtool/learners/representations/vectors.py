"""Texts as vectors: of each of their tokens, or one of each text.

Shape letters: W layers, L tokens of a text, T of a packed batch, N texts of one, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.data.loader import PackedLoader
from lmtool.data.split import Rows
from lmtool.errors import NotFinite, UserError
from lmtool.learners.representations.sentences import SentenceModules
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.sequence import summary
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.tasks.kinds.texts import SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed


class _Kept(Tap):
    """Keeps the states of some layers of the inputs."""

    def __init__(self, layers: Sequence[int]):
        self.layers = frozenset(layers)
        self.states: dict[int, Tensor] = {}

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
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


Pooling = Literal["none", "first", "mean", "max", "last"]
# Texts whose vectors are held at a time: of each token they are many.
_TEXTS, _TOKENISED = 4096, 256


class Vectors(NamedTuple):
    """One text: tokens, (L,) ids with the special tokens around them, and vectors, (W, H) or of each token (W, L, H),
    float32."""

    tokens: np.ndarray
    vectors: np.ndarray


@dataclass(frozen=True)
class Embedder:
    """states: of the layers that are wanted. layout: how texts are laid out, a name in `lmtool.data.formats`. pooling:
    over the tokens of a text, special ones included. average: whether the layers become one, their mean. max_length:
    tokens of a text; of a longer one the end is left out. batch_tokens: of a forward. modules: of a sentence encoder,
    which pool in the place of `pooling`. prompt: stands before every text. notes: what a user should know of it."""

    states: HiddenStates
    tokenizer: Tokenizer
    layout: str
    pooling: Pooling
    average: bool
    max_length: int
    batch_tokens: int
    modules: SentenceModules | None = None
    prompt: str = ""
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.states.width if self.modules is None else self.modules.width

    def vectors(
        self, rows: Rows, progress: Callable[[int, int], None], warn: Callable[[str], None]
    ) -> Iterator[Vectors]:
        """Of rows of one text or two, in their order; beyond rounding no text depends on those around it. progress: is
        given how many rows of how many are done. warn: reports texts that are cut. UserError naming file and line of a
        text without tokens."""
        portion = _TOKENISED if self.pooling == "none" else _TEXTS
        cut = 0
        for start in range(0, len(rows), portion):
            part = rows.take(np.arange(start, min(start + portion, len(rows))))
            examples = SequenceExamples(
                self._prompted(part), self.tokenizer, self.layout, self.max_length, "text", "input"
            )
            cut += examples.truncated
            yield from self._of_examples(examples, start, len(rows), progress)
        if cut:
            warn(f"{cut:,} of {len(rows):,} texts are cut to {self.max_length} tokens")

    def _prompted(self, rows: Rows) -> Rows:
        """The rows with the prompt before their first texts."""
        if not self.prompt:
            return rows
        first = next(iter(rows.columns))
        return replace(rows, columns={**rows.columns, first: [self.prompt + text for text in rows.columns[first]]})

    def _of_examples(
        self, examples: SequenceExamples, before: int, total: int, progress: Callable[[int, int], None]
    ) -> Iterator[Vectors]:
        """Those of a portion, in the order of its rows."""
        done: dict[int, Vectors] = {}
        budget = max(self.batch_tokens, self.max_length)
        for batch in PackedLoader(examples, 0, None, budget, shuffle=False).epoch_batches():
            inputs = batch.inputs.to(self.states.precision.device)
            states_WTH = self.states.read(inputs)
            if self.average:
                states_WTH = states_WTH.mean(0, keepdim=True)
            tokens = np.split(batch.inputs.tokens.numpy(), np.cumsum(batch.inputs.lengths)[:-1])
            for number, ids, vectors in zip(
                batch.examples.tolist(), tokens, self._pooled(states_WTH, inputs), strict=True
            ):
                done[number] = Vectors(ids, vectors)
            progress(before + len(done), total)
        for number in range(len(done)):
            yield done.pop(number)

    def _pooled(self, states_WTH: Tensor, inputs: Packed) -> list[np.ndarray]:
        """Of each text (W, H), or (W, L, H)."""
        if self.pooling == "none":
            return np.split(states_WTH.cpu().numpy(), np.cumsum(inputs.lengths)[:-1], axis=1)
        if self.modules is not None:
            return list(torch.stack([self.modules(states_TH, inputs) for states_TH in states_WTH], dim=1).cpu().numpy())
        pooled = [summary(states_TH, inputs, self.pooling).cpu().numpy() for states_TH in states_WTH]
        return list(np.stack(pooled, axis=1))
