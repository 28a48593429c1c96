"""How long a step takes: its products, the values that it moves, the optimizer, the calls, and what crosses devices."""

from __future__ import annotations

from dataclasses import dataclass

from lmtool.training.devices import NETWORK, NODE, UTILISATION, Device

# Times that a value which the forward keeps passes through memory: written, read by the next operation and by the
# backward, and its gradient as often. Bytes of a parameter that AdamW reads and writes: weight, gradient, two moments.
_PASSES, _OPTIMIZER_BYTES = 6, 28
# Calls of kernels that a layer takes forward and backward, and seconds of each on the host: about 1,500 in 20 to 30 ms
# for twelve layers where they are called one by one, a few microseconds each where they are well prepared.
_CALLS, _CALL_SECONDS = 125, (5e-6, 20e-6)


@dataclass(frozen=True)
class StepWork:
    """A step as a device does it. flops: of its products. kept_bytes: that its forwards keep. learning: parameters that
    learn. layers: that run in it, of all its forwards. devices: that share the step, each with as much of it. sharded:
    whether each has a share of the weights (fsdp). forwards: of a device in the step."""

    flops: float
    kept_bytes: float
    learning: float
    layers: float
    devices: int = 1
    sharded: bool = False
    forwards: float = 1.0

    @property
    def crossing_bytes(self) -> float:
        """What a device sends in a step: gradients in a ring, 2 (N-1)/N of them. Of shares, in every forward, the
        weights twice, there and on the way back, and a reduction of gradients."""
        times = 3 * self.forwards if self.sharded else 2
        return times * 4 * self.learning * (self.devices - 1) / self.devices


def seconds_here(work: StepWork, rate: float, bandwidth: float, cuda: bool = False) -> float:
    """On this machine. rate: FLOP/s of products at the model's widths; bandwidth: bytes a second; both measured. On a
    CPU calls add to what they do; a GPU works while it is called."""
    share = work.learning / (work.devices if work.sharded else 1)
    moved = _PASSES * work.kept_bytes + _OPTIMIZER_BYTES * share
    does, calls = work.flops / rate + moved / bandwidth, work.layers * _CALLS * _CALL_SECONDS[1]
    return max(does, calls) if cuda else does + calls


def seconds_on(work: StepWork, device: Device, precision: str) -> tuple[float, float]:
    """On a published device, from the lowest to the highest: products at a share of the published rate (which has all
    that runs beside them in it) and the optimizer, but no less than the calls of the kernels. What crosses devices is
    hidden behind the products at best, and at worst not at all."""
    share = work.learning / (work.devices if work.sharded else 1)
    optimizer = _OPTIMIZER_BYTES * share / device.bandwidth
    crossing = work.crossing_bytes / (device.link if work.devices <= NODE else min(device.link, NETWORK))
    calls = [work.layers * _CALLS * seconds for seconds in _CALL_SECONDS]
    low, high = (
        max(work.flops / (utilisation * device.rate(precision)), floor) + optimizer
        for utilisation, floor in zip(reversed(UTILISATION), calls, strict=True)
    )
    return max(low, crossing), high + crossing
