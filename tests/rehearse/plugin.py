"""A plugin of pytest by which tests marked `gpu` or `rehearse` run on the CUDA device that device.py plays:

    python -m pytest -p tests.rehearse.plugin -m 'gpu or rehearse' FILES

At the end it prints where steps, evaluations and the rest made the host wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rehearse import guard

try:
    guard.load()  # before torch is imported
except guard.NotBuilt as reason:
    pytest.exit(str(reason), returncode=5)

from tests.rehearse.device import Device, played  # noqa: E402

WAITS = "waits"


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest, record_property: Any) -> Iterator[Device | None]:
    """The device, for tests that want one."""
    if not any(request.node.get_closest_marker(name) for name in ("gpu", "rehearse")):
        yield None
        return
    with played() as device:
        yield device
    record_property(WAITS, [[*where, what, count] for (what, where), count in device.waits.items()])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The waits of all tests by phase and line, those of steps first."""
    counts: Counter[tuple[str, ...]] = Counter()
    tests: Counter[tuple[str, ...]] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        ended = isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, rows in report.user_properties if ended else ():
            for *where, count in rows if name == WAITS else ():
                counts[tuple(where)] += count
                tests[tuple(where)] += 1
    order = {"step": 0, "row": 1, "evaluation": 2, "checkpoint": 3, "around": 4}
    terminalreporter.section("what the host waited for")
    for where in sorted(counts, key=lambda where: (order[where[0]], -counts[where])):
        phase, line, what = where
        terminalreporter.line(f"{phase:<11}{counts[where]:>7,} in {tests[where]:>3} tests  {what}  {line}")
