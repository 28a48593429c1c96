"""The token store: a split of a source, tokenized once, memory-mapped by every run that reads it.

A store is a folder `stores/<key>` of the cache folder, where the key is a hash of the text, the tokenizer and the
version of this code. It is written beside its place (`store_draft.py`) and renamed, under a lock, and never changed.
Every opening holds all of it against its manifest: 2 bytes a token at 1.2 GB/s, a fiftieth of what reading the text
takes before it. A damaged store is rebuilt and reported.

Shape letters: D documents, S sentences.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.sources import OnStage, Source, splits_of
from lmtool.data.store_draft import FILES, StoreDraft
from lmtool.errors import UserError
from lmtool.manifest import MANIFEST, Damaged, Manifest, write_manifest
from lmtool.tokenizers.tokenizer import Tokenizer

VERSION = 4  # of the layout, of its facts and of how text becomes tokens and sentences: raise it when one changes


@dataclass(frozen=True)
class TokenStore:
    """tokens: all ids, documents laid end to end, uint16 or uint32. document_offsets: (D+1,) their borders in it.
    sentence_offsets: (S+1,) borders of sentences in tokens. document_sentences: (D+1,) borders of documents among
    the sentences. No document and no sentence is without tokens. All are read-only maps of files.
    rows: labelled rows that are learned beside the text, by the name of their task.
    """

    tokens: np.ndarray
    document_offsets: np.ndarray
    sentence_offsets: np.ndarray
    document_sentences: np.ndarray
    facts: dict[str, Any]
    folder: Path
    rows: Mapping[str, Any] = field(default_factory=dict)

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
    if folder.exists():
        with contextlib.suppress(Damaged):
            return _open(folder, key)
    with writing(cache_dir):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{key[:32]}.lock") as alone:
            if folder.exists():
                try:
                    return _open(folder, key)  # another process may have built it while we waited
                except Damaged as damage:
                    rebuilding(damage, progress)
                    shutil.rmtree(folder, ignore_errors=True)
            with StoreDraft(folder, tokenizer, alone) as draft:
                facts = draft.write(source, split, progress)
                write_manifest(draft.folder, {"key": key, "arrays": draft.arrays, "facts": facts})
                os.rename(draft.folder, folder)
    try:
        return _open(folder, key)
    except Damaged as damage:
        raise UserError(f"cache_dir={cache_dir}: {damage}", "set cache_dir= to another folder") from damage


def release(values: np.ndarray) -> None:
    """Give back the memory of what was read of a mapped file; it is read again where it is asked for again."""
    base: Any = values
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


def _open(folder: Path, key: str) -> TokenStore:
    """The store in a folder. Damaged where it is not as it was written."""
    manifest = Manifest.read(folder)
    missing = set(FILES.values()) - manifest.files.keys()
    if manifest.facts.get("key") != key or missing:
        raise Damaged(folder / MANIFEST, "is of another store")
    manifest.verify()
    arrays: dict[str, Any] = {}
    for name, file in FILES.items():
        dtype, count = (manifest.facts["arrays"][name][fact] for fact in ("dtype", "count"))
        arrays[name] = np.memmap(folder / file, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
    return TokenStore(**arrays, facts=manifest.facts["facts"], folder=folder)
