"""Text on its way from elsewhere, kept below the cache folder: shards of JSON lines, each complete or not there.

What is interrupted resumes behind the last shard. When all is there the folder gets its manifest, and is never changed.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lmtool.data.store import writing
from lmtool.drafts import sync_path, write_bytes
from lmtool.manifest import MANIFEST, Manifest, write_manifest

SHARD = 64 << 20
"""Bytes of a shard, about."""
_PROGRESS = "progress.json"
_DRAFT = "draft"


@dataclass
class Kept:
    """What is there so far. origin: what the text is of; position: where its source reads on, plain data. rows: those
    that were read, without_text: those of them that hold none."""

    origin: str
    position: Any = None
    rows: int = 0
    without_text: int = 0
    bytes: int = 0
    shards: list[int] = field(default_factory=list)
    complete: bool = True  # whether all of the source is there, not its first `max_bytes`


def complete_shards(folder: Path) -> tuple[list[Path], Kept] | None:
    """The shards of a folder that is finished, in order; None where it is not. Damaged where one is not as it was
    written."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    manifest.verify()
    return [folder / name for name in sorted(manifest.files) if name != _PROGRESS], Kept(**manifest.facts["kept"])


class ShardWriter:
    """Writes texts into a folder. As a context: what ends it early leaves the shard at hand, to be read on from there.

    origin: what the texts are of; where the folder holds others, they are cleared away. UserError naming cache_dir
    where it cannot be written.
    """

    def __init__(self, folder: Path, cache_dir: str | Path, origin: str):
        self._folder, self._cache_dir = folder, cache_dir
        self._file: BinaryIO | None = None
        self._size = 0
        with writing(cache_dir):
            self.kept = self._begun(origin)

    def _begun(self, origin: str) -> Kept:
        try:
            kept = Kept(**json.loads((self._folder / _PROGRESS).read_bytes()))
            sizes = [self._path(number).stat().st_size for number in range(len(kept.shards))]
        except (OSError, ValueError, TypeError):
            kept, sizes = Kept(""), []
        if kept.origin != origin or sizes != kept.shards or (self._folder / MANIFEST).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            kept = Kept(origin)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _DRAFT).unlink(missing_ok=True)  # of a process that died
        return kept

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.jsonl"

    def add(self, text: str, most: int) -> bool:
        """Write the text of a row, which may be empty; False where it would make more than `most` bytes in all."""
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" if text else b""
        if self.kept.bytes + len(line) > most:
            self.kept.complete = False
            return False
        if line:
            with writing(self._cache_dir):
                if self._file is None:
                    self._file = (self._folder / _DRAFT).open("wb")
                self._file.write(line)
        self.kept.rows += 1
        self.kept.without_text += not text
        self.kept.bytes += len(line)
        self._size += len(line)
        return True

    @property
    def full(self) -> bool:
        """Whether the shard at hand is to be closed."""
        return self._size >= SHARD

    def close(self, position: Any) -> None:
        """End the shard at hand. position: where the source reads on behind its last row."""
        if self._file is None:
            return
        with writing(self._cache_dir):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._folder / _DRAFT, self._path(len(self.kept.shards)))
            self.kept.shards.append(self._size)
            self.kept.position = position
            draft = self._folder / _DRAFT
            write_bytes(draft, json.dumps(asdict(self.kept)).encode())
            os.replace(draft, self._folder / _PROGRESS)
            sync_path(self._folder)
        self._file, self._size = None, 0

    def finish(self) -> list[Path]:
        """All is there: the shards, in order."""
        with writing(self._cache_dir):
            write_manifest(self._folder, {"kept": asdict(self.kept)})
        return [self._path(number) for number in range(len(self.kept.shards))]
