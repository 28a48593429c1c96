"""The file LOCK: one process per run folder.

The lock has two parts: an advisory lock on the open file, which the system releases when the process dies; and the
owner's host, boot and process as the file's content, for filesystems and hosts that do not share advisory locks. A
process takes over an existing lock only if both parts show that its owner has ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lmtool.errors import UserError, cannot_write
from lmtool.runs.files import write_errors
from lmtool.system.files import boot, process_exists


@dataclass(frozen=True)
class Owner:
    """A process. Its start distinguishes it from a later process with the same number."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> Owner:
        return cls(socket.gethostname(), boot(), os.getpid(), _started(os.getpid()))

    def alive(self) -> bool:
        """Whether the process may still run. False only if it ran on this host, and has ended or the host has rebooted
        since."""
        if self.host != socket.gethostname():
            return True
        return self.boot == boot() and _started(self.pid) == self.started and process_exists(self.pid)


def _started(pid: int) -> str:
    """Returns field 22 of /proc/PID/stat, the start in clock ticks since boot; "" without /proc or the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Lock:
    """The lock of a folder. `acquire` raises a UserError that names the owner if another process holds the lock."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        while True:
            with write_errors(self.path):
                handle, created = _open(self.path)
            try:
                if self._take(handle, created):
                    self._handle = handle
                    return
            except OSError as error:
                self._remove()  # this process created the file but could not write it, for example on a full disk
                os.close(handle)
                raise cannot_write(self.path, error) from error
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _take(self, handle: int, created: bool) -> bool:
        """Locks the open file. Returns False if the path names another file by now, or none; the caller then tries
        again."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use_error(_read(handle)) from None
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                raise cannot_write(self.path, error) from error
            if not created:  # without advisory locks, only the creator of the file holds it
                raise self._in_use_error(_read(handle)) from None
        try:
            current = os.stat(self.path).st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            current = False
        if not current:
            return False
        owner = _read(handle)
        if owner is not None and owner.alive():
            raise self._in_use_error(owner)
        if os.fstat(handle).st_nlink > 1:  # a hard link: the file also has another name, so it must not be written
            self.path.unlink()
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(Owner.me())).encode(), 0)
        os.fsync(handle)
        return True

    def _in_use_error(self, owner: Owner | None) -> UserError:
        holder = f"process {owner.pid} on {owner.host}" if owner else "another process"
        hint = "wait for it, or set another name="
        if owner is not None and owner.host != socket.gethostname():
            hint += f"; if it is gone: rm {self.path}"
        return UserError(f"{self.path.parent} is in use by {holder}", hint)

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._handle is None:
            return
        self._remove()
        os.close(self._handle)
        self._handle = None

    def _remove(self) -> None:
        """Removes the file. On a disk that became read-only the file stays, but the next process sees that the owner
        has ended."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Removes the lock file that this process left because a signal interrupted it before the lock could be released.
    A file that names no owner is removed only if no process has locked it."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            owner = _read(handle)
            if owner is None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if owner in (None, Owner.me()):
                path.unlink()
        finally:
            os.close(handle)


def is_held(path: Path) -> bool:
    """Whether the process that wrote a lock file may be alive; False without a file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owner = _read(handle)
    finally:
        os.close(handle)
    return owner is not None and owner.alive()


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_EXCL, 0o644), True
    except FileExistsError:
        return os.open(path, flags, 0o644), False


def _read(handle: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(handle, 4096, 0)))
    except (ValueError, TypeError):
        return None
