"""Where a run is planned: a device that is here, whose rate is measured, or a published one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmtool.costs.memory import available_bytes
from lmtool.costs.rate import STEP_SHARE, measure_bandwidth, measure_rate
from lmtool.costs.timing import StepWork, seconds_here, seconds_on
from lmtool.reporting.text import flops, percent
from lmtool.schema.run import RunConfig
from lmtool.training.devices import DEVICES, UTILISATION, Device, device_of
from lmtool.training.precision import Precision, choose_device, choose_precision

Times = Callable[[StepWork], tuple[float, float] | None]


@dataclass(frozen=True)
class Place:
    """name: on the screen. cuda: a GPU. room_bytes: memory there is; None where nobody says. seconds: of a step, from
    the least to the most; None where no rate is known. rate: how it was found, in words. here: the device is."""

    name: str
    precision: Precision
    cuda: bool
    room_bytes: int | None
    seconds: Times
    rate: str
    here: bool = True


def here(config: RunConfig, precision: Precision) -> Place:
    """A device of this machine. Measures it for a third of a second at most."""
    model, device = config.model, str(precision.device)
    rate = measure_rate(model.hidden_size, model.inner_size, precision.name, device) / STEP_SHARE
    bandwidth = measure_bandwidth(device)

    def seconds(work: StepWork) -> tuple[float, float]:
        each = seconds_here(work, rate, bandwidth, precision.device.type == "cuda")
        return each, each

    words = f"estimated from {flops(rate)}/s of products of its widths, measured here"
    return Place(device, precision, precision.device.type == "cuda", available_bytes(precision.device), seconds, words)


def place_of(config: RunConfig, published: str | None) -> Place:
    """Where a plan is made. published: a device of the table, or None for the one that `config` names. A CUDA device
    that is not here is planned without a rate."""
    if published is not None:
        return _published(published, config.precision)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        precision = Precision(_precision(config.precision, True), torch.device("cuda"), "planned")
        rate = f"no CUDA device is here; name one: device={', '.join(name for name, of in DEVICES.items() if of.cuda)}"
        return Place(f"{config.device}, which is not here", precision, True, None, lambda work: None, rate, False)
    return here(config, choose_precision(config.precision, choose_device(config.device)))


def _published(name: str, asked: str) -> Place:
    device: Device = device_of(name)
    precision = Precision(
        _precision(asked, device.bf16 is not None), torch.device("cuda" if device.cuda else "cpu"), "planned"
    )
    rate = device.rate(precision.name)
    low, high = (percent(share) for share in UTILISATION)
    words = f"estimated, at {low} to {high} of the published {flops(rate)}/s in {precision.name}"
    return Place(
        f"{name}, as published", precision, device.cuda, round(device.memory),
        lambda work: seconds_on(work, device, precision.name), words, False,
    )  # fmt: skip


def _precision(asked: str, has_bf16: bool) -> str:
    return asked if asked != "auto" else "bf16" if has_bf16 else "fp32"
