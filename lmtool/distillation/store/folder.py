"""A folder of what a teacher gave: made once, under a lock, and never changed; verified whenever it is opened.

It is written beside its place and renamed. Its manifest says what it is of: the teacher, the data, the tokenizer, how
texts are read. Without a place of its own it is `teachers/<key>` of the cache folder, where the key is a hash of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.data.sources import OnStage
from lmtool.data.store import locked, rebuilding, writing
from lmtool.errors import UserError
from lmtool.system.files import MANIFEST, Damaged, Manifest, draft_of, remove, write_manifest

VERSION = 1  # of the files and of how examples are known again: raise it when one changes

Fill = Callable[[Path], Mapping[str, Any]]
"""Writes the files of a folder; returns metadata of them for its manifest."""


@dataclass(frozen=True)
class Shelf:
    """Where a store is kept. typed: the folder that a user named; None: below the cache folder, by its key."""

    typed: str | None
    cache_dir: str


@dataclass(frozen=True)
class Opened:
    """facts: as `Fill` gave them. seconds: that it took to make it now; None where it was there."""

    folder: Path
    metadata: dict[str, Any]
    bytes: int
    seconds: float | None

    def said(self, **metadata: Any) -> dict[str, Any]:
        """What the first screen says of it."""
        seconds = self.metadata["seconds"] if self.seconds is None else self.seconds
        found = "made" if self.seconds is not None else "found"
        return {"teacher_outputs": found, **metadata, "store_bytes": self.bytes, "store_seconds": round(seconds, 1)}


def open_or_make(shelf: Shelf, of: Mapping[str, Any], fill: Fill, progress: OnStage | None = None) -> Opened:
    """The folder of what `of` says, as plain data. UserError where the folder that a user named is of something else,
    naming what differs."""
    of = json.loads(json.dumps({"version": VERSION, **of}))
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    cache = Path(shelf.cache_dir).expanduser() / "teachers"
    typed = None if shelf.typed is None else Path(shelf.typed).expanduser()
    folder = cache / key[:32] if typed is None else typed.parent.resolve() / typed.name
    if folder.exists() and (opened := _opened(folder, of, shelf, progress)) is not None:
        return opened
    with writing(shelf.cache_dir if shelf.typed is None else folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            # Another process may have made it while this one waited.
            if folder.exists() and (opened := _opened(folder, of, shelf, progress)) is not None:
                return opened
            seconds = _make(folder, of, fill)
    opened = _opened(folder, of, shelf, None)
    if opened is None:
        raise UserError(f"{folder} was damaged as it was written", "set cache_dir= to another disk")
    return Opened(opened.folder, opened.metadata, opened.bytes, seconds)


def _opened(folder: Path, of: Mapping[str, Any], shelf: Shelf, progress: OnStage | None) -> Opened | None:
    """A folder that is there; None where it is damaged, and is made again."""
    if shelf.typed is not None and not (folder / MANIFEST).is_file():
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            return None
        raise UserError(
            f"distill.store={shelf.typed} is there and holds no teacher's outputs",
            "give a folder that is not there yet, or distill.store=true",
        )
    try:
        manifest = Manifest.read(folder)
        manifest.verify()
    except Damaged as damage:
        if shelf.typed is not None:
            raise
        rebuilding(damage, progress)
        return None
    differing = [name for name in of if manifest.metadata.get("of", {}).get(name) != of[name]]
    if differing and shelf.typed is not None:
        others = "; ".join(_difference(name, manifest.metadata.get("of", {}).get(name), of[name]) for name in differing)
        raise UserError(
            f"distill.store={shelf.typed} is of something else than this run: {others}",
            "give another folder, which is made, or distill.store=true",
        )
    if differing:
        return None
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return Opened(folder, manifest.metadata["facts"], size, None)


def _difference(name: str, there: Any, here: Any) -> str:
    """What of a store is not what a run has: values that a reader knows, not hashes."""
    title = name.replace("_", " ")
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        keys = [key for key in here if there.get(key) != here[key]] or [key for key in there if key not in here]
        return f"other {title} ({', '.join(keys)})"
    if any(isinstance(value, str) and len(value) == 64 for value in (there, here)) or there is None:
        return f"another {title}"
    return f"{title} {there} there, {here} here"


def _make(folder: Path, of: Mapping[str, Any], fill: Fill) -> float:
    """Make it. Returns the seconds that it took."""
    began = time.perf_counter()
    remove(folder)  # it is damaged
    draft = draft_of(folder)
    draft.mkdir()
    try:
        metadata = dict(fill(draft))
        seconds = time.perf_counter() - began
        write_manifest(draft, {"of": of, "facts": {**metadata, "seconds": seconds}})
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return seconds


def require_room(folder: Path, done: int, examples: int, total: int) -> None:
    """UserError where what is left to write does not fit on the disk. done: bytes of so many examples of `total`."""
    free, needed = shutil.disk_usage(folder).free, done / max(examples, 1) * (total - examples)
    if needed > 0.95 * free:
        raise UserError(
            f"the teacher's outputs take about {(done + needed) / 1e9:,.1f} GB, and {folder.parent} has "
            f"{free / 1e9:,.1f} GB left",
            "give distill.top_k=64, which keeps the most probable words alone; or distill.store_dtype=float16, or "
            "distill.store=FOLDER on another disk",
        )
