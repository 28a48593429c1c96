"""Pauses a training loop between steps, times them, and measures the memory of the process."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}


def peak_bytes(device: str) -> int:
    """Returns the peak resident set of this process (`ru_maxrss` starts at the parent's size on Linux); on CUDA, the
    peak of allocated memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Waits:
    """Counts how often the host waits for CUDA, by the warnings of torch's synchronization debugging."""

    def __init__(self) -> None:
        self.count = 0
        self.original_showwarning = warnings.showwarning

    def start(self) -> None:
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        warnings.showwarning = self.show
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> int:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self.original_showwarning
        return self.count

    def show(self, message: Warning | str, *rest: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.count += 1
        else:
            self.original_showwarning(message, *rest)


def compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has built in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0


class Gate:
    """Pauses a training loop until a command says how many steps to run, and times them."""

    def __init__(self, commands: TextIO, answers: TextIO, device: str):
        self.commands, self.answers, self.device = commands, answers, device
        self.steps_left, self.started, self.graphs = 0, 0.0, 0
        self.turn: dict[str, Any] | None = None
        self.waits: Waits | None = None
        self.options: dict[str, Any] = {}  # of the variant whose turn it is, where variants share a process

    def say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.answers, flush=True)

    def open(self) -> bool:
        """Waits, before each step, for a command if none is left to run. Returns False at the end of the commands."""
        if self.steps_left == 0:
            if self.turn is not None:
                self.say(self.close_turn(self.turn))
            line = self.commands.readline()
            if not line.strip():
                return False
            command = json.loads(line)
            self.steps_left, self.options = command["steps"], command.get("options", {})
            self.turn, self.graphs, self.started = {"steps": self.steps_left}, compiled_graphs(), self.now()
            if command.get("count") and self.device == "cuda":
                self.waits = Waits()
                self.waits.start()
        self.steps_left -= 1
        return True

    def close_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Returns the finished turn with its measurements."""
        waits = {} if self.waits is None else {"waits": self.waits.stop()}
        self.waits = None
        seconds, graphs = self.now() - self.started, compiled_graphs() - self.graphs
        return {**turn, **waits, "seconds": seconds, "graphs": graphs, "peak_bytes": peak_bytes(self.device)}

    def now(self) -> float:
        """Returns the time at which the device has finished all work."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def count(self, **amounts: float) -> None:
        """Adds the amounts of a step: real `tokens`, `examples`, and `slots`, the positions including padding."""
        assert self.turn is not None
        for name, amount in amounts.items():
            self.turn[name] = self.turn.get(name, 0) + amount


def products(precision: str, device: str) -> Any:
    """Returns a function that multiplies two square matrices, and its FLOPs."""
    kind, size = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision], PRODUCT_SIZE[device]
    matrix = torch.full((size, size), 0.01, dtype=kind, device=device)
    out = torch.empty_like(matrix)
    return lambda: torch.mm(matrix, matrix, out=out), 2 * size**3


def product_rate(precision: str, device: str, seconds: float = 0.5) -> float:
    """Returns the GFLOP/s of products of square matrices."""
    multiply, flops = products(precision, device)
    for _ in range(3):
        multiply()
    clock = Gate(sys.stdin, sys.stdout, device)
    runs, started = 0, clock.now()
    while runs == 0 or time.perf_counter() - started < seconds:
        for _ in range(10):
            multiply()
        runs += 10
        clock.now()
    return runs * flops / (time.perf_counter() - started) / 1e9


def run_products(folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Multiplies matrices until the gate closes, to measure the current speed of the machine."""
    multiply, flops = products(settings["precision"], settings["device"])
    gate.say({"ready": "products", "imports_bytes": peak_bytes("cpu")})
    while gate.open():
        multiply()
        gate.count(flops=flops)
