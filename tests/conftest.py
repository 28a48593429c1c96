"""The surroundings of the tests, the same on every machine: a home, a temporary folder and an environment of their own.

One thread a test process: torch's threads spin, and cost minutes where several processes share two cores. And no
waiting for a disk: what a test writes need not outlive the machine."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from lmtool import errors

CHECKOUT = Path(__file__).resolve().parents[1]
# All other variables of the user are removed: those of the machine and of the tests' own tools.
KEPT = re.compile(r"(LD_LIBRARY_)?PATH|CC|CXX|(PYTEST|COV|CUDA|NVIDIA|SLURM)_\w+|PYTHON(PATH|DONTWRITEBYTECODE)")
_ROOT = "LMTOOL_TESTS"
"""Set to the folder of the tests' home and temporary files, for the processes that the tests start."""


def surround() -> Path:
    """Gives this process, before a library reads them, a new home, a new temporary folder and an environment that names
    no other. Returns the folder of both. Their names have a space, as a user's may."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="lmtool-tests-")))
    home, temporary = root / "a home", root / "temporary files"
    home.mkdir()
    temporary.mkdir()
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    own = {
        _ROOT: root, "HOME": home, "TMPDIR": temporary, "USER": "tester", "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    os.environ.clear()
    os.environ.update(kept | {name: str(value) for name, value in own.items()})
    tempfile.tempdir = None  # it was found before
    return root


def watch(root: Path, homes: tuple[str, ...]) -> list[str]:
    """Lists what this process reads in a user's home or temporary folder, and what it writes outside `root`, as it
    happens. The checkout and Python's folders are read, wherever they are; caches of bytecode are written."""

    def names(*folders: object) -> tuple[str, ...]:
        return tuple(f"{os.path.realpath(str(folder))}/" for folder in folders)

    private = names(*homes)
    read = names(CHECKOUT, *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, *filter(None, sys.path))
    written = names(root, "/dev", "/proc", CHECKOUT / ".pytest_cache")
    unproblematic = (*written, *read)
    changes = {"os.rename": 1, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    touched: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in changes and event not in ("open", "os.listdir", "os.scandir"):
            return
        path, writes = (
            arguments[changes.get(event, 0)],
            event in changes or (event == "open" and arguments[2] & writing),
        )
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor
        # shutil.rmtree names files relative to the descriptor of their folder; os.mkdir has its mode before it.
        folders = [argument for argument in arguments[2 if event == "os.mkdir" else 1 :] if isinstance(argument, int)]
        try:
            if not writes and os.path.join(os.getcwd(), os.fsdecode(path)).startswith(unproblematic):
                return  # resolving the links of each file that is read took a twelfth of the time of all tests
            within = f"/proc/self/fd/{folders[-1]}" if event in changes and folders and folders[-1] >= 0 else ""
            real = f"{os.path.realpath(os.path.join(within, os.fsdecode(path)))}/"
        except OSError:
            return  # the working folder is gone
        exists = event == "os.mkdir" and os.path.isdir(real)  # asked for by os.makedirs, and refused
        if exists or real.startswith(written) or "/__pycache__/" in real:
            return
        if writes or (real.startswith(private) and not real.startswith(read)):
            touched.append(f"{event} {real}")

    sys.addaudithook(note)
    return touched


HOMES = tuple({os.path.expanduser("~"), tempfile.gettempdir()})
if owner := _ROOT not in os.environ:
    surround()
TOUCHED = watch(Path(os.environ[_ROOT]), HOMES)

os.fsync = lambda descriptor: None

# What collecting the tests leaves lives as long as they do: the collector need not look through it again and again.
gc.disable()


@pytest.fixture(autouse=True)
def fp32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """precision=auto is fp32 on every CPU. In bf16, scores depend on the kernel that a batch's shape selects: one row
    alone differs by 1e-4 from the same row among others, and tests compare to 1e-5 and finer."""
    monkeypatch.setattr("lmtool.training.precision.cpu_has_bf16", lambda: False)


@pytest.fixture(autouse=True)
def nothing_outside_is_touched() -> Iterator[None]:
    """No test reads a user's files, or writes outside the tests' own folder."""
    yield
    touched = [*TOUCHED]
    TOUCHED.clear()
    assert not touched, "\n".join(touched)


@pytest.fixture
def compiler_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files in a folder without a space: torch's compiler does not quote paths in its commands."""
    folder = Path(os.environ[_ROOT]) / "compiler"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder))


def pytest_unconfigure() -> None:
    if owner:
        shutil.rmtree(os.environ[_ROOT], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first: the other process works beside it, and nobody waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_RAISED: list[str] = []
_HELD: set[str] = set()


def _noted(begin: Callable[..., None]) -> Callable[..., None]:
    """The constructor of an error, which notes its hint."""

    @wraps(begin)
    def noting(self: Any, *arguments: Any, **keywords: Any) -> None:
        begin(self, *arguments, **keywords)
        if self.hint:
            _RAISED.append(self.hint)

    return noting


errors.LmtoolError.__init__ = _noted(errors.LmtoolError.__init__)
errors.Problem.__init__ = _noted(errors.Problem.__init__)


@pytest.fixture(autouse=True)
def hints_can_be_typed() -> Iterator[None]:
    """Every hint that a test provokes names keys, values and commands that there are. A module whose own configuration
    classes stand for lmtool's has a fixture of this name that does nothing."""
    _RAISED.clear()
    yield
    # Values with quotes, backslashes or control characters of their own are quoted in ways that `wrong_in` cannot read.
    new = {hint for hint in set(_RAISED) - _HELD if not re.search(r"'\"'\"'|\\\\|[\x00-\x1f]|^quote it: ", hint)}
    if new:
        from tests.hints import wrong_in

        wrong = [f"{problem}   in the hint: {hint}" for hint in sorted(new) for problem in wrong_in(hint)]
        _HELD.update(new)
        assert not wrong, "\n".join(wrong)
