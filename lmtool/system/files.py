"""Atomic writes of files and folders: a crash leaves the old content or the new, and no link is followed.

What replaces a file is written beside it, under a name of this process's own, and moved there: a link that has the name
is replaced, and what it leads to stays as it is. What is appended to is opened without following a link, and where the
same file has further names (hard links) it gets a copy of its own first. Folders that strangers have filled, such as an
unpacked run, are therefore written in like any other.

A draft that a killed process left is taken away by the next one that writes in its folder. Standard library only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmtool.errors import UserError

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
    draft = path.with_name(draft_name(path.name, os.getpid()))
    with suppress(OSError):
        with os.scandir(path.parent) as entries:
            left = [Path(entry.path) for entry in entries if entry.name == draft.name or _is_left(entry)]
        for other in left:
            remove(other)
    return draft


def draft_name(name: str, process: int) -> str:
    """The name of a draft that goes when the process with this number is gone."""
    return f".tmp-{name}-{machine()}-{process}"


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
    if match["machine"] == machine():
        return not process_exists(int(match["process"]))
    with suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS
    return False


@cache
def machine() -> str:
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


# A folder held against its manifest: bytes and sha256 of each file, written last, and a hash of the manifest itself.
#
# Checkpoints, token stores and cached tokenizers are such folders. Neither safetensors nor torch's format nor a
# memory map notices flipped bits, the manifest does. sha256 reads 1.2 GB/s on a core with instructions for it.


FORMAT = 1
MANIFEST = "manifest.json"


class Damaged(UserError):
    """A folder that is not as it was written: which file, and what is wrong with it."""

    def __init__(self, path: Path, why: str, hint: str = "copy it again from where it came"):
        super().__init__(f"{path} {why}", hint)
        self.path, self.why = path, why


# --- writing -------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, metadata: Mapping[str, object]) -> None:
    """Hash what is in the folder, sync it, and write the manifest last. metadata: plain data that it carries too."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }
    for path in paths:
        sync_path(path)
    write_bytes(folder / MANIFEST, _encoded({"format": FORMAT, **metadata, "files": files}))
    sync_path(folder)


def _encoded(body: Mapping[str, object]) -> bytes:
    """The manifest carries a hash of itself, so that a flipped bit in it is noticed too."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=2, ensure_ascii=False, allow_nan=False).encode()


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- verifying -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """metadata: what was given to `write_manifest`. files: {"bytes", "sha256"} by the name within the folder."""

    folder: Path
    metadata: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Damaged where the manifest is missing or not as it was written; UserError where a newer lmtool wrote it."""
        path = folder / MANIFEST
        with _reading(path):
            content = path.read_bytes()
        try:
            body = json.loads(content)
            version = body["format"]
            if isinstance(version, int) and version > FORMAT:
                raise UserError(
                    f"{folder} was written by a newer lmtool (format {version}, this one reads {FORMAT})",
                    "pip install --upgrade lmtool",
                )
            body.pop("sha256")
            intact = content == _encoded(body)
            files = {
                name: {"bytes": int(entry["bytes"]), "sha256": entry["sha256"]} for name, entry in body["files"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise Damaged(path, "is not as it was written")
        metadata = {key: value for key, value in body.items() if key not in ("format", "files")}
        return cls(folder, metadata, files)

    def verify(self, names: Iterable[str] | None = None, hashes: bool = True) -> None:
        """Compares files with the manifest.

        Args:
            names: the files; None for all.
            hashes: False compares only presence and sizes, if files are verified again when read.

        Raises:
            Damaged: a file differs, or is not in the manifest.
        """
        for name in self.files if names is None else names:
            path, entry = self.folder / name, self._entry(name)
            with _reading(path):
                size = path.stat().st_size
                if size != entry["bytes"]:
                    raise Damaged(path, f"is damaged: {size} bytes instead of {entry['bytes']}")
                if hashes and sha256(path) != entry["sha256"]:
                    raise Damaged(path, "is damaged: its sha256 is not the manifest's")

    def read_bytes(self, name: str) -> bytes:
        """The verified contents of a small file."""
        entry = self._entry(name)
        path = self.folder / name
        with _reading(path):
            content = path.read_bytes()
        if len(content) != entry["bytes"]:
            raise Damaged(path, f"is damaged: {len(content)} bytes instead of {entry['bytes']}")
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise Damaged(path, "is damaged: its sha256 is not the manifest's")
        return content

    def _entry(self, name: str) -> dict[str, object]:
        if name not in self.files:
            raise Damaged(self.folder / name, f"is not in {MANIFEST}")
        return self.files[name]


def verify_siblings(folder: Path, names: Iterable[str]) -> None:
    """Verifies those of the named files that exist or should exist, if the folder has a manifest."""
    if not (folder / MANIFEST).is_file():
        return
    manifest = Manifest.read(folder)
    manifest.verify(name for name in names if name in manifest.files or os.path.lexists(folder / name))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors while reading a file into Damaged."""
    if not path.is_file():  # reading a FIFO would block
        raise Damaged(path, "is no regular file" if os.path.lexists(path) else "is missing")
    try:
        yield
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror or error}") from error
