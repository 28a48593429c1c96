"""Compressed files, read as a stream without decompressing them to disk: `.gz` with the standard library, `.zst` with
pyarrow. Since a small file may expand to terabytes (a bomb), reading stops at a maximum ratio and size.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from lmtool.errors import UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Compression by the suffix of a file."""
RATIO = 100
"""Maximum ratio of decompressed to compressed bytes, after `HARMLESS` decompressed bytes."""
HARMLESS = 32 << 20
"""Number of decompressed bytes up to which any ratio is accepted."""
MAX_BYTES = 50 << 30
"""Maximum number of decompressed bytes of a file."""


class Broken(Exception):
    """A compressed stream that cannot be read further: the reason and a hint."""

    def __init__(self, reason: str, hint: str):
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def without_compression_suffix(name: str) -> str:
    """Returns the name of a file without the suffix of its compression."""
    lower = name.lower()
    return next((name[: -len(end)] for end in PACKED if lower.endswith(end)), name)


def suffix_of(path: PurePath) -> str:
    """Returns the suffix of a file in lower case, without that of its compression: .csv for a.csv.gz."""
    return PurePath(without_compression_suffix(path.name)).suffix.lower()


def stem_of(path: PurePath) -> str:
    """Returns the name of a file without `suffix_of` and its compression: a for a.csv.gz."""
    return PurePath(without_compression_suffix(path.name)).stem


def compressed_suffixes(*suffixes: str) -> tuple[str, ...]:
    """Returns the suffixes, and the suffixes of the same files when they are compressed."""
    return (*suffixes, *(suffix + end for suffix in suffixes for end in PACKED))


def open_bytes(path: Path) -> io.BufferedReader:
    """Opens a file for reading its decompressed bytes. Reading may raise Broken. Raises UserError if pyarrow is
    required but not installed."""
    kind = PACKED.get(path.suffix.lower())
    file = cast(io.BufferedReader, path.open("rb", buffering=1 << 16))
    if kind is None:
        return file
    try:
        stream: _Stream = gzip.GzipFile(fileobj=file, mode="rb") if kind == "gzip" else _zstd(path, file)
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Decompressed(file, stream, kind), 1 << 18)


def require_proportion(written: int, read: int) -> None:
    """Raises Broken if `written` decompressed bytes are too many, or too many for `read` compressed bytes."""
    hint = "check its content; if it is text, decompress it and read the plain file"
    if written > HARMLESS and written > RATIO * max(read, 1):
        raise Broken(f"expands to more than {RATIO} times its size", hint)
    if written > MAX_BYTES:
        raise Broken(f"expands to more than {MAX_BYTES >> 30} GB", "split it into smaller files")


class _Stream(Protocol):
    def read1(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _Decompressed(io.RawIOBase):
    def __init__(self, file: BinaryIO, stream: _Stream, kind: str):
        self._file, self._stream, self._kind, self._written = file, stream, kind, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer)
        content = self._read(len(target))
        target[: len(content)] = content
        self._written += len(content)
        require_proportion(self._written, self._file.tell())
        return len(content)

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read1(size)
        except (EOFError, OSError, zlib.error) as problem:
            if isinstance(problem, OSError) and problem.errno:  # an error of the disk, not of the content
                raise
            if isinstance(problem, EOFError) or "runcated" in str(problem):
                message = f"the {self._kind} stream is truncated"
                raise Broken(message, "copy or download the file again") from problem
            reason = " ".join(str(problem).split())[:120]
            suffix = next(suffix for suffix, kind in PACKED.items() if kind == self._kind)
            hint = f"copy or download it again; if it is not compressed, name it without {suffix}"
            raise Broken(f"not readable as {self._kind}: {reason}", hint) from problem

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def _zstd(path: Path, file: BinaryIO) -> _Stream:
    try:
        import pyarrow  # large, and required only for these files
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{path}: reading zstd requires the library pyarrow, which is not installed",
            f"pip install 'lmtool[hub]', or decompress it: unzstd {path}",
        ) from problem
    stream: _Stream = pyarrow.CompressedInputStream(file, "zstd")
    return stream
