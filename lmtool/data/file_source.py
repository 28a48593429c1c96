"""Sources of text in files. A subclass for a kind of file divides a file into documents.

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
from lmtool.system.files import draft_path, user_path

VERSION = 2  # increase it if the division into documents or the format of a cached scan changes
LARGE = 32 << 20  # minimum bytes of files whose scan is cached
_STABLE_SECONDS = 10.0  # a file that was written more recently may change without a new time stamp


@dataclass
class Scan:
    """The result of reading files once. sizes: characters of each document. digest: hash of all text. stamps: size and
    time of each file. bytes: the size of all files. counts: what a subclass counts,
    such as empty rows, by the names in the metadata."""

    files: list[Path]
    sizes: array[int] = field(default_factory=lambda: array("q"))
    digest: str = ""
    stamps: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class CachedScan:
    """A scan in the cache folder. Its key consists of the names, sizes and times of the files and of `rules`, plain
    data that describes how they are read. Scans of small or recently written files are not cached."""

    def __init__(self, files: Sequence[Path], rules: Sequence[object], cache_dir: str | Path | None):
        self._files = list(files)
        states = [path.stat() for path in files]
        self._stamps = [(state.st_size, state.st_mtime_ns) for state in states]
        newest = max(state.st_mtime for state in states)
        self._path: Path | None = None
        stable = abs(time.time() - newest) > _STABLE_SECONDS
        if cache_dir is not None and stable and sum(size for size, _ in self._stamps) >= LARGE:
            names = [os.path.realpath(path) for path in files]
            key = hashlib.sha256(json.dumps([VERSION, rules, names, self._stamps]).encode()).hexdigest()
            self._path = user_path(cache_dir) / "scans" / f"{key[:32]}.npz"

    def load(self) -> Scan | None:
        """Returns the scan; None if it is missing or damaged, according to the checksums in the file."""
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
        """Saves the scan, unless the files have changed or the cache folder cannot be written."""
        if self._path is None or scan.stamps != self._stamps:
            return
        metadata = json.dumps({"digest": scan.digest, "counts": scan.counts}).encode()
        draft = draft_path(self._path)
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
    """A `data.sources.Source` that reads all files once when it is built, so that an error in the last file is reported
    at once, and again when text is needed. Inside `data.files.collect_errors`, rows with errors are left out; if an
    error makes the rest of a file unreadable, the rest is left out too. key: the key of the path, for errors. Raises
    UserError if there are no files or no text, and as in `documents_of`."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt",)
    """Suffixes of the files to read in a folder, the most common first."""
    blank: ClassVar[str] = "only white space"
    """The content of files that are not empty but have no text, for an error."""

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
        holds_out = "validation" not in files
        self._scans = {split: self._scanned(paths, split) for split, paths in files.items()}
        scan = self._scans["train"]
        self._held_out: np.ndarray | None = None
        self._offset: int | None = None  # at which a single document is split
        if holds_out and len(scan.sizes) > 1:
            self._held_out = held_out(_as_array(scan.sizes), config.validation_fraction)
        elif holds_out:
            self._offset = split_offset(partial(self._characters, scan), scan.sizes[0], config.validation_fraction)
        self.fingerprint = self._fingerprint(config.validation_fraction if holds_out else None)

    @abstractmethod
    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        """Yields (text, ends) for the documents of a file that have text. A document of more than `sources.PART`
        characters comes in several parts; `ends` is true for its last part. counts: counts to increase; None after the
        first reading. Raises UserError, which names the file and line."""

    @abstractmethod
    def unit(self) -> str:
        """Returns the name of a document: block, row, ..."""

    def rule(self) -> str:
        """Returns the rule that divides a file into documents, for the fingerprint."""
        return "rows 1"

    def prepare(self) -> None:
        """Checks the configuration before files are searched."""

    def files(self) -> dict[str, list[Path]]:
        """Returns the files of "train", and of "validation" if it has files."""
        assert isinstance(self.config, FileConfig)
        files = {"train": find(self.key, self.config.path, self.suffixes)}
        if self.config.validation is not None:
            files["validation"] = find("data.validation", self.config.validation, self.suffixes)
            train, validation = ({path.resolve() for path in files[split]} for split in ("train", "validation"))
            if shared := sorted(train & validation):
                raise UserError(f"data.validation: {shared[0]} is training text too", "use other files, or omit it")
        return files

    @property
    def scans(self) -> Iterable[Scan]:
        """The scans of the training files, and of validation files if there are any."""
        return self._scans.values()

    def complete(self) -> Self:
        """Returns a copy whose training and validation texts are both the complete training files."""
        source = copy(self)
        source._scans = dict.fromkeys(("train", "validation"), self._scans["train"])
        source._held_out = source._offset = None
        source.fingerprint = source._fingerprint(None)
        return source

    def _fingerprint(self, fraction: float | None) -> str:
        digests = [scan.digest for scan in self._scans.values()]
        return hashlib.sha256(" ".join([f"{self.rule()} {fraction}", *digests]).encode()).hexdigest()

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        scan = self._scans.get(splits_of(split))
        if self._offset is not None:
            parts = self._read(self._scans["train"])
            yield from _before_offset(parts, self._offset) if split == "train" else _after_offset(parts, self._offset)
        elif scan is not None and self._held_out is None:
            yield from self._read(scan)
        else:
            assert self._held_out is not None
            in_split = iter((self._held_out == (split == "validation")).tobytes())
            selected, at_start = False, True
            for text, ends in self._read(self._scans["train"]):
                if at_start:
                    selected = bool(next(in_split))
                at_start = ends
                if selected:
                    yield text, ends

    def count(self, split: str) -> int:
        return 1 if self._offset is not None else len(self._sizes(split))

    def characters(self, split: str) -> int:
        if self._offset is not None:
            return self._offset if splits_of(split) == "train" else int(self._scans["train"].sizes[0]) - self._offset
        return int(self._sizes(split).sum())

    def _sizes(self, split: str) -> np.ndarray:
        """(D,) int64: characters of each document of a split."""
        if self._held_out is None:
            return _as_array(self._scans[splits_of(split)].sizes)
        return _as_array(self._scans["train"].sizes)[self._held_out == (splits_of(split) == "validation")]

    def metadata(self) -> dict[str, object]:
        scans = self.scans
        counts: Counter[str] = sum((scan.counts for scan in scans), Counter())  # without zeros
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

    def _scanned(self, files: list[Path], split: str) -> Scan:
        keys = {"path", "validation", "validation_fraction", "documents"}
        rules = [type(self).__name__, self.rule(), self.config.model_dump(exclude=keys)]
        cached = CachedScan(files, rules, None if collecting() else self.cache_dir)
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
            subject = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files are"
            reason = f"{subject} {self.blank if scan.bytes else 'empty'}"
            raise UserError(f"{key}: {reason}: there is no text", f"use files with text: {key}=PATH")
        return scan

    def _read(self, scan: Scan) -> Iterator[tuple[str, bool]]:
        for path, stamp in zip(scan.files, scan.stamps, strict=True):
            if not path.is_file() or (path.stat().st_size, path.stat().st_mtime_ns) != stamp:
                raise UserError(f"{path} has changed since it was first read", "do not change the files; start again")
            yield from self._documents(path, None)

    def _documents(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        """Inside `collect_errors`, an error is recorded and ends the unfinished document."""
        started = False
        try:
            for text, ends in self.documents_of(path, counts):
                started = not ends
                yield text, ends
        except UserError as error:
            kind = kind_of(path.name) if isinstance(self.config, FileConfig) else None
            if kind not in (None, "text", self.config.name):
                error = UserError(
                    error.message, f"use data={kind}, which reads files with this suffix; or {error.hint}"
                )
            refuse(error)
            if started:
                yield "", True

    def _characters(self, scan: Scan, start: int, end: int) -> str:
        pieces, position = [], 0
        for text, _ in self._read(scan):
            pieces.append(text[max(start - position, 0) : max(end - position, 0)])
            position += len(text)
        return "".join(pieces)


def has_control_characters(text: str) -> bool:
    """Whether a text contains control characters. Eight times as fast as a regular expression."""
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded.translate(None, _CONTROL)) != len(encoded)


def _before_offset(parts: Iterable[tuple[str, bool]], offset: int) -> Iterator[tuple[str, bool]]:
    for text, _ in parts:
        yield text[:offset], len(text) >= offset
        offset -= len(text)
        if offset <= 0:
            return


def _after_offset(parts: Iterable[tuple[str, bool]], offset: int) -> Iterator[tuple[str, bool]]:
    """Starts at the first character after the offset that is not white space."""
    started = False
    for text, ends in parts:
        text, offset = text[max(offset, 0) :], offset - len(text)
        text = text if started else text.lstrip()
        started = started or bool(text)
        if text:
            yield text, ends


def _as_array(sizes: array[int]) -> np.ndarray:
    return np.frombuffer(sizes, dtype=np.int64)
