"""Builds guard.cpp with the C++ compiler of this machine, once per torch version, and loads it. Imports no torch, which
must be imported afterwards."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


class NotBuilt(Exception):
    """The reason why the guard cannot be built, in a sentence."""


def built() -> Path:
    """The path of the library. Raises NotBuilt without a compiler, if it refuses torch's headers,
    or if torch has a CUDA device of its own."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    spec = importlib.util.find_spec("torch")
    if compiler is None or spec is None or not spec.submodule_search_locations:
        raise NotBuilt("simulating a CUDA device needs a C++ compiler, and none was found: install g++")
    torch = Path(spec.submodule_search_locations[0])
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise NotBuilt("simulating a CUDA device needs a build of torch without CUDA")
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch} {importlib.metadata.version('torch')}".encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"lmtool-rehearse-{os.getuid()}"
    library = folder / f"guard_{key[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(mode=0o700, exist_ok=True)
    draft = library.with_suffix(f".{os.getpid()}")
    words = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE), "-o", str(draft)]
    words += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NotBuilt(f"{compiler} does not build the guard of a CUDA device: {first}")
    draft.replace(library)
    return library


def load() -> None:
    """Gives torch in this process a CUDA device. Raises NotBuilt like `built`."""
    ctypes.CDLL(str(built())).initialize()
