"""Dropout that belongs to the token, not to the batch.

On a CPU whether an activation is dropped is a pure function of (seed, step, example, part, position, site, channel),
so a step's gradient does not depend on how its examples were packed or split into micro-batches, and nothing has to
be restored on resume. It is also the fast way: 0.6 ms against 2.6 ms of F.dropout, forward and backward of
(2048, 256) in fp32 on one thread of an AVX-512 core. On CUDA, where each of its integer operations would be a kernel,
dropout is torch's own, from the device's generator seeded once for each micro-batch.

Shape letters: T tokens, N documents, H channels, R rows, A heads, L queries, S keys.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.streams import key
from lmtool.types import Packed


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER = _signed(0xD6E8FEB86659FD93)
# 16 bits decide one channel: a rate is met to within 1/131072.
_LEVELS = 1 << 16
_LANES = 4
_BLOCK = 1 << 17


def mix(values: Tensor) -> Tensor:
    """A hash of contiguous int64 tensors of any shape, in place: two rounds of xor-shift and multiply (multiplier and
    shifts by degski, "Invertible integer hash functions", 2018), then a shift. Torch shifts with the sign, which costs
    a xor the top bit: the rounds can spare it, but the last step adds instead, since all of its bits are used."""
    # Blocks that stay in the cache: 2**18 numbers take 2.0 ms in one piece and 0.6 ms so.
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
    """(T,) int64 on the device of the batch: a hash of (seed, step, example, part, position) of each token. outputs:
    for the decoder's side of an encoder-decoder, whose tokens have keys of their own."""
    device = packed.tokens.device
    keys_N = mix(examples_N.to(device, torch.int64) * _GOLDEN + _signed(key(seed, "dropout", step)))
    keys_N = mix(parts_N.to(device, torch.int64) * _GOLDEN + keys_N)
    if outputs:
        keys_N = mix(keys_N)
    return mix(packed.positions * _GOLDEN + keys_N[packed.documents])


def lane_constants(site: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Hashed int64 constants of a site, one for four channels each. A row of the last dimension starts at the same
    number whatever its length, so padding the channels does not change them."""
    rows = torch.arange(torch.Size(shape[:-1]).numel(), device=device)[:, None] << 24
    numbers = (rows + torch.arange(shape[-1], device=device) + (site << 44)).view(shape)
    return mix(numbers * _GOLDEN)


def keep(keys: Tensor, constants: Tensor, channels: int, rate: float) -> Tensor:
    """int16, 0 for dropped channels and 1 for kept ones: keys (..., 1) and constants (..., lanes) give
    (..., channels)."""
    bits = mix(keys + constants).view(torch.int16)[..., :channels].contiguous()
    # In place, since a comparison into bools takes 14 times as long.
    return bits.ge_(round(rate * _LEVELS) - _LEVELS // 2)


def factors(kept: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """What an activation of `dtype` is multiplied with: 0 where `kept` (integers) is 0, and 1/(1-rate) where it is 1.
    May be computed in the memory of `kept`."""
    scale = _LEVELS / (_LEVELS - round(rate * _LEVELS))
    if dtype in (torch.bfloat16, torch.float16):
        # The scale's bits times 0 or 1, as integers: a conversion of the choices takes five times as long.
        pattern = int(torch.tensor(scale, dtype=dtype).view(torch.int16))
        return kept.to(torch.int16).mul_(pattern).view(dtype)
    return kept.to(dtype).mul_(scale)


class _Keyed(torch.autograd.Function):
    """x * factors(...). The choices are stored for the backward, a byte each: to draw them again takes three to five
    times as long as to read them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, constants: Tensor, rate: float) -> Tensor:
        kept = keep(keys, constants, x.shape[-1], rate)
        ctx.save_for_backward(kept.to(torch.uint8))
        ctx.rate = rate
        return factors(kept, rate, x.dtype).mul_(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (kept,) = ctx.saved_tensors
        return factors(kept, ctx.rate, gradient.dtype).mul_(gradient), None, None, None


class Draws(Protocol):
    """The randomness of one forward. Sites are counted in the order of the calls, so each call draws anew."""

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        """Dropout of the hidden states of the tokens the draws were made for."""

    def rows(self, index_N: Tensor) -> Draws:
        """The draws of some of the tokens, for a head that reads only those."""

    def for_outputs(self) -> Draws:
        """The draws of the tokens that the decoder of an encoder-decoder reads."""


def draws_of(draws: Draws | None, read_M: Tensor | None) -> Draws | None:
    """The draws of the tokens that are read further on; all of them where None."""
    return draws if draws is None or read_M is None else draws.rows(read_M)


class TokenDraws:
    """Keyed draws for the tokens of a batch. keys_T: (T,) int64, see `token_keys`. output_keys_T: those of the
    batch's outputs, where it has them."""

    def __init__(self, keys_T: Tensor, sites: itertools.count[int] | None = None, output_keys_T: Tensor | None = None):
        self.keys_T = keys_T
        self._output_keys_T = output_keys_T
        self._sites = itertools.count() if sites is None else sites

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        lanes = -(-x_TH.shape[-1] // _LANES)
        constants = lane_constants(next(self._sites), (lanes,), x_TH.device)
        return _Keyed.apply(x_TH, self.keys_T[:, None], constants, rate)

    def next_site(self) -> int:
        """Take a site for attention weights: all tiles of a call share it."""
        return next(self._sites)

    def drop_weights(self, weights_RALS: Tensor, query_RL: Tensor, site: int, rate: float) -> Tensor:
        """Dropout of attention weights. query_RL: flat index of each query token. A weight's draw depends on the
        query token, the head and the number of the key in its document, not on the tile."""
        lanes = -(-weights_RALS.shape[-1] // _LANES)
        constants = lane_constants(site, (weights_RALS.shape[1], 1, lanes), weights_RALS.device)
        return _Keyed.apply(weights_RALS, self.keys_T[query_RL][:, None, :, None], constants, rate)

    def rows(self, index_N: Tensor) -> TokenDraws:
        return TokenDraws(self.keys_T[index_N], self._sites)

    def for_outputs(self) -> TokenDraws:
        if self._output_keys_T is None:
            raise ValueError("these draws were made without the keys of the outputs")
        return TokenDraws(self._output_keys_T, self._sites)


class DeviceDraws:
    """Torch's own dropout from the default generator of a device, seeded here: no other state is touched."""

    def __init__(self, seed: int, device: torch.device):
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed & (2**63 - 1))
        else:
            torch.default_generator.manual_seed(seed & (2**63 - 1))

    def drop(self, x_TH: Tensor, rate: float) -> Tensor:
        return F.dropout(x_TH, rate)

    def rows(self, index_N: Tensor) -> DeviceDraws:
        return self

    def for_outputs(self) -> DeviceDraws:
        return self


class Dropout(nn.Module):
    """Drops `rate` of the channels where it is given draws; without them (evaluation) it passes its input on."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x_TH: Tensor, draws: Draws | None) -> Tensor:
        if draws is None or self.rate == 0.0:
            return x_TH
        return draws.drop(x_TH, self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
