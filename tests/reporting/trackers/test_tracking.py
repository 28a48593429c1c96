"""A tracker that fails, hangs or exits costs a run one warning and a bounded time; the loop never waits for it."""

from __future__ import annotations

import io
import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtool.config import registry
from lmtool.reporting.trackers import tracking
from lmtool.reporting.trackers.base import RunMetadata, TrackerConfig, numbers
from lmtool.reporting.trackers.tracking import Trackers, serve
from tests.reporting.trackers import odd
from tests.reporting.trackers.odd import Odd, OddConfig

ROWS = [{"step": step, "split": "train", "loss": 1.0 / step} for step in (1, 2, 3)]


def metadata(folder: Path, step: int = 0) -> RunMetadata:
    return RunMetadata(str(folder), folder.name, None, "pretrain", {}, True, step)


class Messages(list[str]):
    """Reported lines; warnings have a prefix."""

    def say(self, line: str) -> None:
        self.append(line)

    def warn(self, line: str) -> None:
        self.append(f"warning: {line}")


@pytest.fixture
def odd_tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the plugin, and wait one second for a hanging tracker."""
    monkeypatch.setattr(registry, "_typed_plugins", (odd.__name__,))
    monkeypatch.setattr(tracking, "END_SECONDS", 1.0)
    yield


def run_of(folder: Path, said: Messages, result: dict[str, Any] | None = None, **configs: TrackerConfig) -> None:
    with Trackers(configs, lambda step: metadata(folder, step), said.say, said.warn) as trackers:
        trackers.on_start(0, 3)
        for row in ROWS:
            trackers.on_step(row)
        if result is not None:
            trackers.finish(result)


def test_tracker_receives_rows_and_result(tmp_path: Path, odd_tracker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said = Messages()
    run_of(tmp_path, said, {"metric": "loss", "value": 0.5, "seed": 3, "baseline": None}, odd=OddConfig())
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3"]
    assert said == ["odd: begun", "odd: ended with {'metric': 'loss', 'value': 0.5}"]


@pytest.mark.parametrize(
    ("at", "how", "expected"),
    [
        pytest.param("begin", "raise", "RuntimeError: odd begin", marks=pytest.mark.slow),
        ("write", "raise", "RuntimeError: odd write"),
        pytest.param("end", "raise", "RuntimeError: odd end", marks=pytest.mark.slow),
        pytest.param("begin", "leave", "its process ended", marks=pytest.mark.slow),
        pytest.param("write", "leave", "its process ended", marks=pytest.mark.slow),
        pytest.param("end", "leave", "its process ended", marks=pytest.mark.slow),
        pytest.param("begin", "hang", "no answer within 5 seconds", marks=pytest.mark.slow),
        pytest.param("write", "hang", "it did not finish within 1 seconds after the run", marks=pytest.mark.slow),
        pytest.param("end", "hang", "it did not finish within 1 seconds after the run", marks=pytest.mark.slow),
    ],
)
def test_failing_tracker_warns_once(
    tmp_path: Path, odd_tracker: None, monkeypatch: pytest.MonkeyPatch, at: str, how: str, expected: str
) -> None:
    if (at, how) == ("begin", "hang"):
        monkeypatch.setattr(tracking, "BEGIN_SECONDS", 5.0)
    elif how != "hang":
        monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said, before = Messages(), time.monotonic()
    run_of(tmp_path, said, {}, odd=OddConfig(at=at, how=how))
    assert time.monotonic() - before < 40
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 1 and f"logger=odd: {expected}" in warnings[0], said


@pytest.mark.slow
def test_failed_tracker_restarts_with_fallback(
    tmp_path: Path, odd_tracker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said = Messages()
    run_of(tmp_path, said, {}, odd=OddConfig(at="begin", second="nowhere"))
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3"]
    assert "warning: logger=odd: RuntimeError: odd begin; starting again" in said[0] and said[1] == "odd: begun"


class FailingPopen:
    """Replaces Popen on a machine that cannot start processes."""

    def __init__(self, *arguments: Any, **keywords: Any):
        raise OSError("no more processes")


def test_slow_tracker_drops_rows_without_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dropped and counted once the queue of a tracker is full."""
    monkeypatch.setattr(tracking.TrackerThread, "_work", lambda thread: thread.ready.set())  # never takes a row
    said = Messages()
    with Trackers({"odd": OddConfig()}, lambda step: metadata(tmp_path, step), said.say, said.warn) as trackers:
        trackers.on_start(0, None)
        (thread,) = trackers.threads

        class NoWaiting(queue.Queue[Any]):
            """Fails instead of waiting."""

            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                assert not block, "the loop waits"
                super().put(item, block, timeout)

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                raise AssertionError("the loop reads what it wrote")

        thread._rows = NoWaiting(2)
        for row in ROWS:
            trackers.on_step(row)
        trackers.on_evaluation(ROWS[0])
        trackers.on_checkpoint(3, "x")
        assert thread.dropped == 2
    assert any("2 rows dropped" in line for line in said)


def test_failed_process_start_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.subprocess, "Popen", FailingPopen)
    said = Messages()
    run_of(tmp_path, said, {}, odd=OddConfig())
    assert said == [
        "warning: logger=odd: no process can be started (no more processes); "
        "training continues, metrics.jsonl has every row"
    ]


def test_tracker_ends_if_run_is_killed(tmp_path: Path) -> None:
    """The input of the tracker process ends without a result; the tracker still closes its files."""
    answers = io.StringIO()
    serve(Odd(OddConfig(), metadata(tmp_path)), iter([json.dumps({"row": ROWS[0]})]), answers)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert said == [{"kind": "ready", "text": "begun"}, {"kind": "done", "text": "ended with None"}]


def test_numbers_of_row_are_flattened() -> None:
    row = {"step": 3, "split": "validation", "loss": 0.5, "best": True, "of": {"a": 1, "name": "x"}, "nothing": None}
    assert dict(numbers(row)) == {"loss": 0.5, "of/a": 1}
