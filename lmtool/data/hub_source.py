"""`data=hub`: a data set of the hub, read row by row into shards of text below the cache folder, and from there on a
source of files."""

from __future__ import annotations

import contextlib
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

from lmtool.config.nearest import nearest
from lmtool.data.configs import HubConfig, columns_of
from lmtool.data.file_source import FileSource, has_control_characters
from lmtool.data.files import LINE, no_such_file
from lmtool.data.rows import name_list, no_column, objects, text_of, values_of
from lmtool.data.sources import OnStage, in_parts
from lmtool.data.store import locked, rebuilding, writing
from lmtool.errors import UserError
from lmtool.system.environment import answers
from lmtool.system.files import MANIFEST, Damaged, Manifest, sync_path, write_bytes, write_manifest
from lmtool.system.secrets import masked


@contextmanager
def hub_access(what: str, name: str, offline: bool, hint: str) -> Iterator[Any]:
    """The library, for what is done inside. What it raises becomes a UserError: `what` names the data set as it was
    typed, `hint` says what to do without it. name: of the data set, or a local folder. offline: no connection is
    opened; none is for a folder. Without a network the library would retry for half a minute; what it has in its cache
    it reads without one.
    """
    try:
        import datasets  # seconds to import, and needed for hub data only
        import huggingface_hub.constants
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{what} is read by the library datasets, which is not installed", f"pip install 'lmtool[hub]', or {hint}"
        ) from problem
    local = Path(name).expanduser().is_dir()
    unreachable = not local and not offline and not answers(huggingface_hub.constants.ENDPOINT)
    modes = (datasets.config, huggingface_hub.constants)
    before = [mode.HF_HUB_OFFLINE for mode in modes]
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    for mode, was in zip(modes, before, strict=True):
        mode.HF_HUB_OFFLINE = was or local or offline or unreachable
    logger.setLevel(logging.ERROR)  # its retries are reported once, as the error
    try:
        yield datasets
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as problem:
        # The library's own errors, those of its transport, of huggingface_hub and of pyarrow are all of these kinds.
        reason = masked(" ".join(str(problem).split()))[:160] or type(problem).__name__
        if not local and (unreachable or offline):
            reason = "no network" if unreachable else "offline=true, and not in the cache"
        raise UserError(f"{what} cannot be read: {reason}", hint) from problem
    finally:
        logger.setLevel(level)
        for mode, was in zip(modes, before, strict=True):
            mode.HF_HUB_OFFLINE = was


# Text on its way from elsewhere, kept below the cache folder: shards of JSON lines, each complete or not there.
#
# What is interrupted resumes behind the last shard. When all is there the folder gets its manifest, and is never
# changed.


SHARD = 64 << 20
"""Bytes of a shard, about."""
_PROGRESS = "progress.json"
_DRAFT = "draft"


@dataclass
class StoredText:
    """What is there so far. origin: what the text is of; position: where its source reads on, plain data. rows: those
    that were read, without_text: those of them that hold none."""

    origin: str
    position: object = None
    rows: int = 0
    without_text: int = 0
    bytes: int = 0
    shards: list[int] = field(default_factory=list)
    complete: bool = True  # whether all of the source is there, not its first `max_bytes`


def complete_shards(folder: Path) -> tuple[list[Path], StoredText] | None:
    """The shards of a folder that is finished, in order; None where it is not. Damaged where one is not as it was
    written."""
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    manifest.verify()
    return [folder / name for name in sorted(manifest.files) if name != _PROGRESS], StoredText(
        **manifest.metadata["kept"]
    )


class ShardWriter:
    """Writes texts into a folder. As a context: what ends it early leaves the current shard, to be read on from there.

    origin: what the texts are of; where the folder holds others, they are cleared away. UserError naming cache_dir
    where it cannot be written.
    """

    def __init__(self, folder: Path, cache_dir: str | Path, origin: str):
        self._folder, self._cache_dir = folder, cache_dir
        self._file: BinaryIO | None = None
        self._size = 0
        with writing(cache_dir):
            self.stored = self._resume(origin)

    def _resume(self, origin: str) -> StoredText:
        try:
            stored = StoredText(**json.loads((self._folder / _PROGRESS).read_bytes()))
            sizes = [self._path(number).stat().st_size for number in range(len(stored.shards))]
        except (OSError, ValueError, TypeError):
            stored, sizes = StoredText(""), []
        if stored.origin != origin or sizes != stored.shards or (self._folder / MANIFEST).exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            stored = StoredText(origin)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _DRAFT).unlink(missing_ok=True)  # of a process that died
        return stored

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.jsonl"

    def add(self, text: str, most: int) -> bool:
        """Write the text of a row, which may be empty; False where it would make more than `most` bytes in all."""
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
        """Whether the current shard is to be closed."""
        return self._size >= SHARD

    def close(self, position: object) -> None:
        """End the current shard. position: where the source reads on behind its last row."""
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
        """All is state: the shards, in order."""
        with writing(self._cache_dir):
            write_manifest(self._folder, {"kept": asdict(self.stored)})
        return [self._path(number) for number in range(len(self.stored.shards))]


VERSION = 1  # of how rows become text: raise it when that changes
_REPORT = 1000  # rows between two reports of progress


class HubSource(FileSource[HubConfig]):
    """The rows of a split, its columns of text under each other. A split is streamed: nothing but its text is kept.

    offline: what is kept is read, and nothing else. UserError: the data set cannot be had, it has no such split or
    column, a row holds no text but something else, or the disk is full.
    """

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
                f"data.validation={self.config.validation} is the split that is learned from",
                "name another split, or omit it: data.validation_fraction is held out",
            )
        return {role: self._shards(split) for role, split in splits.items()}

    def _shards(self, split: str) -> list[Path]:
        assert self.cache_dir is not None
        folder = folder_of(self.config, split, self.cache_dir)
        with writing(self.cache_dir):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock")):
            try:
                done = complete_shards(folder)
            except Damaged as damage:
                rebuilding(damage, self.progress)
                shutil.rmtree(folder, ignore_errors=True)
                done = None
            paths, self._stored[split] = done or self._read_split(split, folder)
        return paths

    def _read_split(self, split: str, folder: Path) -> tuple[list[Path], StoredText]:
        """Stream a split into its folder, from where that was left."""
        assert self.cache_dir is not None
        config, what = self.config, f"data.hub={self.config.hub}"
        name, _, subset = config.hub.partition(":")
        local = Path(name).expanduser()
        if name.startswith((".", "/", "~")) and not local.is_dir():
            raise no_such_file("data.hub", name)
        without = "give files that are here: data=parquet data.path=FOLDER"
        if self._offline and not local.is_dir():
            state = "is not in the cache" if not folder.exists() else "is in the cache in part only"
            raise UserError(
                f"{what}: offline=true, and its split {split} {state}",
                f"type the command once with a network and without offline=true, or {without}",
            )
        with hub_access(what, name, self._offline, f"type the command again to read on, or {without}") as datasets:
            builder = datasets.load_dataset_builder(str(local) if local.is_dir() else name, subset or None)
            _require_strict(builder, what, name if local.is_dir() else None)
            splits = list(builder.config.data_files or ())
            if splits and split not in splits:
                like = nearest(split, splits)
                key = "data.split" if split == config.split else "data.validation"
                raise UserError(
                    f"{what} has no split {split}; there are {name_list(splits)}", f"{key}={like or splits[0]}"
                )
            rows = _columns(builder.as_streaming_dataset(split=split), columns_of(config), f"{what} {split}")
            writer = ShardWriter(folder, self.cache_dir, f"{builder.hash} datasets {datasets.__version__}")
            if writer.stored.position is not None:
                rows.load_state_dict(writer.stored.position)
            try:
                self._write(rows, writer, f"{what} {split}")
            finally:
                writer.close(rows.state_dict())
            if not writer.stored.shards:
                raise UserError(
                    f"{what}: the split {split} holds no text in {name_list(columns_of(config))}",
                    "name another column: data.text=COLUMN",
                )
            return writer.finish(), writer.stored

    def _write(self, rows: Any, writer: ShardWriter, what: str) -> None:
        columns, most, stored = columns_of(self.config), self.config.max_bytes, writer.stored
        for row in rows:
            where = f"{what}:{stored.rows + 1}"
            text = text_of(where, columns, values_of(where, row, columns, "data.text"), "data.text")
            if len(text) > LINE // 2:  # what JSON makes of it is up to twice as long
                raise UserError(f"{where}: a text of {len(text):,} characters", "omit it: it is no document")
            if not writer.add(text, most):
                return
            if writer.full:
                writer.close(rows.state_dict())
            if self.progress is not None and stored.rows % _REPORT == 0:
                self.progress(f"reading {what}", stored.bytes, most)

    def documents_of(self, path: Path, counts: Counter[str] | None) -> Iterator[tuple[str, bool]]:
        for _, row in objects(path):
            if counts is not None:
                counts["rows_with_control_characters"] += has_control_characters(row["text"])
            yield from in_parts(row["text"])

    def unit(self) -> str:
        return "row"

    def metadata(self) -> dict[str, object]:
        stored = self._stored.values()
        more = {
            "text": ", ".join(columns_of(self.config)),
            "rows_without_text": sum(split.without_text for split in stored),
            "kept": ", ".join(
                f"{'all' if split.complete else 'the beginning'} of {name}" for name, split in self._stored.items()
            ),
            "origin": ", ".join(dict.fromkeys(split.origin for split in stored)),
        }
        return super().metadata() | {"source": f"hub {self.config.hub}"} | more


def folder_of(config: HubConfig, split: str, cache_dir: str | Path) -> Path:
    """Where the text of a split is kept. A folder on this machine is another one where its files change; what comes
    from the hub stays as it was when it was read."""
    parts: list[object] = [VERSION, config.hub, split, *columns_of(config), config.max_bytes]
    local = Path(config.hub.partition(":")[0]).expanduser()
    if local.is_dir():
        files = sorted(path for path in local.rglob("*") if path.is_file())
        parts += [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return Path(cache_dir).expanduser() / "hub_text" / key[:32]


def to_download(config: HubConfig, cache_dir: str | Path) -> list[str]:
    """The splits that are still to be read from the hub, or to be read on; building the source does."""
    missing = []
    for split in (config.split, *([config.validation] if config.validation else [])):
        done = None
        with contextlib.suppress(Damaged):
            done = complete_shards(folder_of(config, split, cache_dir))
        if done is None:
            missing.append(split)
    return missing


def _columns(rows: Any, columns: tuple[str, ...], what: str) -> Any:
    """The rows with these columns alone: of pictures and sounds beside the text nothing is decoded."""
    if rows.column_names is None:  # the first row shows them
        return rows
    names = rows.column_names
    top_level = [name if name in names else name.partition(".")[0] for name in columns]  # of a.b the column a
    missing = next((name for name, top in zip(columns, top_level, strict=True) if top not in names), None)
    if missing is not None:
        raise no_column(what, missing, names, "data.text")
    return rows.select_columns(list(dict.fromkeys(top_level)))


def _require_strict(builder: object, what: str, folder: str | None) -> None:
    """UserError for CSV, of which the library shifts ragged rows and turns "NA" into nothing, silently."""
    if any(base.__module__.endswith("packaged_modules.csv.csv") for base in type(builder).__mro__):
        read = f"data=csv data.path={folder}" if folder else "download its files, and data=csv data.path=FOLDER"
        raise UserError(f"{what} is CSV, which the library datasets reads with silent errors", f"{read} reads it")
