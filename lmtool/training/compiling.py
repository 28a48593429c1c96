"""Compilation of a run's regions (`nn/regions`).

Chosen once and stated. It takes about a minute at the start and changes nothing beyond rounding.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lmtool.errors import UserError
from lmtool.nn.regions import CompiledRegions, regions_by
from lmtool.system.environment import SAFE_PATH, inherited

Choice = Literal["auto"] | bool
WORTHWHILE_MINUTES = 5.0
# What a run's length is estimated with where none is given, in operations a second: a tenth of an H100's bf16 rate, and
# about what its training reaches uncompiled.
RATE = 1e14
# Layers that learn beside some that are frozen, adapters in a part of them, with and without gradient: a graph each.
# Beyond so many the compiler gives up.
GRAPHS = 64


@dataclass(frozen=True)
class Compilation:
    """Whether a run is compiled. why: a half-sentence for the screen."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.on else 'no'} ({self.why})"


def select_compilation(
    choice: Choice, device: torch.device, flops: float, max_minutes: float | None = None
) -> Compilation:
    """auto: on CUDA for a run of more than `WORTHWHILE_MINUTES`, never on a CPU, where no gain was measured. That rule
    is a guess: no GPU has measured it. flops: operations of the run; max_minutes: what it is limited to, if at all."""
    if choice != "auto":
        return Compilation(choice, "as asked")
    if device.type != "cuda":
        return Compilation(False, "no gain was measured on a CPU")
    minutes = min(flops / RATE / 60, float("inf") if max_minutes is None else max_minutes)
    length = f"the run takes {'more' if minutes > WORTHWHILE_MINUTES else 'less'} than {WORTHWHILE_MINUTES:g} minutes"
    if minutes <= WORTHWHILE_MINUTES:
        return Compilation(False, f"by estimate {length}")
    lacks = missing(device)
    return Compilation(False, f"{lacks} is missing") if lacks else Compilation(True, f"by estimate {length}")


def require_compiler(choice: Choice, device: torch.device) -> None:
    """UserError where a run shall be compiled on a machine that cannot."""
    lacks = missing(device) if choice is True else None
    if lacks is not None:
        raise UserError(
            f"compile=true: {lacks} is missing, with which torch compiles", f"install {lacks}, or set compile=false"
        )


def missing(device: torch.device) -> str | None:
    """What torch's compiler lacks on this machine, as far as a look tells; None: nothing."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton"
    named = os.environ.get("CC" if device.type == "cuda" else "CXX")
    usual = ("cc", "gcc", "clang") if device.type == "cuda" else ("g++", "clang++")
    if not any(map(shutil.which, [named] if named else usual)):
        return f"the compiler {named}" if named else f"the compiler {usual[0]}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the header Python.h (python3-dev)"
    return None


@contextmanager
def compiled(on: bool, backend: str | Callable[..., object] = "inductor") -> Iterator[None]:
    """Within, the regions of all models are compiled."""
    if not on:
        yield
        return
    import torch._dynamo  # takes a second
    import torch._inductor.config

    # DDP's own optimizer of graphs cuts a whole model's; these end where a layer does.
    changes = torch._dynamo.config.patch(recompile_limit=GRAPHS, optimize_ddp=False)
    fixed_order = torch._inductor.config.patch(deterministic=torch.are_deterministic_algorithms_enabled())
    with inherited(SAFE_PATH), changes, fixed_order, regions_by(CompiledRegions(backend)):
        yield
