"""Random choices as pure functions of (seed, stream, epoch, example, draw).

Nothing here has a state, so the number of workers, the order of calls and the size of micro-batches change nothing, and
resuming has no generator to restore. The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014): an example's draws are the outputs of the SplitMix64 generator whose state is the example's
key. Known-answer tests freeze the values; changing them would change every run.

Shape letters: N examples, M single draws.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

# A stream's place in this tuple enters its keys: append, never reorder.
STREAMS = ("init", "order", "corrupt", "sample", "dropout", "interchange")

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
# Chosen by a chi-squared test that every item is equally likely at every position: of 20 items, four rounds fail
# (chi2/df 1.23) and six pass; of very few items, six still fail (n=5: 4 sigma) and twelve pass.
_ROUNDS, _ROUNDS_SMALL, _SMALL = 6, 12, 4096


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix(values: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer: a bijection of uint64, any shape."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def key(seed: int, stream: str, *counters: int) -> int:
    """Returns a 64-bit key of a named stream and any counters, as an int in [0, 2**64)."""
    value = _mix_int((seed + _GOLDEN) & _MASK)
    for counter in (STREAMS.index(stream), *counters):
        value = _mix_int(((value ^ _mix_int((counter + _GOLDEN) & _MASK)) + _GOLDEN) & _MASK)
    return value


def keys(seed: int, stream: str, epoch: int, examples: np.ndarray) -> np.ndarray:
    """Returns (N,) uint64: `key(seed, stream, epoch, example)` of each example."""
    base = np.uint64(key(seed, stream, epoch))
    golden = np.uint64(_GOLDEN)
    return mix((base ^ mix(_unsigned(examples) + golden)) + golden)


def bits(seed: int, stream: str, epoch: int, examples: np.ndarray, count: int, first_draw: int = 0) -> np.ndarray:
    """Returns (N, count) uint64: `count` draws of each example, from `first_draw` on."""
    counters = np.arange(first_draw + 1, first_draw + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(keys(seed, stream, epoch, examples)[:, None] + counters[None, :])


def bits_at(seed: int, stream: str, epoch: int, examples: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Returns (M,) uint64: draw `draw[m]` of example `examples[m]`; equal to the entries of `bits`."""
    counters = (_unsigned(draw) + np.uint64(1)) * np.uint64(_GOLDEN)
    return mix(keys(seed, stream, epoch, examples) + counters)


def uniform(seed: int, stream: str, epoch: int, examples: np.ndarray, count: int, first_draw: int = 0) -> np.ndarray:
    """Returns (N, count) float64 in [0, 1), 53 bits each."""
    return _to_unit(bits(seed, stream, epoch, examples, count, first_draw))


def uniform_at(seed: int, stream: str, epoch: int, examples: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Returns (M,) float64 in [0, 1): a pure function of each (example, draw)."""
    return _to_unit(bits_at(seed, stream, epoch, examples, draw))


def _unsigned(values: np.ndarray) -> np.ndarray:
    return np.atleast_1d(np.asarray(values)).astype(np.int64, copy=False).view(np.uint64)


def _to_unit(values: np.ndarray) -> np.ndarray:
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Permutation:
    """A random permutation of range(size), computed instead of stored.

    A Feistel network over the smallest rows x columns grid that holds `size` (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002): each round adds a hash of one coordinate to the other. Values outside the range
    are mapped again (cycle walking), so the result is a bijection of range(size).
    """

    def __init__(self, size: int, seed: int, stream: str, epoch: int):
        if size < 0:
            raise ValueError(f"a permutation of {size} items")
        self.size = size
        self._rows = isqrt(max(size - 1, 0)) + 1
        self._columns = -(-size // self._rows) if size else 1
        rounds = _ROUNDS_SMALL if size < _SMALL else _ROUNDS
        self._round_keys = [np.uint64(key(seed, stream, epoch, size, number)) for number in range(rounds)]

    def __len__(self) -> int:
        return self.size

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Returns the image of each of `indices` (any shape, in [0, size)): int64 of the same shape."""
        indices = np.asarray(indices, dtype=np.int64)
        values = indices.ravel().view(np.uint64)
        if values.size and int(values.max()) >= self.size:
            raise IndexError(f"an index outside [0, {self.size})")
        values = self._once(values)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.view(np.int64).reshape(indices.shape)

    def _once(self, values: np.ndarray) -> np.ndarray:
        row, column = np.divmod(values, np.uint64(self._columns))
        for number, round_key in enumerate(self._round_keys):
            if number % 2:
                column = (column + self._hash(row, round_key) % np.uint64(self._columns)) % np.uint64(self._columns)
            else:
                row = (row + self._hash(column, round_key) % np.uint64(self._rows)) % np.uint64(self._rows)
        return row * np.uint64(self._columns) + column

    @staticmethod
    def _hash(values: np.ndarray, round_key: np.uint64) -> np.ndarray:
        return mix(values * np.uint64(_GOLDEN) + round_key)
