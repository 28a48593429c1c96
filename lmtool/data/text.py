"""`data=text`: plain text files."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.configs import TextConfig
from lmtool.data.files import check_encoding, find, read_pieces
from lmtool.data.sources import PART, OnStage, held_out, split_place, splits_of
from lmtool.errors import UserError

LONG_LINE = 1_000_000  # characters; longer lines are read and counted
_CONTROL = re.compile(r"[\x01-\x08\x0e-\x1f\x7f]")


@dataclass
class _Scan:
    """What one pass over some files found."""

    files: list[Path]
    sizes: array[int] = field(default_factory=lambda: array("q"))  # characters of each document
    digest: Any = field(default_factory=hashlib.sha256)
    stamps: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    long_lines: int = 0
    control_lines: int = 0
    empty_files: int = 0


class TextSource:
    """Files, folders and glob patterns of text. Everything is read once when it is built, so that a bad byte in the
    last file is an error before anything starts; text is then read again as it is needed, never held. key: what the
    path is called in errors.

    UserError: no such file, not text, bad bytes (file:line:byte), no text at all.
    """

    def __init__(
        self,
        config: TextConfig,
        cache_dir: str | Path | None = None,
        progress: OnStage | None = None,
        key: str = "data.path",
    ):
        self._config, self._progress = config, progress
        check_encoding("data.encoding", config.encoding)
        files = find(key, config.path)
        own = [] if config.validation is None else find("data.validation", config.validation)
        shared = {file.resolve() for file in files} & {file.resolve() for file in own}
        if shared:
            raise UserError(
                f"data.validation: {sorted(shared)[0]} is training text too", "give other files, or leave it out"
            )
        self._scans = {"train": self._scan(files, key)}
        if own:
            self._scans["validation"] = self._scan(own, "data.validation")
        scan = self._scans["train"]
        self._held_out: np.ndarray | None = None
        self._cut: int | None = None  # of the only document there is
        if not own and len(scan.sizes) > 1:
            self._held_out = held_out(_array(scan.sizes), config.validation_fraction)
        elif not own:
            self._cut = split_place(partial(self._stretch, scan), scan.sizes[0], config.validation_fraction)
        self.fingerprint = self._fingerprint(None if own else config.validation_fraction)

    def complete(self) -> TextSource:
        """The same files with nothing held out: all of `data.path` is what is validated on."""
        source = copy(self)
        source._scans = dict.fromkeys(("train", "validation"), self._scans["train"])
        source._held_out = source._cut = None
        source.fingerprint = source._fingerprint(None)
        return source

    def _fingerprint(self, fraction: float | None) -> str:
        rule = f"text 1 {self._config.document} {fraction}"
        digests = [scan.digest.hexdigest() for scan in self._scans.values()]
        return hashlib.sha256(" ".join([rule, *digests]).encode()).hexdigest()

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        scan = self._scans.get(splits_of(split))
        if self._cut is not None:
            parts = self._read(self._scans["train"])
            yield from _up_to(parts, self._cut) if split == "train" else _from(parts, self._cut)
        elif scan is not None and self._held_out is None:
            yield from self._read(scan)
        else:
            assert self._held_out is not None
            out, wanted = iter(self._held_out.tobytes()), split == "validation"
            here, begins = False, True
            for text, ends in self._read(self._scans["train"]):
                if begins:
                    here = bool(next(out)) == wanted
                begins = ends
                if here:
                    yield text, ends

    def count(self, split: str) -> int:
        return 1 if self._cut is not None else len(self._sizes(split))

    def characters(self, split: str) -> int:
        if self._cut is not None:
            return self._cut if splits_of(split) == "train" else int(self._scans["train"].sizes[0]) - self._cut
        return int(self._sizes(split).sum())

    def _sizes(self, split: str) -> np.ndarray:
        """Characters of each document of a split."""
        if self._held_out is None:
            return _array(self._scans[splits_of(split)].sizes)
        return _array(self._scans["train"].sizes)[self._held_out == (splits_of(split) == "validation")]

    def facts(self) -> dict[str, Any]:
        scans = self._scans.values()
        facts: dict[str, Any] = {
            "source": "text",
            "files": sum(len(scan.files) for scan in scans),
            "bytes": sum(scan.bytes for scan in scans),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": self._config.document,
            "held_out": self._config.validation is None,
            "fingerprint": self.fingerprint,
        }
        counted = {
            "empty_files": sum(scan.empty_files for scan in scans),
            "long_lines": sum(scan.long_lines for scan in scans),
            "lines_with_control_characters": sum(scan.control_lines for scan in scans),
        }
        return facts | {name: count for name, count in counted.items() if count}

    def _scan(self, files: list[Path], key: str) -> _Scan:
        scan = _Scan(files)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            state = path.stat()
            before = len(scan.sizes)
            size = 0
            for text, ends in self._parts_of(path, scan):
                encoded = text.encode("utf-8", "surrogatepass")
                scan.digest.update(b"%d:" % len(encoded) if ends else b"%d+" % len(encoded))
                scan.digest.update(encoded)
                size += len(text)
                if ends:
                    scan.sizes.append(size)
                    size = 0
            scan.stamps.append((state.st_size, state.st_mtime_ns))
            scan.bytes += state.st_size
            scan.empty_files += len(scan.sizes) == before
            if self._progress is not None:
                self._progress("reading", scan.bytes, total)
        if not scan.sizes:
            which = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files are"
            problem = f"{which} {'white space alone' if scan.bytes else 'empty'}"
            raise UserError(f"{key}: {problem}: there is no text", f"give files with text: {key}=PATH")
        return scan

    def _read(self, scan: _Scan) -> Iterator[tuple[str, bool]]:
        for path, stamp in zip(scan.files, scan.stamps, strict=True):
            if not path.is_file() or (path.stat().st_size, path.stat().st_mtime_ns) != stamp:
                raise UserError(f"{path} changed while it was being read", "leave the files alone and start again")
            yield from self._parts_of(path, None)

    def _stretch(self, scan: _Scan, start: int, end: int) -> str:
        """The characters of the only document from one place to another."""
        pieces, at = [], 0
        for text, _ in self._read(scan):
            pieces.append(text[max(start - at, 0) : max(end - at, 0)])
            at += len(text)
        return "".join(pieces)

    def _parts_of(self, path: Path, scan: _Scan | None) -> Iterator[tuple[str, bool]]:
        pieces: Pieces = ((text, ends) for _, text, ends in read_pieces(path, self._config.encoding, "data.encoding"))
        if scan is not None:
            pieces = _counted(pieces, scan)
        return _GROUPINGS[self._config.document](pieces)


Pieces = Iterable[tuple[str, bool]]
"""Lines, long ones in several pieces; and whether the line ends with the piece."""


def _counted(pieces: Pieces, scan: _Scan) -> Iterator[tuple[str, bool]]:
    size, control = 0, False
    for text, ends in pieces:
        size += len(text)
        control = control or _CONTROL.search(text) is not None
        if ends:
            scan.long_lines += size > LONG_LINE
            scan.control_lines += control
            size, control = 0, False
        yield text, ends


class _Document:
    """A document while its lines come in. What is beyond `PART` characters is given up as a part of it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self.parted = False  # whether a part of it was given up

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, text: str, begins: bool) -> Iterator[tuple[str, bool]]:
        """Take a line, or a further piece of one; a part is given up where enough came before it."""
        if self._size > PART:
            yield "\n".join(self._lines), False
            self._lines, self._size, self.parted = [""], 0, True
        if begins:
            self._lines.append(text)
        else:
            self._lines[-1] += text
        self._size += len(text) + begins

    def close(self) -> Iterator[tuple[str, bool]]:
        """The end of the document, where one was begun."""
        if self._lines:
            yield "\n".join(self._lines), True
            self._lines, self._size, self.parted = [], 0, False


def _blocks(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins = _Document(), True
    for text, ends in pieces:
        if not begins or (text and not text.isspace()):
            yield from document.add(text, begins)
        else:
            yield from document.close()
        begins = ends
    yield from document.close()


def _each(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins = _Document(), True
    for text, ends in pieces:
        if not begins or (text and not text.isspace()):
            yield from document.add(text, begins)
        if ends:
            yield from document.close()
        begins = ends


def _whole(pieces: Pieces) -> Iterator[tuple[str, bool]]:
    document, begins, empty, blank = _Document(), True, 0, True
    for text, ends in pieces:
        if not text and begins and ends:
            empty += 1  # kept where more text follows
        else:
            for _ in range(empty if document else 0):
                yield from document.add("", True)
            empty, blank = 0, blank and text.isspace()
            yield from document.add(text, begins)
        begins = ends
    if not blank or document.parted:
        yield from document.close()


def _up_to(parts: Iterable[tuple[str, bool]], place: int) -> Iterator[tuple[str, bool]]:
    """The only document, up to a place in it."""
    for text, _ in parts:
        yield text[:place], len(text) >= place
        place -= len(text)
        if place <= 0:
            return


def _from(parts: Iterable[tuple[str, bool]], place: int) -> Iterator[tuple[str, bool]]:
    """The only document from the first character behind a place in it that is not white space."""
    begun = False
    for text, ends in parts:
        text, place = text[max(place, 0) :], place - len(text)
        text = text if begun else text.lstrip()
        begun = begun or bool(text)
        if text:
            yield text, ends


_GROUPINGS = {"block": _blocks, "file": _whole, "line": _each}


def _array(sizes: array[int]) -> np.ndarray:
    return np.frombuffer(sizes, dtype=np.int64)
