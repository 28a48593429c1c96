"""Shared by the scripts: the root of the tree, the machine, lists of options, and errors."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


def stop(message: str, hint: str, status: int = 2) -> NoReturn:
    """Ends the script like lmtool: with an error, a hint and an exit status."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(status)


def listed(option: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse `type` for A,B: a list of known names. Ends the script at an unknown one."""

    def read(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                stop(f"{option} {name}: there is no such name", f"use some of {', '.join(known)}")
        return text.split(",")

    return read


def processor() -> str:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_this_tree(environment: dict[str, Any]) -> dict[str, Any]:
    """The environment with this tree first in PYTHONPATH."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
