"""One thread a test process: torch's threads spin, and cost minutes where several processes share two cores. And no
waiting for a disk: what a test writes need not outlive the machine."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from lmtool import errors

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

os.fsync = lambda descriptor: None

# What collecting the tests leaves lives as long as they do: the collector need not look through it again and again.
gc.disable()


@pytest.fixture(autouse=True)
def fp32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """precision=auto is fp32 on every CPU. In bf16, scores depend on the kernel that a batch's shape selects: one row
    alone differs by 1e-4 from the same row among others, and tests compare to 1e-5 and finer."""
    monkeypatch.setattr("lmtool.training.precision.cpu_has_bf16", lambda: False)


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
