"""Atomic writes of files and folders, and manifests. A crash leaves either the old content or the new. No link is
followed, so it is safe to write in a folder from a stranger (an unpacked run). Standard library only.

To replace a file, lmtool writes a draft in the same folder, named after this process, and renames it. This replaces a
link at the file's path, but leaves the link's target unchanged. A file to append to is opened without following links;
if it has several names (hard links), it is copied first. The next process that writes in the folder removes drafts of
killed processes.
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

RUNS = Path("runs")
"""The folder in which a run's folder is created, unless run_dir= sets another."""

_DRAFT = re.compile(r"\.tmp-.+-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)", re.DOTALL)
_ABANDONED_SECONDS = 3600.0
"""Age at which a draft of another machine counts as abandoned, since its process cannot be checked from here."""


def user_path(path: str | Path) -> Path:
    """Returns a path that a user typed; a leading ~ or ~NAME is replaced by that user's home. Raises UserError if there
    is no such user, or no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = Path(path).parts[0]
    if home == "~":
        reason = f"~ stands for no folder here: HOME is not set, and user {os.getuid()} has no entry in /etc/passwd"
        raise UserError(f"{path}: {reason}", "export HOME=FOLDER, or give a path without ~, such as cache_dir=FOLDER")
    raise UserError(f"{path}: there is no user {home[1:]}", f"write ./{path} if {home} is the name of a folder or file")


def sync_path(path: Path) -> None:
    """Waits until a file's content, or a folder's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a new file, instead of any file of that name, and waits until it is on disk."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a small file atomically."""
    draft = draft_path(path)
    try:
        write_bytes(draft, content)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def open_to_append(path: Path) -> int:
    """Opens a file for appending, creating it if needed, and returns its descriptor. Replaces a file with hard links by
    a copy first. Raises OSError (ELOOP) if the path is a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o666)
    if os.fstat(handle).st_nlink < 2:
        return handle
    os.close(handle)
    replace_bytes(path, path.read_bytes())
    return os.open(path, flags, 0o666)


def real_folder(path: Path) -> Path:
    """Creates a folder if needed, and returns it. Raises OSError (ELOOP) if the path is a link."""
    require_no_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_no_link(path: Path) -> None:
    """Raises OSError (ELOOP) if the path is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed", str(path))


# --- drafts -----------------------------------------------------------------------------------------------------------


def draft_path(path: Path) -> Path:
    """Returns an unused path, in the same folder, for the draft that will replace a file. Removes drafts of processes
    that no longer exist."""
    draft = path.with_name(draft_name(path.name, os.getpid()))
    with suppress(OSError):
        with os.scandir(path.parent) as entries:
            drafts = [Path(entry.path) for entry in entries if entry.name == draft.name or _is_abandoned(entry)]
        for abandoned in drafts:
            remove(abandoned)
    return draft


def draft_name(name: str, process: int) -> str:
    """Returns the name of a draft that belongs to the process with this id."""
    return f".tmp-{name}-{machine()}-{process}"


def publish(draft: Path, folder: Path) -> None:
    """Renames a finished draft to the folder that it is the draft of. If another process has published the same content
    first, as happens in file systems without locks, its folder stays and the draft is removed."""
    try:
        os.rename(draft, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        remove(draft)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether a file is the draft of a process that does not, or probably does not, exist any more."""
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
    """Returns a hash of the host, its boot and its process namespace, within which a process id is unique."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {boot()} {namespace}".encode()).hexdigest()[:8]


def boot() -> str:
    """Returns the identifier of the current boot; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_exists(number: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# --- JSON of others ------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes, path: Path, hint: str) -> Any:
    """Returns the content of a JSON file that was not written by this process. Raises UserError for anything else, also
    for nesting and numbers that Python refuses. path: the file, for the error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8", hint) from error
    except RecursionError as error:
        raise UserError(f"{path}: not readable JSON: nested too deeply", hint) from error
    except ValueError as error:
        raise UserError(f"{path}: not readable JSON: {str(error).partition(';')[0]}", hint) from error


def read_json(path: Path, max_bytes: int, hint: str) -> Any:
    """Reads a JSON file, see `parse_json`. Raises UserError also for a file that is too large or cannot be read."""
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise UserError(f"{path}: {size:,} bytes; such a file has at most {max_bytes:,}", hint)
        return parse_json(path.read_bytes(), path, hint)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint) from error


# --- manifests ----------------------------------------------------------------------------------------------------
#
# Checkpoints, token stores and cached tokenizers have a manifest, which is written last: size and sha256 of each file,
# and a hash of the manifest. It detects flipped bits, which safetensors, torch's format and memory maps do not. sha256
# reads 1.2 GB/s on a core with instructions for it.

FORMAT = 1
MANIFEST = "manifest.json"


class Damaged(UserError):
    """A file that does not match its folder's manifest, or a damaged manifest."""

    def __init__(self, path: Path, reason: str, hint: str = "copy it again from where it came"):
        super().__init__(f"{path} {reason}", hint)
        self.path = path


def write_manifest(folder: Path, metadata: Mapping[str, object]) -> None:
    """Hashes and syncs all files of a folder, then writes the manifest. metadata: further entries of the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths
    }
    for path in paths:
        sync_path(path)
    write_bytes(folder / MANIFEST, Manifest(folder, dict(metadata), files).encode())
    sync_path(folder)


def _encode(body: Mapping[str, object]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=2, ensure_ascii=False, allow_nan=False).encode()


def sha256(path: Path) -> str:
    """Returns the hash of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A manifest. metadata: as passed to `write_manifest`. files: {"bytes", "sha256"} by relative path."""

    folder: Path
    metadata: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and checks a manifest. Raises Damaged if it is missing or changed, UserError if a newer lmtool wrote
        it."""
        path = folder / MANIFEST
        with _read_errors(path):
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
            intact = content == _encode(body)
            files = {
                name: {"bytes": int(entry["bytes"]), "sha256": entry["sha256"]} for name, entry in body["files"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise Damaged(path, "was changed after it was written")
        metadata = {key: value for key, value in body.items() if key not in ("format", "files")}
        return cls(folder, metadata, files)

    def encode(self) -> bytes:
        return _encode({"format": FORMAT, **self.metadata, "files": self.files})

    def verify(self, names: Iterable[str] | None = None, hashes: bool = True) -> None:
        """Compares files with the manifest. Raises Damaged if a file differs or is not in the manifest. names: None
        means all files. hashes: False compares only presence and sizes, for files that are verified when read."""
        for name in self.files if names is None else names:
            path, entry = self.folder / name, self._entry(name)
            with _read_errors(path):
                size = path.stat().st_size
                _compare(path, entry, size, sha256(path) if hashes and size == entry["bytes"] else None)

    def read_bytes(self, name: str) -> bytes:
        """Reads and verifies a small file."""
        entry = self._entry(name)
        path = self.folder / name
        with _read_errors(path):
            content = path.read_bytes()
        _compare(path, entry, len(content), hashlib.sha256(content).hexdigest())
        return content

    def _entry(self, name: str) -> dict[str, object]:
        if name not in self.files:
            raise Damaged(self.folder / name, f"is not in {MANIFEST}")
        return self.files[name]


def _compare(path: Path, entry: Mapping[str, object], size: int, digest: str | None) -> None:
    if size != entry["bytes"]:
        raise Damaged(path, f"is damaged: {size} bytes instead of {entry['bytes']}")
    if digest not in (None, entry["sha256"]):
        raise Damaged(path, "is damaged: its sha256 differs from the manifest")


def verify_siblings(folder: Path, names: Iterable[str]) -> None:
    """Verifies the named files that exist or are in the manifest; does nothing without a manifest."""
    if not (folder / MANIFEST).is_file():
        return
    manifest = Manifest.read(folder)
    manifest.verify(name for name in names if name in manifest.files or os.path.lexists(folder / name))


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    if not path.is_file():  # reading a FIFO would block
        raise Damaged(path, "is not a regular file" if os.path.lexists(path) else "is missing")
    try:
        yield
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror or error}") from error
