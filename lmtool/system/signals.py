"""Signals end a command in order, with the status that a shell, a batch system or a sweep goes by.

A command is ended where it is (`Interrupts`). While a run trains, a flag is set that the loop reads between steps,
where it saves and stops (`Signals`). After its last step it is too late for that (`too_late`): what is left is to write
the results. Standard library only.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from lmtool.errors import INTERRUPTED, REQUEUE, TERMINATED, LmtoolError, Stopped
from lmtool.system.ranks import started_together

# Schedulers announce preemption with the user signals: exit 75 asks to be queued again. A lost terminal ends a run
# like SIGTERM does.
STATUS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
    signal.SIGUSR2: REQUEUE,
}

AGAIN_SECONDS = 0.05
REPEATED_SECONDS = 0.5
"""In which the same signal is one request, of processes that were started together."""


class Interrupted(KeyboardInterrupt):
    """A signal, raised where the process is. Like Ctrl-C it is no Exception, which a library would take for one of its
    own errors."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


def stopped(interrupt: KeyboardInterrupt, when: str = "", hint: str | None = None) -> Stopped:
    """The end of a command by a signal, or by Ctrl-C where nothing handles signals."""
    if not isinstance(interrupt, Interrupted):
        return Stopped("interrupted", INTERRUPTED, hint)
    return Stopped(f"stopped by {interrupt.signal.name}{when}", STATUS[interrupt.signal], hint)


class Interrupts:
    """Context in which the first signal raises Interrupted wherever the process is.

    Where that is a finalizer, in which Python drops what is raised, it is raised again a moment later; where a library
    makes an error of its own of it, the end of the context makes it Interrupted again. The second signal raises
    Stopped, so that files are closed and the lock is given up where the first one is still being obeyed; the third ends
    the process at once. A scheduler that preempts a run sends SIGTERM and then a user signal: that is one request, to
    be queued again. Signals that were ignored (nohup) stay ignored. Handlers belong to the main thread: entered in
    another, this does nothing.
    """

    def __init__(self, go_on: str | None = None, stands: str = "") -> None:
        """go_on: what to type to go on. stands: what a second signal leaves."""
        self.go_on, self.stands = go_on, stands
        self.received: signal.Signals | None = None
        self._count = 0
        self._last: tuple[int, float] = (0, 0.0)
        self._together = started_together(os.environ)
        self._before: dict[signal.Signals, Any] = {}
        self._unraisable = sys.unraisablehook
        self._again: threading.Timer | None = None
        self._raised = False

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._before:
            return
        sys.unraisablehook = self._unraisable
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        outer = None if self.received is None else self._before.get(self.received)
        self._before.clear()
        if self._again is not None and self._again.is_alive():
            self._again.cancel()
            if inspect.ismethod(outer) and isinstance(outer.__self__, Interrupts):
                outer(self.received)
        if self._raised and isinstance(error, Exception) and not isinstance(error, LmtoolError):
            assert self.received is not None
            raise Interrupted(self.received) from error

    def install(self) -> None:
        """Handle signals from here on."""
        if threading.current_thread() is threading.main_thread():
            for number in STATUS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self.handle)
            sys.unraisablehook, self._unraisable = self._dropped, sys.unraisablehook

    def _dropped(self, problem: sys.UnraisableHookArgs) -> None:
        """Something was raised where nobody could catch it."""
        if not isinstance(problem.exc_value, Interrupted):
            self._unraisable(problem)
            return
        self._count, self._last = 0, (0, 0.0)
        self._again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), problem.exc_value.signal))
        self._again.daemon = True
        self._again.start()

    def obey(self, number: signal.Signals) -> None:
        """What the first signal does."""
        self._raised = True
        raise Interrupted(number)

    def handle(self, code: int, frame: FrameType | None = None) -> None:
        number = signal.Signals(code)
        if self._repeated(number):
            return
        if self._count == 1 and self.received is signal.SIGTERM and STATUS[number] == REQUEUE:
            self.received = number
            return
        self._count += 1
        if self._count == 1:
            self.received = number
            self.obey(number)
        elif self._count == 2:
            raise Stopped(f"stopped at once by a second {number.name}{self.stands}", STATUS[number], self.go_on)
        else:
            os._exit(STATUS[number])

    def _repeated(self, number: int) -> bool:
        """Whether a signal is the one that came just before: one of several processes has it from their launcher too,
        and where that one is killed, again for each of its threads."""
        before, self._last = self._last, (number, time.monotonic())
        return self._together and number == before[0] and self._last[1] - before[1] < REPEATED_SECONDS


class Signals(Interrupts):
    """Context in which the first signal sets `received`, which the loop reads between steps."""

    def __init__(self, go_on: str) -> None:
        super().__init__(go_on, "; the last checkpoint stands")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self.received is not None:  # it came in the last step
            _late.append(self.received)

    def obey(self, number: signal.Signals) -> None:
        """The loop does, between steps."""

    def stopped(self, step: int, saved: bool) -> Stopped:
        """The end of a run that was asked to stop after `step`."""
        assert self.received is not None
        where = f"a checkpoint of step {step} is saved" if saved else "saving failed, the checkpoint before it stands"
        return Stopped(f"stopped by {self.received.name}: {where}", STATUS[self.received], self.go_on)


# --- after the last step ----------------------------------------------------------------------------------------------

_late: list[signal.Signals] = []


class _Late(Interrupts):
    """The first signal is answered, and changes nothing: what is left of a run is to write its results."""

    def __init__(self, go_on: str, log: Callable[[str], None], speaks: bool) -> None:
        super().__init__(go_on, "; the checkpoint of the last step stands")
        self.log, self.speaks = log, speaks

    def obey(self, number: signal.Signals) -> None:
        _late.append(number)
        text = f"{number.name} came after the last step, too late to stop: the run has finished, and writes its results"
        if self.speaks:
            with suppress(OSError):  # not by print, in the middle of which the signal may have come
                os.write(2, f"warning: {text}\n".encode())
            self.log(text)


def too_late(go_on: str, log: Callable[[str], None], speaks: bool) -> None:
    """From here to the end of the surrounding `Interrupts` a signal changes nothing. One that came in the last step is
    answered now. log: takes the line for log.txt. speaks: whether this process does, of several."""
    late = _Late(go_on, log, speaks)
    late.install()
    for number in take_late():
        late.handle(number)


def take_late() -> list[signal.Signals]:
    """The signals that came too late for a run, once: a sweep runs no further job."""
    late = [*_late]
    _late.clear()
    return late
