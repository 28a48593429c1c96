"""What a layer is given beside its states: where its tokens lie, what they may see, and what is asked of it.

Shape letters: T tokens, S tokens of the encoder, M tokens that are read, H hidden width, A heads, D width of a head,
L queries and K keys of a document.
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
"""Takes what an attention of a layer computes with."""


@dataclass
class EncoderState:
    """What a decoder reads of its encoder.

    hidden_SH: the last hidden states of the inputs. segments: its documents. keep: keep each layer's keys and values
    for the next call, as generation wants; without gradients only. cached: those keys and values, (S, A, D) each, by the
    attention they belong to. mask: which tokens of an input are read. outputs: texts of the decoder, one after the
    other, that read the same input. rng: dropout's of the inputs' tokens, for what the decoder makes of their states.
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
        """How the tokens of the decoder stand to those of the encoder: each sees its whole input, and as many keys of
        a prefix in front of it as `ahead` says."""
        keys, mask = with_prefix(self.segments, ahead), self.mask
        if ahead and isinstance(mask, First):
            mask = First(tuple(length + ahead for length in mask.lengths))
        if not self.keep:
            return Layout(outputs.segments, keys, mask)
        lengths = outputs.lengths
        if self.outputs > 1:
            lengths = tuple(sum(lengths[at : at + self.outputs]) for at in range(0, len(lengths), self.outputs))
        if lengths not in self._layouts:
            # Step after step has one token a text: the plan of the last step is that of the next.
            queries = Segments.packed(lengths, outputs.tokens.device)
            self._layouts = {lengths: Layout(queries, keys, mask)}
        return self._layouts[lengths]

    def in_rows(self) -> EncoderState:
        """The same for generation: every input in a row of the longest one's length, which costs no gathering of keys
        at each step. The further tokens are hidden by the mask. ValueError where an input has no tokens."""
        lengths, device = self.segments.lengths, self.hidden_SH.device
        if not min(lengths):
            raise ValueError("an input has no tokens")
        longest = max(lengths)
        if min(lengths) == longest:
            return EncoderState(self.hidden_SH, self.segments, True)
        steps_NL = torch.minimum(torch.arange(longest), torch.tensor(lengths)[:, None] - 1)
        index = (steps_NL + torch.tensor(self.segments.starts)[:, None]).flatten()
        segments = Segments.packed((longest,) * len(lengths), device)
        hidden = self.hidden_SH.index_select(0, send(index, device))
        return EncoderState(hidden, segments, True, mask=First(lengths))

    def select(self, rows: Sequence[int], outputs: int) -> None:
        """Keep the inputs of these rows alone, each for this many outputs. After `in_rows`."""
        self.outputs, self._layouts = outputs, {}
        inputs = len(self.segments.lengths)
        if list(rows) == list(range(inputs)):
            return
        longest, device = self.segments.lengths[0], self.hidden_SH.device
        rows_N = send(torch.tensor(rows), device)

        def cached(x_S: Tensor) -> Tensor:
            return x_S.unflatten(0, (inputs, -1)).index_select(0, rows_N).flatten(0, 1)

        self.hidden_SH = cached(self.hidden_SH)
        self.cached = {module: (cached(keys), cached(values)) for module, (keys, values) in self.cached.items()}
        self.segments = Segments.packed((longest,) * len(rows), device)
        if isinstance(self.mask, First):
            self.mask = First(tuple(self.mask.lengths[row] for row in rows))


@dataclass(frozen=True)
class Context:
    """One layer's place in one forward.

    packed: the texts that the states belong to. layout: which of their tokens see which. positions_T: where they stand
    in their documents. position: how attention uses that. rng: dropout's, None in evaluation. cache: what the layer
    keeps of the tokens before these. encoded, cross_layout: what a decoder reads of its encoder, and how its tokens
    stand to that. read_M: flat indices of the tokens whose result is wanted; None for all. watch: asks who takes
    what an attention of the layer computes with. prefix, cross_prefix: keys and values in front of those of the texts,
    and of those of the encoder; None where there are none, and where they are kept with the others by now. queries_TH:
    the states that ask, and that a layer adds to, where they are not those it reads. memory_NFH: states in front of
    those of each text, as many, that the layer read before; they are keys and values, and ask nothing.
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
    def of(cls, packed: Packed, mask: Mask, position: Position | None = None, **more: Any) -> Self:
        """Of a layer by itself, on a packed batch. position: none where None."""
        position = Position() if position is None else position
        return cls(packed, Layout.of(packed, mask), packed.positions, position, **more)

    @cached_property
    def read_rng(self) -> DropoutRng | None:
        """The draws of the tokens whose result is wanted."""
        return select_rng(self.rng, self.read_M)

    def observer(self, kind: AttentionKind) -> AttentionObserver | None:
        """Who takes what an attention of this layer computes with; None: nobody."""
        return None if self.watch is None else self.watch(kind)
