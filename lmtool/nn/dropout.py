"""Dropout keyed by token instead of by batch.

On a CPU, whether an activation is dropped is a pure function of (seed, step, example, part, position, location,
channel). A step's gradient therefore does not depend on how its examples were packed or split into micro-batches, and a
resumed run has no generator state to restore. A location is identified by names, not by a counter: the dropout module
(its site), the layer that applies it, and the forward pass within the step. A layer recomputed for activation
checkpointing therefore drops the same values. Keyed dropout is also faster: 0.6 ms instead of 2.6 ms for F.dropout,
forward and backward of (2048, 256) in fp32 on one thread of an AVX-512 core. On CUDA, where every integer operation
would be a kernel, torch's own dropout is used, with the device's generator seeded at each location.

Shape letters: T tokens, N documents, H channels, R rows, A heads, L queries, S keys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.random_streams import key
from lmtool.types import Packed


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
_MULTIPLIER = _to_signed(0xD6E8FEB86659FD93)
# 16 bits decide one channel: rates are exact to 1/131072.
_LEVELS = 1 << 16
_CHANNELS_PER_HASH = 4
_BLOCK = 1 << 17


def mix(values: Tensor) -> Tensor:
    """Hashes int64 tensors of any shape in place: two rounds of xor-shift and multiply (multiplier and shifts by
    degski, "Invertible integer hash functions", 2018), then a shift. Torch shifts arithmetically, which costs a xor its
    top bit. The rounds can spare that bit; the last step adds instead, because all of its bits are used."""
    if torch.compiler.is_compiling():  # it cuts blocks of its own
        for _ in range(2):
            values = (values ^ (values >> 32)) * _MULTIPLIER
        return values + (values >> 32)
    # Blocks fit into the cache: 2**18 numbers take 2.0 ms at once and 0.6 ms in blocks.
    shifted = torch.empty(min(values.numel(), _BLOCK), dtype=torch.int64, device=values.device)
    for block in values.view(-1).split(_BLOCK):
        moved = shifted[: len(block)]
        for _ in range(2):
            torch.bitwise_right_shift(block, 32, out=moved)
            block.bitwise_xor_(moved).mul_(_MULTIPLIER)
        torch.bitwise_right_shift(block, 32, out=moved)
        block.add_(moved)
    return values


def token_keys(
    seed: int, step: int, examples_N: Tensor, parts_N: Tensor, packed: Packed, outputs: bool = False
) -> Tensor:
    """Returns (T,) int64 on the device of the batch: a hash of (seed, step, example, part, position) of each token.
    outputs: for the decoder side of an encoder-decoder, whose tokens have separate keys."""
    device = packed.tokens.device
    keys_N = mix(examples_N.to(device, torch.int64) * _GOLDEN + _to_signed(key(seed, "dropout", step)))
    keys_N = mix(parts_N.to(device, torch.int64) * _GOLDEN + keys_N)
    if outputs:
        keys_N = mix(keys_N)
    return mix(packed.positions * _GOLDEN + keys_N[packed.documents])


@lru_cache(maxsize=1024)
def hash_constants(location: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns hashed int64 constants of a location, one for every four channels. A row of the last dimension starts at
    the same number regardless of its length, so padding the channels does not change them. Cached, because every step
    uses the same ones."""
    return _constants(_to_signed(location), shape, device)


def _constants(location: int | Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    rows = torch.arange(torch.Size(shape[:-1]).numel(), device=device)[:, None] << 24
    numbers = (rows + torch.arange(shape[-1], device=device)).view(shape)
    return mix(numbers * _GOLDEN + location)


def keep_mask(keys: Tensor, constants: Tensor, channels: int, rate: float) -> Tensor:
    """Returns the mask, (..., channels) int16: 0 for dropped channels, 1 for the others. keys: (..., 1). constants:
    (..., hashes)."""
    return _threshold(mix(keys + constants).view(torch.int16)[..., :channels].contiguous(), rate)


def _threshold(bits: Tensor, rate: float) -> Tensor:
    """Compares in place: a comparison that returns bools takes 14 times as long."""
    return bits.ge_(round(rate * _LEVELS) - _LEVELS // 2)


def _factor(rate: float) -> float:
    """Returns the factor of values that are not dropped: 1/(1 - rate), with the rate rounded to 16 bits."""
    return _LEVELS / (_LEVELS - round(rate * _LEVELS))


def factors(mask: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Factors for activations of `dtype`: 0 where `mask` (integers) is 0, 1/(1 - rate) where it is 1. May reuse the
    memory of `mask`."""
    scale = _factor(rate)
    if dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling():
        # The scale's bits times 0 or 1, as integers: converting the mask would take five times as long.
        pattern = int(torch.tensor(scale, dtype=dtype).view(torch.int16))
        return mask.to(torch.int16).mul_(pattern).view(dtype)
    return mask.to(dtype).mul_(scale)


class RngTensors(NamedTuple):
    """The generator of one `Dropout` as tensors, for compiled code, which would otherwise be recompiled for every
    number. keys_T: keys of the tokens. location: (), a hash of the location in the model. Both None: torch's own
    dropout, whose generator has been seeded."""

    keys_T: Tensor | None = None
    location: Tensor | None = None

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        if self.keys_T is None or self.location is None:
            return F.dropout(x_TH, rate)
        channels = x_TH.shape[-1]
        constants = _constants(self.location, (-(-channels // _CHANNELS_PER_HASH),), x_TH.device)
        return factors(keep_mask(self.keys_T[:, None], constants, channels, rate), rate, x_TH.dtype) * x_TH


@lru_cache(maxsize=1024)
def _as_tensor(location: int, device: torch.device) -> Tensor:
    return torch.tensor(_to_signed(location), device=device)


class _KeyedDropout(torch.autograd.Function):
    """x * factors(...). The mask is stored, a byte per value: computing it again takes three to five times as long as
    reading it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, constants: Tensor, rate: float) -> Tensor:
        mask = keep_mask(keys, constants, x.shape[-1], rate)
        ctx.save_for_backward(mask.to(torch.uint8))
        ctx.rate = rate
        return factors(mask, rate, x.dtype).mul_(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (mask,) = ctx.saved_tensors
        return factors(mask, ctx.rate, gradient.dtype).mul_(gradient), None, None, None


def matrix_factors(weight_RC: Tensor, draw: int, rate: float) -> Tensor:
    """Returns (R, C): dropout factors for a matrix: 0 for a fraction `rate` of its values, 1/(1 - rate) for the others.
    A function of `draw` alone on every device."""
    rows, columns = weight_RC.shape
    keys_R = mix(torch.arange(rows, device=weight_RC.device) * _GOLDEN + _to_signed(draw))
    constants = hash_constants(0, (-(-columns // _CHANNELS_PER_HASH),), weight_RC.device)
    return factors(keep_mask(keys_R[:, None], constants, columns, rate), rate, weight_RC.dtype)


class DropoutRng(Protocol):
    """The random numbers of one forward pass at a location of the model. The same location always gets the same
    numbers."""

    def at(self, site: int) -> DropoutRng:
        """Returns the generator of a location within this one: of a module, a layer or a second forward pass."""

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        """Applies dropout to the hidden states of this generator's tokens."""

    def rng_tensors(self) -> RngTensors:
        """Returns the generator as tensors, for compiled code."""

    def rows(self, index_N: Tensor) -> DropoutRng:
        """Returns the generator of some of the tokens, for a head that reads only those."""

    def for_outputs(self) -> DropoutRng:
        """Returns the generator of the tokens that the decoder of an encoder-decoder reads."""

    def insert_virtual(self, source_S: Tensor, number_S: Tensor) -> DropoutRng:
        """Returns the generator after inserting virtual tokens. source_S: the token at or next to each position.
        number_S: the number of the virtual token there, 0 for none."""


def select_rng(rng: DropoutRng | None, read_M: Tensor | None) -> DropoutRng | None:
    """Returns the generator of the tokens with the indices `read_M`; None means all tokens."""
    return rng if rng is None or read_M is None else rng.rows(read_M)


def rng_at(rng: DropoutRng | None, location: int) -> DropoutRng | None:
    """Returns the generator at a location; None if there is no generator."""
    return None if rng is None else rng.at(location)


class TokenRng:
    """Keyed random numbers for the tokens of a batch. keys_T: (T,) int64, see `token_keys`. output_keys_T: the keys of
    the decoder's tokens, or None. location: a hash of the location in the model."""

    def __init__(self, keys_T: Tensor, output_keys_T: Tensor | None = None, location: int = 0):
        self.keys_T = keys_T
        self._output_keys_T = output_keys_T
        self._location = location

    def at(self, site: int) -> TokenRng:
        return TokenRng(self.keys_T, self._output_keys_T, key(self._location, "dropout", site))

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        hashes = -(-x_TH.shape[-1] // _CHANNELS_PER_HASH)
        constants = hash_constants(self._location, (hashes,), x_TH.device)
        return _KeyedDropout.apply(x_TH, self.keys_T[:, None], constants, rate)

    def drop_weights(self, weights_RALS: Tensor, query_RL: Tensor, rate: float) -> Tensor:
        """Applies dropout to attention weights. query_RL: flat index of each query token. Each weight's random number
        depends on the query token, the head and the index of the key in its document, not on the tile."""
        hashes = -(-weights_RALS.shape[-1] // _CHANNELS_PER_HASH)
        constants = hash_constants(self._location, (weights_RALS.shape[1], 1, hashes), weights_RALS.device)
        return _KeyedDropout.apply(weights_RALS, self.keys_T[query_RL][:, None, :, None], constants, rate)

    def rng_tensors(self) -> RngTensors:
        return RngTensors(self.keys_T, _as_tensor(self._location, self.keys_T.device))

    def weight_masks(
        self, tokens_P: Tensor, shapes: Sequence[tuple[int, int, int]], heads: int, rate: float
    ) -> tuple[list[Tensor], float]:
        """Returns the masks of `drop_weights` for several tiles at once, uint8, 0 for dropped weights, and the scale of
        the kept ones. shapes: (rows times heads, L queries, S keys) of each tile, with S a multiple of four. tokens_P:
        the token of each query in the tiles, rows concatenated."""
        keys_P, start, end = self.keys_T[tokens_P], 0, 0
        numbers = keys_P.new_empty(sum(rows * queries * keys // _CHANNELS_PER_HASH for rows, queries, keys in shapes))
        for rows, queries, keys in shapes:
            constants = hash_constants(self._location, (heads, 1, keys // _CHANNELS_PER_HASH), keys_P.device)
            tile_keys = keys_P[start : start + rows // heads * queries].view(rows // heads, 1, queries, 1)
            size = rows * queries * keys // _CHANNELS_PER_HASH
            torch.add(
                tile_keys, constants, out=numbers[end : end + size].view(-1, heads, queries, keys // _CHANNELS_PER_HASH)
            )
            start, end = start + rows // heads * queries, end + size
        mask = _threshold(mix(numbers).view(torch.int16), rate).to(torch.uint8)
        parts = mask.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], _factor(rate)

    def rows(self, index_N: Tensor) -> TokenRng:
        return TokenRng(self.keys_T[index_N], location=self._location)

    def for_outputs(self) -> TokenRng:
        if self._output_keys_T is None:
            raise ValueError("these draws were made without the keys of the outputs")
        return TokenRng(self._output_keys_T, location=self._location)

    def insert_virtual(self, source_S: Tensor, number_S: Tensor) -> TokenRng:
        keys_S = self.keys_T[source_S]
        return TokenRng(torch.where(number_S > 0, mix(keys_S + number_S * _GOLDEN), keys_S), location=self._location)


class DeviceRng:
    """Torch's own dropout from a device's default generator, reseeded at each location."""

    def __init__(self, seed: int, device: torch.device):
        self._seed, self._device = seed, device

    def at(self, site: int) -> DeviceRng:
        return DeviceRng(key(self._seed, "dropout", site), self._device)

    def seed(self) -> None:
        """Seeds the generator before one of torch's kernels uses it."""
        seed_generators(self._device, self._seed)

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        self.seed()
        return F.dropout(x_TH, rate)

    def rng_tensors(self) -> RngTensors:
        self.seed()
        return RngTensors()

    def rows(self, index_N: Tensor) -> DeviceRng:
        return self

    def for_outputs(self) -> DeviceRng:
        return self

    def insert_virtual(self, source_S: Tensor, number_S: Tensor) -> DeviceRng:
        return self


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the default generators of the CPU and of the device, from which torch's own dropout draws. This takes 7 us,
    `torch.manual_seed` about 1 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class Dropout(nn.Module):
    """Drops a fraction `rate` of the channels if it is given a generator; without one (evaluation) it returns its
    input.

    site: identifies the module, from its name (`name_dropouts`). A forward pass calls it once. preset_rng: a generator
    set before the call, for callers that cannot pass one. rng_tensors: the generator in compiled code, see `regions`.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.site: int | None = None
        self.preset_rng: DropoutRng | None = None
        self.rng_tensors: RngTensors | None = None

    def rng(self, rng: DropoutRng | None) -> DropoutRng | None:
        """Returns the generator of this site, for other forms of dropout; None if nothing is dropped."""
        if rng is None or self.rate == 0.0:
            return None
        if self.site is None:
            raise ValueError("a Dropout without a name would drop as another one does: call name_dropouts on the model")
        return rng.at(self.site)

    def set_rng_tensors(self, rng: DropoutRng | None) -> list[Tensor]:
        """Stores this generator, or the preset one, for compiled code. Returns the tensors whose first dimension counts
        tokens."""
        site_rng = self.rng(rng if self.preset_rng is None else self.preset_rng)
        self.rng_tensors = None if site_rng is None else site_rng.rng_tensors()
        return [] if self.rng_tensors is None or self.rng_tensors.keys_T is None else [self.rng_tensors.keys_T]

    def forward(self, x_TH: Tensor, rng: DropoutRng | None) -> Tensor:
        if self.rng_tensors is not None:
            return self.rng_tensors.drop(x_TH, self.rate)
        site_rng = self.rng(rng if self.preset_rng is None else self.preset_rng)
        return x_TH if site_rng is None else site_rng.drop(x_TH, self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def name_dropouts(module: nn.Module, prefix: str = "") -> None:
    """Sets the site of every `Dropout` in a module from its name. prefix: prepended to the names, for a part of a
    larger model."""
    for name, part in module.named_modules():
        if isinstance(part, Dropout):
            part.site = zlib.crc32(f"{prefix}{name}".encode())
