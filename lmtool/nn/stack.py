"""One run through a stack, for every family: `enter`, the layers one after the other, `leave`.

A layer is called `layer(x_TH, context)`; each has a mask and positions of its own, so local and global layers, or two
kinds of positions, stand in one stack. A tap sees what stands between the layers, and may replace it. Without one
nothing is computed or kept for it. A stack may recompute its layers in the backward instead of keeping what they
computed (Chen, Xu, Zhang and Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1).

Shape letters: T tokens, M of them that are read, E width of the token vectors, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtool.errors import UserError
from lmtool.nn.attention import only
from lmtool.nn.block_sparse import BlockPattern
from lmtool.nn.cache import Cache
from lmtool.nn.configs import Side as Side
from lmtool.nn.context import AttentionKind, AttentionObserver, Context, EncoderState
from lmtool.nn.dropout import Dropout, DropoutRng, rng_at, select_rng
from lmtool.nn.embeddings import StackInput
from lmtool.nn.layout import Full, Layout, Mask, causal_mask
from lmtool.nn.positions import Position
from lmtool.nn.prefix import KeyPrefix, LayerPrefix
from lmtool.types import Packed


class TapPoint(NamedTuple):
    """Where a tap stands: behind the embedding (layer 0) or behind the layer of this number, counted from 1, of the
    stack that reads this side of a batch."""

    layer: int
    side: Side = "inputs"


class Tap:
    """Sees the states at every place of a forward, and may replace them. This one does neither.

    With a tap that wants its states, a last layer works on all tokens, whichever are read of its result. They are seen
    before the final norm.
    """

    def wants(self, point: TapPoint) -> bool:
        """Whether it sees or replaces the states at this point: it is not called for others."""
        return True

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        """A forward of a stack begins. A layer and the states (T, H) behind it, as they were before a tap, that an
        earlier forward over the same texts had: where nothing else watches the layers up to there, they are left out.
        None: the forward begins at the embedding."""
        return None

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        """What the model computes with further on: the states given, or others of their shape. The tokens are those of
        the batch, without virtual ones."""
        return x_TH

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        """Who takes what an attention in the layer before this place computes with; None: nobody."""
        return None


class Taps(Tap):
    """Several taps one after the other: each sees what those before it gave."""

    def __init__(self, *taps: Tap):
        self.taps = taps

    def wants(self, point: TapPoint) -> bool:
        return any(tap.wants(point) for tap in self.taps)

    def begin(self, side: Side) -> None:
        for tap in self.taps:
            tap.begin(side)

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        for tap in self.taps:
            x_TH = tap(point, x_TH) if tap.wants(point) else x_TH
        return x_TH

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        takers = [taker for tap in self.taps if (taker := tap.attention(point, kind)) is not None]
        return partial(_each, takers) if takers else None


def _each(takers: Iterable[AttentionObserver], *arguments: Any) -> None:
    for taker in takers:
        taker(*arguments)


@dataclass(frozen=True)
class StackState:
    """Texts behind the embedding, and what the layers want to know of them.

    x_TH: their states. packed, positions_T, rng: of the tokens that entered, virtual ones included. position: what
    the stack's attention knows of positions. cache: the tokens before these. batch_T: where the tokens of the batch
    stand among those that entered; None where they are the same. ahead: places in front of each text, of a prefix or a
    memory. memories: of each layer (N, F, H), the states in front of each text; None where there are none.
    """

    x_TH: Tensor
    packed: Packed
    positions_T: Tensor
    position: Position
    rng: DropoutRng | None = None
    cache: Cache | None = None
    batch_T: Tensor | None = None
    ahead: int = 0
    memories: Sequence[Tensor] | None = None

    def read(self, read_M: Tensor | None) -> Tensor | None:
        """Of tokens of the batch (None: all), where they stand among those that entered; None: all of these."""
        if self.batch_T is None or read_M is None:
            return read_M if self.batch_T is None else self.batch_T
        return self.batch_T.index_select(0, read_M)

    def layout(self, mask: Mask) -> Layout:
        """Which tokens see which under a mask."""
        return Layout.of(self.packed, mask, self.ahead) if self.cache is None else self.cache.layout(self.packed, mask)

    def tapped(self, tap: Tap, point: TapPoint, x_TH: Tensor) -> Tensor:
        """The states behind a tap."""
        if not tap.wants(point):
            return x_TH
        if self.batch_T is None:
            return tap(point, x_TH)
        seen = x_TH.index_select(0, self.batch_T)
        replaced = tap(point, seen)
        return x_TH if replaced is seen else x_TH.index_copy(0, self.batch_T, replaced)


def enter(
    embed: StackInput,
    vectors_TE: Tensor,
    packed: Packed,
    rng: DropoutRng | None = None,
    cache: Cache | None = None,
    ahead: int = 0,
) -> StackState:
    """Token vectors to what the first layer reads. cache: of the tokens before these; it makes room for these. ahead:
    places in front of each text, of a prefix."""
    batch_T = None
    if embed.virtual is not None:
        insertion = embed.virtual.insertion(packed, None if cache is None else cache.lengths)
        vectors_TE = embed.virtual.among(vectors_TE, insertion)
        packed, batch_T = insertion.packed, insertion.batch_T
        rng = None if rng is None else rng.inserted(insertion.source_S, insertion.number_S)
    if ahead and packed.prefixes:
        packed = replace(packed, prefixes=tuple(prefix + ahead for prefix in packed.prefixes))
    if cache is None:
        embed.position.check(max(packed.lengths, default=0) + ahead, embed.virtual_count + ahead)
        positions_T = packed.positions + ahead if ahead else packed.positions
    else:
        positions_T = cache.extend(packed)
    x_TH = embed.finish(vectors_TE, packed, positions_T, rng)
    return StackState(x_TH, packed, positions_T, embed.position, rng, cache, batch_T, ahead)


class Stack(nn.Module):
    """Layers over an embedding, and what stands behind the last of them.

    causal: whether a token sees only itself and what is before it. final_norm: None for none. dropout: behind it.
    side: the side of a batch that it reads. embed: the embedding, where it is the stack's own.
    prefix, cross_prefix: learned keys and values in front of each text, and in front of what the cross-attention reads,
    for who tunes a model by them; no family has any. tap: stands in every forward, before the one that a caller gives,
    for who watches a model from outside; none as it is built. recomputes: whether a layer keeps its input alone for the
    backward, which runs it a second time.
    """

    prefix: KeyPrefix | None
    cross_prefix: KeyPrefix | None
    tap: Tap | None

    def __init__(
        self,
        layers: Iterable[nn.Module],
        causal: bool = False,
        final_norm: nn.Module | None = None,
        dropout: float = 0.0,
        side: Side = "inputs",
        embed: StackInput | None = None,
    ):
        super().__init__()
        if embed is not None:
            self.add_module("embed", embed)
        self.layers = nn.ModuleList(layers)
        self.causal = causal
        self.final_norm = final_norm
        self.dropout = Dropout(dropout)
        self.side: Side = side
        self.prefix, self.cross_prefix = None, None
        self.tap = None
        self.recomputes = False

    @property
    def blocks(self) -> BlockPattern | None:
        """By which longer texts are seen by blocks, as the first layer draws them; None where they are not."""
        return None

    @property
    def ahead(self) -> int:
        """Places that a prefix takes in front of each text."""
        return 0 if self.prefix is None else len(self.prefix)

    @property
    def crossed(self) -> int:
        """Those that one takes in front of what the cross-attention reads."""
        return 0 if self.cross_prefix is None else len(self.cross_prefix)

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        """An empty cache for this many texts of at most `capacity` tokens, and their virtual ones. UserError where
        there are not so many positions."""
        virtual = embed.virtual_count
        embed.position.check(capacity + virtual + self.ahead, virtual + self.ahead)
        return Cache(len(list(self.depth())), documents, capacity + virtual, ahead=self.ahead)

    def depth(self) -> Iterator[nn.Module]:
        """The layers in the order they are applied."""
        yield from self.layers

    def mask(self, number: int, packed: Packed) -> Mask:
        """What the tokens see in the layer of this number, counted from 0."""
        return causal_mask(packed) if self.causal else Full()

    def seen(self, number: int, length: float) -> float:
        """Tokens of a text of this length that one of them sees in the layer of this number, mean, for the count of
        operations: each is a product with a key and one with a value."""
        return length / 2 if self.causal else length

    def position(self, number: int, state: StackState) -> Position:
        """How the layer of this number knows where its tokens stand."""
        return state.position

    def leave(self, x_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """States of a layer to those of the stack: the final norm, and dropout. rng: those of the same tokens."""
        return self.dropout(x_TH if self.final_norm is None else self.final_norm(x_TH), rng)

    def run(
        self,
        state: StackState,
        read_M: Tensor | None = None,
        encoded: EncoderState | None = None,
        tap: Tap | None = None,
        last: Callable[[Tensor, Context], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states (T, H) of the stack, or (M, H) of the tokens that entered with the flat indices `read_M`.
        encoded: what a decoder reads of its encoder. last: what stands in the place of the last layer."""
        first, x_TH = 0, state.x_TH
        layers: list[Callable[[Tensor, Context], Tensor]] = list(self.depth())
        if last is not None:
            layers[-1] = last
        if self.tap is not None:
            tap = self.tap if tap is None else Taps(self.tap, tap)
        if tap is not None:
            resumed = tap.begin(self.side)
            if resumed is not None and state.batch_T is None:
                first, x_TH = resumed
            x_TH = state.tapped(tap, TapPoint(first, self.side), x_TH)
        layouts: dict[Mask, Layout] = {}
        cross_layout = None if encoded is None else encoded.layout(state.packed, self.crossed)
        prefixes, cross_prefixes = self._prefixes(state), self._cross_prefixes(encoded)
        tapped_last = tap is not None and tap.wants(TapPoint(len(layers), self.side))
        for number, layer in enumerate(layers[first:], first):
            mask, point = self.mask(number, state.packed), TapPoint(number + 1, self.side)
            if mask not in layouts:
                layouts[mask] = state.layout(mask)
            context = Context(
                state.packed,
                layouts[mask],
                state.positions_T,
                self.position(number, state),
                # A layer that is applied again draws anew.
                rng_at(state.rng, number),
                None if state.cache is None else state.cache.layers[number],
                encoded,
                cross_layout,
                read_M if number == len(layers) - 1 and not tapped_last else None,
                None if tap is None else partial(tap.attention, point),
                None if prefixes is None else prefixes[number],
                None if cross_prefixes is None else cross_prefixes[number],
                memory_NFH=None if state.memories is None else state.memories[number],
            )
            x_TH = self._applied(layer, x_TH, context)
            if tap is not None:
                x_TH = state.tapped(tap, point, x_TH)
        if tapped_last or first == len(layers):
            x_TH = only(x_TH, read_M)
        return self.leave(x_TH, select_rng(state.rng, read_M))

    def _applied(self, layer: Callable[[Tensor, Context], Tensor], x_TH: Tensor, context: Context) -> Tensor:
        """What a layer makes of its states. It is recomputed from what it read alone: a cache that grows, and who takes
        what an attention computes with, would see it twice. Its draws are functions of their place, so the generators'
        state need not be restored."""
        single_run = not torch.is_grad_enabled() or (context.cache is not None and context.cache.accumulates)
        single_run = single_run or (context.encoded is not None and context.encoded.keep)
        if (
            not self.recomputes
            or single_run
            or any(context.observer(kind) is not None for kind in get_args(AttentionKind))
        ):
            return layer(x_TH, context)
        output: Tensor = checkpoint(layer, x_TH, context, use_reentrant=False, preserve_rng_state=False)
        return output

    def _prefixes(self, state: StackState) -> list[LayerPrefix] | None:
        """The prefix of each layer; None where a cache has it."""
        if self.prefix is None or (state.cache is not None and not state.cache.fresh):
            return None
        return self.prefix.layers(state.packed.segments)

    def _cross_prefixes(self, encoded: EncoderState | None) -> list[LayerPrefix] | None:
        """The prefix of each layer's cross-attention; None where it is kept with the keys of the encoder."""
        if self.cross_prefix is None or encoded is None or encoded.cached:
            return None
        return self.cross_prefix.layers(encoded.segments)


def recompute_layers(model: nn.Module) -> None:
    """Let every stack of a model recompute its layers in the backward. UserError where it has none."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise UserError(
            "gradient_checkpointing=true: the model has no stack of layers that could be recomputed",
            "give gradient_checkpointing=false",
        )
    for stack in stacks:
        stack.recomputes = True
