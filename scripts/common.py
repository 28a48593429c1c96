"""What the scripts share: the root of the tree, the machine, lists as a sweep of lmtool has them, and how one ends."""

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
    """End the script as lmtool ends: two lines and a status."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(status)


def listed(option: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Reads A,B as argparse's `type`: some of the known names. Ends the script where one is unknown."""

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
    """An environment in which this tree's lmtool is imported, installed or not."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
