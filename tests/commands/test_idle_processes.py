"""A run warns if its steps have fewer examples than processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from lmtool.data.loader import PackedLoader
from lmtool.session.fit import warn_of_idle_ranks
from tests.data.data_fixtures import DrawnExamples


def warnings_for(examples: int, processes: int) -> list[str]:
    lines: list[str] = []
    output = SimpleNamespace(warn=lines.append)
    opened = cast(Any, SimpleNamespace(group=SimpleNamespace(size=processes), output=output))
    warn_of_idle_ranks(opened, PackedLoader(DrawnExamples(60), 1, batch_examples=examples))
    return lines


def test_idle_processes_are_reported() -> None:
    assert warnings_for(8, 8) == warnings_for(1, 1) == []
    (line,) = warnings_for(4, 8)
    assert "a step has 4 examples for 8 processes" in line and "devices=4" in line
