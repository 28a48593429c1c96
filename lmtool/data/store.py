"""The token store: a split of a source, tokenized once, memory-mapped by every run that reads it.

A store is a folder `stores/<key>` of the cache folder, where the key is a hash of the text, the tokenizer and the
version of this code. It is written beside its place (`StoreDraft`) and renamed, under a lock, and never changed.
Every opening holds all of it against its manifest: 2 bytes a token at 1.2 GB/s, a fiftieth of what reading the text
takes before it. A damaged store is rebuilt and reported.

Shape letters: D documents, S sentences.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.sources import OnStage, Source, splits_of
from lmtool.data.tokenizing import ChildDied, Tokenized, dtype_of, portions, tokenize, workers_for
from lmtool.errors import UserError
from lmtool.system.files import MANIFEST, Damaged, Manifest, sync_path, write_manifest
from lmtool.system.ranks import rank_info
from lmtool.tokenizers.tokenizer import Tokenizer

FILES = {
    "tokens": "tokens.bin",
    "document_offsets": "document_offsets.bin",
    "sentence_offsets": "sentence_offsets.bin",
    "document_sentences": "document_sentences.bin",
}
SHARD = 16
"""Portions between rows of the journal: some seconds of work."""


@dataclass
class Counts:
    """What was written so far; seconds: that it took."""

    portions: int = 0
    tokens: int = 0
    documents: int = 0
    sentences: int = 0
    last_boundary: int = 0  # sentences up to the end of the last document that has tokens
    without_tokens: int = 0
    unknown: int = 0
    characters: int = 0
    words: int = 0
    bytes: int = 0
    seconds: float = 0.0


class StoreDraft:
    """The folder in which a store is built, and all that is left of it when building ends otherwise: what a later build
    resumes from where it is killed, nothing after an error of the text.

    alone: whether no other process builds the same: only then an earlier draft is taken up.
    """

    def __init__(self, place: Path, tokenizer: Tokenizer, alone: bool = True):
        stem = f".{place.name}.{'draft' if alone else os.getpid()}"
        self.folder, self._journal = place.with_name(stem), place.with_name(f"{stem}.jsonl")
        self._tokenizer, self._alone = tokenizer, alone
        dtypes = dict.fromkeys(FILES, np.dtype("<i8")) | {"tokens": dtype_of(tokenizer)}
        self._dtypes: dict[str, np.dtype[Any]] = dtypes
        self._counts = Counts()
        self._hashes = {name: hashlib.sha256() for name in FILES}
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> StoreDraft:
        sizes = self._resume() if self._alone else None
        if sizes is None:
            self._discard()
            self.folder.mkdir()
            self._counts = Counts()
        else:
            for left in self.folder.iterdir():
                if left.name not in FILES.values():
                    left.unlink()
            for name, file in FILES.items():
                os.truncate(self.folder / file, sizes[name])
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        of_the_text = kind is not None and issubclass(kind, UserError) and not issubclass(kind, ChildDied)
        if kind is None or of_the_text or not self._journal.exists():
            self._discard()

    def _discard(self) -> None:
        self._journal.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, source: Source, split: str, progress: OnStage | None) -> dict[str, object]:
        """Tokenize a split, from where an earlier build came to. Returns the metadata of the store."""
        total, stage = max(source.characters(split), 1), f"tokenizing {split}"
        before = Counts(**asdict(self._counts))
        began = time.perf_counter()
        if before.portions and progress is not None:
            progress(f"{stage}: an earlier build was cut short at {before.characters / total:.0%}; resuming", 0, 1)
        with ExitStack() as stack:
            for name, file in FILES.items():
                self._files[name] = stack.enter_context(open(self.folder / file, "ab"))
            if not before.portions:
                for name in ("document_offsets", "sentence_offsets", "document_sentences"):
                    self._append(name, np.zeros(1))
            left = islice(portions(source.parts(split)), before.portions, None)
            workers = workers_for(total - before.characters)
            for portion in stack.enter_context(closing(tokenize(self._tokenizer, left, workers))):
                self._enter(portion)
                self._counts.seconds = before.seconds + time.perf_counter() - began
                if self._counts.portions % SHARD == 0:
                    self._close_shard()
                if progress is not None:
                    progress(stage, min(self._counts.characters, total - 1), total, self._rates(before))
        if self._counts.tokens == 0:
            raise UserError(f"the {split} text holds no tokens", "use text with data.path=")
        self._counts.seconds = before.seconds + time.perf_counter() - began
        if progress is not None:
            progress(stage, total, total, self._rates(before))
        return self._metadata(source, split)

    def _append(self, name: str, values: np.ndarray) -> None:
        content = values.astype(self._dtypes[name]).tobytes()
        self._files[name].write(content)
        self._hashes[name].update(content)

    def _enter(self, portion: Tokenized) -> None:
        counts = self._counts
        offsets = counts.tokens + np.concatenate([[0], np.cumsum(portion.sentence_lengths)])
        # Sentences up to the end of each document that ends here; one without any has no tokens.
        boundaries_P = counts.sentences + np.cumsum(portion.sentences)
        boundaries = boundaries_P[portion.ends]
        grown = np.diff(boundaries, prepend=counts.last_boundary) > 0
        counts.without_tokens += int((~grown).sum())
        boundaries = boundaries[grown]
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
        """Bytes and tokens a second since this build began."""
        seconds = max(self._counts.seconds - before.seconds, 1e-9)
        size, tokens = self._counts.bytes - before.bytes, self._counts.tokens - before.tokens
        return f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds:,.0f} tokens/s"

    # --- the journal -----------------------------------------------------------------------------------------------

    def _close_shard(self) -> None:
        """Everything so far on the disk, and then the row that says so."""
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
        """The bytes of each file that are as the journal says, whose counts are taken over; None: of none."""
        with contextlib.suppress(OSError), ExitStack() as stack:
            rows = self._journal.read_bytes().splitlines(keepends=True)
            files = {name: stack.enter_context(open(self.folder / file, "rb")) for name, file in FILES.items()}
            sizes, complete_rows = dict.fromkeys(FILES, 0), 0
            for line in rows:
                row = _row(line)
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

    # --- what is said of it ------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> dict[str, dict[str, object]]:
        """Kind and number of the values of each file."""
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
        return {
            "split": split,
            "documents": counts.documents,
            "documents_without_tokens": counts.without_tokens,
            "sentences": counts.sentences,
            "tokens": counts.tokens,
            "characters": counts.characters,
            "words": counts.words,
            "bytes": counts.bytes,
            "characters_per_token": counts.characters / counts.tokens,
            "unknown_fraction": counts.unknown / counts.tokens,
            "seconds": round(counts.seconds, 3),
            "bytes_per_second": round(counts.bytes / max(counts.seconds, 1e-9)),
            "tokens_per_second": round(counts.tokens / max(counts.seconds, 1e-9)),
            "tokenizer": self._tokenizer.fingerprint,
            "source": source.fingerprint,
        }


def _line(row: dict[str, Any]) -> bytes:
    """A row of the journal behind its own hash, so that a damaged one is not believed."""
    content = json.dumps(row).encode()
    return hashlib.sha256(content).hexdigest().encode() + b" " + content + b"\n"


def _row(line: bytes) -> dict[str, Any] | None:
    digest, _, content = line.partition(b" ")
    content = content.removesuffix(b"\n")
    return json.loads(content) if hashlib.sha256(content).hexdigest().encode() == digest else None


VERSION = 4  # of the layout, of its metadata and of how text becomes tokens and sentences: raise it when one changes


@dataclass(frozen=True)
class TokenStore:
    """tokens: all ids, documents laid end to end, uint16 or uint32. document_offsets: (D+1,) their boundaries in it.
    sentence_offsets: (S+1,) boundaries of sentences in tokens. document_sentences: (D+1,) boundaries of documents among
    the sentences. No document and no sentence is without tokens. All are read-only maps of files.
    rows: labeled rows that are learned beside the text, by the name of their task. cache: of what is computed from the
    store.
    """

    tokens: np.ndarray
    document_offsets: np.ndarray
    sentence_offsets: np.ndarray
    document_sentences: np.ndarray
    metadata: dict[str, Any]
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
        """The ids of one document."""
        return self.tokens[self.document_offsets[number] : self.document_offsets[number + 1]]


def open_store(
    source: Source, split: str, tokenizer: Tokenizer, cache_dir: str | Path, progress: OnStage | None = None
) -> TokenStore:
    """The store of a split: mapped where it is there and intact, else built.

    UserError naming cache_dir where it cannot be written or is full, and where the split holds no tokens.
    """
    parts = [f"store {VERSION}", source.fingerprint, splits_of(split), tokenizer.fingerprint]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    root = Path(cache_dir).expanduser() / "stores"
    folder = root / key[:32]
    processes = rank_info(os.environ).local_size
    cache = UNSHARED if processes == 1 else ArrayCache(root.with_name("plans"), key, processes, progress)
    if folder.exists():
        with contextlib.suppress(Damaged):
            return _open(folder, key, cache)
    with writing(cache_dir):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{key[:32]}.lock") as alone:
            if folder.exists():
                try:
                    return _open(folder, key, cache)  # another process may have built it while we waited
                except Damaged as damage:
                    rebuilding(damage, progress)
                    shutil.rmtree(folder, ignore_errors=True)
            with StoreDraft(folder, tokenizer, alone) as draft:
                metadata = draft.write(source, split, progress)
                write_manifest(draft.folder, {"key": key, "arrays": draft.arrays, "facts": metadata})
                os.rename(draft.folder, folder)
    try:
        return _open(folder, key, cache)
    except Damaged as damage:
        raise UserError(f"cache_dir={cache_dir}: {damage}", "set cache_dir= to another folder") from damage


def release(values: np.ndarray) -> None:
    """Give back the memory of what was read of a mapped file; it is read again where it is asked for again."""
    base: object = values
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None:
        base.madvise(mmap.MADV_DONTNEED)


def rebuilding(damage: Damaged, progress: OnStage | None) -> None:
    """Report a damaged entry of the cache folder, which is built again from what it was built from."""
    if progress is not None:
        progress(f"warning: {damage}; building it again", 0, 1)


@contextlib.contextmanager
def writing(cache_dir: str | Path) -> Iterator[None]:
    """Turns a failure to write below cache_dir into a UserError that names the key."""
    try:
        yield
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space, or set cache_dir=FOLDER on another disk" if full else "set cache_dir=FOLDER"
        kind = "is a file" if Path(cache_dir).expanduser().is_file() else problem.strerror or str(problem)
        raise UserError(f"cache_dir={cache_dir}: {kind}", hint) from problem


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a file's lock; waits for another process that does. Renaming keeps results whole even without it, so a
    file system that knows no locks only costs double work. Gives whether it is held."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+b") as file:
        held = False
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        yield held


def _open(folder: Path, key: str, cache: ArrayCache) -> TokenStore:
    """The store in a folder. Damaged where it is not as it was written."""
    manifest = Manifest.read(folder)
    missing = set(FILES.values()) - manifest.files.keys()
    if manifest.metadata.get("key") != key or missing:
        raise Damaged(folder / MANIFEST, "is of another store")
    manifest.verify()
    arrays: dict[str, Any] = {}
    for name, file in FILES.items():
        dtype, count = (manifest.metadata["arrays"][name][fact] for fact in ("dtype", "count"))
        arrays[name] = np.memmap(folder / file, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
    return TokenStore(**arrays, metadata=manifest.metadata["facts"], folder=folder, cache=cache)
