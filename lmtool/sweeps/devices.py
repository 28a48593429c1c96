"""One GPU a process: each process of a parallel launcher takes one that no other of them has."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from lmtool.drafts import real_folder

_GPUS = Path("/proc/driver/nvidia/gpus")
_held: list[int] = []


def visible_devices() -> list[str]:
    """The GPUs this process may use, without loading CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []


def take_device(sweep: Path, asked: object) -> None:
    """Let this process see one GPU alone, the first that is free, until it ends: CUDA reads once which there are. With
    more processes than GPUs the rest share them. sweep: its folder, for the locks. asked: the job's `device`; only
    auto and cuda leave it open which."""
    devices = visible_devices()
    if _held or len(devices) < 2 or asked not in ("auto", "cuda"):
        return
    locks = real_folder(sweep / ".devices")
    for device in devices:
        handle = os.open(locks / device, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            continue
        _held.append(handle)
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[os.getpid() % len(devices)]
