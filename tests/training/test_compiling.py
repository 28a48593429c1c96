"""Compilation: the choice of compile=auto, missing requirements, and failures."""

from __future__ import annotations

import shutil

import pytest
import torch

from lmtool.errors import UserError
from lmtool.nn.attention import SelfAttention
from lmtool.nn.context import Context
from lmtool.nn.layout import Full
from lmtool.training import compiling
from lmtool.training.compiling import compiled, missing_requirement, require_compiler, select_compilation
from lmtool.types import Packed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def unmet_requirements(monkeypatch):
    """Missing requirements by device type; empty unless a test adds some."""
    requirements = {}
    monkeypatch.setattr(compiling, "missing_requirement", lambda device: requirements.get(device.type))
    return requirements


def test_auto_compiles_long_runs_on_cuda(unmet_requirements):
    hour = 3600 * compiling.RATE
    assert str(select_compilation("auto", CUDA, hour)) == "yes (by estimate the run takes more than 5 minutes)"
    assert not select_compilation("auto", CUDA, hour / 20).on
    assert not select_compilation("auto", CUDA, hour, max_minutes=2).on
    assert str(select_compilation("auto", CPU, hour)) == "no (no gain was measured on a CPU)"
    assert select_compilation(True, CPU, 0).on and not select_compilation(False, CUDA, hour).on
    unmet_requirements["cuda"] = "triton"
    assert str(select_compilation("auto", CUDA, hour)) == "no (triton is missing)"


def test_compile_without_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing_requirement(CPU) == "the compiler no-such-compiler"
    with pytest.raises(UserError, match="compile=true needs the compiler no-such-compiler, which") as caught:
        require_compiler(True, CPU)
    assert "compile=false" in caught.value.hint
    require_compiler("auto", CPU)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert missing_requirement(CPU) == "the compiler g++"


def test_failed_compilation_suggests_compile_false():
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    with (
        compiled(True, broken),
        pytest.raises(UserError, match="could not compile SelfAttention.project_and_rotate.*no such") as caught,
    ):
        SelfAttention(8, 2, 0.0)(torch.randn(5, 8), Context.of(Packed(torch.zeros(5), (3, 2)), Full()))
    assert caught.value.hint == "set compile=false"
