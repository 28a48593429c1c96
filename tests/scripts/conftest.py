"""Imports scripts as modules; scripts/ is outside the package, and scripts import each other by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a script by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module
