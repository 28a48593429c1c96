"""How fast this machine is at the shapes of a model, measured once a process for each."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

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
