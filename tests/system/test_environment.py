"""Environment variables set for torch's libraries, and safe module search paths of child processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmtool
from lmtool.cli import main as cli
from lmtool.data import tokenizing
from lmtool.data.tokenizing import Portion
from lmtool.system.environment import ENVIRONMENT
from lmtool.training.compiling import compiled
from lmtool.training.precision import cpu_has_bf16
from tests.data.data_fixtures import wordpiece

# Prints the memory retained after matrix products of many shapes, in bytes.
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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not cpu_has_bf16(), reason="reads /proc; needs bf16")
def test_environment_limits_memory_of_bf16_products():
    def retained_bytes(environment):
        clean = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        words = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(words, env={**clean, **environment}, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert retained_bytes(ENVIRONMENT) < retained_bytes({}) / 2


def test_cli_sets_environment_unless_user_did(monkeypatch):
    environment = {"GOMP_SPINCOUNT": "7"}
    monkeypatch.setattr(cli.os, "environ", environment)
    assert cli.main(["help"]) == 0
    assert environment == {**ENVIRONMENT, "GOMP_SPINCOUNT": "7"}


PLANTED = "RAN"


def plant_modules(folder):
    """Foreign files named like modules of Python; a file appears if one of them is imported."""
    for name in ("json", "token", "threading", "tempfile"):
        (folder / f"{name}.py").write_text(f"open({PLANTED!r}, 'w')\n")


def test_modules_in_working_folder_are_not_imported(tmp_path, monkeypatch):
    plant_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-m", "lmtool", "list", "objective"], capture_output=True, check=False)
    assert done.returncode == 0 and b"mlm" in done.stdout
    (portion,) = tokenizing.tokenize(wordpiece(), [Portion(["the cat sat"], [True])], 2)
    assert len(portion.tokens) and not Path(PLANTED).exists()


def test_python_safe_path_is_set_only_while_compiling(monkeypatch):
    """Processes that a user's code starts keep their own search path."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with compiled(True, "eager"):
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in os.environ


def test_lmtool_in_working_folder_is_imported():
    """A checkout that is not installed."""
    command = [sys.executable, "-S", "-m", "lmtool", "--version"]
    root = Path(lmtool.__file__).resolve().parents[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=clean, check=False)
    assert done.stdout == f"lmtool {lmtool.__version__}\n"


def test_child_pythons_exclude_working_folder():
    package = Path(lmtool.__file__).parent
    starts = [
        (path.name, line.strip())
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"sys\.executable[,)]", line)
    ]
    assert len(starts) > 4
    assert not [start for start in starts if not re.search(r'sys\.executable(,|\)\() ?"-[PI]"', start[1])]


def test_package_folders_are_not_git_ignored():
    """The wheel lacks every path that git ignores, even tracked ones."""
    root = Path(lmtool.__file__).resolve().parents[1]
    if not (root / ".gitignore").is_file():
        pytest.skip("no checkout")
    ignored = {line.strip("/") for line in (root / ".gitignore").read_text().split() if not line.startswith("/")}
    folders = {path.name for place in ("lmtool", "conf") for path in (root / place).rglob("*") if path.is_dir()}
    assert "runs" in folders and not (folders & ignored) - {"__pycache__"}
