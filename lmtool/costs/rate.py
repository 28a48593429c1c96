"""How fast a machine is: measured here, or published; and how long a step takes on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from lmtool.costs.memory_of_run import available_bytes
from lmtool.reporting.text import flops, percent
from lmtool.resolver.schema.run import RunConfig
from lmtool.training.devices import DEVICES, NETWORK, NODE, UTILISATION, Device, device_of
from lmtool.training.precision import Precision, choose_device, choose_precision

# How fast this machine is at the shapes of a model, measured once a process for each.


# What a whole step (attention, norms, optimizer, data) keeps of the rate of its largest matrix products. The plan is
# an estimate; the bar corrects it from the first measured steps.
STEP_SHARE = 0.7

# Runs at most: tiny widths are measured well in less than the time.
MAX_RUNS = 50

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# Bytes that are copied to measure how fast memory is: more than caches hold.
_COPIED = 1 << 25


@cache
def measure_bandwidth(device: str = "cpu", runs: int = 5) -> float:
    """Bytes a second that this device reads and writes, from a few copies of 32 MiB: 10 to 50 ms."""
    place = torch.device(device)
    source = torch.ones(_COPIED // 4, device=place)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        target.copy_(source)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - started)
    return 2 * _COPIED / min(seconds)


@cache
def measure_rate(
    hidden_size: int, inner_size: int, precision: str = "fp32", device: str = "cpu", seconds: float = 0.3
) -> float:
    """Training FLOP/s to expect of a model of these widths on this device, in `seconds` or MAX_RUNS runs.
    inner_size: inside a layer.

    Forward and backward of one feed-forward part on 512 tokens under autocast, which small widths cannot run at the
    speed of a large square product; times STEP_SHARE. precision: fp32, bf16 or fp16.
    """
    tokens = 512
    # Beyond these widths a machine is no faster, and a product may not fit.
    hidden_size, inner_size = min(hidden_size, 4096), min(inner_size, 16384)
    with torch.device(device):
        part = nn.Sequential(nn.Linear(hidden_size, inner_size), nn.GELU(), nn.Linear(inner_size, hidden_size))
        x_TH = torch.full((tokens, hidden_size), 0.01, requires_grad=True)

    def once() -> None:
        with torch.autocast(torch.device(device).type, _TYPES.get(precision), enabled=precision in _TYPES):
            out_TH = part(x_TH)
        out_TH.float().sum().backward()

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    once()
    synchronize()
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds and runs < MAX_RUNS or runs == 0:
        once()
        synchronize()
        runs += 1
    return STEP_SHARE * 6 * 2 * hidden_size * inner_size * tokens * runs / elapsed


def product_rate(precision: str = "fp32", device: str = "cpu", seconds: float = 0.3) -> float:
    """FLOP/s of large square matrix products on this device in `seconds`: what it multiplies at most. precision: fp32,
    bf16 or fp16."""
    place, kind = torch.device(device), _TYPES.get(precision, torch.float32)
    size = 1024 if place.type == "cpu" else 8192
    left, right = (torch.full((size, size), 0.01, dtype=kind, device=place) for _ in range(2))

    def multiply(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            left @ right
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - started

    multiply(2)
    once = multiply(1)
    # The best of several turns: whatever else the machine does can only slow one down.
    turns = max(1, min(MAX_RUNS, round(seconds / once / 4)))
    return 2 * size**3 * turns / min(multiply(turns) for _ in range(4))


# How long a step takes: its products, the values that it moves, the optimizer, the calls, and what crosses devices.


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


# Where a run is planned: a device that is here, whose rate is measured, or a published one.


Times = Callable[[StepWork], tuple[float, float] | None]


@dataclass(frozen=True)
class PlannedDevice:
    """name: on the screen. cuda: a GPU. room_bytes: memory there is; None where nobody says. seconds: of a step, from
    the least to the most; None where no rate is known. rate: how it was found, in words. here: the device is."""

    name: str
    precision: Precision
    cuda: bool
    room_bytes: int | None
    seconds: Times
    rate: str
    here: bool = True


def here(config: RunConfig, precision: Precision) -> PlannedDevice:
    """A device of this machine. Measures it for a third of a second at most."""
    model, device = config.model, str(precision.device)
    rate = measure_rate(model.hidden_size, model.inner_size, precision.name, device) / STEP_SHARE
    bandwidth = measure_bandwidth(device)

    def seconds(work: StepWork) -> tuple[float, float]:
        each = seconds_here(work, rate, bandwidth, precision.device.type == "cuda")
        return each, each

    words = f"estimated from {flops(rate)}/s of products of its widths, measured here"
    return PlannedDevice(
        device, precision, precision.device.type == "cuda", available_bytes(precision.device), seconds, words
    )


def place_of(config: RunConfig, published: str | None) -> PlannedDevice:
    """Where a plan is made. published: a device of the table, or None for the one that `config` names. A CUDA device
    that is not here is planned without a rate."""
    if published is not None:
        return _published(published, config.precision)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        precision = Precision(_precision(config.precision, True), torch.device("cuda"), "planned")
        rate = f"no CUDA device is here; name one: device={', '.join(name for name, of in DEVICES.items() if of.cuda)}"
        return PlannedDevice(
            f"{config.device}, which is not here", precision, True, None, lambda work: None, rate, False
        )
    return here(config, choose_precision(config.precision, choose_device(config.device)))


def _published(name: str, asked: str) -> PlannedDevice:
    device: Device = device_of(name)
    precision = Precision(
        _precision(asked, device.bf16 is not None), torch.device("cuda" if device.cuda else "cpu"), "planned"
    )
    rate = device.rate(precision.name)
    low, high = (percent(share) for share in UTILISATION)
    words = f"estimated, at {low} to {high} of the published {flops(rate)}/s in {precision.name}"
    return PlannedDevice(
        f"{name}, as published", precision, device.cuda, round(device.memory),
        lambda work: seconds_on(work, device, precision.name), words, False,
    )  # fmt: skip


def _precision(asked: str, has_bf16: bool) -> str:
    return asked if asked != "auto" else "bf16" if has_bf16 else "fp32"
