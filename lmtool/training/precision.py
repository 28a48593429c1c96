"""The device and the number format of a run: chosen once, reported, and equal to fp32 up to rounding.

Weights, gradients and optimizer state stay fp32; bf16 and fp16 are those of the matrix products under autocast.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TextIO

import torch
from torch.amp import GradScaler

from lmtool.errors import UserError
from lmtool.system.ranks import rank_info
from lmtool.system.terminal import say

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The number format of a run's matrix products. name: fp32, bf16 or fp16. why: a half-sentence for the screen."""

    name: str
    device: torch.device
    why: str

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrix products."""
        return _TYPES.get(self.name, torch.float32)

    def autocast(self) -> AbstractContextManager[None]:
        """The context of every forward."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> GradScaler | None:
        """fp16 alone needs its gradients scaled away from underflow (Micikevicius et al. 2018)."""
        return GradScaler(self.device.type) if self.name == "fp16" else None


FP32_CPU = Precision("fp32", torch.device("cpu"), "plain")


def select_device(name: str) -> torch.device:
    """auto (CUDA where there is one), cpu, cuda or cuda:N; of several processes on a machine each has its own CUDA
    device. UserError where the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"device={name}: torch {torch.__version__} sees no CUDA device", "device=cpu or device=auto")
    process = rank_info(os.environ)
    if process.size > 1 and device.index is not None:
        raise UserError(
            f"device={name} is one device, and {process.size} processes train together",
            "device=cuda, or device=auto: each takes the device of its local rank",
        )
    device = torch.device("cuda", process.local_rank if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        if process.size > 1:
            raise UserError(
                f"local rank {process.local_rank} has no CUDA device: the last one is cuda:{last}",
                f"devices={last + 1} (or --nproc-per-node={last + 1} of torchrun)",
            )
        raise UserError(f"device={name}: there is no such device, the last is cuda:{last}", f"device=cuda:{last}")
    return device


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 matrices itself. Emulated ones are slower than fp32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def select_precision(name: str, device: torch.device) -> Precision:
    """auto: bf16 where the device multiplies it itself, else fp32. Anything else is taken as asked and stated."""
    native = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else cpu_has_bf16()
    if name == "auto":
        if native:
            return Precision("bf16", device, "the device multiplies bf16 itself")
        return Precision("fp32", device, "the device has no bf16 of its own")
    if name == "bf16" and not native:
        return Precision(name, device, "as asked; the device emulates bf16, fp32 is likely faster")
    if name == "fp16" and device.type == "cpu":
        return Precision(name, device, "as asked; fp16 is very slow on a CPU")
    return Precision(name, device, "as asked")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU, kernels that add in a fixed order (with several threads `index_put` adds atomically otherwise), so
    that a run which resumes is bitwise the uninterrupted one. CUDA promises that for no speed, and is left alone."""
    if device.type != "cpu":
        yield
        return
    # Not torch.use_deterministic_algorithms, which imports the compiler for a setting of its own: `compiled` has that.
    before = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn")
    # A debugging help that would cost a write of every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


# What makes the host wait for the device.


_WAITED = "called a synchronizing CUDA operation"
_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"
# Steps in which kernels are loaded and memory is taken.
_WARM_UP = 2


class StepWaits:
    """Has torch say where a step makes the host wait for a CUDA device, and tells of each line once: queued work hides
    what Python takes, until somebody waits for it. watches: False where there is no such device, or where another
    process tells of it."""

    def __init__(self, watches: bool, log: Callable[[str], None]):
        self._watches, self._log = watches, log
        self._told: set[str] = set()
        self._steps = 0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Around the whole training: filters that change with every step would let old warnings through again."""
        with warnings.catch_warnings():
            if self._watches:
                show = warnings.showwarning
                warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
                warnings.filterwarnings("always", _WAITED, UserWarning)

                def showing(
                    message: Warning | str, category: type[Warning], filename: str, lineno: int,
                    file: TextIO | None = None, line: str | None = None,
                ) -> None:  # fmt: skip
                    if str(message).startswith(_WAITED):
                        self._tell(filename, lineno)
                    else:
                        show(message, category, filename, lineno, file, line)

                warnings.showwarning = showing
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what a step asks of the device, without what it reads."""
        self._steps += 1
        if not self._watches or self._steps <= _WARM_UP:
            yield
            return
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _tell(self, file: str, number: int) -> None:
        """Of the line that torch names or, where that is its own, of the one that called it."""
        if file.startswith(_TORCH):
            callers = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_stack())]
            within = callers[[name.startswith(_TORCH) for name, _ in callers].index(True) :]
            file, number = next((at for at in within if not at[0].startswith(_TORCH)), (file, number))
        line = f"{file}:{number}"
        if line not in self._told:
            self._told.add(line)
            text = f"{line} makes the host wait for the device in a step, which leaves the device idle"
            self._log(f"warning: {text}")
            say(f"warning: {text}", sys.stderr)


# How the C library treats the memory that a training step frees, on a CPU.


# Parameters of glibc's mallopt(3). 32 MiB is the largest mmap threshold it takes.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 2**31 - 1
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 * 2**20


def keep_freed_memory() -> bool:
    """Keep what is freed for the next step instead of giving it back to the system and faulting it in again.

    Once a process, before training on a CPU. It saves 19,000 page faults a step and 17 to 20% of the step's time
    (BERT of 4 layers, width 256, 30522 tokens, 900 tokens a batch, bf16), and the peak stays what it is. Returns
    whether the C library took it: glibc does, others are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES))
