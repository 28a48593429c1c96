"""The token store: a split of a source, tokenized once and memory-mapped by every run that reads it.

A store is a folder `stores/<key>` of the cache folder; the key is a hash of the text, the tokenizer and the version of
this code. It is written under a lock as a draft next to it, then renamed, and never changed. When it is opened, all
of it is verified against its manifest (1.2 GB/s). A damaged store is reported and rebuilt.

Shape letters: D documents, S sentences.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.sources import OnStage, Source, splits_of
from lmtool.data.tokenizing import ChildDied, Tokenized, dtype_of, portions, tokenize, workers_for
from lmtool.errors import UserError, write_hint
from lmtool.system.files import MANIFEST, Damaged, Manifest, publish, sync_path, user_path, write_manifest
from lmtool.system.ranks import rank_info
from lmtool.tokenizers.tokenizer import Tokenizer

FILES = {
    "tokens": "tokens.bin",
    "document_offsets": "document_offsets.bin",
    "sentence_offsets": "sentence_offsets.bin",
    "document_sentences": "document_sentences.bin",
}
PORTIONS_PER_ROW = 16  # of the journal; tokenizing this many portions takes some seconds

Built = TypeVar("Built")


@dataclass
class Counts:
    """Totals of a draft."""

    portions: int = 0
    tokens: int = 0
    documents: int = 0
    sentences: int = 0
    last_boundary: int = 0  # number of sentences up to the end of the last document with tokens
    without_tokens: int = 0
    unknown: int = 0
    characters: int = 0
    words: int = 0
    bytes: int = 0
    seconds: float = 0.0


class StoreDraft:
    """The folder in which a store is built. After a kill a later build resumes from it; after an error in the text it
    is removed. store: the folder of the complete store. holds_lock: whether this process holds the lock of the
    store; only then is an earlier draft resumed."""

    def __init__(self, store: Path, tokenizer: Tokenizer, holds_lock: bool = True):
        stem = f".{store.name}.{'draft' if holds_lock else os.getpid()}"
        self.folder, self._journal = store.with_name(stem), store.with_name(f"{stem}.jsonl")
        self._tokenizer, self._holds_lock = tokenizer, holds_lock
        self._dtypes: dict[str, np.dtype] = dict.fromkeys(FILES, np.dtype("<i8")) | {"tokens": dtype_of(tokenizer)}
        self._counts = Counts()
        self._hashes = {name: hashlib.sha256() for name in FILES}
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> StoreDraft:
        sizes = self._resume() if self._holds_lock else None
        if sizes is None:
            self._discard()
            self.folder.mkdir()
            self._counts = Counts()
        else:
            for path in self.folder.iterdir():
                if path.name not in FILES.values():
                    path.unlink()
            for name, file in FILES.items():
                os.truncate(self.folder / file, sizes[name])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        error_in_text = kind is not None and issubclass(kind, UserError) and not issubclass(kind, ChildDied)
        if kind is None or error_in_text or not self._journal.exists():
            self._discard()

    def _discard(self) -> None:
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, source: Source, split: str, progress: OnStage | None) -> dict[str, object]:
        """Tokenizes a split, resuming an earlier build. Returns the metadata of the store."""
        total, stage = max(source.characters(split), 1), f"tokenizing {split}"
        before = Counts(**asdict(self._counts))
        began = time.perf_counter()
        if before.portions and progress is not None:
            progress(f"{stage}: an earlier build was interrupted at {before.characters / total:.0%}; resuming", 0, 1)
        with ExitStack() as stack:
            for name, file in FILES.items():
                self._files[name] = stack.enter_context(open(self.folder / file, "ab"))
            if not before.portions:
                for name in ("document_offsets", "sentence_offsets", "document_sentences"):
                    self._append(name, np.zeros(1))
            remaining_portions = islice(portions(source.parts(split)), before.portions, None)
            workers = workers_for(total - before.characters)
            for portion in stack.enter_context(closing(tokenize(self._tokenizer, remaining_portions, workers))):
                self._add(portion)
                self._counts.seconds = before.seconds + time.perf_counter() - began
                if self._counts.portions % PORTIONS_PER_ROW == 0:
                    self._write_row()
                if progress is not None:
                    progress(stage, min(self._counts.characters, total - 1), total, self._rates(before))
        if self._counts.tokens == 0:
            key = "data.path" if split == "train" else "data.validation"
            raise UserError(f"the {split} text has no tokens", f"use files with text: {key}=PATH")
        self._counts.seconds = before.seconds + time.perf_counter() - began
        if progress is not None:
            progress(stage, total, total, self._rates(before))
        return self._metadata(source, split)

    def _append(self, name: str, values: np.ndarray) -> None:
        content = values.astype(self._dtypes[name]).tobytes()
        self._files[name].write(content)
        self._hashes[name].update(content)

    def _add(self, portion: Tokenized) -> None:
        counts = self._counts
        offsets = counts.tokens + np.concatenate([[0], np.cumsum(portion.sentence_lengths)])
        # portion.sentences: the number of sentences of each part. boundaries: the number of sentences up to the end of
        # each document; a document without sentences has no tokens.
        boundaries = (counts.sentences + np.cumsum(portion.sentences))[portion.ends]
        has_sentences = np.diff(boundaries, prepend=counts.last_boundary) > 0
        counts.without_tokens += int((~has_sentences).sum())
        boundaries = boundaries[has_sentences]
        self._append("tokens", portion.tokens)
        self._append("sentence_offsets", offsets[1:])
        self._append("document_sentences", boundaries)
        self._append("document_offsets", offsets[boundaries - counts.sentences])
        counts.last_boundary = int(boundaries[-1]) if len(boundaries) else counts.last_boundary
        counts.portions += 1
        counts.tokens += len(portion.tokens)
        counts.documents += len(boundaries)
        counts.sentences += len(portion.sentence_lengths)
        for name in ("unknown", "characters", "words", "bytes"):
            setattr(counts, name, getattr(counts, name) + getattr(portion, name))

    def _rates(self, before: Counts) -> str:
        seconds = max(self._counts.seconds - before.seconds, 1e-9)
        size, tokens = self._counts.bytes - before.bytes, self._counts.tokens - before.tokens
        return f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds:,.0f} tokens/s"

    def _write_row(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        row = {
            "counts": asdict(self._counts),
            "bytes": {name: file.tell() for name, file in self._files.items()},
            "sha256": {name: sha256.hexdigest() for name, sha256 in self._hashes.items()},
        }
        with open(self._journal, "ab") as file:
            file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
        sync_path(self.folder.parent)
        self._hashes = {name: hashlib.sha256() for name in FILES}

    def _resume(self) -> dict[str, int] | None:
        """Finds the last row of the journal that matches the files, and takes its counts. Returns the bytes of each
        file."""
        with contextlib.suppress(OSError), ExitStack() as stack:
            rows = self._journal.read_bytes().splitlines(keepends=True)
            files = {name: stack.enter_context(open(self.folder / file, "rb")) for name, file in FILES.items()}
            sizes, complete_rows = dict.fromkeys(FILES, 0), 0
            for line in rows:
                row = _read_row(line)
                if row is None or any(
                    hashlib.sha256(files[name].read(row["bytes"][name] - sizes[name])).hexdigest() != digest
                    for name, digest in row["sha256"].items()
                ):
                    break
                self._counts, sizes, complete_rows = Counts(**row["counts"]), row["bytes"], complete_rows + 1
            if complete_rows:
                os.truncate(self._journal, sum(map(len, rows[:complete_rows])))
                return sizes
        return None

    @property
    def arrays(self) -> dict[str, dict[str, object]]:
        """The type and number of the values in each file."""
        counts = self._counts
        lengths = {
            "tokens": counts.tokens,
            "document_offsets": counts.documents + 1,
            "sentence_offsets": counts.sentences + 1,
            "document_sentences": counts.documents + 1,
        }
        return {name: {"dtype": self._dtypes[name].str, "count": lengths[name]} for name in FILES}

    def _metadata(self, source: Source, split: str) -> dict[str, object]:
        counts = self._counts
        names = ("sentences", "tokens", "characters", "words", "bytes")
        return {
            "split": split,
            "documents": counts.documents,
            "documents_without_tokens": counts.without_tokens,
            **{name: value for name, value in asdict(counts).items() if name in names},
            "characters_per_token": counts.characters / counts.tokens,
            "unknown_fraction": counts.unknown / counts.tokens,
            "seconds": round(counts.seconds, 3),
            "bytes_per_second": round(counts.bytes / max(counts.seconds, 1e-9)),
            "tokens_per_second": round(counts.tokens / max(counts.seconds, 1e-9)),
            "tokenizer": self._tokenizer.fingerprint,
            "source": source.fingerprint,
        }


def _line(row: JsonObject) -> bytes:
    """A row of the journal after its hash, by which damage is detected."""
    content = json.dumps(row).encode()
    return hashlib.sha256(content).hexdigest().encode() + b" " + content + b"\n"


def _read_row(line: bytes) -> JsonObject | None:
    digest, _, content = line.partition(b" ")
    content = content.removesuffix(b"\n")
    return json.loads(content) if hashlib.sha256(content).hexdigest().encode() == digest else None


VERSION = 4  # increase it if the layout, the metadata, tokenization or sentence splitting changes


@dataclass(frozen=True)
class TokenStore:
    """A token store as read-only maps of files. Every document and every sentence has tokens.

    tokens: uint16 or uint32 ids of all documents, concatenated. document_offsets: (D+1,) boundaries of documents in the
    tokens. sentence_offsets: (S+1,) boundaries of sentences in the tokens. document_sentences: (D+1,) boundaries of
    documents in the sentences. rows: labeled rows to train on together with the text, by the name of their task. cache:
    the cache of arrays computed from the store.
    """

    tokens: np.ndarray
    document_offsets: np.ndarray
    sentence_offsets: np.ndarray
    document_sentences: np.ndarray
    metadata: JsonObject
    folder: Path
    rows: Mapping[str, object] = field(default_factory=dict)
    cache: ArrayCache = UNSHARED

    def __len__(self) -> int:
        return len(self.document_offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """(D,) int64: tokens of each document."""
        return np.diff(self.document_offsets)

    def document(self, number: int) -> np.ndarray:
        """Returns the ids of one document."""
        return self.tokens[self.document_offsets[number] : self.document_offsets[number + 1]]


def open_store(
    source: Source, split: str, tokenizer: Tokenizer, cache_dir: str | Path, progress: OnStage | None = None
) -> TokenStore:
    """Returns the store of a split, which is built if it is missing or damaged. Raises UserError if cache_dir is full
    or cannot be written, or if the split has no tokens."""
    parts = [f"store {VERSION}", source.fingerprint, splits_of(split), tokenizer.fingerprint]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    root = user_path(cache_dir)
    folder = root / "stores" / key[:32]
    processes = rank_info(os.environ).local_size
    cache = UNSHARED if processes == 1 else ArrayCache(root / "plans", key, processes, progress)

    def build(holds_lock: bool) -> None:
        with StoreDraft(folder, tokenizer, holds_lock) as draft:
            metadata = draft.write(source, split, progress)
            write_manifest(draft.folder, {"key": key, "arrays": draft.arrays, "facts": metadata})
            publish(draft.folder, folder)

    return cached_folder(folder, cache_dir, lambda: _open(folder, key, cache), build, progress)


def release(values: np.ndarray) -> None:
    """Frees the memory of a mapped file; its pages are read again when they are needed."""
    base: object = values
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)


def cached_folder(
    folder: Path,
    cache_dir: str | Path,
    load: Callable[[], Built],
    build: Callable[[bool], None],
    progress: OnStage | None,
) -> Built:
    """Loads a folder of the cache; if it is missing or damaged, builds it under its lock. An intact folder needs no
    writing, so the cache may be read-only. build: called with whether this process holds the lock. Raises UserError if
    cache_dir is full or cannot be written."""
    if folder.exists():
        with contextlib.suppress(Damaged):
            return load()
    with writing(cache_dir):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f"{folder.name}.lock")) as holds_lock:
            if folder.exists():
                try:
                    return load()  # another process may have built it in the meantime
                except Damaged as damage:
                    rebuilding(damage, progress)
                    shutil.rmtree(folder, ignore_errors=True)
            build(holds_lock)
    try:
        return load()
    except Damaged as damage:
        raise UserError(f"cache_dir={cache_dir}: {damage}", "set cache_dir= to another folder") from damage


def rebuilding(damage: Damaged, progress: OnStage | None) -> None:
    """Reports a damaged entry of the cache folder, which is then rebuilt."""
    if progress is not None:
        progress(f"warning: {damage}; building it again", 0, 1)


@contextlib.contextmanager
def writing(cache_dir: str | Path) -> Iterator[None]:
    """Converts a failure to write in cache_dir to a UserError that names the key."""
    try:
        yield
    except OSError as problem:
        reason = "is a file" if user_path(cache_dir).is_file() else problem.strerror or str(problem)
        raise UserError(f"cache_dir={cache_dir}: {reason}", write_hint(problem, "cache_dir")) from problem


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Waits for a file's lock and holds it. Yields False if the file system has no locks: processes may then repeat
    work, but renaming keeps results intact."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+b") as file:
        is_locked = False
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        yield is_locked


def _open(folder: Path, key: str, cache: ArrayCache) -> TokenStore:
    manifest = Manifest.read(folder)
    missing = set(FILES.values()) - manifest.files.keys()
    if manifest.metadata.get("key") != key or missing:
        raise Damaged(folder / MANIFEST, "belongs to another store")
    manifest.verify()
    arrays: JsonObject = {}
    for name, file in FILES.items():
        entry = manifest.metadata["arrays"][name]
        memory_map = np.memmap(folder / file, dtype=entry["dtype"], mode="r", shape=(entry["count"],))
        arrays[name] = memory_map.view(np.ndarray)
    return TokenStore(**arrays, metadata=manifest.metadata["facts"], folder=folder, cache=cache)
