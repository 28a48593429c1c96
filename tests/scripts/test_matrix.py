"""Every pair of a family, a tuning method and a task kind trains, or is refused with a valid hint. scripts/matrix.py
checks all combinations; these tests use the fewest combinations that contain every pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmtool.config import registry
from lmtool.models.configs import TransformerConfig
from tests.breadth import slow_but


def shipped(group: str) -> list[str]:
    return [entry.name for entry in registry.entries(group) if entry.config.__module__.startswith("lmtool.")]


@pytest.fixture
def matrix(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("matrix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@cache
def covering_cells(matrix: ModuleType, folder: Path) -> list[Any]:
    matrix.write_rows(folder)
    return matrix.covering_cells(matrix.FAMILIES, [*matrix.METHODS], matrix.KINDS, folder)


@pytest.mark.parametrize("family", slow_but({"albert"}, shipped("model")))
def test_every_pair_trains_or_is_refused_with_hint(family: str, matrix: ModuleType, folder: Path) -> None:
    outcomes = [matrix.trial(cell, folder) for cell in covering_cells(matrix, folder) if cell.family == family]
    assert not [outcome for outcome in outcomes if outcome.failures]
    assert {outcome.cell.method for outcome in outcomes} == {*matrix.METHODS}
    # Most methods edit the layers of a transformer.
    (config,) = (entry.config for entry in registry.entries("model") if entry.name == family)
    least = 1 / 2 if issubclass(config, TransformerConfig) else 1 / 4
    assert sum(not outcome.refusal for outcome in outcomes) > len(outcomes) * least


def test_matrix_has_every_method_and_task_kind(matrix: ModuleType) -> None:
    """Except those built from others (fused adapters, task mixtures, suites), and minimal pairs, which are scored."""
    methods = {word.partition("=")[2] for words in matrix.METHODS.values() for word in words if word[:7] == "tuning="}
    assert {*shipped("tuning")} - {"adapter_fusion"} == methods | {"full"}
    assert {*shipped("task")} - {"mixture", "glue", "minimal_pairs"} == {*matrix.KINDS}
