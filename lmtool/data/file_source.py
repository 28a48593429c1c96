"""Text that is read from files: found, read once to know what is there, held out by documents, read again as needed.

A kind of file is a subclass that says what the documents of one file are.

Shape letters: D documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import numpy as np

from lmtool.data.configs import DataConfig, FileConfig, kind_of
from lmtool.data.files import collecting, find, refuse
from lmtool.data.sources import OnStage, held_out, split_offset, splits_of
from lmtool.errors import UserError
from lmtool.system.files import draft_of

VERSION = 1  # of how files become documents, and of what is kept: raise it when one changes
LARGE = 32 << 20
"""Bytes of files that are worth it."""
_STABLE_SECONDS = 10.0  # a file that was written in this time may be written again at the same time stamp


@dataclass
class Scan:
    """sizes: characters of each document. digest: a hash of all of their text. stamps: size and time of each file.
    bytes: of the files. counts: what a kind of file counts, by the name that metadata give it."""

    files: list[Path]
    sizes: array[int] = field(default_factory=lambda: array("q"))
    digest: str = ""
    stamps: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class CachedScan:
    """The place of a scan in the cache folder, by the names, sizes and times of the files and by how they are read.

    reading: plain data that says how. Small files have none, and neither have those that were just written.
    """

    def __init__(self, files: Sequence[Path], reading: Sequence[object], cache_dir: str | Path | None):
        self._files = list(files)
        states = [path.stat() for path in files]
        self._stamps = [(state.st_size, state.st_mtime_ns) for state in states]
        newest = max(state.st_mtime for state in states)
        self._path: Path | None = None
        stable = abs(time.time() - newest) > _STABLE_SECONDS
        if cache_dir is not None and stable and sum(size for size, _ in self._stamps) >= LARGE:
            names = [os.path.realpath(path) for path in files]
            key = hashlib.sha256(json.dumps([VERSION, reading, names, self._stamps]).encode()).hexdigest()
            self._path = Path(cache_dir).expanduser() / "scans" / f"{key[:32]}.npz"

    def load(self) -> Scan | None:
        """The scan, where it is there and not damaged: each part of the file has its checksum."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            with np.load(self._path) as parts:
                sizes, metadata = parts["sizes"], json.loads(parts["facts"].tobytes())
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        counts, size = Counter(metadata["counts"]), sum(size for size, _ in self._stamps)
        return Scan(
            self._files, array("q", sizes.astype("<i8").tobytes()), metadata["digest"], self._stamps, size, counts
        )

    def save(self, scan: Scan) -> None:
        """Keep it; where the cache folder cannot be written, the files are read again next time. Nothing is kept of
        files that changed in the meantime."""
        if self._path is None or scan.stamps != self._stamps:
            return
        metadata = json.dumps({"digest": scan.digest, "counts": scan.counts}).encode()
        draft = draft_of(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                np.savez(
                    file, sizes=np.frombuffer(scan.sizes, dtype="q"), facts=np.frombuffer(metadata, dtype=np.uint8)
                )
            os.replace(draft, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


_CONTROL = bytes([*range(9), *range(14, 32), 127])

AnyConfig = TypeVar("AnyConfig", bound=DataConfig)


class FileSource(ABC, Generic[AnyConfig]):
    """Implements `data.sources.Source`. Everything is read once when it is built, so that a bad byte in the last file
    is an error before anything starts; `data.scans` keeps what that found of large files. Text is then read again as it
    is needed, never held. key: what the path is called in errors. Where problems are collected (`data.problems`), rows
    that fail are left out, and what is behind an error that ends a file.

    UserError: no such file, no text at all, and what `documents_of` raises.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".txt",)
    """The ends of the names of files that are read of a folder, the commonest first."""
    blank: ClassVar[str] = "white space alone"
    """What files without text are, where they are not empty."""

    def __init__(
        self,
        config: AnyConfig,
        cache_dir: str | Path | None = None,
        progress: OnStage | None = None,
        key: str = "data.path",
    ):
        self.config, self.cache_dir, self.progress, self.key = config, cache_dir, progress, key
        self.prepare()
        files = self.files()
        own = "validation" in files
        self._scans = {split: self._scanned(paths, split) for split, paths in files.items()}
        scan = self._scans["train"]
        self._held_out: np.ndarray | None = None
        self._cut: int | None = None  # of the only document there is
        if not own and len(scan.sizes) > 1:
            self._held_out = held_out(_array(scan.sizes), config.validation_fraction)
        elif not own:
            self._cut = split_offset(partial(self._stretch, scan), scan.sizes[0], config.validation_fraction)
        self.fingerprint = self._fingerprint(None if own else config.validation_fraction)

    # --- what a kind supplies ---------------------------------------------------------------------------------------

    @abstractmethod
    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        """The documents of a file, none of them without text: those of more than `sources.PART` characters in several
        parts, and whether the document ends with the part. counts: to be added to, in the first reading alone.
        UserError naming file and line."""

    @abstractmethod
    def unit(self) -> str:
        """What a document is: a block, a row."""

    def rule(self) -> str:
        """How a file becomes documents, for the fingerprint: it need not name what the documents themselves show."""
        return "rows 1"

    def prepare(self) -> None:
        """Check the configuration before any file is looked for."""

    def files(self) -> dict[str, list[Path]]:
        """The files of "train" and, where they are not held out of these, of "validation"."""
        assert isinstance(self.config, FileConfig)
        files = {"train": find(self.key, self.config.path, self.suffixes)}
        if self.config.validation is not None:
            files["validation"] = find("data.validation", self.config.validation, self.suffixes)
            train, own = ({path.resolve() for path in files[split]} for split in ("train", "validation"))
            if shared := sorted(train & own):
                raise UserError(f"data.validation: {shared[0]} is training text too", "give other files, or omit it")
        return files

    @property
    def scans(self) -> Iterable[Scan]:
        """What was found: of training, and of validation where that has files of its own."""
        return self._scans.values()

    # --- a source ---------------------------------------------------------------------------------------------------

    def complete(self) -> Self:
        """The same files with nothing held out: all of `data.path` is what is validated on."""
        source = copy(self)
        source._scans = dict.fromkeys(("train", "validation"), self._scans["train"])
        source._held_out = source._cut = None
        source.fingerprint = source._fingerprint(None)
        return source

    def _fingerprint(self, fraction: float | None) -> str:
        digests = [scan.digest for scan in self._scans.values()]
        return hashlib.sha256(" ".join([f"{self.rule()} {fraction}", *digests]).encode()).hexdigest()

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        scan = self._scans.get(splits_of(split))
        if self._cut is not None:
            parts = self._read(self._scans["train"])
            yield from _up_to(parts, self._cut) if split == "train" else _from(parts, self._cut)
        elif scan is not None and self._held_out is None:
            yield from self._read(scan)
        else:
            assert self._held_out is not None
            out, is_validation = iter(self._held_out.tobytes()), split == "validation"
            selected, at_start = False, True
            for text, ends in self._read(self._scans["train"]):
                if at_start:
                    selected = bool(next(out)) == is_validation
                at_start = ends
                if selected:
                    yield text, ends

    def count(self, split: str) -> int:
        return 1 if self._cut is not None else len(self._sizes(split))

    def characters(self, split: str) -> int:
        if self._cut is not None:
            return self._cut if splits_of(split) == "train" else int(self._scans["train"].sizes[0]) - self._cut
        return int(self._sizes(split).sum())

    def _sizes(self, split: str) -> np.ndarray:
        """(D,) int64: characters of each document of a split."""
        if self._held_out is None:
            return _array(self._scans[splits_of(split)].sizes)
        return _array(self._scans["train"].sizes)[self._held_out == (splits_of(split) == "validation")]

    def metadata(self) -> dict[str, object]:
        scans = self.scans
        counts: Counter[str] = sum((scan.counts for scan in scans), Counter())  # those of nothing drop out
        return {
            "source": self.config.name,
            "files": sum(len(scan.files) for scan in scans),
            "bytes": sum(scan.bytes for scan in scans),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": self.unit(),
            "held_out": "validation" not in self._scans,
            "fingerprint": self.fingerprint,
            **counts,
        }

    # --- reading ----------------------------------------------------------------------------------------------------

    def _scanned(self, files: list[Path], split: str) -> Scan:
        """What is in some files; where nothing changed since they were read, without reading them again."""
        keys = {"path", "validation", "validation_fraction", "documents"}
        reading = [type(self).__name__, self.rule(), self.config.model_dump(exclude=keys)]
        cached = CachedScan(files, reading, None if collecting() else self.cache_dir)
        scan = cached.load()
        if scan is None:
            scan = self._scan(files, split)
            cached.save(scan)
        return scan

    def _scan(self, files: list[Path], split: str) -> Scan:
        scan, digest = Scan(files), hashlib.sha256()
        total = sum(path.stat().st_size for path in files)
        for path in files:
            state = path.stat()
            before, size = len(scan.sizes), 0
            for text, ends in self._documents(path, scan.counts):
                encoded = text.encode("utf-8", "surrogatepass")
                digest.update(b"%d:" % len(encoded) if ends else b"%d+" % len(encoded))
                digest.update(encoded)
                size += len(text)
                if ends:
                    scan.sizes.append(size)
                    size = 0
            scan.stamps.append((state.st_size, state.st_mtime_ns))
            scan.bytes += state.st_size
            scan.counts["empty_files"] += len(scan.sizes) == before
            if self.progress is not None:
                self.progress("reading", scan.bytes, total)
        scan.digest = digest.hexdigest()
        if not scan.sizes:
            key = self.key if split == "train" else "data.validation"
            which = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files are"
            reason = f"{which} {self.blank if scan.bytes else 'empty'}"
            raise UserError(f"{key}: {reason}: there is no text", f"give files with text: {key}=PATH")
        return scan

    def _read(self, scan: Scan) -> Iterator[tuple[str, bool]]:
        for path, stamp in zip(scan.files, scan.stamps, strict=True):
            if not path.is_file() or (path.stat().st_size, path.stat().st_mtime_ns) != stamp:
                raise UserError(f"{path} changed while it was being read", "do not change the files, and start again")
            yield from self._documents(path, None)

    def _documents(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        """The documents of a file, the last of them cut where an error that is collected ends it."""
        started = False
        try:
            for text, ends in self.documents_of(path, counts):
                started = not ends
                yield text, ends
        except UserError as error:
            kind = kind_of(path.name) if isinstance(self.config, FileConfig) else None
            if kind not in (None, "text", self.config.name):
                error = UserError(
                    error.message, f"use data={kind}, which reads files of this name; otherwise {error.hint}"
                )
            refuse(error)
            if started:
                yield "", True

    def _stretch(self, scan: Scan, start: int, end: int) -> str:
        """The characters of the only document from one place to another."""
        pieces, at = [], 0
        for text, _ in self._read(scan):
            pieces.append(text[max(start - at, 0) : max(end - at, 0)])
            at += len(text)
        return "".join(pieces)


def has_control_characters(text: str) -> bool:
    """Whether a text holds characters that none should: its lines or rows are counted. (Eight times as fast as a search
    by pattern.)"""
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded.translate(None, _CONTROL)) != len(encoded)


def _up_to(parts: Iterable[tuple[str, bool]], place: int) -> Iterator[tuple[str, bool]]:
    """The only document, up to a place in it."""
    for text, _ in parts:
        yield text[:place], len(text) >= place
        place -= len(text)
        if place <= 0:
            return


def _from(parts: Iterable[tuple[str, bool]], place: int) -> Iterator[tuple[str, bool]]:
    """The only document from the first character behind a place in it that is not white space."""
    started = False
    for text, ends in parts:
        text, place = text[max(place, 0) :], place - len(text)
        text = text if started else text.lstrip()
        started = started or bool(text)
        if text:
            yield text, ends


def _array(sizes: array[int]) -> np.ndarray:
    return np.frombuffer(sizes, dtype=np.int64)
