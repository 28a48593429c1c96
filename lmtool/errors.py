"""The errors a user can cause, and the ways a run can end.

Every error carries what was given, where, what is allowed and what to do. `cli` prints it as one line
`error: ...` and one line `hint: ...`, without a traceback, and exits with `exit_status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DONE = 0
FAULT = 1
USER_ERROR = 2
CHECK_FAILED = 3
DIVERGED = 4
REQUEUE = 75
INTERRUPTED = 130
TERMINATED = 143


class LmtoolError(Exception):
    """Anything lmtool ends a command with on purpose. `message` is one line; `hint` is what to type or change."""

    exit_status = FAULT

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UserError(LmtoolError):
    """The user can fix it: exit 2. Name the key or file:line, what was given and what is allowed."""

    exit_status = USER_ERROR


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration: the dotted key, what is wrong with it, and what to do.

    meant: the keys that an unknown one probably stands for. absent: the key has no value, and needs one.
    """

    key: str
    message: str
    hint: str | None = None
    meant: tuple[str, ...] = ()
    absent: bool = False


class ConfigError(UserError):
    """All mistakes of a configuration together."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.message, first.hint)


class CheckFailed(LmtoolError):
    """A check did not hold (a round trip, measured statistics): exit 3."""

    exit_status = CHECK_FAILED


class Diverged(LmtoolError):
    """The loss stopped being a number, or exploded: exit 4. The offending batch is saved beside the run."""

    exit_status = DIVERGED


class Stopped(LmtoolError):
    """Stopped from outside with a checkpoint saved: 75 (requeue me), 130 (SIGINT) or 143 (SIGTERM)."""

    def __init__(self, message: str, exit_status: int, hint: str | None = None):
        super().__init__(message, hint)
        self.exit_status = exit_status
