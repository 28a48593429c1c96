"""Arrays that one process computes and all processes of the machine share.

The first process that needs the arrays computes them and writes them to a file in the cache folder; the others wait and
map the file read-only, so the arrays are in memory once. The last process to map the file deletes its name, and the
system frees its disk space when no process uses the arrays any more, however the processes end. A damaged or missing
file is computed again. If no file can be written, every process keeps the arrays in its own memory. Files are never
read by a later run, so they need no version.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Protocol, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
from pydantic import BaseModel

from lmtool.data.sources import OnStage
from lmtool.system.files import draft_name, draft_path, machine

Arrays = dict[str, np.ndarray]

# Sizes in bytes: the header, the alignment of arrays, and the count of processes at the end of the header.
_HEADER, _ALIGNMENT, _COUNT = 4096, 64, 4
# The files that this process has mapped and still uses.
_MAPPED: WeakValueDictionary[Path, np.memmap] = WeakValueDictionary()


@dataclass(frozen=True)
class ArrayCache:
    """The place where processes share arrays. folder: that of the files. key: hash of everything that the arrays are
    computed from. processes: number of processes on this machine, all of which load the same arrays; 1: use no file.
    progress: receives a warning if no file can be written."""

    folder: Path
    key: str
    processes: int
    progress: OnStage | None = None

    def of(self, *parts: object) -> ArrayCache:
        """Returns the cache of arrays that are computed from this cache's arrays and from `parts`, see `identity`."""
        return self if self.processes == 1 else replace(self, key=_digest(self.key, *map(identity, parts)))

    def load(self, compute: Callable[[], Arrays]) -> Arrays:
        """Returns the one-dimensional arrays of `compute`, read-only and mapped from a file if possible. `compute` must
        be pure and must not wait for other processes."""
        if self.processes == 1:
            return compute()
        folder = self.folder / machine()
        path = folder / draft_name(self.key[:32], os.getppid())  # all processes have the same parent
        with ExitStack() as stack:
            try:
                stack.enter_context(_hold_lock(folder / draft_name(f"{self.key[:32]}.lock", os.getppid())))
            except OSError as error:
                return self._in_memory(compute(), error)
            if not _is_empty(path):
                mapped = _MAPPED.get(path)
                mapped = _map(path, self.processes) if mapped is None else mapped
                if mapped is not None:
                    return _arrays_of(mapped)
                arrays = compute()
                try:
                    _write(path, arrays)
                except OSError as error:
                    weakref.finalize(next(iter(arrays.values())), _remove, path, os.getpid())
                    return self._in_memory(arrays, error)
                mapped = _map(path, self.processes)
                return arrays if mapped is None else _arrays_of(mapped)
        # Outside the lock, so that all processes compute at the same time.
        return self._in_memory(compute(), "no process could write a file")

    def _in_memory(self, arrays: Arrays, reason: OSError | str) -> Arrays:
        if self.progress is not None:
            text = reason if isinstance(reason, str) else reason.strerror
            size = sum(array.nbytes for array in arrays.values())
            self.progress(
                f"warning: {self.folder}: {text}; each of {self.processes} "
                f"processes keeps {size / 1e6:,.1f} MB of the plan of the data in memory",
                0,
                1,
            )
        return arrays


UNSHARED = ArrayCache(Path(), "", 1)
"""The cache of arrays that every process keeps in its own memory."""


@runtime_checkable
class Cached(Protocol):
    """An object with arrays, and the cache for other arrays computed from them."""

    @property
    def cache(self) -> ArrayCache: ...


def identity(value: object) -> str:
    """Returns a text that is the same only for equal values. Raises TypeError for an unsupported type."""
    if isinstance(value, Cached) and value.cache.processes > 1:
        return value.cache.key
    if value is None or isinstance(value, bool | int | float | str | BaseModel):
        return repr(value)
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).hexdigest()
        return f"{value.dtype.descr} {value.shape} {content}"
    if isinstance(value, Sequence):
        return _digest(*map(identity, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _digest(*(identity(getattr(value, part.name)) for part in fields(value) if part.compare))
    if isinstance(value, FunctionType) and "<" not in value.__qualname__:  # no closure
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"no identity of a {type(value).__name__}")


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Deletes the file at the end. Without locks in the file system the processes do not wait, and each maps a file of
    its own."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last process that used the folder removed it
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)
    try:
        yield
    finally:
        _remove(path, os.getpid())
        os.close(handle)


def _write(path: Path, arrays: Arrays) -> None:
    """Writes the arrays to a draft and renames it to `path`. Raises OSError if that fails; other processes then find an
    empty file."""
    draft, header, offset, checksum = draft_path(path), {}, _HEADER, 0
    try:
        with open(draft, "xb") as file:
            file.write(bytes(_HEADER))
            for name, array in arrays.items():
                content = np.ascontiguousarray(array).view(np.uint8).data
                padding = bytes(-len(content) % _ALIGNMENT)
                header[name] = {
                    "dtype": np.lib.format.dtype_to_descr(array.dtype),
                    "count": len(array),
                    "start": offset,
                }
                for part in (content, padding):
                    file.write(part)
                    checksum = zlib.crc32(part, checksum)
                offset += len(content) + len(padding)
            file.seek(0)
            line = json.dumps({"arrays": header, "size": offset, "crc32": checksum}).encode()
            file.write(line.ljust(_HEADER - _COUNT) + bytes(_COUNT))
        os.rename(draft, path)
    except OSError:
        with suppress(OSError):
            os.truncate(draft, 0)
            os.rename(draft, path)
        raise


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def _map(path: Path, processes: int) -> np.memmap | None:
    """Maps a file and counts this process; the last process deletes the file's name. None if it is missing or
    damaged."""
    try:
        with open(path, "r+b") as file:
            head = file.read(_HEADER)
            header = json.loads(head[:-_COUNT])
            mapped = np.memmap(file, dtype=np.uint8, mode="r")
            if len(mapped) != header["size"] or zlib.crc32(mapped[_HEADER:].data) != header["crc32"]:
                raise ValueError("not as it was written")
            count = int.from_bytes(head[-_COUNT:], "little") + 1
            file.seek(_HEADER - _COUNT)
            file.write(count.to_bytes(_COUNT, "little"))
    except (OSError, ValueError, KeyError):
        path.unlink(missing_ok=True)
        return None
    if count >= processes:
        _remove(path, os.getpid())
    else:
        weakref.finalize(mapped, _remove, path, os.getpid())
    _MAPPED[path] = mapped
    return mapped


def _arrays_of(mapped: np.memmap) -> Arrays:
    arrays = {}
    for name, entry in json.loads(bytes(mapped[: _HEADER - _COUNT]))["arrays"].items():
        descr = entry["dtype"]
        dtype = np.dtype([tuple(field) for field in descr] if isinstance(descr, list) else descr)
        end = entry["start"] + entry["count"] * dtype.itemsize
        arrays[name] = mapped[entry["start"] : end].view(dtype).view(np.ndarray)
    return arrays


def _remove(path: Path, process: int) -> None:
    """Only in the process that mapped the file; also removes its folder if that is empty."""
    if process == os.getpid():
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
