"""The trackers of a run, as the loop sees them: a listener that never waits.

Each tracker has a queue, a thread that empties it, and a process that does the work (process.py): what it imports, and
what it waits for, costs the training nothing, and one that hangs can be ended.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from lmtool.config import plugins
from lmtool.reporting.trackers.base import RunMetadata
from lmtool.reporting.trackers.configs import TrackerConfig
from lmtool.runs.files import to_json
from lmtool.system.environment import SAFE_PATH
from lmtool.system.secrets import masked_data

QUEUE_ROWS = 10_000
BEGIN_SECONDS = 30.0
"""In which a tracker must be ready, counted from when training starts."""
END_SECONDS = 8.0
"""For what is left to write when a run ends, all trackers together; one that has not begun is waited for before."""
_SUMMARY_KEYS = (
    "metric", "value", "ended", "best_step", "steps", "epochs", "tokens", "seconds", "tokens_per_second",
    "peak_memory_bytes", "parameters", "trainable_parameters", "baseline", "standard_error",
)  # fmt: skip

Say = Callable[[str], object]


class Failed(Exception):
    """A tracker cannot begin, or ended before the run did."""


class TrackerThread:
    """One tracker of a running training."""

    def __init__(self, name: str, config: TrackerConfig, run: RunMetadata, rows: int = QUEUE_ROWS):
        self.name, self.config, self.run = name, config, run
        self.dropped = 0
        self.notes: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
        """Lines to report, and whether each is a warning."""
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(rows)
        self._end: dict[str, Any] | None = None
        self._over = False
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ready = threading.Event()
        """Set when the tracker takes rows, or never will."""
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # --- the run's side: nothing here waits, but for `join` -----------------------------------------------------------

    def put(self, row: Mapping[str, Any]) -> None:
        """Hand a row over; where the tracker is behind by too many it is left out and counted."""
        if self._over:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.dropped += 1

    def end(self, result: Mapping[str, Any] | None) -> None:
        """No more rows will come."""
        self._end = {"end": None if result is None else masked_data(dict(result))}
        with suppress(queue.Full):  # the thread looks for the end whenever the queue is empty
            self._rows.put_nowait(None)

    def join(self, deadline: float) -> bool:
        """Wait for what is left until `deadline` of time.monotonic, then end the process. Whether it was done."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        done = not self._thread.is_alive()
        self._over = True
        self._kill()
        return done

    @property
    def left(self) -> str:
        """A sentence about rows that were not written."""
        return self.config.left(self.run.folder)

    # --- the thread ---------------------------------------------------------------------------------------------------

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
        except Failed as failure:
            if not self._over:
                self.notes.put(
                    (True, f"logger={self.name}: {failure}; training continues, metrics.jsonl has every row")
                )
        # A bug here must not reach the run either.
        except Exception as error:
            self.notes.put(
                (True, f"logger={self.name}: {type(error).__name__}: {error}; training continues without it")
            )
        finally:
            self._over = True
            self.ready.set()
            self._kill()

    def _begin(self) -> None:
        """Start the process and wait until it takes rows; where it does not, once more as its configuration has it for
        that. Raises Failed."""
        try:
            note = self._start(self.config)
        except Failed as failure:
            second = self.config.fallback()
            if second is None:
                raise
            self._kill()
            self.notes.put((True, f"logger={self.name}: {failure}; it begins again, and reaches for no server"))
            note = self._start(second)
        self.ready.set()
        if note:
            self.notes.put((False, f"{self.name}: {note}"))

    def _start(self, config: TrackerConfig) -> str | None:
        self._answers = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lmtool.reporting.trackers.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **SAFE_PATH},  # for what its library starts
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C and a scheduler's signal are for the run
            )
        except OSError as error:
            raise Failed(f"no process can be started ({error})") from error
        threading.Thread(target=_listen, args=(self._process, self._answers), daemon=True).start()
        self._send({
            "name": self.name,
            "config": config.model_dump(mode="json"),
            "plugins": list(plugins.typed()),
            "run": vars(self.run),
        })  # fmt: skip
        return self._answer(BEGIN_SECONDS)

    def _send(self, message: Mapping[str, Any] | None) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            self._answer(1.0)  # which says why, where it can
            raise Failed("it ended") from error

    def _answer(self, seconds: float | None) -> str | None:
        """The tracker's next answer; None: however long it takes, since `join` ends it. Raises Failed where there is
        none, or where it says so."""
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"no answer within {seconds:g} seconds") from None
        if answer["kind"] == "failed":
            raise Failed(answer["text"])
        return answer["text"]

    def _kill(self) -> None:
        """End the process and what it has started; harmless where it has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError, subprocess.TimeoutExpired):
            process.wait(1.0)


def _listen(process: subprocess.Popen[str], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass on what a tracker answers; its last word is that it ended."""
    assert process.stdout is not None
    with suppress(OSError, ValueError):
        for line in process.stdout:
            answers.put(json.loads(line))
    answers.put({"kind": "failed", "text": "it ended"})


class Trackers:
    """Listens to the loop for all trackers of a run. Use as a context: leaving it ends them, within a bounded time.

    configs: by name. metadata: of the run, from the step after which training continues. say, warn: where lines go;
    they are called on the thread that calls the listener.
    """

    def __init__(
        self, configs: Mapping[str, TrackerConfig], metadata: Callable[[int], RunMetadata], say: Say, warn: Say
    ):
        self.configs, self.metadata, self.say, self.warn = configs, metadata, say, warn
        self.threads: Sequence[TrackerThread] = ()
        self._result: dict[str, Any] | None = None

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_start(self, step: int, steps: int | None, max_seconds: float | None = None) -> None:
        metadata = self.metadata(step)
        self.threads = [TrackerThread(name, config, metadata) for name, config in self.configs.items()]

    def on_step(self, row: Mapping[str, Any]) -> None:
        for thread in self.threads:
            thread.put(row)
        self._report()

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        self.on_step(row)

    def on_checkpoint(self, step: int, path: str) -> None:
        self._report()

    def on_end(self) -> None:
        self._report()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Take the headline of result.json as the summary of the trackers."""
        self._result = {name: result[name] for name in _SUMMARY_KEYS if result.get(name) is not None}

    def close(self) -> None:
        """End the trackers, and report what they could not take. Waits for those that are still about to begin, as long
        as they may, and END_SECONDS for the rest."""
        threads, self.threads = self.threads, ()
        for thread in threads:
            thread.end(self._result)
        start_deadline = time.monotonic() + BEGIN_SECONDS
        for thread in threads:
            thread.ready.wait(max(0.0, start_deadline - time.monotonic()))
        deadline = time.monotonic() + END_SECONDS
        for thread in threads:
            done = thread.join(deadline)
            self._report([thread])
            if not done:
                self.warn(f"logger={thread.name}: not done {END_SECONDS:g} seconds after the run; {thread.left}")
            if thread.dropped:
                self.warn(
                    f"logger={thread.name}: {thread.dropped} rows came faster than it took them, and are missing there"
                )

    def _report(self, threads: Sequence[TrackerThread] | None = None) -> None:
        for thread in self.threads if threads is None else threads:
            while not thread.notes.empty():
                warns, line = thread.notes.get()
                (self.warn if warns else self.say)(line)
