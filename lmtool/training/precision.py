"""The device and the number format of a run.

Weights, gradients and optimizer state are fp32; bf16 and fp16 are used for matrix products under autocast.
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
    """The number format of a run's matrix products. name: fp32, bf16 or fp16. why: the reason
    for this format, a half-sentence for the screen."""

    name: str
    device: torch.device
    why: str

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES.get(self.name, torch.float32)

    def autocast(self) -> AbstractContextManager[None]:
        """Returns the context of a forward pass."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> GradScaler | None:
        """Returns the scaler that keeps fp16 gradients from underflow (Micikevicius et al. 2018); None for other
        formats."""
        return GradScaler(self.device.type) if self.name == "fp16" else None


FP32_CPU = Precision("fp32", torch.device("cpu"), "plain")


def select_device(name: str) -> torch.device:
    """Returns the device named auto (CUDA if available), cpu, cuda or cuda:N. With several processes, each uses the
    CUDA device of its local rank. Raises UserError if the device does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(
            f"device={name}: torch {torch.__version__} finds no CUDA device", "set device=cpu or device=auto"
        )
    process = rank_info(os.environ)
    if process.size > 1 and device.index is not None:
        raise UserError(
            f"device={name} names one device for {process.size} processes",
            "set device=cuda or device=auto, so that each process uses the device of its local rank",
        )
    device = torch.device("cuda", process.local_rank if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        if process.size > 1:
            raise UserError(
                f"local rank {process.local_rank} has no CUDA device; the last device is cuda:{last}",
                f"set devices={last + 1} (with torchrun: --nproc-per-node={last + 1})",
            )
        raise UserError(f"device={name} does not exist; the last device is cuda:{last}", f"set device=cuda:{last}")
    return device


def cpu_has_bf16() -> bool:
    """Whether the processor has instructions for bf16 matrix products. Emulated ones are slower than fp32."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def select_precision(name: str, device: torch.device) -> Precision:
    """Returns the number format of this name; for `auto`, bf16 if the device supports it natively, otherwise fp32."""
    native = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else cpu_has_bf16()
    if name == "auto":
        if native:
            return Precision("bf16", device, "the device supports bf16 natively")
        return Precision("fp32", device, "the device does not support bf16 natively")
    if name == "bf16" and not native:
        return Precision(name, device, "as asked; the device emulates bf16, fp32 is likely faster")
    if name == "fp16" and device.type == "cpu":
        return Precision(name, device, "as asked; fp16 is very slow on a CPU")
    return Precision(name, device, "as asked")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU, uses kernels that add in a fixed order (by default the threads of `index_put` add atomically), so that
    a resumed run is bitwise equal to an uninterrupted one. On CUDA such kernels would be slower, and lmtool does not
    need them."""
    if device.type != "cpu":
        yield
        return
    # Not torch.use_deterministic_algorithms, which imports the compiler; training/compiling.py sets the mode there.
    previous_mode = torch.get_deterministic_debug_mode()
    previous_fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn")
    # Off: a debugging aid that fills every new tensor, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(previous_mode)
        torch.utils.deterministic.fill_uninitialized_memory = previous_fill  # type: ignore[attr-defined]


_WAIT_WARNING = "called a synchronizing CUDA operation"
_TORCH_FOLDER = f"{os.path.dirname(torch.__file__)}{os.sep}"
_WARM_UP_STEPS = 2  # steps in which kernels are loaded and memory is allocated


class StepWaits:
    """Warns once about each line of code that makes the host wait for a CUDA device in a step. Such a wait empties the
    device's queue of work, and then the device idles while Python runs. watches: False without a CUDA device, or if
    another process warns."""

    def __init__(self, watches: bool, log: Callable[[str], None]):
        self._watches, self._log = watches, log
        self._reported: set[str] = set()
        self._steps = 0

    @contextmanager
    def receive_warnings(self) -> Iterator[None]:
        """Receives torch's warnings during the whole training. The filters are set once, because
        changing them in every step would repeat old warnings."""
        with warnings.catch_warnings():
            if self._watches:
                show = warnings.showwarning
                warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
                warnings.filterwarnings("always", _WAIT_WARNING, UserWarning)

                def show_or_report(
                    message: Warning | str, category: type[Warning], filename: str, lineno: int,
                    file: TextIO | None = None, line: str | None = None,
                ) -> None:  # fmt: skip
                    if str(message).startswith(_WAIT_WARNING):
                        self._report(filename, lineno)
                    else:
                        show(message, category, filename, lineno, file, line)

                warnings.showwarning = show_or_report
            yield

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Watches the part of a step that should not wait for the device."""
        self._steps += 1
        if not self._watches or self._steps <= _WARM_UP_STEPS:
            yield
            return
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _report(self, file: str, number: int) -> None:
        """Names the line that torch names; if it is in torch, the line that called it."""
        if file.startswith(_TORCH_FOLDER):
            callers = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_stack())]
            torch_and_callers = callers[[name.startswith(_TORCH_FOLDER) for name, _ in callers].index(True) :]
            file, number = next((at for at in torch_and_callers if not at[0].startswith(_TORCH_FOLDER)), (file, number))
        line = f"{file}:{number}"
        if line not in self._reported:
            self._reported.add(line)
            text = f"{line} makes the host wait for the device in a step, which leaves the device idle"
            self._log(f"warning: {text}")
            say(f"warning: {text}", sys.stderr)


# Parameters of glibc's mallopt(3). 32 MiB is the largest mmap threshold that it accepts.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 2**31 - 1
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 * 2**20


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory for the next step instead of returning it to the system. Called once
    per process before training on a CPU, it saves 19,000 page faults and 17 to 20% of the time per step (BERT of 4
    layers, width 256, 30522 tokens, 900 tokens per batch, bf16) with the same peak memory. Returns whether the C
    library supports it (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES))
