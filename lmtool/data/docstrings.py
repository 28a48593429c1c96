"""Docstrings of the Python packages on this machine, read in parallel processes.

Files are parsed, never imported. A child process runs this module as a script, which reads a JSON list of paths and
writes a JSON list. So it imports only the standard library, and starts in milliseconds without lmtool on its path.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STANDARD = "python"  # stands for the standard library in a list of packages
_LMTOOL = "lmtool"  # its docstrings would change the text with every edit
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "_tests", "idle_test", "idlelib"}
_PORTION = 1_000_000  # bytes of source that a child process reads, in about a tenth of a second
_LARGEST = 400_000  # characters of a file; larger ones are generated tables

Docstring = tuple[int, str]
"""The line and the text of a docstring."""


@dataclass(frozen=True)
class Module:
    """A source file: the package it belongs to, its dotted name, its path and size in bytes."""

    package: str
    name: str
    path: str
    size: int


def installed() -> list[str]:
    """Returns the names of top-level packages and modules of the environment, sorted, without lmtool."""
    return sorted(_locations(), key=lambda name: (name.lower(), name))


def versions() -> list[str]:
    """Returns Python's version, and the names of folders with the names and versions of installed distributions."""
    entries = {
        entry for folder in _folders() for entry in _entries(folder) if entry.endswith((".dist-info", ".egg-info"))
    }
    return [sys.version, *sorted(entries)]


def modules(package: str) -> list[Module]:
    """Returns the source files of a package without tests, by path; empty if it is not installed. STANDARD is the
    standard library."""
    if package == STANDARD:
        return list(_walk(package, sysconfig.get_paths()["stdlib"], ""))
    location = _locations().get(package)
    if location is None:
        return _standard_module(package)
    if location.endswith(".py"):
        return [Module(package, package, location, os.path.getsize(location))]
    return list(_walk(package, location, package))


def read(modules: Iterable[Module]) -> Iterator[tuple[Module, list[Docstring]]]:
    """Yields the docstrings of modules, in order. Child processes read some portions in advance."""
    workers = min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(workers) as pool:
        running: list[tuple[list[Module], Future[list[list[Docstring]]]]] = []
        try:
            for portion in itertools.chain(_portions(modules), [None] * (workers + 1)):
                if portion is not None:
                    running.append((portion, pool.submit(_extract, [module.path for module in portion])))
                if running and (portion is None or len(running) > workers):
                    read_modules, result = running.pop(0)
                    yield from zip(read_modules, result.result(), strict=True)
        finally:
            for _, result in running:
                result.cancel()


def _portions(modules: Iterable[Module]) -> Iterator[list[Module]]:
    portion: list[Module] = []
    for module in modules:
        portion.append(module)
        if sum(module.size for module in portion) >= _PORTION or len(portion) == 200:
            yield portion
            portion = []
    if portion:
        yield portion


def _extract(paths: Sequence[str]) -> list[list[Docstring]]:
    """Returns the docstrings of files, read by a child process; none for a file that crashes the parser."""
    command = [sys.executable, "-I", "-S", "-X", "utf8", __file__]
    process = subprocess.run(command, input=json.dumps(list(paths)), capture_output=True, encoding="utf-8", check=False)
    if process.returncode == 0:
        return [[(line, text) for line, text in texts] for texts in json.loads(process.stdout)]
    if len(paths) == 1:
        return [[]]
    return [_extract([path])[0] for path in paths]


def _folders() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))


def _entries(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _locations() -> dict[str, str]:
    locations: dict[str, str] = {}
    for folder in _folders():
        for entry in _entries(folder):
            path, name = os.path.join(folder, entry), entry.removesuffix(".py")
            if name.isidentifier() and name not in _SKIPPED | {_LMTOOL} and (entry != name or os.path.isdir(path)):
                locations.setdefault(name, path)
    return locations


def _standard_module(package: str) -> list[Module]:
    library = sysconfig.get_paths()["stdlib"]
    folder, file = os.path.join(library, package), os.path.join(library, f"{package}.py")
    if package in _SKIPPED or not package.isidentifier():
        return []
    if os.path.isdir(folder):
        return list(_walk(package, folder, package))
    return [Module(package, package, file, os.path.getsize(file))] if os.path.isfile(file) else []


def _walk(package: str, root: str, prefix: str) -> Iterator[Module]:
    for location, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and name.isidentifier())
        within = Path(location).relative_to(root).parts
        for file in sorted(files):
            stem = file.removesuffix(".py")
            if stem == file or stem.startswith("test_") or stem.endswith("_test") or stem == "conftest":
                continue
            path = os.path.join(location, file)
            if os.path.isfile(path):  # not a broken link
                parts = [prefix, *within] if stem == "__init__" else [prefix, *within, stem]
                yield Module(package, ".".join(part for part in parts if part), path, os.path.getsize(path))


def docstrings(path: str) -> list[Docstring]:
    """Returns the docstrings of a file, in order; none if it is not valid Python."""
    try:
        with tokenize.open(path) as file:
            source = file.read(_LARGEST + 1)
        if len(source) > _LARGEST or ('"""' not in source and "'''" not in source):
            return []
        return list(_docstrings_in(ast.parse(source)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _docstrings_in(node: ast.AST) -> Iterator[Docstring]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.lineno, inspect.cleandoc(first.value.value).strip()
    for name in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _docstrings_in(child)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # invalid escapes in other people's sources
    json.dump([docstrings(path) for path in json.load(sys.stdin)], sys.stdout)
