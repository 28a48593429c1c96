"""Compilation of a run's regions (`nn/regions`). It takes about a minute and leaves results equal up to rounding."""

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
from lmtool.system.environment import SAFE_PATH, child_environment

Choice = Literal["auto"] | bool
WORTHWHILE_MINUTES = 5.0
# FLOP/s for an estimate of the run's length: a tenth of an H100's bf16 rate, about what uncompiled training reaches.
RATE = 1e14
# Maximum number of graphs. Trained and frozen layers, with and without adapters and gradients, need a graph each.
GRAPHS = 64


@dataclass(frozen=True)
class Compilation:
    """Whether a run is compiled. why: the reason, a half-sentence for the screen."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.on else 'no'} ({self.why})"


def select_compilation(
    choice: Choice, device: torch.device, flops: float, max_minutes: float | None = None
) -> Compilation:
    """Decides whether to compile a run of `flops` FLOPs. With `auto`, a run is compiled on CUDA if it takes more than
    `WORTHWHILE_MINUTES` (a guess, not measured), and never on a CPU, where no gain was measured."""
    if choice != "auto":
        return Compilation(choice, "as asked")
    if device.type != "cuda":
        return Compilation(False, "no gain was measured on a CPU")
    minutes = min(flops / RATE / 60, float("inf") if max_minutes is None else max_minutes)
    length = f"the run takes {'more' if minutes > WORTHWHILE_MINUTES else 'less'} than {WORTHWHILE_MINUTES:g} minutes"
    if minutes <= WORTHWHILE_MINUTES:
        return Compilation(False, f"by estimate {length}")
    requirement = missing_requirement(device)
    return Compilation(not requirement, f"{requirement} is missing" if requirement else f"by estimate {length}")


def require_compiler(choice: Choice, device: torch.device) -> None:
    """Raises UserError for compile=true on a machine without a requirement of torch's compiler."""
    requirement = missing_requirement(device) if choice is True else None
    if requirement is not None:
        raise UserError(
            f"compile=true needs {requirement}, which this machine does not have",
            f"install {requirement}, or set compile=false",
        )


def missing_requirement(device: torch.device) -> str | None:
    """Returns a requirement of torch's compiler that this machine lacks, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton"
    compiler = os.environ.get("CC" if device.type == "cuda" else "CXX")
    usual_compilers = ("cc", "gcc", "clang") if device.type == "cuda" else ("g++", "clang++")
    if not any(map(shutil.which, [compiler] if compiler else usual_compilers)):
        return f"the compiler {compiler}" if compiler else f"the compiler {usual_compilers[0]}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the header Python.h (python3-dev)"
    return None


@contextmanager
def compiled(on: bool, backend: str | Callable[..., object] = "inductor") -> Iterator[None]:
    """Compiles the regions of all models within the context if `on`."""
    if not on:
        yield
        return
    import torch._dynamo  # takes a second
    import torch._inductor.config

    # DDP's graph optimizer splits the graph of a whole model; these graphs are parts of a layer.
    dynamo_settings = torch._dynamo.config.patch(recompile_limit=GRAPHS, optimize_ddp=False)
    inductor_settings = torch._inductor.config.patch(deterministic=torch.are_deterministic_algorithms_enabled())
    with child_environment(SAFE_PATH), dynamo_settings, inductor_settings, regions_by(CompiledRegions(backend)):
        yield
