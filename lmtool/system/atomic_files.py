"""Writing so that a crash at any moment leaves the old content or the new, and so that no link is followed.

What replaces a file is written beside it, under a name of this process's own, and moved there: a link that has the name
is replaced, and what it leads to stays as it is. What is appended to is opened without following a link, and where the
same file has further names (hard links) it gets a copy of its own first. Folders that strangers have filled, such as an
unpacked run, are therefore written in like any other.

A draft that a killed process left is taken away by the next one that writes in its folder. Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_DRAFT = re.compile(r"\.tmp-.+-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)", re.DOTALL)
_ABANDONED_SECONDS = 3600.0
"""After which a draft of another machine that nobody has written to is left: its process cannot be asked."""


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """A new file, on the disk when this returns, in the place of one of that name."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a small file in one move."""
    draft = draft_of(path)
    try:
        write_bytes(draft, content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def open_to_append(path: Path) -> int:
    """The descriptor of a file that is appended to, made where it is not there; one with further names is replaced by
    a copy first. OSError (ELOOP) where a link stands there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o666)
    if os.fstat(handle).st_nlink < 2:
        return handle
    os.close(handle)
    replace_bytes(path, path.read_bytes())
    return os.open(path, flags, 0o666)


def real_folder(path: Path) -> Path:
    """A folder inside one that is written in, made where it is not there. OSError (ELOOP) where a link stands there."""
    require_no_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_no_link(path: Path) -> None:
    """OSError (ELOOP) where a link stands at a path."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a link, and none is followed", str(path))


# --- drafts -----------------------------------------------------------------------------------------------------------


def draft_of(path: Path) -> Path:
    """A name beside a path for what will take its place, at which nothing stands. Drafts that processes which are gone
    left in the folder are taken away."""
    draft = path.with_name(f".tmp-{path.name}-{_machine()}-{os.getpid()}")
    with suppress(OSError):
        with os.scandir(path.parent) as entries:
            left = [Path(entry.path) for entry in entries if entry.name == draft.name or _is_left(entry)]
        for other in left:
            remove(other)
    return draft


def remove(path: Path) -> None:
    """Take away a file, a link or a folder, as far as the disk allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Whether the process that wrote a draft is gone, as far as it can be known."""
    match = _DRAFT.fullmatch(entry.name)
    if match is None:
        return False
    if match["machine"] == _machine():
        return not process_exists(int(match["process"]))
    with suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS
    return False


@cache
def _machine() -> str:
    """This machine since it was started, and which processes are seen on it: numbers mean another process elsewhere."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot()} {space}".encode()).hexdigest()[:8]


def boot() -> str:
    """What the system calls its present run; "" where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_exists(number: int) -> bool:
    """Whether a process of this machine has the number."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
