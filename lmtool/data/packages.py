"""The Python packages of this machine, and the docstrings of their modules, read in parallel processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lmtool.data import docstrings

STANDARD = "python"  # the name the standard library goes by
_LMTOOL = "lmtool"  # its docstrings would change the corpus with every edit
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "_tests", "idle_test", "idlelib"}
_PORTION = 1_000_000  # bytes of source a child process reads: about a tenth of a second


@dataclass(frozen=True)
class Module:
    """A source file: the package it belongs to, its dotted name, its path and size in bytes."""

    package: str
    name: str
    path: str
    size: int


@dataclass(frozen=True)
class Docs:
    """The docstrings of a module: line and text of each, in the order of the source."""

    module: Module
    texts: list[tuple[int, str]]


def installed() -> list[str]:
    """Top-level packages and modules of the environment, by name; without lmtool."""
    return sorted(_locations(), key=lambda name: (name.lower(), name))


def versions() -> list[str]:
    """Names of the folders that state which distributions are installed, and in which version."""
    entries = {entry for folder in _folders() for entry in _list(folder) if entry.endswith((".dist-info", ".egg-info"))}
    return [sys.version, *sorted(entries)]


def modules(package: str) -> list[Module]:
    """The source files of a package, tests left out, by path; STANDARD is the standard library. None where it is not
    installed."""
    if package == STANDARD:
        return list(_walk(package, sysconfig.get_paths()["stdlib"], ""))
    location = _locations().get(package)
    if location is None:
        return _standard_module(package)
    if location.endswith(".py"):
        return [Module(package, package, location, os.path.getsize(location))]
    return list(_walk(package, location, package))


def read(requested: Iterable[Module]) -> Iterator[Docs]:
    """The docstrings of modules, in order; a few portions are read ahead, in a process each."""
    workers = min(os.cpu_count() or 1, 8)
    portions = _portions(requested)
    with ThreadPoolExecutor(workers) as pool:
        running: list[tuple[list[Module], Future[list[list[tuple[int, str]]]]]] = []
        try:
            for portion in itertools.chain(portions, [None] * (workers + 1)):
                if portion is not None:
                    running.append((portion, pool.submit(_extract, [module.path for module in portion])))
                if running and (portion is None or len(running) > workers):
                    done, result = running.pop(0)
                    for module, texts in zip(done, result.result(), strict=True):
                        yield Docs(module, texts)
        finally:
            for _, result in running:
                result.cancel()


def _portions(requested: Iterable[Module]) -> Iterator[list[Module]]:
    portion: list[Module] = []
    for module in requested:
        portion.append(module)
        if sum(module.size for module in portion) >= _PORTION or len(portion) == 200:
            yield portion
            portion = []
    if portion:
        yield portion


def _extract(paths: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Docstrings of some files, by a child process. A file that takes the parser down with it has none."""
    command = [sys.executable, "-I", "-S", "-X", "utf8", docstrings.__file__]
    done = subprocess.run(command, input=json.dumps(list(paths)), capture_output=True, encoding="utf-8", check=False)
    if done.returncode == 0:
        return [[(line, text) for line, text in texts] for texts in json.loads(done.stdout)]
    if len(paths) == 1:
        return [[]]
    return [_extract([path])[0] for path in paths]


def _folders() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))


def _list(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _locations() -> dict[str, str]:
    """Where each installed package or module is."""
    locations: dict[str, str] = {}
    for folder in _folders():
        for entry in _list(folder):
            path, name = os.path.join(folder, entry), entry.removesuffix(".py")
            if name.isidentifier() and name not in _SKIPPED | {_LMTOOL} and (entry != name or os.path.isdir(path)):
                locations.setdefault(name, path)
    return locations


def _standard_module(package: str) -> list[Module]:
    """A package or module of the standard library by its own name."""
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
        within = [part for part in Path(location).relative_to(root).parts]
        for file in sorted(files):
            stem = file.removesuffix(".py")
            if stem == file or stem.startswith("test_") or stem.endswith("_test") or stem == "conftest":
                continue
            path = os.path.join(location, file)
            if os.path.isfile(path):  # a broken link is none
                parts = [prefix, *within] if stem == "__init__" else [prefix, *within, stem]
                yield Module(package, ".".join(part for part in parts if part), path, os.path.getsize(path))
