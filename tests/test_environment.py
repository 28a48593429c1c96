"""What the command line sets for torch's libraries does what it is set for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lmtool
from lmtool import cli
from lmtool.environment import ENVIRONMENT
from lmtool.training.precision import cpu_has_bf16

# The memory that stays after products of many shapes, in bytes.
SCRIPT = """
import ctypes, os, torch
def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
torch.set_num_threads(1)
weight = torch.ones(256, 256, dtype=torch.bfloat16)
def products(lengths):
    for length in lengths:
        torch.nn.functional.linear(torch.ones(length, 256, dtype=torch.bfloat16), weight)
products(range(600, 620))
before = resident()
products(range(100, 600))
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or not cpu_has_bf16(), reason="reads /proc; needs bf16")
def test_products_of_many_shapes_keep_little():
    def kept(environment):
        clean = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        words = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(words, env={**clean, **environment}, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert kept(ENVIRONMENT) < kept({}) / 2


def test_the_command_line_sets_it_and_the_user_goes_first(monkeypatch):
    environment = {"GOMP_SPINCOUNT": "7"}
    monkeypatch.setattr(cli.os, "environ", environment)
    assert cli.main(["help"]) == 0
    assert environment == {**ENVIRONMENT, "GOMP_SPINCOUNT": "7"}


def test_no_folder_of_the_package_is_ignored():
    """What git ignores stays out of the wheel, tracked or not."""
    root = Path(lmtool.__file__).resolve().parents[1]
    if not (root / ".gitignore").is_file():
        pytest.skip("no checkout")
    ignored = {line.strip("/") for line in (root / ".gitignore").read_text().split() if not line.startswith("/")}
    folders = {path.name for place in ("lmtool", "conf") for path in (root / place).rglob("*") if path.is_dir()}
    assert "runs" in folders and not (folders & ignored) - {"__pycache__"}
