"""Every script prints help, every module imports, and no modules import each other in a cycle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODULES = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts): path for path in SCRIPTS.rglob("*.py")}
RUN = sorted(name for name, path in MODULES.items() if "\nimport argparse\n" in path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """The modules of scripts/ that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
        yield from (name for name in names if name in MODULES)


def test_scripts_have_no_import_cycle() -> None:
    graph = {name: set(imported(path)) for name, path in MODULES.items()}
    assert "timing.turns" in graph["benchmark"] and "common" in graph["scale"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_every_module_of_scripts_imports(script: Callable[[str], ModuleType]) -> None:
    for name in MODULES:
        assert script(name.removesuffix(".__init__")).__doc__, name


def test_every_script_prints_help(tmp_path: Path) -> None:
    """One process runs all scripts, to import lmtool once; help has the script's name and purpose."""
    assert {
        "benchmark",
        "bundle",
        "compare_losses",
        "conf",
        "faults",
        "gpu",
        "matrix",
        "scale",
    } == set(RUN)
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path, '--help']\n"
        "    try:\n"
        "        runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as ended:\n"
        "        print('status', ended.code)\n"
    )
    command = [sys.executable, "-c", code, *(str(MODULES[name]) for name in RUN)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("\nstatus 0\n") == len(RUN), done.stderr
    for name in RUN:
        purpose = (MODULES[name].read_text(encoding="utf-8").removeprefix('"""')).splitlines()[0]
        assert f"usage: {name}.py" in done.stdout and purpose in done.stdout
