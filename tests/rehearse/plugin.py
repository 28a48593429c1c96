"""A pytest plugin that runs tests marked `gpu` or `rehearse` on the CUDA device that device.py simulates:

    python -m pytest -p tests.rehearse.plugin -m 'gpu or rehearse' FILES

At the end it prints outcomes by test and by family, and the waits of the host by phase: steps, evaluations, the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rehearse import guard

try:
    guard.load()  # before torch is imported
except guard.NotBuilt as reason:
    pytest.exit(str(reason), returncode=5)

from tests.rehearse.device import Device, WaitRow, simulated_device, wait_lines, wait_rows  # noqa: E402

WAITS = "waits"
# Tests whose first parameter is a model family.
BY_FAMILY = re.compile(r"test_walk\.py::test_family_(\w+)\[(\w+)(?:-(.+))?\]$")


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest, record_property: Any) -> Iterator[Device | None]:
    """The device, for tests marked `gpu` or `rehearse`; None for others."""
    if not any(request.node.get_closest_marker(name) for name in ("gpu", "rehearse")):
        yield None
        return
    with simulated_device() as device:
        yield device
    record_property(WAITS, wait_rows(device))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tables of outcomes, and of the waits of all tests by phase and line."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    reports = [report for report in reports if isinstance(report, pytest.TestReport)]
    terminalreporter.section("tests that ran on the device")
    for line in (*outcome_lines(reports), "", *family_lines(reports)):
        terminalreporter.line(line)
    terminalreporter.section("operations that the host waited for")
    rows: Counter[WaitRow] = Counter()
    tests: Counter[WaitRow] = Counter()
    for report in reports:
        for name, counts in report.user_properties if report.when == "teardown" else ():
            for *row, count in counts if name == WAITS else ():
                rows[WaitRow(*row)] += count
                tests[WaitRow(*row)] += 1
    for line in wait_lines(rows, tests):
        terminalreporter.line(line)


def outcome_lines(reports: list[pytest.TestReport]) -> Iterator[str]:
    """One line per test function: its numbers of passed, failed and skipped cases, and their seconds."""
    outcomes: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    failed: dict[str, list[str]] = {}
    for report in reports:
        function, _, case = report.nodeid.partition("[")
        seconds[function] += report.duration  # type: ignore[assignment]
        if report.when == "call" or report.outcome != "passed":
            outcomes.setdefault(function, Counter())[report.outcome] += 1
        if report.outcome == "failed":
            failed.setdefault(function, []).append(case.removesuffix("]") or report.when or "")
    yield f"{'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>7}  test"
    for function, counts in sorted(outcomes.items()):
        cases = f"  failed: {', '.join(failed[function])}" if function in failed else ""
        yield (
            f"{counts['passed']:>6} {counts['failed']:>6} {counts['skipped']:>7} {seconds[function]:>7.0f}"
            f"  {function.removeprefix('tests/')}{cases}"
        )


def family_lines(reports: list[pytest.TestReport]) -> Iterator[str]:
    """One line per model family: the outcomes of the tests of all families."""
    cells: dict[str, dict[str, str]] = {}
    for report in reports:
        found = BY_FAMILY.search(report.nodeid)
        if found and (report.when == "call" or report.outcome != "passed"):
            test, family, case = found.groups()
            title = f"{test}, {case}" if case else test
            cells.setdefault(family, {})[title.replace("_", " ")] = report.outcome
    titles = sorted({title for row in cells.values() for title in row})
    for number, title in enumerate(titles, 1):
        yield f"({number}) family {title}"
    if cells:
        yield f"{'':<16}" + "".join(f"{f'({number})':<9}" for number in range(1, len(titles) + 1))
    for family, row in sorted(cells.items()):
        yield f"{family:<16}" + "".join(f"{row.get(title, '-'):<9}" for title in titles)
