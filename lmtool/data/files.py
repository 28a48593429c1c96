"""Strict reading of text files: errors name the file, line and byte."""

from __future__ import annotations

import codecs
import encodings.aliases
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from lmtool.data.compressed import PACKED, Broken, open_bytes, without_compression_suffix
from lmtool.data.configs import kind_of
from lmtool.errors import UserError, nearest
from lmtool.system.files import user_path

_collected: ContextVar[list[UserError] | None] = ContextVar("collected", default=None)


def refuse(error: UserError) -> None:
    """Raises the error of a row, or collects it inside `collect_errors`; the reader then omits the row."""
    errors = _collected.get()
    if errors is None:
        raise error
    errors.append(error)


def collecting() -> bool:
    """Whether errors of rows are collected."""
    return _collected.get() is not None


@contextmanager
def collect_errors() -> Iterator[list[UserError]]:
    """Lets readers omit rows with errors within the context. Yields the list of these errors."""
    errors: list[UserError] = []
    token = _collected.set(errors)
    try:
        yield errors
    finally:
        _collected.reset(token)


MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"%PDF-": "PDF",
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"\x7fELF": "ELF",
    b"SQLite format 3": "SQLite",
}
"""Kinds of files that are not text, by their first bytes."""
PIECE = 1 << 20
"""Bytes of a line that are read at a time."""
LINE = 1 << 26
"""Maximum number of characters of a line with a row."""
STANDARD_INPUT = Path("-")
"""The path that stands for standard input."""
WIDE = {b"\xff\xfe\x00\x00": "utf-32", b"\x00\x00\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Wide encodings by their byte-order mark."""


def find(key: str, value: str | tuple[str, ...], suffixes: tuple[str, ...] = (".txt",)) -> list[Path]:
    """Returns the files of a path or a list of paths (files, folders with subfolders in order of names and without
    hidden files, or glob patterns), in order and without duplicates. suffixes: of the files to read in a folder, in
    lower case. Raises UserError, which names `key`, if there are no files."""
    by_path: dict[str, Path] = {}
    for name in (value,) if isinstance(value, str) else value:
        path = user_path(name)
        if path.is_dir():
            files = _files_in_folder(key, path, suffixes)
        elif path.exists():
            files = [path]
        elif any(character in name for character in "*?["):
            files = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if not Path(match).is_dir()]
            if not files:
                raise UserError(f"{key}={name} matches no file", f"list the files: ls {_existing_part(path)}")
        else:
            raise no_such_file(key, name)
        for file in files:
            if not file.is_file():
                raise UserError(f"{key}: {file} is not a regular file", "use a file, a folder or a glob pattern")
            by_path.setdefault(os.path.realpath(file), file)
    return list(by_path.values())


def regular_file(key: str, value: str) -> Path:
    """Returns the file at a path. Raises UserError, which names `key`, if the file does not exist or is not a regular
    file."""
    path = user_path(value)
    if not path.exists():
        raise no_such_file(key, value)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a special file"
        raise UserError(f"{key}={value} is {kind}, not a regular file", f"set {key}=FILE")
    return path


def no_such_file(key: str, value: str) -> UserError:
    """Returns the error for a path that does not exist, with the nearest name that exists."""
    path = user_path(value)
    parent = _existing_part(path)
    missing = path.parts[len(parent.parts)] if parent != Path(".") else path.parts[0]
    names: list[str] = []
    with suppress(OSError):  # a folder that cannot be listed
        names = sorted(entry.name for entry in parent.iterdir())
    like = nearest(missing, names)
    hint = f"did you mean {parent / like}?" if like else f"list the files: ls {parent}"
    return UserError(f"{key}={value}: no such file or folder", hint)


def _existing_part(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.is_dir()), Path("."))


def _files_in_folder(key: str, folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files, other_suffixes = [], Counter[str]()
    for location, folders, names in os.walk(folder):
        folders[:] = sorted(folder_name for folder_name in folders if not folder_name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            plain = without_compression_suffix(name)
            if not name.lower().endswith(suffixes):
                other_suffixes[Path(plain).suffix or "without suffix"] += 1
                continue
            if plain != name and plain in names:
                raise UserError(
                    f"{key}={folder} contains both {plain} and {name}, perhaps the same text", "remove one of them"
                )
            files.append(Path(location) / name)
    if files:
        return files
    if other_suffixes:
        most_common, _ = other_suffixes.most_common(1)[0]
        counts = ", ".join(f"{count} {suffix}" for suffix, count in other_suffixes.most_common(3))
        pattern = folder / "**" / ("*" + most_common if most_common.startswith(".") else "*")
        kind = kind_of(most_common) if key == "data.path" else None
        hint = f"data={kind} reads them: data={kind} {key}={folder}" if kind else f"use a pattern: {key}='{pattern}'"
        raise UserError(f"{key}={folder} contains no {suffixes[0]} file, but {counts}", hint)
    raise UserError(f"{key}={folder} is empty", f"use a folder with {suffixes[0]} files, or a file")


def check_encoding(key: str, encoding: str) -> None:
    """Raises UserError if this is not a text encoding."""
    if not _is_text_encoding(encoding):
        like = nearest(encoding, [name for name in encodings.aliases.aliases if _is_text_encoding(name)])
        hint = f"did you mean {key}={like}?" if like else f"omit {key} for utf-8, or set {key}=latin-1"
        raise UserError(f"{key}={encoding} is not a text encoding", hint)


def _is_text_encoding(encoding: str) -> bool:
    try:
        "\n".encode(encoding)
    except (LookupError, UnicodeError):
        return False
    return True


def read_lines(
    path: Path, encoding: str = "utf-8", key: str | None = None, keep_ends: bool = False
) -> Iterator[tuple[int, str]]:
    """Yields the number from 1 and the text of each line, without a byte-order mark and, unless `keep_ends`, without
    its end (LF, CRLF or CR). Raises UserError like `read_chunks`, and for a line of more than `LINE` characters."""
    pending: list[str] = []
    for number, text, end in read_chunks(path, encoding, key):
        if pending or end is None:
            pending.append(text)
            if end is None:
                if sum(map(len, pending)) > LINE:
                    message = f"{path}:{number}: the line has more than {LINE >> 20} million characters"
                    raise UserError(message, "write one row per line, and split long texts")
                continue
            text, pending = "".join(pending), []
        yield number, text + end if keep_ends else text


def read_chunks(path: Path, encoding: str = "utf-8", key: str | None = None) -> Iterator[tuple[int, str, str | None]]:
    """Yields the lines of a text file, decompressed if its name ends in .gz or .zst: the number of the line, the text,
    and its end: LF, CRLF, CR, or "" at the end of the file; None if the line continues in the next piece. A line of
    more than `PIECE` bytes comes in several pieces, so that only one piece is in memory. key: the key that sets the
    encoding, for hints.

    Raises UserError for bytes that are not in the encoding and NUL bytes (with line and byte), for a truncated
    compressed file (with the line), and for a file that is not text.
    """
    number, before, first = 1, 0, True
    try:
        with _open_file(path) as file:
            _refuse_other_kinds(path, file.peek(64)[:64], encoding, key)
            for text, end in _decode(path, file, encoding, key):
                if first:
                    text, first = text.removeprefix("\ufeff"), False
                if end is not None and not before and "\r" not in text and "\0" not in text:  # nearly every line
                    yield number, text, end
                    number += 1
                    continue
                *lines, last = text.split("\r") if "\r" in text else (text,)
                for line in lines:
                    _refuse_nul(path, number, before, line, encoding)
                    yield number, line, "\r"
                    number, before = number + 1, 0
                _refuse_nul(path, number, before, last, encoding)
                yield number, last, end
                before = before + len(last.encode(encoding, "replace")) if end is None else 0
                number += end is not None
    except Broken as error:
        raise UserError(f"{path}:{number}: {error.reason}", error.hint) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", "check its permissions") from error


@contextmanager
def _open_file(path: Path) -> Iterator[BufferedReader]:
    if path == STANDARD_INPUT:
        yield cast(BufferedReader, sys.stdin.buffer)
        return
    with open_bytes(path) as file:
        yield file


def _refuse_nul(path: Path, number: int, before: int, text: str, encoding: str) -> None:
    """before: bytes of the line before the piece."""
    if "\0" in text:
        byte = before + len(text[: text.index("\0")].encode(encoding, "replace")) + 1
        raise UserError(
            f"{path}:{number}:{byte}: a NUL byte: not a text file", "omit the file, or remove its NUL bytes"
        )


def _decode(path: Path, file: BinaryIO, encoding: str, key: str | None) -> Iterator[tuple[str, str | None]]:
    """Yields the text up to each line feed, without the CR of a CRLF, in pieces of about `PIECE` bytes, and the end
    that follows."""
    if "\n".encode(encoding) != b"\n":  # UTF-16 and UTF-32: bytes cannot be split at line feeds
        yield from _decode_wide(path, file, encoding, key)
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    # Number of earlier lines. For a line in pieces: its bytes so far, and a CR that may be part of a CRLF.
    lines, columns, continued, trailing = 0, 0, False, ""
    for raw in iter(partial(file.readline, PIECE), b""):
        if not continued and len(raw) < PIECE and b"\r" not in raw:  # nearly every line
            try:
                text = raw.decode(encoding)
            except UnicodeDecodeError as error:
                raise _bad_byte(path, error, lines, columns, encoding, key) from error
            lines += 1
            line = text.removesuffix("\n")
            yield line, text[len(line) :]
            continue
        ends = raw.endswith(b"\n") or len(raw) < PIECE
        pending = len(decoder.getstate()[0]) if continued else 0
        try:
            text = raw.decode(encoding) if ends and not continued else trailing + decoder.decode(raw, ends)
        except UnicodeDecodeError as error:
            raise _bad_byte(path, error, lines, columns - pending, encoding, key) from error
        end = None
        if ends:
            line = text.removesuffix("\n").removesuffix("\r")
            text, end = line, text[len(line) :]
            columns, trailing = 0, ""
            decoder.reset()
        else:
            trailing = "\r" if text.endswith("\r") else ""
            text = text.removesuffix("\r")
            columns = len(raw) - raw.rfind(b"\r") - 1 if b"\r" in raw else columns + len(raw)
        continued = not ends
        lines += ends + (text.count("\r") if "\r" in text else 0)
        yield text, end
    if continued:  # the file ends at the end of a piece
        pending = len(decoder.getstate()[0])
        try:
            yield decoder.decode(b"", True), trailing
        except UnicodeDecodeError as error:
            raise _bad_byte(path, error, lines, columns - pending, encoding, key) from error


def _decode_wide(path: Path, file: BinaryIO, encoding: str, key: str | None) -> Iterator[tuple[str, str | None]]:
    """For encodings in which a line feed is not one byte."""
    decoder = codecs.getincrementaldecoder(encoding)()
    rest, done = "", 0
    while True:
        raw = file.read(PIECE)
        pending = len(decoder.getstate()[0])
        try:
            text = rest + decoder.decode(raw, not raw)
        except UnicodeDecodeError as error:
            byte = done - pending + error.start + 1
            raise UserError(f"{path}: byte {byte} is not {encoding}: {error.reason}", _to_utf8(key)) from error
        done += len(raw)
        *lines, rest = text.split("\n")
        for line in lines:
            content = line.removesuffix("\r")
            yield content, line[len(content) :] + "\n"
        if not raw:
            content = rest.removesuffix("\r")
            if rest:
                yield content, rest[len(content) :]
            return
        if len(rest) > PIECE:
            yield rest[:-1], None
            rest = rest[-1]


def _bad_byte(
    path: Path, error: UnicodeDecodeError, lines: int, columns: int, encoding: str, key: str | None
) -> UserError:
    """lines: number of earlier lines. columns: bytes of the line before the decoded ones."""
    before = error.object[: error.start]
    line = lines + before.count(b"\r") + 1
    byte = error.start - before.rfind(b"\r") + (0 if b"\r" in before else columns)
    return UserError(f"{path}:{line}:{byte}: byte 0x{error.object[error.start]:02x} is not {encoding}", _to_utf8(key))


def _to_utf8(key: str | None) -> str:
    name = f"name its encoding ({key}=latin-1, {key}=cp1252), or " if key else ""
    return f"{name}convert the file to UTF-8: iconv -f LATIN1 -t UTF-8"


def _refuse_other_kinds(path: Path, head: bytes, encoding: str, key: str | None) -> None:
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            suffix = next((suffix for suffix, packing in PACKED.items() if packing == kind), None)
            hint = f"name it {path.name}{suffix} if it contains text" if suffix else "convert it to plain text first"
            raise UserError(f"{path}: a {kind} file, not text", hint)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
        return
    for mark, name in WIDE.items():
        if head.startswith(mark):
            hint = f"set {key}={name}" if key else f"convert it: iconv -f {name.upper()} -t UTF-8"
            raise UserError(f"{path}:1:1: {name.upper()}, not UTF-8", hint)
