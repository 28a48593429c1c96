"""The folder of a teacher's stored outputs, which is written once, never changed, and verified when it is opened.

The outputs are written, under a lock, to a temporary folder, which is then renamed. The manifest of the folder contains
the identity of the outputs, which is everything that they depend on, such as the teacher, the data, the tokenizer and
the text format. The folder is set by the user, or it is `teachers/<key>` in the cache folder, where the key is a hash
of the identity.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.sources import OnStage
from lmtool.data.store import hold_lock, rebuilding, writing
from lmtool.errors import UserError
from lmtool.system.files import MANIFEST, Damaged, Manifest, draft_path, publish, remove, user_path, write_manifest

VERSION = 1  # the version of the file format and of the example keys; increment it when either changes

Fill = Callable[[Path], JsonMapping]
"""A function that writes the files of a store to a folder, and returns metadata for the manifest."""


@dataclass(frozen=True)
class StoreLocation:
    """Where a store is. folder: as the user wrote it; None means `teachers/<key>` in cache_dir."""

    folder: str | None
    cache_dir: str


@dataclass(frozen=True)
class OpenedStore:
    """A verified store that is ready to be read. metadata: what `Fill` returned when the store was made, and the
    `seconds` that it took. made: whether this run made the store."""

    folder: Path
    metadata: JsonObject
    bytes: int
    made: bool = False

    def screen_metadata(self, **metadata: object) -> JsonObject:
        """Returns a description of the store for the first screen, with the metadata of the caller."""
        seconds = round(self.metadata["seconds"], 1)
        origin = "made" if self.made else "found"
        return {"teacher_outputs": origin, **metadata, "store_bytes": self.bytes, "store_seconds": seconds}


def open_or_make(
    location: StoreLocation, identity: JsonMapping, fill: Fill, progress: OnStage | None = None
) -> OpenedStore:
    """Opens the store with an identity (everything that the outputs depend on, as plain data), and makes it first if it
    does not exist or is damaged. fill: writes the files of a new store. progress: shows that a damaged store is made
    again. Raises UserError if the user's folder cannot be written, or contains other files or outputs with another
    identity."""
    identity = json.loads(json.dumps({"version": VERSION, **identity}))
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    cache = user_path(location.cache_dir) / "teachers"
    user_folder = None if location.folder is None else user_path(location.folder)
    folder = cache / key[:32] if user_folder is None else user_folder.parent.resolve() / user_folder.name
    if (opened := _open(folder, identity, location, progress)) is not None:
        return opened
    with writing(location.cache_dir if location.folder is None else folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f".{folder.name}.lock")):
            # Another process may have made the store while this one waited for the lock.
            if (opened := _open(folder, identity, location, progress)) is not None:
                return opened
            _make(folder, identity, fill)
    opened = _open(folder, identity, location, None)
    if opened is None:
        raise UserError(f"{folder} was damaged while it was written", "set cache_dir= to another disk")
    return replace(opened, made=True)


def _open(folder: Path, identity: JsonMapping, location: StoreLocation, progress: OnStage | None) -> OpenedStore | None:
    """A store in the cache is made again if it is damaged or has another identity. In a folder that the user set, both
    are errors."""
    if not folder.exists():
        return None
    if location.folder is not None and not (folder / MANIFEST).is_file():
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            return None
        raise UserError(
            f"distill.store={location.folder} is an existing folder or file without stored teacher outputs",
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
    stored_identity = manifest.metadata.get("of", {})
    differing = [name for name in identity if stored_identity.get(name) != identity[name]]
    if differing and location.folder is not None:
        differences = "; ".join(_difference(name, stored_identity.get(name), identity[name]) for name in differing)
        raise UserError(
            f"distill.store={location.folder} contains teacher outputs that this run cannot use: {differences}",
            "use a new folder, or distill.store=true",
        )
    if differing:
        return None
    size = sum(entry["bytes"] for entry in manifest.files.values())
    return OpenedStore(folder, manifest.metadata["facts"], size)


def _difference(name: str, stored_value: object, expected: object) -> str:
    title = name.replace("_", " ")
    if isinstance(stored_value, Mapping) and isinstance(expected, Mapping):
        keys = [key for key in expected if stored_value.get(key) != expected[key]] or [
            key for key in stored_value if key not in expected
        ]
        return f"other {title} ({', '.join(keys)})"
    if any(isinstance(value, str) and len(value) == 64 for value in (stored_value, expected)) or stored_value is None:
        return f"another {title}"
    return f"{title} {stored_value} in the store, {expected} in this run"


def _make(folder: Path, identity: JsonMapping, fill: Fill) -> None:
    start = time.perf_counter()
    remove(folder)
    draft = draft_path(folder)
    draft.mkdir()
    try:
        metadata = fill(draft)
        seconds = time.perf_counter() - start
        write_manifest(draft, {"of": identity, "facts": {**metadata, "seconds": seconds}})
        publish(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def require_free_space(folder: Path, bytes_done: int, examples_done: int, examples: int) -> None:
    """Raises UserError if the remaining outputs will not fit on the disk. bytes_done: bytes written for the first
    examples_done of all `examples`."""
    free = shutil.disk_usage(folder).free
    required_bytes = bytes_done / max(examples_done, 1) * (examples - examples_done)
    if required_bytes > 0.95 * free:  # the size is an estimate, so a margin remains
        raise UserError(
            f"the teacher's outputs need about {(bytes_done + required_bytes) / 1e9:,.1f} GB, but the disk of "
            f"{folder.parent} has only {free / 1e9:,.1f} GB left",
            "set distill.top_k=64, which stores only the most probable tokens; or distill.store_dtype=float16, or "
            "distill.store=FOLDER on another disk",
        )
