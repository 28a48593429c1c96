"""Compressed files read as a stream: never unpacked to disk, and limited in size.

`.gz` is read by the standard library, `.zst` by pyarrow. A small file may stand for terabytes (a bomb): reading stops
where what comes out is out of proportion.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from lmtool.errors import UserError

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Compressed files by the end of their names."""
RATIO = 100
"""Bytes that may come out of a byte of a file, on average, once `HARMLESS` bytes have come out of it."""
HARMLESS = 32 << 20
MOST = 50 << 30
"""Bytes that may come out of one file."""


class Broken(Exception):
    """A compressed stream that cannot be read on: why, in a few words, and what to do."""

    def __init__(self, reason: str, hint: str):
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def without_packing(name: str) -> str:
    """The name of a file without the end that says how it is compressed."""
    lower = name.lower()
    return next((name[: -len(end)] for end in PACKED if lower.endswith(end)), name)


def packed(*suffixes: str) -> tuple[str, ...]:
    """Ends of names, and those of the same files compressed."""
    return (*suffixes, *(suffix + end for suffix in suffixes for end in PACKED))


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, those of a compressed one as they come out. Broken where they cannot be read on; UserError where
    pyarrow is needed and not installed."""
    kind = PACKED.get(path.suffix.lower())
    file = cast(io.BufferedReader, path.open("rb", buffering=1 << 16))
    if kind is None:
        return file
    try:
        unpacked: object = gzip.GzipFile(fileobj=file, mode="rb") if kind == "gzip" else _zstd(path, file)
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Unpacked(file, unpacked, kind), 1 << 18)


def require_proportion(written: int, read: int) -> None:
    """Broken where so many bytes are too many for the bytes of the file that they came out of."""
    hint = "look at what is in it; where it is text, unpack it and read the plain file"
    if written > HARMLESS and written > RATIO * max(read, 1):
        raise Broken(f"expands to more than {RATIO} times its size", hint)
    if written > MOST:
        raise Broken(f"expands to more than {MOST >> 30} GB", "split it into smaller files")


class _Unpacked(io.RawIOBase):
    """What comes out of a compressed file."""

    def __init__(self, file: BinaryIO, unpacked: Any, kind: str):
        self._file, self._unpacked, self._kind, self._written = file, unpacked, kind, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        unpacked = self._guarded(lambda: self._unpacked.read1(len(buffer)))
        buffer[: len(unpacked)] = unpacked
        self._written += len(unpacked)
        require_proportion(self._written, self._file.tell())
        return len(unpacked)

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except EOFError as problem:
            raise self._short() from problem
        except (OSError, zlib.error) as problem:
            if isinstance(problem, OSError) and problem.errno:  # of the disk, not of what it holds
                raise
            if "runcated" in str(problem):
                raise self._short() from problem
            reason = " ".join(str(problem).split())[:120]
            hint = f"copy or download it again; where it is not compressed, name it without {self._end()}"
            raise Broken(f"not readable as {self._kind}: {reason}", hint) from problem

    def _short(self) -> Broken:
        return Broken(f"the {self._kind} stream breaks off", "the file is incomplete: copy or download it again")

    def _end(self) -> str:
        return next(end for end, kind in PACKED.items() if kind == self._kind)

    def close(self) -> None:
        if not self.closed:
            self._unpacked.close()
            self._file.close()
        super().close()


def _zstd(path: Path, file: BinaryIO) -> object:
    try:
        import pyarrow  # a large library, needed for these files only
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{path}: zstd is read by the library pyarrow, which is not installed",
            f"pip install 'lmtool[hub]', or unpack it: unzstd {path}",
        ) from problem
    return pyarrow.CompressedInputStream(file, "zstd")
