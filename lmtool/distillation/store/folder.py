"""A folder of teacher outputs: made once, under a lock, and never changed; verified whenever it is opened.

It is written to a temporary folder and renamed. Its manifest identifies its contents: the teacher, the data, the
tokenizer, the text format. Without a configured location it is `teachers/<key>` of the cache folder, where the key is a
hash of these.
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

VERSION = 1  # version of the files and of the example keys: increment it when either changes

Fill = Callable[[Path], Mapping[str, Any]]
"""Writes the files of a folder; returns metadata for the manifest."""


@dataclass(frozen=True)
class Shelf:
    """The location of a store. typed: the user's folder; None: below the cache folder, by key."""

    typed: str | None
    cache_dir: str


@dataclass(frozen=True)
class Opened:
    """facts: the metadata returned by `Fill`. seconds: time to make it; None if it existed."""

    folder: Path
    metadata: dict[str, Any]
    bytes: int
    seconds: float | None

    def screen_metadata(self, **metadata: Any) -> dict[str, Any]:
        """A description for the first screen."""
        seconds = self.metadata["seconds"] if self.seconds is None else self.seconds
        found = "made" if self.seconds is not None else "found"
        return {"teacher_outputs": found, **metadata, "store_bytes": self.bytes, "store_seconds": round(seconds, 1)}


def open_or_make(shelf: Shelf, of: Mapping[str, Any], fill: Fill, progress: OnStage | None = None) -> Opened:
    """Opens or makes the folder for `of`, its identity as plain data. UserError if the user's folder has a different
    identity, with the differences."""
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
            # Another process may have made it in the meantime.
            if folder.exists() and (opened := _opened(folder, of, shelf, progress)) is not None:
                return opened
            seconds = _make(folder, of, fill)
    opened = _opened(folder, of, shelf, None)
    if opened is None:
        raise UserError(f"{folder} was damaged while it was written", "set cache_dir= to another disk")
    return Opened(opened.folder, opened.metadata, opened.bytes, seconds)


def _opened(folder: Path, of: Mapping[str, Any], shelf: Shelf, progress: OnStage | None) -> Opened | None:
    """An existing folder; None if it is damaged, and must be made again."""
    if shelf.typed is not None and not (folder / MANIFEST).is_file():
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            return None
        raise UserError(
            f"distill.store={shelf.typed} exists and holds no teacher outputs",
            "use a new folder, or distill.store=true",
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
        differences = "; ".join(
            _difference(name, manifest.metadata.get("of", {}).get(name), of[name]) for name in differing
        )
        raise UserError(
            f"distill.store={shelf.typed} does not belong to this run: {differences}",
            "use another folder, which will be made, or distill.store=true",
        )
    if differing:
        return None
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return Opened(folder, manifest.metadata["facts"], size, None)


def _difference(name: str, stored: Any, expected: Any) -> str:
    """The differences between the store's identity and the run's: readable values, not hashes."""
    title = name.replace("_", " ")
    if isinstance(stored, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in expected if stored.get(key) != expected[key]] or [
            key for key in stored if key not in expected
        ]
        return f"other {title} ({', '.join(keys)})"
    if any(isinstance(value, str) and len(value) == 64 for value in (stored, expected)) or stored is None:
        return f"another {title}"
    return f"{title} {stored} in the store, {expected} in this run"


def _make(folder: Path, of: Mapping[str, Any], fill: Fill) -> float:
    """Makes it. Returns the seconds it took."""
    began = time.perf_counter()
    remove(folder)  # a damaged folder
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


def require_free_space(folder: Path, done: int, examples: int, total: int) -> None:
    """UserError if the rest does not fit on the disk. done: bytes of the first `examples` of `total`."""
    free, needed = shutil.disk_usage(folder).free, done / max(examples, 1) * (total - examples)
    if needed > 0.95 * free:
        raise UserError(
            f"the teacher's outputs take about {(done + needed) / 1e9:,.1f} GB, and {folder.parent} has "
            f"{free / 1e9:,.1f} GB left",
            "set distill.top_k=64, which stores only the most probable words; or distill.store_dtype=float16, or "
            "distill.store=FOLDER on another disk",
        )
