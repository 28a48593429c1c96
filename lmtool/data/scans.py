"""What one reading of some files found, kept below the cache folder: large files that did not change are not read again
to know what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.drafts import draft_of

VERSION = 1  # of how files become documents, and of what is kept: raise it when one changes
LARGE = 32 << 20
"""Bytes of files that are worth it."""
_SETTLED_SECONDS = 10.0  # a file that was written in this time may be written again at the same time stamp


@dataclass
class Scan:
    """sizes: characters of each document. digest: a hash of all of their text. stamps: size and time of each file.
    bytes: of the files. counts: what a kind of file counts, by the name that facts give it."""

    files: list[Path]
    sizes: array[int] = field(default_factory=lambda: array("q"))
    digest: str = ""
    stamps: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class KeptScan:
    """The place of a scan in the cache folder, by the names, sizes and times of the files and by how they are read.

    reading: plain data that says how. Small files have none, and neither have those that were just written.
    """

    def __init__(self, files: Sequence[Path], reading: Sequence[Any], cache_dir: str | Path | None):
        self._files = list(files)
        states = [path.stat() for path in files]
        self._stamps = [(state.st_size, state.st_mtime_ns) for state in states]
        newest = max(state.st_mtime for state in states)
        self._path: Path | None = None
        settled = abs(time.time() - newest) > _SETTLED_SECONDS
        if cache_dir is not None and settled and sum(size for size, _ in self._stamps) >= LARGE:
            names = [os.path.realpath(path) for path in files]
            key = hashlib.sha256(json.dumps([VERSION, reading, names, self._stamps]).encode()).hexdigest()
            self._path = Path(cache_dir).expanduser() / "scans" / f"{key[:32]}.npz"

    def load(self) -> Scan | None:
        """The scan, where it is there and not damaged: each part of the file has its checksum."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            with np.load(self._path) as parts:
                sizes, facts = parts["sizes"], json.loads(parts["facts"].tobytes())
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        counts, size = Counter(facts["counts"]), sum(size for size, _ in self._stamps)
        return Scan(self._files, array("q", sizes.astype("<i8").tobytes()), facts["digest"], self._stamps, size, counts)

    def save(self, scan: Scan) -> None:
        """Keep it; where the cache folder cannot be written, the files are read again next time. Nothing is kept of
        files that changed in the meantime."""
        if self._path is None or scan.stamps != self._stamps:
            return
        facts = json.dumps({"digest": scan.digest, "counts": scan.counts}).encode()
        draft = draft_of(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                np.savez(file, sizes=np.frombuffer(scan.sizes, dtype="q"), facts=np.frombuffer(facts, dtype=np.uint8))
            os.replace(draft, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
