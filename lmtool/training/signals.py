"""Signals that end a run in order: a flag that the loop reads between steps, where it saves and stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from lmtool.errors import INTERRUPTED, REQUEUE, TERMINATED, Stopped
from lmtool.ranks import started_together
from lmtool.training.group import Group

# Schedulers announce preemption with the user signals: exit 75 asks to be queued again. A lost terminal ends a run
# like SIGTERM does.
_STATUS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
    signal.SIGUSR2: REQUEUE,
}

_SECONDS = "seconds"
REPEATED_SECONDS = 0.5
"""In which the same signal is one request, of processes that were started together."""


class Signals:
    """Context in which the signals set `received` instead of ending the process.

    The second one raises Stopped wherever the process is, so that files are closed and the lock is given up; the
    third ends it at once. A scheduler that preempts a run sends SIGTERM and then a user signal: that is one request,
    to be queued again. Signals that were ignored (nohup) stay ignored. Handlers belong to the main thread: entered in
    another, this does nothing.
    """

    def __init__(self, go_on: str) -> None:
        """go_on: what to type to resume the run."""
        self.go_on = go_on
        self.received: signal.Signals | None = None
        self._count = 0
        self._last: tuple[int, float] = (0, 0.0)
        self._together = started_together(os.environ)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _STATUS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._repeated(number):
            return
        asks_to_requeue = _STATUS[signal.Signals(number)] == REQUEUE
        if self._count == 1 and self.received is signal.SIGTERM and asks_to_requeue:
            self.received = signal.Signals(number)
            return
        self._count += 1
        if self._count == 1:
            self.received = signal.Signals(number)
            return
        if self._count == 2:
            raise Stopped(
                f"stopped at once by a second {signal.Signals(number).name}; the last checkpoint stands",
                _STATUS[signal.Signals(number)],
                self.go_on,
            )
        os._exit(_STATUS[signal.Signals(number)])

    def _repeated(self, number: int) -> bool:
        """Whether a signal is the one that came just before: one of several processes has it from their launcher too,
        and where that one is killed, again for each of its threads."""
        before, self._last = self._last, (number, time.monotonic())
        return self._together and number == before[0] and self._last[1] - before[1] < REPEATED_SECONDS

    def stopped(self, step: int, saved: bool) -> Stopped:
        """The end of a run that was asked to stop after `step`."""
        assert self.received is not None
        where = f"a checkpoint of step {step} is saved" if saved else "saving failed, the checkpoint before it stands"
        return Stopped(f"stopped by {self.received.name}: {where}", _STATUS[self.received], self.go_on)


def agreed(group: Group, seconds: float, signals: Signals) -> tuple[float, bool]:
    """What a clock and the signals say, the same for all processes of a group: the seconds of rank 0, and whether any
    was asked to stop, as all are then."""
    received = {} if signals.received is None else {signals.received.name: 1.0}
    said = group.sum({_SECONDS: 0.0 if group.rank else seconds, **received})
    names = [name for name in said if name != _SECONDS]
    if names and signals.received is None:
        signals.received = signal.Signals[names[0]]
    return said[_SECONDS], bool(names)
