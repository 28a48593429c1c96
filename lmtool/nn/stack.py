"""One run through a stack, for every family: `enter`, the layers in order, `leave`.

A layer is called `layer(x_TH, context)`. Each has its own mask and positions, so one stack can mix local and global
layers, or two kinds of positions. A tap observes or replaces the states between the layers; without one, nothing extra
is computed or stored. A stack may recompute its layers in the backward pass instead of storing their activations (Chen,
Xu, Zhang and Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1).

Shape letters: T tokens, M selected tokens, E width of the token vectors, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtool.errors import UserError
from lmtool.nn.attention import MultiHead, SelfAttention, only
from lmtool.nn.block_sparse import BlockPattern
from lmtool.nn.cache import Cache
from lmtool.nn.configs import Side as Side
from lmtool.nn.context import AttentionKind, AttentionObserver, Context, EncoderState
from lmtool.nn.dropout import Dropout, DropoutRng, rng_at, select_rng
from lmtool.nn.embeddings import StackInput
from lmtool.nn.kernels import has_window, kernel_for
from lmtool.nn.layout import Full, Layout, Mask, causal_mask
from lmtool.nn.positions import Position
from lmtool.nn.prefix import KeyPrefix, LayerPrefix
from lmtool.types import Packed


class TapPoint(NamedTuple):
    """Where a tap is called: after the embedding (layer 0) or after a layer, counted from 1, of the stack that reads
    this side of a batch."""

    layer: int
    side: Side = "inputs"


class Tap:
    """Observes the states at every point of a forward pass, and may replace them. This base class does neither.

    If a tap wants the last layer's states, that layer computes all tokens, whichever are selected. States are observed
    before the final norm.
    """

    def wants(self, point: TapPoint) -> bool:
        """Whether the tap is called at this point."""
        return True

    def begin(self, side: Side) -> tuple[int, Tensor] | None:
        """Called when a stack starts a forward pass. A tap may skip the first layers if no other tap is called: it
        returns the number of a layer and the states (T, H) after this layer, before any tap, from an earlier forward
        over the same texts. None: start at the embedding."""
        return None

    def __call__(self, point: TapPoint, x_TH: Tensor) -> Tensor:
        """Returns the states with which the model continues: `x_TH` itself, or other states of its shape. The tokens
        are those of the batch, without virtual ones."""
        return x_TH

    def attention(self, point: TapPoint, kind: AttentionKind) -> AttentionObserver | None:
        """Returns the observer of an attention in the layer before this point, or None."""
        return None


class Taps(Tap):
    """Several taps in order: each receives the result of those before it."""

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
        observers = [observe for tap in self.taps if (observe := tap.attention(point, kind)) is not None]
        return partial(_call_each, observers) if observers else None


def _call_each(observers: Iterable[AttentionObserver], *arguments: Any) -> None:
    for observe in observers:
        observe(*arguments)


@dataclass(frozen=True)
class StackState:
    """The texts after the embedding, as the layers read them.

    x_TH: the states of all tokens. packed, positions_T, rng: all tokens including virtual ones, their positions and
    their dropout generator. position: the position encoding that attention reads. cache: the cache of earlier
    tokens. batch_T: indices of the batch's tokens among all; None if there are no others. ahead: positions of a prefix
    or a memory before each text. memories: (N, F, H) for each layer, the states before each text; None if there are
    none.
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
        """Maps indices of the batch's tokens (None: all of them) to indices among all tokens. None: all tokens."""
        if self.batch_T is None or read_M is None:
            return read_M if self.batch_T is None else self.batch_T
        return self.batch_T.index_select(0, read_M)

    def layout(self, mask: Mask) -> Layout:
        """Returns the attention layout under a mask."""
        return Layout.of(self.packed, mask, self.ahead) if self.cache is None else self.cache.layout(self.packed, mask)

    def apply_tap(self, tap: Tap, point: TapPoint, x_TH: Tensor) -> Tensor:
        """Returns the states that a tap returns, or `x_TH` if it is not called at this point."""
        if not tap.wants(point):
            return x_TH
        if self.batch_T is None:
            return tap(point, x_TH)
        batch_TH = x_TH.index_select(0, self.batch_T)
        tapped_TH = tap(point, batch_TH)
        return x_TH if tapped_TH is batch_TH else x_TH.index_copy(0, self.batch_T, tapped_TH)


def enter(
    embed: StackInput,
    vectors_TE: Tensor,
    packed: Packed,
    rng: DropoutRng | None = None,
    cache: Cache | None = None,
    ahead: int = 0,
) -> StackState:
    """Turns token vectors into the input of the first layer. cache: the cache of earlier tokens, which is extended.
    ahead: prefix positions before each text."""
    batch_T = None
    if embed.virtual is not None:
        insertion = embed.virtual.insertion(packed, None if cache is None else cache.lengths)
        vectors_TE = embed.virtual.insert(vectors_TE, insertion)
        packed, batch_T = insertion.packed, insertion.batch_T
        rng = None if rng is None else rng.insert_virtual(insertion.source_S, insertion.number_S)
    if ahead and packed.prefixes:
        packed = replace(packed, prefixes=tuple(prefix + ahead for prefix in packed.prefixes))
    if cache is None:
        embed.position.check(max(packed.lengths, default=0) + ahead, embed.virtual_count + ahead)
        positions_T = packed.positions + ahead if ahead else packed.positions
    else:
        positions_T = cache.extend(packed)
    x_TH = embed.finish(vectors_TE, packed, positions_T, rng)
    position = embed.position.of_batch(packed)
    return StackState(x_TH, packed, positions_T, position, rng, cache, batch_T, ahead)


class Stack(nn.Module):
    """Layers over an embedding, and what follows the last one.

    causal: whether a token attends only to itself and earlier tokens. final_norm: the norm after the last layer, or
    None. dropout: the rate of the dropout after the norm. side: the side of a batch that the stack reads. embed: the
    embedding, if the stack owns it. prefix, cross_prefix: learned keys and values before each text, and before those of
    cross-attention; set by prefix tuning, otherwise None. tap: called in every forward, before the caller's; None by
    default. recomputes: whether a layer stores only its input for the backward pass, which then runs the layer again.
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
        """The block pattern of the first layer for longer texts, or None."""
        return None

    @property
    def ahead(self) -> int:
        """Prefix positions before each text."""
        return 0 if self.prefix is None else len(self.prefix)

    @property
    def cross_ahead(self) -> int:
        """Prefix positions before the keys of cross-attention."""
        return 0 if self.cross_prefix is None else len(self.cross_prefix)

    def cache_for(self, embed: StackInput, documents: int, capacity: int) -> Cache:
        """Returns an empty cache for this many texts of at most `capacity` tokens, virtual ones not counted. Raises
        UserError if there are too few positions."""
        virtual = embed.virtual_count
        embed.position.check(capacity + virtual + self.ahead, virtual + self.ahead)
        return Cache(len(list(self.applied_layers())), documents, capacity + virtual, ahead=self.ahead)

    def applied_layers(self) -> Iterator[nn.Module]:
        """Yields the layers in the order they are applied."""
        yield from self.layers

    def mask(self, number: int, packed: Packed) -> Mask:
        """Returns the mask of a layer. number: counted from 0."""
        return causal_mask(packed) if self.causal else Full()

    def attended_tokens(self, number: int, length: float) -> float:
        """Returns the mean number of tokens that a token attends to in this layer, for a text of this length. Each of
        them costs a product with a key and one with a value."""
        return length / 2 if self.causal else length

    def position(self, number: int, state: StackState) -> Position:
        """Returns the positions of this layer's attention."""
        return state.position

    def leave(self, x_TH: Tensor, rng: DropoutRng | None = None) -> Tensor:
        """Applies the final norm and dropout. rng: the dropout generator of the same tokens."""
        return self.dropout(x_TH if self.final_norm is None else self.final_norm(x_TH), rng)

    def run(
        self,
        state: StackState,
        read_M: Tensor | None = None,
        encoded: EncoderState | None = None,
        tap: Tap | None = None,
        last: Callable[[Tensor, Context], Tensor] | None = None,
    ) -> Tensor:
        """Returns hidden states (T, H) of the stack, or (M, H) of the tokens with the flat indices `read_M`. encoded: a
        decoder's encoder output. last: replaces the last layer."""
        first, x_TH = 0, state.x_TH
        layers: list[Callable[[Tensor, Context], Tensor]] = list(self.applied_layers())
        if last is not None:
            layers[-1] = last
        if self.tap is not None:
            tap = self.tap if tap is None else Taps(self.tap, tap)
        if tap is not None:
            start = tap.begin(self.side)
            if start is not None and state.batch_T is None:
                first, x_TH = start
            x_TH = state.apply_tap(tap, TapPoint(first, self.side), x_TH)
        layouts: dict[Mask, Layout] = {}
        cross_layout = None if encoded is None else encoded.layout(state.packed, self.cross_ahead)
        prefixes, cross_prefixes = self._prefixes(state), self._cross_prefixes(encoded)
        taps_last = tap is not None and tap.wants(TapPoint(len(layers), self.side))
        for number, layer in enumerate(layers[first:], first):
            mask, point = self.mask(number, state.packed), TapPoint(number + 1, self.side)
            if mask not in layouts:
                layouts[mask] = state.layout(mask)
            context = Context(
                state.packed,
                layouts[mask],
                state.positions_T,
                self.position(number, state),
                # A layer that is applied several times drops other values each time.
                rng_at(state.rng, number),
                None if state.cache is None else state.cache.layers[number],
                encoded,
                cross_layout,
                read_M if number == len(layers) - 1 and not taps_last else None,
                None if tap is None else partial(tap.attention, point),
                None if prefixes is None else prefixes[number],
                None if cross_prefixes is None else cross_prefixes[number],
                memory_NFH=None if state.memories is None else state.memories[number],
            )
            x_TH = self._apply_layer(layer, x_TH, context)
            if tap is not None:
                x_TH = state.apply_tap(tap, point, x_TH)
        if taps_last or first == len(layers):
            x_TH = only(x_TH, read_M)
        return self.leave(x_TH, select_rng(state.rng, read_M))

    def _apply_layer(self, layer: Callable[[Tensor, Context], Tensor], x_TH: Tensor, context: Context) -> Tensor:
        """Recomputes the layer in the backward pass if the stack does so and nothing, as a cache or an observer, would
        be called twice. Random numbers are functions of the location, so no generator state is restored."""
        runs_once = not torch.is_grad_enabled() or (context.cache is not None and context.cache.accumulates)
        runs_once = runs_once or (context.encoded is not None and context.encoded.keep)
        if (
            not self.recomputes
            or runs_once
            or any(context.observer(kind) is not None for kind in get_args(AttentionKind))
        ):
            return layer(x_TH, context)
        output: Tensor = checkpoint(layer, x_TH, context, use_reentrant=False, preserve_rng_state=False)
        return output

    def _prefixes(self, state: StackState) -> list[LayerPrefix] | None:
        if self.prefix is None or (state.cache is not None and not state.cache.fresh):
            return None
        return self.prefix.layers(state.packed.segments)

    def _cross_prefixes(self, encoded: EncoderState | None) -> list[LayerPrefix] | None:
        """None if they are cached with the encoder's keys."""
        if self.cross_prefix is None or encoded is None or encoded.cached:
            return None
        return self.cross_prefix.layers(encoded.segments)


def recompute_layers(model: nn.Module) -> None:
    """Makes every stack of a model recompute its layers in the backward pass. Raises UserError if the model has no
    stack."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise UserError(
            "gradient_checkpointing=true, but the model has no stack of layers that could be recomputed",
            "set gradient_checkpointing=false",
        )
    for stack in stacks:
        stack.recomputes = True


_FLASH_PATHS = {"flash": "variable-length flash", "jagged": "flash of jagged tensors, which has dropout"}
_BLOCK_PATH = "blocks of tokens with the blocks they attend to"
_TILE_PATH = "documents of similar length together, without padding"


def attention_path(
    model: nn.Module, device: torch.device, dtype: torch.dtype, prefixes: Collection[bool] = (False,)
) -> str:
    """Returns how a model's attentions are computed in training, for the screen. prefixes: contains True if there are
    texts with a prefix that the whole text attends to, False if there are texts without one."""
    paths: dict[str, str] = {}
    prefixed: set[SelfAttention] = set()
    windows: dict[nn.Module, tuple[int, int] | None] = {}
    sample = Packed(torch.arange(2), (2,))
    for stack in model.modules():
        if not isinstance(stack, Stack):
            continue
        if stack.blocks is not None:
            paths[_BLOCK_PATH] = f"in texts of more than {stack.blocks.longest_dense} tokens"
        for number, layer in enumerate(stack.applied_layers()):
            attentions = [part for part in layer.modules() if isinstance(part, SelfAttention)]
            prefixed.update(attentions if stack.ahead and stack.causal else ())
            windows |= dict.fromkeys(attentions, stack.mask(number, sample).window)
    biased = any(isinstance(part, Position) and part.scores for part in model.modules())
    for part in model.modules():
        if not isinstance(part, MultiHead):
            continue
        kernel, is_self = kernel_for(device, dtype, part.head_size, part.dropout.rate), isinstance(part, SelfAttention)
        if device.type == "cpu":
            paths[_TILE_PATH] = ""
        elif kernel is None:
            paths[_TILE_PATH] = "flash needs bf16 or fp16, heads of 8, 16, ... 256, and a GPU since Ampere"
        elif is_self and biased:
            paths[_TILE_PATH] = "where positions add to the scores"
        elif kernel == "jagged" and part in prefixed:
            paths[_TILE_PATH] = "where a causal model has a prefix before its texts"
        elif not has_window(kernel, windows.get(part, Full.window)):
            paths[_TILE_PATH] = "where a layer attends to a window"
        else:
            if is_self and True in prefixes:
                paths[_TILE_PATH] = "where a text has a prefix that all its tokens attend to"
            if not is_self or False in prefixes:
                paths[_FLASH_PATHS[kernel]] = ""
    return "; ".join(f"{path} ({why})" if why else path for path, why in paths.items())
