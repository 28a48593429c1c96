"""The errors a user can cause, and the ways a run can end.

Every error carries what was given, where, what is allowed and what to do. `cli` prints it as one line
`error: ...` and one line `hint: ...`, without a traceback, and exits with `exit_status`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """One error in a configuration: the dotted key, what is wrong with it, and what to do.

    meant: the keys that an unknown one probably stands for. absent: the key has no value, and needs one.
    """

    key: str
    message: str
    hint: str | None = None
    meant: tuple[str, ...] = ()
    absent: bool = False


# What the user can do something about: full or read-only disks, quotas, rights, names.
_FIXABLE = {
    errno.ENOSPC: "free some space, or {elsewhere} on another disk",
    errno.EDQUOT: "free some of your quota, or {elsewhere} on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or {elsewhere} on another disk",
    errno.EROFS: "{elsewhere} on a disk that can be written",
    errno.EACCES: "{elsewhere} in a folder you may read and write",
    errno.EPERM: "{elsewhere} in a folder you may read and write",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EIO: "the disk reports a fault: {elsewhere} on another one",
    errno.ENOTDIR: "a part of the path is a file: {elsewhere} in another folder",
    errno.EISDIR: "a folder stands where a file belongs: {elsewhere} in another one",
    errno.ELOOP: "a link leads to itself, or is not followed here: rm it, or {elsewhere} in another folder",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files, or end other programs",
    errno.ENOMEM: "end other programs, or take a smaller model or batch",
}


def cannot_write(path: Path, error: OSError, key: str = "run_dir") -> UserError:
    """One line for a failed write, with what to do. key: names the folder that is written to."""
    hint = _FIXABLE.get(error.errno or 0, "{elsewhere} in another folder")
    return UserError(f"cannot write {path}: {_reason(error)}", hint.format(elsewhere=f"set {key}="))


@contextmanager
def system_errors() -> Iterator[None]:
    """What the system refuses inside (a full disk, a folder that may not be read) leaves as a UserError where the user
    can do something about it. Parts that know the key to give say so themselves: this is for all others."""
    try:
        yield
    except OSError as error:
        hint = _FIXABLE.get(error.errno or 0)
        if hint is None:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        raise UserError(f"{where}{_reason(error)}", hint.format(elsewhere="work")) from error


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "a link stands there"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


class ConfigError(UserError):
    """All errors of a configuration together."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.message, first.hint)

    def inside(self, origin: str, hint: str) -> ConfigError:
        """The same errors in a configuration that nobody typed, named by where it stands. hint: what to do there; a
        plugin is typed beside it."""
        return ConfigError(
            [
                Problem(problem.key, f"{origin}: {problem.message}", problem.hint if problem.key == "plugins" else hint)
                for problem in self.problems
            ]
        )


def out_of_memory(error: BaseException) -> LmtoolError | None:
    """What a device or the system refused for want of memory, as an error with what to do; None for any other."""
    text = str(error)
    refused = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not refused and "not enough memory" not in text and "can't allocate memory" not in text:
        return None
    first = text.splitlines()[0] if text else type(error).__name__
    return LmtoolError(
        f"out of memory: {first}",
        "set a smaller micro_batch_tokens=, which changes no result, gradient_checkpointing=true or a smaller "
        "max_length=; `lmtool plan` shows what the memory is for",
    )


class CheckFailed(LmtoolError):
    """A check did not hold (a round trip, measured statistics): exit 3."""

    exit_status = CHECK_FAILED


class Diverged(LmtoolError):
    """The loss stopped being a number, or exploded: exit 4. The offending batch is saved beside the run."""

    exit_status = DIVERGED


class NotFinite(Diverged):
    """A model gives something that is no finite number where it is scored or used. batch: the `types.Batch` it was
    given, where known."""

    def __init__(self, quantity: str, batch: Any = None):
        super().__init__(
            f"the model's {quantity} are not finite",
            "use an earlier checkpoint of its run (checkpoint=RUN/checkpoints/step_N), or train with a lower "
            "optimizer.lr",
        )
        self.quantity, self.batch = quantity, batch


class Stopped(LmtoolError):
    """Stopped from outside with a checkpoint saved: 75 (requeue me), 130 (SIGINT) or 143 (SIGTERM)."""

    def __init__(self, message: str, exit_status: int, hint: str | None = None):
        super().__init__(message, hint)
        self.exit_status = exit_status
