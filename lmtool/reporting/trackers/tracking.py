"""The trackers of a run: a listener to the training loop that never waits, and the process of each tracker.

Each tracker has a queue, a thread that empties the queue, and a process that imports the tracker's library and writes.
Imports and delays of the library therefore cost the training nothing, and a process that hangs is killed. The process,
`python -m lmtool.reporting.trackers.tracking`, reads JSON lines: the tracker to open, {"row": ...} for each row,
{"end": result}. It answers with lines {"kind": "ready" | "done" | "failed", "text": ...}.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from lmtool.config import registry
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build, lookup
from lmtool.reporting.trackers.base import RunMetadata, Tracker, TrackerConfig
from lmtool.runs.files import to_json
from lmtool.system.environment import SAFE_PATH
from lmtool.system.secrets import masked_data
from lmtool.system.signals import STATUS
from lmtool.system.terminal import counted

QUEUE_ROWS = 10_000
BEGIN_SECONDS = 30.0
"""Time for a tracker to become ready after training starts."""
END_SECONDS = 8.0
"""Time for all trackers together to write the remaining rows when a run ends, after all have become ready."""
_SUMMARY_KEYS = (
    *("metric", "value", "ended", "best_step", "steps", "epochs", "tokens", "seconds", "tokens_per_second"),
    *("peak_memory_bytes", "parameters", "trainable_parameters", "baseline", "standard_error"),
)

Report = Callable[[str], object]


class TrackerFailed(Exception):
    """A tracker cannot start, or ended before the run did."""


class TrackerThread:
    """The queue, the thread and the process of one tracker."""

    def __init__(self, name: str, config: TrackerConfig, run: RunMetadata, rows: int = QUEUE_ROWS):
        self.name, self.config, self.run = name, config, run
        self.dropped = 0
        self.notes: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
        """Lines to report, and whether each is a warning."""
        self._rows: queue.Queue[JsonMapping | None] = queue.Queue(rows)
        self._end: JsonObject | None = None
        self._is_over = False
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
        self.ready = threading.Event()
        """Set when the tracker accepts rows, or has failed."""
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # Called by the run: only `join` waits.

    def put(self, row: JsonMapping) -> None:
        """Queues a row; if the queue is full, drops and counts it."""
        if self._is_over:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.dropped += 1

    def end(self, result: JsonMapping | None) -> None:
        """Announces that no more rows follow."""
        self._end = {"end": None if result is None else masked_data(dict(result))}
        with suppress(queue.Full):  # the thread checks for the end whenever the queue is empty
            self._rows.put_nowait(None)

    def join(self, deadline: float) -> bool:
        """Waits for the remaining rows until `deadline` (of time.monotonic), then kills the process. Returns whether
        the tracker had finished."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        ended = not self._thread.is_alive()
        self._is_over = True
        self._kill()
        return ended

    # Run by the thread.

    def _work(self) -> None:
        try:
            self._begin()
            while self._end is None or not self._rows.empty():
                row = self._rows.get()
                if row is not None:
                    self._send({"row": masked_data(json.loads(to_json(dict(row), indent=None)))})
            self._send(self._end)
            if note := self._answer(None):
                self.notes.put((False, f"{self.name}: {note}"))
        except TrackerFailed as failure:
            if not self._is_over:
                self.notes.put(
                    (True, f"logger={self.name}: {failure}; training continues, metrics.jsonl has every row")
                )
        # A bug in lmtool's own code must not stop the run either.
        except Exception as error:
            self.notes.put(
                (True, f"logger={self.name}: {type(error).__name__}: {error}; training continues without it")
            )
        finally:
            self._is_over = True
            self.ready.set()
            self._kill()

    def _begin(self) -> None:
        try:
            note = self._start(self.config)
        except TrackerFailed as failure:
            fallback = self.config.fallback()
            if fallback is None:
                raise
            self._kill()
            self.notes.put((True, f"logger={self.name}: {failure}; starting again without a server"))
            note = self._start(fallback)
        self.ready.set()
        if note:
            self.notes.put((False, f"{self.name}: {note}"))

    def _start(self, config: TrackerConfig) -> str | None:
        self._answers = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lmtool.reporting.trackers.tracking"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **SAFE_PATH},  # for processes that its library starts
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C and a scheduler's signals reach only the run
            )
        except OSError as error:
            raise TrackerFailed(f"no process can be started ({error})") from error
        threading.Thread(target=_listen, args=(self._process, self._answers), daemon=True).start()
        start = {"name": self.name, "config": config.model_dump(mode="json"), "run": vars(self.run)}
        self._send({**start, "plugins": list(registry.typed_plugins())})
        return self._answer(BEGIN_SECONDS)

    def _send(self, message: JsonMapping | None) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            self._answer(1.0)  # raises TrackerFailed with the reason if the process has reported one
            raise TrackerFailed("its process ended") from error

    def _answer(self, seconds: float | None) -> str | None:
        """Returns the tracker's next answer. Raises TrackerFailed without one in time; None seconds have no limit."""
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TrackerFailed(f"no answer within {seconds:g} seconds") from None
        if answer["kind"] == "failed":
            raise TrackerFailed(answer["text"])
        return answer["text"]

    def _kill(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError, subprocess.TimeoutExpired):
            process.wait(1.0)


def _listen(process: subprocess.Popen[str], answers: queue.SimpleQueue[JsonObject]) -> None:
    assert process.stdout is not None
    with suppress(OSError, ValueError):
        for line in process.stdout:
            answers.put(json.loads(line))
    answers.put({"kind": "failed", "text": "its process ended"})


class Trackers:
    """Listens to the training loop for all trackers of a run. Leaving the context ends them within a bounded time.

    configs: the configurations by name. metadata: the metadata from the step after which training continues. say, warn:
    report a line; called on the listener's thread.
    """

    def __init__(
        self, configs: Mapping[str, TrackerConfig], metadata: Callable[[int], RunMetadata], say: Report, warn: Report
    ):
        self.configs, self.metadata, self.say, self.warn = configs, metadata, say, warn
        self.threads: Sequence[TrackerThread] = ()
        self._result: JsonObject | None = None

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_start(self, step: int, steps: int | None, max_seconds: float | None = None) -> None:
        metadata = self.metadata(step)
        self.threads = [TrackerThread(name, config, metadata) for name, config in self.configs.items()]

    def on_step(self, row: JsonMapping) -> None:
        for thread in self.threads:
            thread.put(row)
        self._report()

    def on_evaluation(self, row: JsonMapping) -> None:
        self.on_step(row)

    def on_checkpoint(self, step: int, path: str) -> None:
        self._report()

    def on_end(self) -> None:
        self._report()

    def finish(self, result: JsonMapping) -> None:
        """Gives the trackers the headline of result.json as their summary."""
        self._result = {name: result[name] for name in _SUMMARY_KEYS if result.get(name) is not None}

    def close(self) -> None:
        """Ends the trackers and reports rows that they did not write. Waits up to BEGIN_SECONDS for trackers that are
        still starting, then END_SECONDS for all."""
        threads, self.threads = self.threads, ()
        for thread in threads:
            thread.end(self._result)
        start_deadline = time.monotonic() + BEGIN_SECONDS
        for thread in threads:
            thread.ready.wait(max(0.0, start_deadline - time.monotonic()))
        deadline = time.monotonic() + END_SECONDS
        for thread in threads:
            ended = thread.join(deadline)
            self._report([thread])
            if not ended:
                unsent = thread.config.unwritten_rows(thread.run.folder)
                self.warn(
                    f"logger={thread.name}: it did not finish within {END_SECONDS:g} seconds after the run; {unsent}"
                )
            if thread.dropped:
                self.warn(f"logger={thread.name}: {counted(thread.dropped, 'row')} dropped, because it was too slow")

    def _report(self, threads: Sequence[TrackerThread] | None = None) -> None:
        for thread in self.threads if threads is None else threads:
            while not thread.notes.empty():
                warns, line = thread.notes.get()
                (self.warn if warns else self.say)(line)


# The process of a tracker.


def main() -> None:
    """Serves one tracker until the run ends or is killed."""
    # Only answers go to the run: other output of the library is dropped.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    for number in STATUS:
        signal.signal(number, signal.SIG_IGN)  # the run ends this process; if the run is killed, the pipe ends
    messages = iter(sys.stdin.readline, "")
    try:
        serve(open_tracker(json.loads(next(messages))), messages, answers)
    # The run reports any exception of a tracker in one line, and continues.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        _reply(answers, "failed", f"{type(error).__name__}: {' '.join(lines[:3])[:300]}")
    os._exit(0)  # skip the exit handlers of the library, which may wait


def open_tracker(start: JsonObject) -> Tracker:
    """Returns the tracker that the first line names."""
    registry.load_plugins(start["plugins"])
    entry = lookup("logger", start["name"])
    assert entry is not None, start["name"]
    tracker: Tracker = build(entry.config.model_validate_json(json.dumps(start["config"])), RunMetadata(**start["run"]))
    return tracker


def serve(tracker: Tracker, lines: Iterable[str], answers: TextIO) -> None:
    """Passes rows to a tracker until the line that ends it, or until no line is left because the run was killed."""
    _reply(answers, "ready", tracker.start())
    result = None
    for line in lines:
        message = json.loads(line)
        if "row" not in message:
            result = message["end"]
            break
        tracker.write(message["row"])
    _reply(answers, "done", tracker.end(result))


def _reply(answers: TextIO, kind: str, text: str | None) -> None:
    with suppress(OSError, ValueError):
        answers.write(json.dumps({"kind": kind, "text": text}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
