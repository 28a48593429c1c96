"""Functions that several scripts share: the repository's root, errors, lists as options, and the machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


def stop(message: str, hint: str, status: int = 2) -> NoReturn:
    """Prints an error and a hint as lmtool does, and ends the script with an exit status."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(status)


def name_list(option: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Returns an argparse `type` that splits A,B into a list of names. Ends the script if a name is not known."""

    def read(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                stop(f"{option} {name}: unknown name", f"use some of {', '.join(known)}")
        return text.split(",")

    return read


def processor() -> str:
    """Returns the model of the processor."""
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def foreign_seconds() -> float | None:
    """Returns the processor seconds since the machine started that this process and its finished children did not use:
    those of other processes, of the kernel, and of the host's other machines ("steal"). None if it is not Linux."""
    with suppress(OSError):
        user, nice, system, _, _, interrupts, soft_interrupts, steal, *_ = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
        total = (user + nice + system + interrupts + soft_interrupts + steal) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return total - sum(usage.ru_utime + usage.ru_stime for usage in used)
    return None


def with_this_tree(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment variables with this repository first in PYTHONPATH."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
