"""The speed of a device, measured or published, and the time of a step on it."""

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
from lmtool.training.precision import Precision, select_device, select_precision

# The rate of a complete step as a fraction of the rate of its largest matrix products. The plan is an estimate; the
# progress bar corrects it from the first measured steps.
STEP_SHARE = 0.7

# Maximum runs: small widths are measured well in less than the time.
MAX_RUNS = 50

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


# Bytes copied to measure memory bandwidth: more than caches hold. The second level of an H100 is 50 MB, of a B200 126
# MB.
_COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}


@cache
def measure_bandwidth(device: str = "cpu", runs: int = 5) -> float:
    """Bytes per second that this device reads and writes, from a few copies, of 32 MiB on a CPU: 10 to 50 ms."""
    target_device = torch.device(device)
    size = _COPIED[target_device.type]
    source = torch.ones(size // 4, device=target_device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        target.copy_(source)
        if target_device.type == "cuda":
            torch.cuda.synchronize(target_device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / min(seconds)


@cache
def measure_rate(
    hidden_size: int, inner_size: int, precision: str = "fp32", device: str = "cpu", seconds: float = 0.3
) -> float:
    """Expected training FLOP/s of a model of these widths on this device, measured in `seconds` or MAX_RUNS runs.
    inner_size: inside a layer.

    Forward and backward of one feed-forward part on 512 tokens under autocast, since small widths are slower than large
    square products; times STEP_SHARE. precision: fp32, bf16 or fp16.
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
    """FLOP/s of large square matrix products on this device in `seconds`: its peak. precision: fp32, bf16 or fp16."""
    target_device, kind = torch.device(device), _TYPES.get(precision, torch.float32)
    size = 1024 if target_device.type == "cpu" else 8192
    left, right = (torch.full((size, size), 0.01, dtype=kind, device=target_device) for _ in range(2))

    def multiply(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            left @ right
        if target_device.type == "cuda":
            torch.cuda.synchronize(target_device)
        return time.perf_counter() - started

    multiply(2)
    once = multiply(1)
    # The best of several runs: other load on the machine can only slow one down.
    turns = max(1, min(MAX_RUNS, round(seconds / once / 4)))
    return 2 * size**3 * turns / min(multiply(turns) for _ in range(4))


# How often a saved value passes through memory: written, read by the next operation and by the backward, and its
# gradient as often. Bytes per parameter that AdamW reads and writes: weight, gradient, two moments.
_PASSES, _OPTIMIZER_BYTES = 6, 28
# Kernel calls per layer, forward and backward, and seconds of each on the host: about 1,500 in 20 to 30 ms for twelve
# layers if launched eagerly, a few microseconds each if captured.
_CALLS, _CALL_SECONDS = 125, (5e-6, 20e-6)


@dataclass(frozen=True)
class StepWork:
    """The work of a step. flops: of its products. activation_bytes: saved by its forwards. learning: trainable
    parameters. layers: run in all its forwards. devices: that divide the step evenly. sharded: whether the weights are
    divided too (fsdp). forwards: of a device in the step."""

    flops: float
    activation_bytes: float
    learning: float
    layers: float
    devices: int = 1
    sharded: bool = False
    forwards: float = 1.0

    @property
    def communicated_bytes(self) -> float:
        """Bytes that a device sends in a step: gradients in a ring, 2 (N-1)/N of them. If sharded, in every forward the
        weights twice, for the forward and the backward, and a reduction of gradients."""
        times = 3 * self.forwards if self.sharded else 2
        return times * 4 * self.learning * (self.devices - 1) / self.devices


def seconds_measured(work: StepWork, rate: float, bandwidth: float, cuda: bool = False) -> float:
    """Seconds of a step on this machine. rate: FLOP/s of products at the model's widths; bandwidth: bytes per second;
    both measured. Kernel calls add to the computation of a CPU, and overlap with that of a GPU."""
    learning = work.learning / (work.devices if work.sharded else 1)
    moved = _PASSES * work.activation_bytes + _OPTIMIZER_BYTES * learning
    computation, calls = work.flops / rate + moved / bandwidth, work.layers * _CALLS * _CALL_SECONDS[1]
    return max(computation, calls) if cuda else computation + calls


def seconds_on(work: StepWork, device: Device, precision: str) -> tuple[float, float]:
    """Minimum and maximum seconds of a step on a published device: products at a fraction of the published rate (which
    includes everything else) and the optimizer, but at least the kernel calls. Communication overlaps with the products
    fully or not at all."""
    learning = work.learning / (work.devices if work.sharded else 1)
    optimizer = _OPTIMIZER_BYTES * learning / device.bandwidth
    communication = work.communicated_bytes / (device.link if work.devices <= NODE else min(device.link, NETWORK))
    calls = [work.layers * _CALLS * seconds for seconds in _CALL_SECONDS]
    low, high = (
        max(work.flops / (utilisation * device.rate(precision)), floor) + optimizer
        for utilisation, floor in zip(reversed(UTILISATION), calls, strict=True)
    )
    return max(low, communication), high + communication


Times = Callable[[StepWork], tuple[float, float] | None]


@dataclass(frozen=True)
class PlannedDevice:
    """The device of a plan: one of this machine, whose rate is measured, or a published one.

    Attributes:
        name: On the screen.
        precision: Its number format.
        cuda: Whether it is a GPU.
        capacity_bytes: Its memory, or None if unknown.
        seconds: Minimum and maximum seconds of a step; None if no rate is known.
        rate: How the rate was determined, as text.
        this_machine: Whether this machine has the device.
    """

    name: str
    precision: Precision
    cuda: bool
    capacity_bytes: int | None
    seconds: Times
    rate: str
    this_machine: bool = True


def this_machine(config: RunConfig, precision: Precision) -> PlannedDevice:
    """A device of this machine. Measures it for at most a third of a second."""
    model, device = config.model, str(precision.device)
    rate = measure_rate(model.hidden_size, model.inner_size, precision.name, device) / STEP_SHARE
    bandwidth = measure_bandwidth(device)

    def seconds(work: StepWork) -> tuple[float, float]:
        each = seconds_measured(work, rate, bandwidth, precision.device.type == "cuda")
        return each, each

    words = f"estimated from {flops(rate)}/s of products of its widths, measured here"
    return PlannedDevice(
        device, precision, precision.device.type == "cuda", available_bytes(precision.device), seconds, words
    )


def planned_device(config: RunConfig, published: str | None) -> PlannedDevice:
    """The device of a plan. published: a device of the table, or None for the one that `config` names. The plan of an
    absent CUDA device has no rate."""
    if published is not None:
        return _published(published, config.precision)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        precision = Precision(_precision(config.precision, True), torch.device("cuda"), "planned")
        names = ", ".join(name for name, device in DEVICES.items() if device.cuda)
        rate = f"this machine has no CUDA device; name one: device={names}"
        return PlannedDevice(
            f"{config.device}, not on this machine", precision, True, None, lambda work: None, rate, False
        )
    return this_machine(config, select_precision(config.precision, select_device(config.device)))


def _published(name: str, precision_name: str) -> PlannedDevice:
    device: Device = device_of(name)
    precision = Precision(
        _precision(precision_name, device.bf16 is not None), torch.device("cuda" if device.cuda else "cpu"), "planned"
    )
    rate = device.rate(precision.name)
    low, high = (percent(share) for share in UTILISATION)
    words = f"estimated, at {low} to {high} of the published {flops(rate)}/s in {precision.name}"
    return PlannedDevice(
        f"{name}, as published", precision, device.cuda, round(device.memory),
        lambda work: seconds_on(work, device, precision.name), words, False,
    )  # fmt: skip


def _precision(requested: str, has_bf16: bool) -> str:
    return requested if requested != "auto" else "bf16" if has_bf16 else "fp32"
