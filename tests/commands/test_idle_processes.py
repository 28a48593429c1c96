"""What a run says where its steps are too small for its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from lmtool.data.loader import PackedLoader
from lmtool.session.fit import warn_of_idle_ranks
from tests.data.data_fixtures import DrawnExamples


def warned(examples: int, processes: int) -> list[str]:
    lines: list[str] = []
    output = SimpleNamespace(line=lambda text, style: lines.append(text))
    opened = cast(Any, SimpleNamespace(group=SimpleNamespace(size=processes), output=output))
    warn_of_idle_ranks(opened, PackedLoader(DrawnExamples(60), 1, batch_examples=examples))
    return lines


def test_processes_without_an_example_are_reported() -> None:
    assert warned(8, 8) == warned(1, 1) == []
    (line,) = warned(4, 8)
    assert "a step has 4 examples for 8 processes" in line and "devices=4" in line
