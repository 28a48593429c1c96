"""The speed of a device, measured on this machine or published by its maker, and the time of a training step on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from lmtool.costs.attention import VALUE_BYTES
from lmtool.costs.memory_of_run import available_bytes
from lmtool.reporting.text import flops, percent
from lmtool.resolver.commands import RunConfig
from lmtool.training.devices import DEVICES, NETWORK, NODE, UTILIZATION, Device, device_of
from lmtool.training.precision import Precision, select_device, select_precision

# The FLOP/s of a complete step as a fraction of the FLOP/s of its largest matrix products: a rough estimate, which the
# progress bar replaces after the first measured steps.
STEP_FRACTION = 0.7

# Maximum number of repetitions of a measurement: small widths are measured well enough before the time is used up.
MAX_RUNS = 50

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Number of bytes that are copied to measure memory bandwidth: more than fit into a cache. The second-level cache of an
# H100 has 50 MB, that of a B200 126 MB.
_COPIED_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}


@cache
def measure_bandwidth(device: str = "cpu", runs: int = 5) -> float:
    """Measures the bytes per second that a device reads and writes, with a few copies (10 to 50 ms on a CPU)."""
    target_device = torch.device(device)
    size = _COPIED_BYTES[target_device.type]
    source = torch.ones(size // 4, device=target_device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        target.copy_(source)
        if target_device.type == "cuda":
            torch.cuda.synchronize(target_device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


@cache
def measure_rate(
    hidden_size: int, inner_size: int, precision: str = "fp32", device: str = "cpu", seconds: float = 0.3
) -> float:
    """Estimates the FLOP/s at which a model trains on a device: the measured rate of forward and backward of one
    feed-forward block on 512 tokens, times STEP_FRACTION. Large square products would be faster than the products of a
    small model. seconds: the duration of the measurement, unless MAX_RUNS repetitions take less time."""
    tokens = 512
    # Larger widths are not faster, and a product might not fit into memory.
    hidden_size, inner_size = min(hidden_size, 4096), min(inner_size, 16384)
    with torch.device(device):
        block = nn.Sequential(nn.Linear(hidden_size, inner_size), nn.GELU(), nn.Linear(inner_size, hidden_size))
        x_TH = torch.full((tokens, hidden_size), 0.01, requires_grad=True)

    def run_once() -> None:
        with torch.autocast(torch.device(device).type, _TYPES.get(precision), enabled=precision in _TYPES):
            out_TH = block(x_TH)
        out_TH.float().sum().backward()

    def synchronize() -> None:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    run_once()
    synchronize()
    runs, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds and runs < MAX_RUNS or runs == 0:
        run_once()
        synchronize()
        runs += 1
    # Two matrices, two FLOPs per element, three passes (forward, and two in the backward).
    return STEP_FRACTION * 6 * 2 * hidden_size * inner_size * tokens * runs / elapsed


def product_rate(precision: str = "fp32", device: str = "cpu", seconds: float = 0.3) -> float:
    """Measures the peak FLOP/s of a device in about `seconds`, with large square matrix products."""
    target_device, dtype = torch.device(device), _TYPES.get(precision, torch.float32)
    size = 1024 if target_device.type == "cpu" else 8192
    left, right = (torch.full((size, size), 0.01, dtype=dtype, device=target_device) for _ in range(2))

    def multiply(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            left @ right
        if target_device.type == "cuda":
            torch.cuda.synchronize(target_device)
        return time.perf_counter() - start

    multiply(2)
    seconds_per_product = multiply(1)
    # The best of several rounds counts: other load on the machine can only slow a round down.
    products = max(1, min(MAX_RUNS, round(seconds / seconds_per_product / 4)))
    return 2 * size**3 * products / min(multiply(products) for _ in range(4))


# How often a saved activation passes through memory: it is written, read by the next operation and read by the backward
# pass, and its gradient likewise.
_PASSES = 6
# Bytes per parameter that AdamW reads and writes in a step: weight, gradient and two moments.
_OPTIMIZER_BYTES = 28
# Kernel launches per layer, forward and backward, and the seconds that the host needs for each: 5 us in a captured CUDA
# graph, 20 us launched one by one (about 1,500 launches of twelve layers take 20 to 30 ms).
_CALLS, _CALL_SECONDS = 125, (5e-6, 20e-6)


@dataclass(frozen=True)
class StepWork:
    """The work of one device in a training step. On a CPU this is the work of all processes, because they share its
    cores.

    Attributes:
        flops: The FLOPs of its matrix products.
        activation_bytes: The bytes that its forward passes save for the backward.
        layers: The number of layers that are run, summed over its forward passes.
        devices: The number of devices among which a step is split equally.
        sharded: Whether the weights are divided among the devices as well (fsdp).
        forwards: The number of its forward passes in the step.
    """

    flops: float
    activation_bytes: float
    trainable_parameters: float
    layers: float
    devices: int = 1
    sharded: bool = False
    forwards: float = 1.0

    @property
    def communicated_bytes(self) -> float:
        """The bytes that a device sends in a step.

        Summing gradients over N devices in a ring sends 2 (N-1)/N of the gradients. With sharded weights, every forward
        pass sends (N-1)/N of the parameters three times: the weights for the forward and for the backward, and the
        gradients.
        """
        copies = 3 * self.forwards if self.sharded else 2
        return copies * VALUE_BYTES * self.trainable_parameters * (self.devices - 1) / self.devices


def seconds_measured(work: StepWork, rate: float, bandwidth: float, cuda: bool = False) -> float:
    """Estimates the seconds of a step on this machine from measured rates: FLOP/s of matrix products at the model's
    widths, and bytes per second that are read and written. The time of kernel calls adds to the computation of a CPU,
    and overlaps with that of a GPU."""
    trainable_parameters = work.trainable_parameters / (work.devices if work.sharded else 1)
    moved_bytes = _PASSES * work.activation_bytes + _OPTIMIZER_BYTES * trainable_parameters
    computation = work.flops / rate + moved_bytes / bandwidth
    calls = work.layers * _CALLS * _CALL_SECONDS[1]
    return max(computation, calls) if cuda else computation + calls


def seconds_on(work: StepWork, device: Device, precision: str) -> tuple[float, float]:
    """Estimates the minimum and maximum seconds of a step on a device whose rates are published.

    Matrix products run at a fraction (UTILIZATION) of the published rate, and take at least as long as the kernel
    calls. The fraction accounts for all other operations except the optimizer, whose time is added. Communication
    overlaps with the products fully in the minimum, and not at all in the maximum.
    """
    trainable_parameters = work.trainable_parameters / (work.devices if work.sharded else 1)
    optimizer = _OPTIMIZER_BYTES * trainable_parameters / device.bandwidth
    communication = work.communicated_bytes / (device.link if work.devices <= NODE else min(device.link, NETWORK))
    calls = [work.layers * _CALLS * seconds for seconds in _CALL_SECONDS]
    low, high = (
        max(work.flops / (utilization * device.rate(precision)), floor) + optimizer
        for utilization, floor in zip(reversed(UTILIZATION), calls, strict=True)
    )
    return max(low, communication), high + communication


StepTimeEstimator = Callable[[StepWork], tuple[float, float] | None]
"""Estimates the minimum and maximum seconds of a step; None if no rate is known."""


@dataclass(frozen=True)
class PlannedDevice:
    """The device that a run is planned for: one of this machine, whose rate is measured, or one with published rates.

    Attributes:
        precision: The number format of the run on this device.
        capacity_bytes: The memory that is available on it; None if this is unknown.
        estimate_seconds: Estimates the seconds of a step.
        time_source: How the seconds are estimated, as text for the screen.
        this_machine: Whether the device is one of this machine.
    """

    name: str
    precision: Precision
    cuda: bool
    capacity_bytes: int | None
    estimate_seconds: StepTimeEstimator
    time_source: str
    this_machine: bool = True


def this_machine(hidden_size: int, inner_size: int, precision: Precision) -> PlannedDevice:
    """Returns the device of this machine that a run uses. Measures its rate on products of a model's sizes, for at most
    a third of a second."""
    device = str(precision.device)
    rate = measure_rate(hidden_size, inner_size, precision.name, device) / STEP_FRACTION
    bandwidth = measure_bandwidth(device)

    def seconds(work: StepWork) -> tuple[float, float]:
        estimate = seconds_measured(work, rate, bandwidth, precision.device.type == "cuda")
        return estimate, estimate

    source = f"estimated from {flops(rate)}/s of matrix products, measured here"
    return PlannedDevice(
        device, precision, precision.device.type == "cuda", available_bytes(precision.device), seconds, source
    )


def planned_device(config: RunConfig, published: str | None) -> PlannedDevice:
    """Returns the device to plan a run for. config: the run's configuration. published: the name of a device with
    published rates; None means the device in the configuration. No rate is known if this is a CUDA device and this
    machine has none."""
    if published is not None:
        return _published_device(published, config.precision)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        precision = Precision(_precision(config.precision, True), torch.device("cuda"), "planned")
        names = ", ".join(name for name, device in DEVICES.items() if device.cuda)
        source = f"this machine has no CUDA device; set a published one: device={names}"
        return PlannedDevice(
            f"{config.device}, not on this machine", precision, True, None, lambda work: None, source, False
        )
    precision = select_precision(config.precision, select_device(config.device))
    return this_machine(config.model.hidden_size, config.model.inner_size, precision)


def _published_device(name: str, precision_name: str) -> PlannedDevice:
    device: Device = device_of(name)
    precision = Precision(
        _precision(precision_name, device.bf16 is not None), torch.device("cuda" if device.cuda else "cpu"), "planned"
    )
    rate = device.rate(precision.name)
    low, high = (percent(fraction) for fraction in UTILIZATION)
    source = f"estimated, at {low} to {high} of the published {flops(rate)}/s in {precision.name}"
    return PlannedDevice(
        f"{name}, as published", precision, device.cuda, round(device.memory),
        lambda work: seconds_on(work, device, precision.name), source, False,
    )  # fmt: skip


def _precision(requested: str, has_bf16: bool) -> str:
    return requested if requested != "auto" else "bf16" if has_bf16 else "fp32"
