"""A tracker that fails, hangs or is gone costs a run one warning and a bounded time; the loop never waits for it."""

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


class Said(list[str]):
    """Lines as they were reported, warnings with a word before them."""

    def say(self, line: str) -> None:
        self.append(line)

    def warn(self, line: str) -> None:
        self.append(f"warning: {line}")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin is typed, and a hanging tracker is waited for a second."""
    monkeypatch.setattr(registry, "_typed_plugins", (odd.__name__,))
    monkeypatch.setattr(tracking, "END_SECONDS", 1.0)
    yield


def run_of(folder: Path, said: Said, result: dict[str, Any] | None = None, **configs: TrackerConfig) -> None:
    with Trackers(configs, lambda step: metadata(folder, step), said.say, said.warn) as trackers:
        trackers.on_start(0, 3)
        for row in ROWS:
            trackers.on_step(row)
        if result is not None:
            trackers.finish(result)


def test_what_happens_reaches_the_tracker(tmp_path: Path, loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said = Said()
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
def test_one_that_goes_wrong_ends_nothing(
    tmp_path: Path, loaded: None, monkeypatch: pytest.MonkeyPatch, at: str, how: str, expected: str
) -> None:
    if (at, how) == ("begin", "hang"):
        monkeypatch.setattr(tracking, "BEGIN_SECONDS", 5.0)
    elif how != "hang":
        monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said, before = Said(), time.monotonic()
    run_of(tmp_path, said, {}, odd=OddConfig(at=at, how=how))
    assert time.monotonic() - before < 40
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 1 and f"logger=odd: {expected}" in warnings[0], said


@pytest.mark.slow
def test_one_that_cannot_begin_is_tried_as_its_configuration_says(
    tmp_path: Path, loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "END_SECONDS", 30.0)
    said = Said()
    run_of(tmp_path, said, {}, odd=OddConfig(at="begin", second="nowhere"))
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3"]
    assert "warning: logger=odd: RuntimeError: odd begin; starting again" in said[0] and said[1] == "odd: begun"


class Never:
    """Stands in for the process of a tracker that reads nothing."""

    def __init__(self, *arguments: Any, **keywords: Any):
        raise OSError("no more processes")


def test_the_loop_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are left out and counted once a tracker is behind by too many; handing one over has nothing to wait for."""
    monkeypatch.setattr(tracking.TrackerThread, "_work", lambda thread: thread.ready.set())  # takes no row, ever
    said = Said()
    with Trackers({"odd": OddConfig()}, lambda step: metadata(tmp_path, step), said.say, said.warn) as trackers:
        trackers.on_start(0, None)
        (thread,) = trackers.threads

        class NoWaiting(queue.Queue[Any]):
            """Fails where it would wait."""

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


def test_no_process_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.subprocess, "Popen", Never)
    said = Said()
    run_of(tmp_path, said, {}, odd=OddConfig())
    assert said == [
        "warning: logger=odd: no process can be started (no more processes); "
        "training continues, metrics.jsonl has every row"
    ]


def test_a_run_that_is_gone_ends_its_trackers(tmp_path: Path) -> None:
    """Killed, it says nothing any more: what was written so far is closed all the same."""
    answers = io.StringIO()
    serve(Odd(OddConfig(), metadata(tmp_path)), iter([json.dumps({"row": ROWS[0]})]), answers)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert said == [{"kind": "ready", "text": "begun"}, {"kind": "done", "text": "ended with None"}]


def test_numbers_of_a_row() -> None:
    row = {"step": 3, "split": "validation", "loss": 0.5, "best": True, "of": {"a": 1, "name": "x"}, "nothing": None}
    assert dict(numbers(row)) == {"loss": 0.5, "of/a": 1}
