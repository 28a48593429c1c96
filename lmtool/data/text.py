"""`data=text`: plain text files."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.configs import TextConfig
from lmtool.data.files import check_encoding, find, read_lines
from lmtool.data.sources import Progress, held_out, split_document, splits_of
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
    last file is an error before anything starts; text is then read again as it is needed, never held.

    UserError: no such file, not text, bad bytes (file:line:byte), no text at all.
    """

    def __init__(self, config: TextConfig, cache_dir: str | Path | None = None, progress: Progress | None = None):
        self._config, self._progress = config, progress
        check_encoding("data.encoding", config.encoding)
        files = find("data.path", config.path)
        own = [] if config.validation is None else find("data.validation", config.validation)
        shared = {one.resolve() for one in files} & {one.resolve() for one in own}
        if shared:
            raise UserError(
                f"data.validation: {sorted(shared)[0]} is training text too", "give other files, or leave it out"
            )
        self._scans = {"train": self._scan(files, "data.path")}
        if own:
            self._scans["validation"] = self._scan(own, "data.validation")
        scan = self._scans["train"]
        self._held_out: np.ndarray | None = None
        if not own and len(scan.sizes) > 1:
            self._held_out = held_out(np.frombuffer(scan.sizes, dtype=np.int64), config.validation_fraction)
        self._single = not own and len(scan.sizes) == 1
        if self._single:
            split_document(next(self._read(scan)), config.validation_fraction)
        rule = f"text 1 {config.document} {None if own else config.validation_fraction}"
        digests = [one.digest.hexdigest() for one in self._scans.values()]
        self.fingerprint = hashlib.sha256(" ".join([rule, *digests]).encode()).hexdigest()

    def documents(self, split: str) -> Iterator[str]:
        scan = self._scans.get(splits_of(split))
        if scan is not None and (split == "validation" or self._held_out is None and not self._single):
            yield from self._read(scan)
            return
        everything = self._read(self._scans["train"])
        if self._single:
            first, second = split_document(next(everything), self._config.validation_fraction)
            yield first if split == "train" else second
            return
        wanted = split == "validation"
        for text, out in zip(everything, self._held_out.tolist(), strict=True):  # type: ignore[union-attr]
            if out == wanted:
                yield text

    def count(self, split: str) -> int:
        if self._single:
            return 1
        if self._held_out is not None:
            out = int(self._held_out.sum())
            return out if splits_of(split) == "validation" else len(self._held_out) - out
        return len(self._scans[splits_of(split)].sizes)

    def facts(self) -> dict[str, Any]:
        scans = self._scans.values()
        facts: dict[str, Any] = {
            "source": "text",
            "files": sum(len(one.files) for one in scans),
            "bytes": sum(one.bytes for one in scans),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": self._config.document,
            "held_out": self._config.validation is None,
            "fingerprint": self.fingerprint,
        }
        counted = {
            "empty_files": sum(one.empty_files for one in scans),
            "long_lines": sum(one.long_lines for one in scans),
            "lines_with_control_characters": sum(one.control_lines for one in scans),
        }
        return facts | {name: count for name, count in counted.items() if count}

    def _scan(self, files: list[Path], key: str) -> _Scan:
        scan = _Scan(files)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            state = path.stat()
            before = len(scan.sizes)
            for text in self._documents_of(path, scan):
                scan.sizes.append(len(text))
                encoded = text.encode("utf-8", "surrogatepass")
                scan.digest.update(b"%d:" % len(encoded))
                scan.digest.update(encoded)
            scan.stamps.append((state.st_size, state.st_mtime_ns))
            scan.bytes += state.st_size
            scan.empty_files += len(scan.sizes) == before
            if self._progress is not None:
                self._progress("reading", scan.bytes, total)
        if not scan.sizes:
            which = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files are"
            what = f"{which} {'white space alone' if scan.bytes else 'empty'}"
            raise UserError(f"{key}: {what}: there is no text", f"give files with text: {key}=PATH")
        return scan

    def _read(self, scan: _Scan) -> Iterator[str]:
        for path, stamp in zip(scan.files, scan.stamps, strict=True):
            if not path.is_file() or (path.stat().st_size, path.stat().st_mtime_ns) != stamp:
                raise UserError(f"{path} changed while it was being read", "leave the files alone and start again")
            yield from self._documents_of(path, None)

    def _documents_of(self, path: Path, scan: _Scan | None) -> Iterator[str]:
        lines: Iterable[str] = (line for _, line in read_lines(path, self._config.encoding, "data.encoding"))
        if scan is not None:
            lines = _counted(lines, scan)
        return _GROUPINGS[self._config.document](lines)


def _counted(lines: Iterable[str], scan: _Scan) -> Iterator[str]:
    for line in lines:
        scan.long_lines += len(line) > LONG_LINE
        if _CONTROL.search(line) is not None:
            scan.control_lines += 1
        yield line


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if line and not line.isspace():
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def _whole(lines: Iterable[str]) -> Iterator[str]:
    text = "\n".join(lines).strip("\n")
    if text and not text.isspace():
        yield text


def _each(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line and not line.isspace())


_GROUPINGS = {"block": _blocks, "file": _whole, "line": _each}
