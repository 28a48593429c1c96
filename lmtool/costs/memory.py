"""How much memory a process can still get, before it asks for it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still get on a device; None where the system does not say.

    On a CPU the least of: what the machine has available, free swap included; what its control groups (containers,
    batch systems) leave it; what its own limit (ulimit -v) leaves it.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([*_machine(), *_groups(), *_own_limit()], default=None)


def _machine() -> Iterator[int]:
    """Linux says what could be freed too; elsewhere it is all there is."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        yield 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, KeyError, ValueError, IndexError):
        if "SC_PHYS_PAGES" in os.sysconf_names:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups() -> Iterator[int]:
    """Of the process's control group and those above it: the limit less what is used and cannot be freed."""
    try:
        entries = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, place in entries:
        if controllers == "":  # version 2
            root, names = _GROUPS, ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "", "")
        else:
            continue
        folder = root / place.strip("/")
        # Within a container the path is that of the host, and its own group is the root.
        for group in [folder, *folder.parents] if folder.is_dir() else [root]:
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None:
                swap = (_number(group / names[2]) or 0) - (_number(group / names[3]) or 0) if names[2] else 0
                yield limit - used + _cached(group) + max(swap, 0)
            if group == root:
                break


def _cached(group: Path) -> int:
    """Pages of files, which are given up when memory is asked for."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    except (OSError, ValueError, IndexError):
        return 0


def _own_limit() -> Iterator[int]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        try:
            pages = int((_PROC / "self/statm").read_text().split()[0])
            yield soft - pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            yield soft


def _number(path: Path) -> int | None:
    """What a file holds; None where it is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
