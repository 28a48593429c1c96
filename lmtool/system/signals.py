"""Ends a command on a signal in an orderly way, with the exit status that shells, batch systems and sweeps expect.

`Interrupts` ends a command at any point. During training, `Signals` sets a flag that the loop reads between steps,
where it saves a checkpoint and stops. After the last step (`ignore_first_signal`) the run finishes: it only has to
write its results. Standard library only.
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

# Schedulers announce preemption with the user signals; exit status 75 asks them to requeue the job. Losing the terminal
# (SIGHUP) ends a run like SIGTERM.
STATUS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
    signal.SIGUSR2: REQUEUE,
}

RESEND_SECONDS = 0.05
REPEATED_SECONDS = 0.5
"""Time within which a repeated signal counts as the same request, for ranks that a launcher started."""


class Interrupted(KeyboardInterrupt):
    """A signal, raised at the current instruction. Like KeyboardInterrupt it is not an Exception, so that libraries do
    not handle it as an ordinary error."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


def stop_error(interrupt: KeyboardInterrupt, when: str = "", hint: str | None = None) -> Stopped:
    """Returns the error for a command that was ended by a signal, or by Ctrl-C without a handler."""
    if not isinstance(interrupt, Interrupted):
        return Stopped("interrupted", INTERRUPTED, hint)
    return Stopped(f"stopped by {interrupt.signal.name}{when}", STATUS[interrupt.signal], hint)


class Interrupts:
    """Context in which the first signal raises Interrupted at any point of the program.

    If Python drops the exception because it was raised in a finalizer, the signal is sent again a moment later. If a
    library converts the exception into another one, the end of the context raises Interrupted again. The second signal
    raises Stopped, so that files are closed and the lock is released even if handling the first signal takes long; the
    third ends the process at once. SIGTERM followed by a user signal, as schedulers send them, is one request to be
    requeued. Ignored signals (nohup) stay ignored. Only the main thread can handle signals; in any other thread the
    context does nothing.
    """

    def __init__(self, resume_hint: str | None = None, remaining: str = "") -> None:
        """resume_hint: the hint of the second signal's error. remaining: the end of the error's message, which names
        the remaining checkpoint."""
        self.resume_hint, self.remaining = resume_hint, remaining
        self.received: signal.Signals | None = None
        self._count = 0
        self._last: tuple[int, float] = (0, 0.0)
        self._has_launcher = started_together(os.environ)
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._previous_hook = sys.unraisablehook
        self._resend_timer: threading.Timer | None = None
        self._raised = False

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._previous_handlers:
            return
        sys.unraisablehook = self._previous_hook
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        outer = None if self.received is None else self._previous_handlers.get(self.received)
        self._previous_handlers.clear()
        if self._resend_timer is not None and self._resend_timer.is_alive():
            self._resend_timer.cancel()
            if inspect.ismethod(outer) and isinstance(outer.__self__, Interrupts):
                outer(self.received)
        if self._raised and isinstance(error, Exception) and not isinstance(error, LmtoolError):
            assert self.received is not None
            raise Interrupted(self.received) from error

    def install(self) -> None:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in STATUS:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:
                    self._previous_handlers[number] = handler
                    signal.signal(number, self.handle)
            sys.unraisablehook, self._previous_hook = self._resend, sys.unraisablehook

    def _resend(self, problem: sys.UnraisableHookArgs) -> None:
        """Sends a signal again if Python dropped its exception."""
        if not isinstance(problem.exc_value, Interrupted):
            self._previous_hook(problem)
            return
        self._count, self._last = 0, (0, 0.0)
        self._resend_timer = threading.Timer(RESEND_SECONDS, os.kill, (os.getpid(), problem.exc_value.signal))
        self._resend_timer.daemon = True
        self._resend_timer.start()

    def handle_first(self, number: signal.Signals) -> None:
        """Handles the first signal."""
        self._raised = True
        raise Interrupted(number)

    def handle(self, code: int, frame: FrameType | None = None) -> None:
        number = signal.Signals(code)
        if self._is_repetition(number):
            return
        if self._count == 1 and self.received is signal.SIGTERM and STATUS[number] == REQUEUE:
            self.received = number
            return
        self._count += 1
        if self._count == 1:
            self.received = number
            self.handle_first(number)
        elif self._count == 2:
            raise Stopped(
                f"stopped at once by a second {number.name}{self.remaining}", STATUS[number], self.resume_hint
            )
        else:
            os._exit(STATUS[number])

    def _is_repetition(self, number: int) -> bool:
        """Whether a signal repeats the previous signal. A rank gets the same signal from the terminal and from the
        launcher, and one for each thread of a killed launcher."""
        previous, self._last = self._last, (number, time.monotonic())
        return self._has_launcher and number == previous[0] and self._last[1] - previous[1] < REPEATED_SECONDS


class Signals(Interrupts):
    """Context in which the first signal only sets `received`, which the loop reads between steps."""

    def __init__(self, resume_hint: str) -> None:
        super().__init__(resume_hint, "; the last checkpoint is intact")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self.received is not None:  # the signal came during the last step
            _late.append(self.received)

    def handle_first(self, number: signal.Signals) -> None:
        """Leaves the signal to the loop, which handles it between steps."""

    def stop_error(self, step: int, saved: bool) -> Stopped:
        """Returns the error for a run that a signal stopped after `step`. saved: whether a checkpoint was saved."""
        assert self.received is not None
        saved_state = (
            f"a checkpoint of step {step} is saved" if saved else "saving failed, the previous checkpoint is intact"
        )
        return Stopped(f"stopped by {self.received.name}: {saved_state}", STATUS[self.received], self.resume_hint)


# --- after the last step ----------------------------------------------------------------------------------------------

_late: list[signal.Signals] = []


class _LateInterrupts(Interrupts):
    """Reports the first signal, and otherwise ignores it, because the run only has to write its results."""

    def __init__(self, resume_hint: str, log: Callable[[str], None], reports: bool) -> None:
        super().__init__(resume_hint, "; the checkpoint of the last step is intact")
        self.log, self.reports = log, reports

    def handle_first(self, number: signal.Signals) -> None:
        _late.append(number)
        text = (
            f"{number.name} came after the last step, too late to stop: the run has finished and is writing its results"
        )
        if self.reports:
            with suppress(OSError):  # print is not reentrant, and the signal may have interrupted a print
                os.write(2, f"warning: {text}\n".encode())
            self.log(text)


def ignore_first_signal(resume_hint: str, log: Callable[[str], None], reports: bool) -> None:
    """Ignores the first signal until the end of the surrounding `Interrupts`, and reports a signal that came during the
    last step. log: writes a line to log.txt. reports: whether this rank prints the message."""
    interrupts = _LateInterrupts(resume_hint, log, reports)
    interrupts.install()
    for number in pop_late_signals():
        interrupts.handle(number)


def pop_late_signals() -> list[signal.Signals]:
    """Removes and returns the signals that came too late to stop a run. After such a signal a sweep starts no further
    job."""
    late = [*_late]
    _late.clear()
    return late
