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
from dataclasses import dataclass, replace
from pathlib import Path

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.sources import OnStage
from lmtool.data.store import locked, rebuilding, writing
from lmtool.errors import UserError
from lmtool.system.files import MANIFEST, Damaged, Manifest, draft_of, remove, write_manifest

VERSION = 1  # version of the files and of the example keys: increment it when either changes

Fill = Callable[[Path], JsonMapping]
"""Writes the files of a folder; returns metadata for the manifest."""


@dataclass(frozen=True)
class StoreLocation:
    """The location of a store. folder: as typed by the user; None: below the cache folder, by key."""

    folder: str | None
    cache_dir: str


@dataclass(frozen=True)
class OpenedStore:
    """metadata: returned by `Fill`, and the `seconds` that it took. made: whether this run made the store."""

    folder: Path
    metadata: JsonObject
    bytes: int
    made: bool = False

    def screen_metadata(self, **metadata: object) -> JsonObject:
        """A description for the first screen."""
        seconds = round(self.metadata["seconds"], 1)
        origin = "made" if self.made else "found"
        return {"teacher_outputs": origin, **metadata, "store_bytes": self.bytes, "store_seconds": seconds}


def open_or_make(
    location: StoreLocation, identity: JsonMapping, fill: Fill, progress: OnStage | None = None
) -> OpenedStore:
    """Opens or makes the folder for an identity (plain data). UserError if the user's folder has a different identity,
    with the differences."""
    identity = json.loads(json.dumps({"version": VERSION, **identity}))
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    cache = Path(location.cache_dir).expanduser() / "teachers"
    typed = None if location.folder is None else Path(location.folder).expanduser()
    folder = cache / key[:32] if typed is None else typed.parent.resolve() / typed.name
    if (opened := _opened(folder, identity, location, progress)) is not None:
        return opened
    with writing(location.cache_dir if location.folder is None else folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock")):
            # Another process may have made it in the meantime.
            if (opened := _opened(folder, identity, location, progress)) is not None:
                return opened
            _make(folder, identity, fill)
    opened = _opened(folder, identity, location, None)
    if opened is None:
        raise UserError(f"{folder} was damaged while it was written", "set cache_dir= to another disk")
    return replace(opened, made=True)


def _opened(
    folder: Path, identity: JsonMapping, location: StoreLocation, progress: OnStage | None
) -> OpenedStore | None:
    """An existing folder; None if there is none, or if it is damaged and must be made again."""
    if not folder.exists():
        return None
    if location.folder is not None and not (folder / MANIFEST).is_file():
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            return None
        raise UserError(
            f"distill.store={location.folder} exists and holds no teacher outputs",
            "use a new folder, or distill.store=true",
        )
    try:
        manifest = Manifest.read(folder)
        manifest.verify()
    except Damaged as damage:
        if location.folder is not None:
            raise
        rebuilding(damage, progress)
        return None
    stored = manifest.metadata.get("of", {})
    differing = [name for name in identity if stored.get(name) != identity[name]]
    if differing and location.folder is not None:
        differences = "; ".join(_difference(name, stored.get(name), identity[name]) for name in differing)
        raise UserError(
            f"distill.store={location.folder} does not belong to this run: {differences}",
            "use another folder, which will be made, or distill.store=true",
        )
    if differing:
        return None
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return OpenedStore(folder, manifest.metadata["facts"], size)


def _difference(name: str, stored: object, expected: object) -> str:
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


def _make(folder: Path, identity: JsonMapping, fill: Fill) -> None:
    """Makes the folder, in the place of a damaged one."""
    began = time.perf_counter()
    remove(folder)
    draft = draft_of(folder)
    draft.mkdir()
    try:
        metadata = fill(draft)
        seconds = time.perf_counter() - began
        write_manifest(draft, {"of": identity, "facts": {**metadata, "seconds": seconds}})
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


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
