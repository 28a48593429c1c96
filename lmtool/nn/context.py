"""The context of a layer: where its tokens are, which tokens they attend to, and which results are needed.

Shape letters: T tokens, N texts, S encoder tokens, M selected tokens, F memory states of a text, H hidden width, A
heads, D head width, L tokens of the longest encoder input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from lmtool.nn.dropout import DropoutRng, select_rng
from lmtool.nn.layout import First, Full, Layout, Mask, with_prefix
from lmtool.nn.positions import Position
from lmtool.nn.prefix import LayerPrefix
from lmtool.nn.tiled import AttentionInputs
from lmtool.types import Packed, Segments, send

AttentionKind = Literal["self_attn", "cross_attn"]
AttentionObserver = Callable[[AttentionInputs], None]
"""Called with the inputs of an attention of a layer."""


@dataclass
class EncoderState:
    """The encoder output that a decoder attends to.

    hidden_SH: last hidden states of the inputs. segments: documents of the inputs. keep: whether each layer's keys
    and values are cached for the next call, for generation without gradients. cached: the cached keys and values, (S,
    A, D) each, by attention module. mask: which input tokens are visible. outputs: the number of consecutive decoder
    texts that share an input. rng: the dropout generator of the input tokens, for values that the decoder computes from
    their states.
    """

    hidden_SH: Tensor
    segments: Segments
    keep: bool = False
    cached: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    mask: Mask = field(default_factory=Full)
    outputs: int = 1
    rng: DropoutRng | None = None
    _layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict, repr=False)

    def layout(self, outputs: Packed, ahead: int = 0) -> Layout:
        """Returns the cross-attention layout: each decoder token attends to its whole input and to the `ahead` prefix
        keys before it."""
        keys, mask = with_prefix(self.segments, ahead), self.mask
        if ahead and isinstance(mask, First):
            mask = First(tuple(length + ahead for length in mask.lengths))
        if not self.keep:
            return Layout(outputs.segments, keys, mask)
        lengths = outputs.lengths
        if self.outputs > 1:
            lengths = tuple(
                sum(lengths[first : first + self.outputs]) for first in range(0, len(lengths), self.outputs)
            )
        if lengths not in self._layouts:
            # Successive steps of decoding have one token per text, so the plan of the last step is reused.
            queries = Segments.packed(lengths, outputs.tokens.device)
            self._layouts = {lengths: Layout(queries, keys, mask)}
        return self._layouts[lengths]

    def in_rows(self) -> EncoderState:
        """Returns the same state for generation, with every input padded to the longest length, so that no step has to
        gather keys. The mask hides the padding. Raises ValueError if an input has no tokens."""
        lengths, device = self.segments.lengths, self.hidden_SH.device
        if not min(lengths):
            raise ValueError("an input has no tokens")
        longest = max(lengths)
        if min(lengths) == longest:
            return EncoderState(self.hidden_SH, self.segments, keep=True)
        steps_NL = torch.minimum(torch.arange(longest), torch.tensor(lengths)[:, None] - 1)
        index = (steps_NL + torch.tensor(self.segments.starts)[:, None]).flatten()
        segments = Segments.packed((longest,) * len(lengths), device)
        hidden = self.hidden_SH.index_select(0, send(index, device))
        return EncoderState(hidden, segments, keep=True, mask=First(lengths))

    def select(self, rows: Sequence[int], outputs: int) -> None:
        """Keeps only the inputs in these rows, with `outputs` decoder texts each. Call after `in_rows`."""
        self.outputs, self._layouts = outputs, {}
        inputs = len(self.segments.lengths)
        if list(rows) == list(range(inputs)):
            return
        longest, device = self.segments.lengths[0], self.hidden_SH.device
        rows_N = send(torch.tensor(rows), device)

        def select_inputs(x_S: Tensor) -> Tensor:
            return x_S.unflatten(0, (inputs, -1)).index_select(0, rows_N).flatten(0, 1)

        self.hidden_SH = select_inputs(self.hidden_SH)
        self.cached = {
            module: (select_inputs(keys), select_inputs(values)) for module, (keys, values) in self.cached.items()
        }
        self.segments = Segments.packed((longest,) * len(rows), device)
        if isinstance(self.mask, First):
            self.mask = First(tuple(self.mask.lengths[row] for row in rows))


@dataclass(frozen=True)
class Context:
    """Everything a layer reads besides its hidden states in one forward pass.

    packed: the texts. layout: which tokens attend to which. positions_T: positions within the documents. position: how
    attention uses positions. rng: dropout's generator, None in evaluation. cache: the layer's cache of earlier tokens.
    encoded, cross_layout: a decoder's encoder output, and the layout of attention to it. read_M: flat indices of the
    tokens whose result is needed; None for all. watch: returns the observer of an attention, or None.
    prefix, cross_prefix: keys and values before those of the texts and of the encoder; None if there are none or if a
    cache already holds them. queries_TH: states that form the queries and the residual, if they differ from the layer's
    input. memory_NFH: earlier states of each text, used as keys and values only.
    """

    packed: Packed
    layout: Layout
    positions_T: Tensor
    position: Position
    rng: DropoutRng | None = None
    cache: Any = None
    encoded: EncoderState | None = None
    cross_layout: Layout | None = None
    read_M: Tensor | None = None
    watch: Callable[[AttentionKind], AttentionObserver | None] | None = None
    prefix: LayerPrefix | None = None
    cross_prefix: LayerPrefix | None = None
    queries_TH: Tensor | None = None
    memory_NFH: Tensor | None = None

    @classmethod
    def of(cls, packed: Packed, mask: Mask, position: Position | None = None, **fields: Any) -> Self:
        """Returns the context of a single layer on a packed batch. position: None for no positions."""
        position = Position() if position is None else position
        return cls(packed, Layout.of(packed, mask), packed.positions, position, **fields)

    @cached_property
    def read_rng(self) -> DropoutRng | None:
        """The generator of the tokens whose result is needed."""
        return select_rng(self.rng, self.read_M)

    def observer(self, kind: AttentionKind) -> AttentionObserver | None:
        """Returns the observer of this layer's attention inputs, or None."""
        return None if self.watch is None else self.watch(kind)
