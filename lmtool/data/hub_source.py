"""`data=hub`: a data set of the hub, streamed row by row into shards of text in the cache folder, which are then a
source of files.

Shards are JSON lines; each is complete or missing, and an interrupted download resumes after the last one. A complete
folder has a manifest and is never changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lmtool.data.configs import HubConfig, columns_of
from lmtool.data.file_source import FileSource, has_control_characters
from lmtool.data.files import LINE, no_such_file
from lmtool.data.rows import name_list, no_column, objects, text_of, values_of
from lmtool.data.sources import OnStage, in_parts
from lmtool.data.store import hold_lock, rebuilding, writing
from lmtool.errors import UserError, nearest
from lmtool.system.environment import is_reachable
from lmtool.system.files import (
    MANIFEST,
    Damaged,
    Manifest,
    draft_path,
    publish,
    sync_path,
    user_path,
    write_bytes,
    write_manifest,
)
from lmtool.system.secrets import masked


@contextmanager
def hub_access(subject: str, name: str, offline: bool, hint: str) -> Iterator[Any]:
    """Yields the library datasets, and converts its errors to UserError. Without a network it works offline with its
    cache, instead of retrying for half a minute. subject: the data set as typed, for errors. name: the data set, or a
    local folder, for which no connection is opened."""
    try:
        import datasets  # takes seconds, and is required only for hub data
        import huggingface_hub.constants
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{subject}: reading it requires the library datasets, which is not installed",
            f"pip install 'lmtool[hub]', or {hint}",
        ) from problem
    local = user_path(name).is_dir()
    unreachable = not local and not offline and not is_reachable(huggingface_hub.constants.ENDPOINT)
    modes = (datasets.config, huggingface_hub.constants)
    before = [mode.HF_HUB_OFFLINE for mode in modes]
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels = [logger.level for logger in loggers]
    for mode, setting in zip(modes, before, strict=True):
        mode.HF_HUB_OFFLINE = setting or local or offline or unreachable
    for logger in loggers:
        logger.setLevel(logging.ERROR)  # without warnings about retries, and about reading the cache
    try:
        yield datasets
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as problem:
        # These include the errors of its transport, huggingface_hub and pyarrow.
        reason = masked(" ".join(str(problem).split()))[:160] or type(problem).__name__
        if not local and (unreachable or offline):
            reason = "no network" if unreachable else "offline=true, and it is not in the cache"
        raise UserError(f"{subject} cannot be read: {reason}", hint) from problem
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for mode, setting in zip(modes, before, strict=True):
            mode.HF_HUB_OFFLINE = setting


SHARD = 64 << 20  # approximate bytes of a shard
_PROGRESS = "progress.json"
_DRAFT = "draft"


@dataclass
class StoredText:
    """The state of a folder of shards. origin: the source of the text and its version. position: the source's position
    after the last shard, as plain data. rows, without_text: numbers of rows read, and of those without text. shards:
    bytes of each shard."""

    origin: str
    position: object = None
    rows: int = 0
    without_text: int = 0
    bytes: int = 0
    shards: list[int] = field(default_factory=list)
    complete: bool = True  # whether it has all text of the source, instead of the first `max_bytes`


def complete_shards(folder: Path) -> tuple[list[Path], StoredText] | None:
    """Returns the shards of a complete folder, in order; None if it is not complete. Raises Damaged."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    manifest.verify()
    return [folder / name for name in sorted(manifest.files) if name != _PROGRESS], StoredText(
        **manifest.metadata["kept"]
    )


class ShardWriter:
    """Writes texts into shards in a folder, resuming after the last complete shard. origin: the source of the texts and
    its version; texts of another origin are removed. Raises UserError if cache_dir cannot be written."""

    def __init__(self, folder: Path, cache_dir: str | Path, origin: str):
        self._folder, self._cache_dir = folder, cache_dir
        self._file: BinaryIO | None = None
        self._size = 0
        with writing(cache_dir):
            self.stored = self._resume(origin)

    def _resume(self, origin: str) -> StoredText:
        try:
            text = StoredText(**json.loads((self._folder / _PROGRESS).read_bytes()))
            sizes = [self._path(number).stat().st_size for number in range(len(text.shards))]
        except (OSError, ValueError, TypeError):
            text, sizes = StoredText(""), []
        if text.origin != origin or sizes != text.shards or (self._folder / MANIFEST).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            text = StoredText(origin)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _DRAFT).unlink(missing_ok=True)  # of a killed process
        return text

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.jsonl"

    def add(self, text: str, most: int) -> bool:
        """Adds the text of a row, which may be empty. Returns False if the total would exceed `most` bytes."""
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" if text else b""
        if self.stored.bytes + len(line) > most:
            self.stored.complete = False
            return False
        if line:
            with writing(self._cache_dir):
                if self._file is None:
                    self._file = (self._folder / _DRAFT).open("wb")
                self._file.write(line)
        self.stored.rows += 1
        self.stored.without_text += not text
        self.stored.bytes += len(line)
        self._size += len(line)
        return True

    @property
    def full(self) -> bool:
        """Whether the current shard should be closed."""
        return self._size >= SHARD

    def close(self, position: object) -> None:
        """Completes the current shard. position: the source's position after its last row."""
        if self._file is None:
            return
        with writing(self._cache_dir):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._folder / _DRAFT, self._path(len(self.stored.shards)))
            self.stored.shards.append(self._size)
            self.stored.position = position
            draft = self._folder / _DRAFT
            write_bytes(draft, json.dumps(asdict(self.stored)).encode())
            os.replace(draft, self._folder / _PROGRESS)
            sync_path(self._folder)
        self._file, self._size = None, 0

    def finish(self) -> list[Path]:
        """Marks the folder as complete. Returns the shards in order."""
        with writing(self._cache_dir):
            write_manifest(self._folder, {"kept": asdict(self.stored)})
        return [self._path(number) for number in range(len(self.stored.shards))]


VERSION = 1  # increase it if the text of a row changes
_REPORT = 1000  # rows between reports of progress


class HubSource(FileSource[HubConfig]):
    """The rows of a data set, with their columns of text joined by newlines. Only the text is stored. offline: read
    only stored text. Raises UserError if the data set, the split or a column does not exist or cannot be read, if a
    value is not text, or if the disk is full."""

    def __init__(
        self, config: HubConfig, cache_dir: str | Path, progress: OnStage | None = None, offline: bool = False
    ):
        self._offline, self._stored = offline, dict[str, StoredText]()
        super().__init__(config, cache_dir, progress, key="data.hub")

    def files(self) -> dict[str, list[Path]]:
        splits = {"train": self.config.split}
        if self.config.validation is not None:
            splits["validation"] = self.config.validation
        if len({*splits.values()}) < len(splits):
            raise UserError(
                f"data.validation={self.config.validation} is also the training split",
                "name another split, or omit data.validation to hold out data.validation_fraction",
            )
        return {role: self._shards(split) for role, split in splits.items()}

    def _shards(self, split: str) -> list[Path]:
        assert self.cache_dir is not None
        folder = folder_of(self.config, split, self.cache_dir)
        with writing(self.cache_dir):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_suffix(".lock")) as holds_lock:
            try:
                shards = complete_shards(folder)
            except Damaged as damage:
                rebuilding(damage, self.progress)
                shutil.rmtree(folder, ignore_errors=True)
                shards = None
            if shards is None and not holds_lock:  # another process may be writing this folder
                self._read_split(split, draft := draft_path(folder))
                publish(draft, folder)
                shards = complete_shards(folder)
            paths, self._stored[split] = shards or self._read_split(split, folder)
        return paths

    def _read_split(self, split: str, folder: Path) -> tuple[list[Path], StoredText]:
        assert self.cache_dir is not None
        config, subject = self.config, f"data.hub={self.config.hub}"
        name, _, subset = config.hub.partition(":")
        local = user_path(name)
        if name.startswith((".", "/", "~")) and not local.is_dir():
            raise no_such_file("data.hub", name)
        alternative = "use local files: data=parquet data.path=FOLDER"
        if self._offline and not local.is_dir():
            state = "is not in the cache" if not folder.exists() else "is only partly in the cache"
            raise UserError(
                f"{subject}: offline=true, but its split {split} {state}",
                f"run the command once with a network and without offline=true, or {alternative}",
            )
        with hub_access(
            subject, name, self._offline, f"run the command again to continue, or {alternative}"
        ) as datasets:
            builder = datasets.load_dataset_builder(str(local) if local.is_dir() else name, subset or None)
            _require_strict(builder, subject, name if local.is_dir() else None)
            splits = list(builder.config.data_files or ())
            if splits and split not in splits:
                like = nearest(split, splits)
                key = "data.split" if split == config.split else "data.validation"
                raise UserError(
                    f"{subject} has no split {split}; there are {name_list(splits)}", f"{key}={like or splits[0]}"
                )
            rows = _columns(builder.as_streaming_dataset(split=split), columns_of(config), f"{subject} {split}")
            writer = ShardWriter(folder, self.cache_dir, f"{builder.hash} datasets {datasets.__version__}")
            if writer.stored.position is not None:
                rows.load_state_dict(writer.stored.position)
            try:
                self._write(rows, writer, f"{subject} {split}")
            finally:
                writer.close(rows.state_dict())
            if not writer.stored.shards:
                raise UserError(
                    f"{subject}: the split {split} has no text in {name_list(columns_of(config))}",
                    "name another column: data.text=COLUMN",
                )
            return writer.finish(), writer.stored

    def _write(self, rows: Any, writer: ShardWriter, subject: str) -> None:
        columns, most, stored_text = columns_of(self.config), self.config.max_bytes, writer.stored
        for row in rows:
            place = f"{subject}:{stored_text.rows + 1}"
            text = text_of(place, columns, values_of(place, row, columns, "data.text"), "data.text")
            if len(text) > LINE // 2:  # JSON escapes may double its length
                raise UserError(
                    f"{place}: the text has {len(text):,} characters, more than {LINE // 2:,}",
                    "remove the row from the data set",
                )
            if not writer.add(text, most):
                return
            if writer.full:
                writer.close(rows.state_dict())
            if self.progress is not None and stored_text.rows % _REPORT == 0:
                self.progress(f"reading {subject}", stored_text.bytes, most)

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        for _, row in objects(path):
            if counts is not None:
                counts["rows_with_control_characters"] += has_control_characters(row["text"])
            yield from in_parts(row["text"])

    def unit(self) -> str:
        return "row"

    def metadata(self) -> dict[str, object]:
        texts = self._stored.values()
        return super().metadata() | {
            "source": f"hub {self.config.hub}",
            "text": ", ".join(columns_of(self.config)),
            "rows_without_text": sum(split.without_text for split in texts),
            "kept": ", ".join(
                f"{'all' if split.complete else 'the beginning'} of {name}" for name, split in self._stored.items()
            ),
            "origin": ", ".join(dict.fromkeys(split.origin for split in texts)),
        }


def folder_of(config: HubConfig, split: str, cache_dir: str | Path) -> Path:
    """Returns the folder with the text of a split. It depends on the names, sizes and times of the files in a local
    data set; text from the hub is not updated."""
    parts: list[object] = [VERSION, config.hub, split, *columns_of(config), config.max_bytes]
    local = user_path(config.hub.partition(":")[0])
    if local.is_dir():
        files = sorted(path for path in local.rglob("*") if path.is_file())
        parts += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return user_path(cache_dir) / "hub_text" / key[:32]


def _columns(rows: Any, columns: tuple[str, ...], subject: str) -> Any:
    """Only these columns, so that images and audio in others are not decoded."""
    if rows.column_names is None:  # unknown until the first row is read
        return rows
    names = rows.column_names
    top_level = [name if name in names else name.partition(".")[0] for name in columns]  # "a.b" -> "a"
    missing = next((name for name, top in zip(columns, top_level, strict=True) if top not in names), None)
    if missing is not None:
        raise no_column(subject, missing, names, "data.text")
    return rows.select_columns(list(dict.fromkeys(top_level)))


def _require_strict(builder: object, subject: str, folder: str | None) -> None:
    """The library silently shifts ragged rows of CSV and reads "NA" as null."""
    if any(base.__module__.endswith("packaged_modules.csv.csv") for base in type(builder).__mro__):
        hint = f"use data=csv data.path={folder}" if folder else "download its files, and use data=csv data.path=FOLDER"
        raise UserError(f"{subject} is CSV, which the library datasets reads with silent errors", hint)
