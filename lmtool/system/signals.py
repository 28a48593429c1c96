"""Signals end a command in order, with the exit status that shells, batch systems and sweeps expect.

`Interrupts` ends a command wherever it is. During training, `Signals` sets a flag that the loop reads between steps,
where it saves a checkpoint and stops. After the last step (`too_late`) the run finishes: only results are left to
write. Standard library only.
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

# Schedulers announce preemption with the user signals: exit 75 asks to be queued again. Losing the terminal (SIGHUP)
# ends a run like SIGTERM.
STATUS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
    signal.SIGUSR2: REQUEUE,
}

AGAIN_SECONDS = 0.05
REPEATED_SECONDS = 0.5
"""Seconds within which a repeated signal counts as the same request, for ranks of one launcher."""


class Interrupted(KeyboardInterrupt):
    """A signal, raised at the current instruction. Like Ctrl-C it is not an Exception, so that no library handles it as
    an error of its own."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


def stopped(interrupt: KeyboardInterrupt, when: str = "", hint: str | None = None) -> Stopped:
    """The end of a command by a signal, or by Ctrl-C if no handler is installed."""
    if not isinstance(interrupt, Interrupted):
        return Stopped("interrupted", INTERRUPTED, hint)
    return Stopped(f"stopped by {interrupt.signal.name}{when}", STATUS[interrupt.signal], hint)


class Interrupts:
    """Context in which the first signal raises Interrupted wherever the process is.

    In a finalizer, where Python drops exceptions, the signal is sent again a moment later. If a library converts the
    exception into its own, the end of the context raises Interrupted again. The second signal raises Stopped, so that
    files are closed and the lock is released while the first one is still being handled; the third ends the process at
    once. SIGTERM followed by a user signal, as schedulers send them, is one request to be queued again. Ignored signals
    (nohup) stay ignored. Handlers belong to the main thread; in any other thread the context does nothing.
    """

    def __init__(self, resume_hint: str | None = None, remaining: str = "") -> None:
        """resume_hint: the hint of the second signal's error. remaining: the end of its message, which names the
        checkpoint that is left."""
        self.resume_hint, self.remaining = resume_hint, remaining
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
        """Send a signal again whose exception was raised where nothing can catch it."""
        if not isinstance(problem.exc_value, Interrupted):
            self._unraisable(problem)
            return
        self._count, self._last = 0, (0, 0.0)
        self._again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), problem.exc_value.signal))
        self._again.daemon = True
        self._again.start()

    def obey(self, number: signal.Signals) -> None:
        """Handle the first signal."""
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
            raise Stopped(
                f"stopped at once by a second {number.name}{self.remaining}", STATUS[number], self.resume_hint
            )
        else:
            os._exit(STATUS[number])

    def _repeated(self, number: int) -> bool:
        """Whether a signal repeats the one just before: a rank also receives it from the launcher, and once for each of
        the launcher's threads if that is killed."""
        before, self._last = self._last, (number, time.monotonic())
        return self._together and number == before[0] and self._last[1] - before[1] < REPEATED_SECONDS


class Signals(Interrupts):
    """Context in which the first signal sets `received`, which the loop reads between steps."""

    def __init__(self, resume_hint: str) -> None:
        super().__init__(resume_hint, "; the last checkpoint is intact")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self.received is not None:  # it came during the last step
            _late.append(self.received)

    def obey(self, number: signal.Signals) -> None:
        """The loop handles it between steps."""

    def stopped(self, step: int, saved: bool) -> Stopped:
        """The end of a run that was asked to stop after `step`."""
        assert self.received is not None
        where = f"a checkpoint of step {step} is saved" if saved else "saving failed, the previous checkpoint is intact"
        return Stopped(f"stopped by {self.received.name}: {where}", STATUS[self.received], self.resume_hint)


# --- after the last step ----------------------------------------------------------------------------------------------

_late: list[signal.Signals] = []


class _Late(Interrupts):
    """The first signal is reported and otherwise ignored, because the run only has its results left to write."""

    def __init__(self, resume_hint: str, log: Callable[[str], None], reports: bool) -> None:
        super().__init__(resume_hint, "; the checkpoint of the last step is intact")
        self.log, self.reports = log, reports

    def obey(self, number: signal.Signals) -> None:
        _late.append(number)
        text = (
            f"{number.name} came after the last step, too late to stop: the run has finished and is writing its results"
        )
        if self.reports:
            with suppress(OSError):  # print is not reentrant, and the signal may have interrupted one
                os.write(2, f"warning: {text}\n".encode())
            self.log(text)


def too_late(resume_hint: str, log: Callable[[str], None], reports: bool) -> None:
    """Ignore the first signal from here to the end of the surrounding `Interrupts`; one that came during the last step
    is reported now. log: writes a line to log.txt. reports: whether this rank prints the message."""
    late = _Late(resume_hint, log, reports)
    late.install()
    for number in take_late():
        late.handle(number)


def take_late() -> list[signal.Signals]:
    """Remove and return the signals that came too late for a run, after which a sweep starts no further job."""
    late = [*_late]
    _late.clear()
    return late
