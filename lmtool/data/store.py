"""The token store: a split of a source, tokenized once, memory-mapped by every run that reads it.

A store is a folder `stores/<key>` of the cache folder, where the key is a hash of the text, the tokenizer and the
version of this code. It is written beside its place and renamed, under a lock, and never changed. Every opening holds
all of it against its manifest: 2 bytes a token at 1.2 GB/s, a fiftieth of what reading the text takes before it. A
damaged store is rebuilt and reported.

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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.data.sentences import SentenceSplitter
from lmtool.data.sources import OnStage, Source, splits_of
from lmtool.errors import UserError
from lmtool.manifest import MANIFEST, Damaged, Manifest, write_manifest
from lmtool.tokenizers.tokenizer import Tokenizer

VERSION = 3  # of the layout, of its facts and of how text becomes tokens and sentences: raise it when one changes
_PORTION = 1_000_000  # characters tokenized at a time
_FILES = {
    "tokens": "tokens.bin",
    "document_offsets": "document_offsets.bin",
    "sentence_offsets": "sentence_offsets.bin",
    "document_sentences": "document_sentences.bin",
}


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
        with locked(root / f"{key[:32]}.lock"):
            if folder.exists():
                try:
                    return _open(folder, key)  # another process may have built it while we waited
                except Damaged as damage:
                    rebuilding(damage, progress)
            _build(folder, key, source, split, tokenizer, progress)
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
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; waits for another process that does. Renaming keeps results whole even without it, so a
    file system that knows no locks only costs double work."""
    with open(path, "a+b") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(folder: Path, key: str) -> TokenStore:
    """The store in a folder. Damaged where it is not as it was written."""
    manifest = Manifest.read(folder)
    missing = set(_FILES.values()) - manifest.files.keys()
    if manifest.facts.get("key") != key or missing:
        raise Damaged(folder / MANIFEST, "is of another store")
    manifest.verify()
    arrays: dict[str, Any] = {}
    for name, file in _FILES.items():
        dtype, count = (manifest.facts["arrays"][name][fact] for fact in ("dtype", "count"))
        arrays[name] = np.memmap(folder / file, dtype=dtype, mode="r", shape=(count,)).view(np.ndarray)
    return TokenStore(**arrays, facts=manifest.facts["facts"], folder=folder)


def _build(folder: Path, key: str, source: Source, split: str, tokenizer: Tokenizer, progress: OnStage | None) -> None:
    for left in [*folder.parent.glob(f".{folder.name}.*"), folder]:  # of a process that died, or a damaged store
        shutil.rmtree(left, ignore_errors=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir()
    try:
        content = _Content(draft, tokenizer)
        content.write(source, split, progress)
        write_manifest(draft, {"key": key, "arrays": content.arrays, "facts": content.facts(source, split)})
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class _Content:
    """Writes the arrays of a store while the text comes in; nothing is held but the portion at hand."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = folder, tokenizer
        dtypes = dict.fromkeys(_FILES, "<i8") | {"tokens": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._counts = dict.fromkeys(_FILES, 0)
        self._sentences_of = SentenceSplitter()
        self._last_border = self._characters = self._without_tokens = self._unknown = 0
        self._size = TextSize()
        self._seconds = 0.0

    def write(self, source: Source, split: str, progress: OnStage | None) -> None:
        began = time.perf_counter()
        total, done = source.count(split), 0
        with contextlib.ExitStack() as stack:
            self._files = {name: stack.enter_context(open(self._folder / file, "wb")) for name, file in _FILES.items()}
            for name in ("document_offsets", "sentence_offsets", "document_sentences"):
                self._append(name, np.zeros(1))
            for portion in _portions(source.parts(split)):
                self._tokenize(portion)
                done += sum(ends for _, ends in portion)
                if progress is not None:
                    progress(f"tokenizing {split}", done, total)
        if self._counts["tokens"] == 0:
            raise UserError(f"the {split} text holds no tokens", "give text with data.path=")
        self._seconds = time.perf_counter() - began

    def _append(self, name: str, values: np.ndarray) -> None:
        values.astype(self._dtypes[name]).tofile(self._files[name])
        self._counts[name] += len(values)

    def _tokenize(self, portion: list[tuple[str, bool]]) -> None:
        """The ids of some text, and the borders of its sentences and documents."""
        sentences = [self._sentences_of.split(text, ends) for text, ends in portion]
        ids = self._tokenizer.encode_batch([sentence for part in sentences for sentence in part])
        lengths = np.array([len(sentence) for sentence in ids], dtype=np.int64)
        part_of = np.repeat(np.arange(len(portion)), [len(part) for part in sentences])
        kept = lengths > 0
        tokens_before, sentences_before = self._counts["tokens"], self._counts["sentence_offsets"] - 1
        offsets = tokens_before + np.concatenate([[0], np.cumsum(lengths[kept])])
        # Sentences up to the end of each document that ends here; one without any has no tokens.
        after = np.cumsum(np.bincount(part_of[kept], minlength=len(portion)))
        borders = sentences_before + after[[ends for _, ends in portion]]
        grown = np.diff(borders, prepend=self._last_border) > 0
        self._without_tokens += int((~grown).sum())
        borders = borders[grown]
        self._append("sentence_offsets", offsets[1:])
        self._append("document_sentences", borders)
        self._append("document_offsets", offsets[borders - sentences_before])
        self._last_border = int(borders[-1]) if len(borders) else self._last_border
        self._characters += sum(len(text) for text, _ in portion)
        for text, ends in portion:
            self._size.add(text, ends)
        if ids:
            flat = np.concatenate(ids)
            self._append("tokens", flat)
            if "unk" in self._tokenizer.roles:
                self._unknown += int((flat == self._tokenizer.roles["unk"]).sum())

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Kind and number of the values of each file."""
        return {name: {"dtype": self._dtypes[name].str, "count": count} for name, count in self._counts.items()}

    def facts(self, source: Source, split: str) -> dict[str, Any]:
        tokens = self._counts["tokens"]
        facts = {
            "split": split,
            "documents": self._counts["document_offsets"] - 1,
            "documents_without_tokens": self._without_tokens,
            "sentences": self._counts["sentence_offsets"] - 1,
            "tokens": tokens,
            "characters": self._characters,
            "words": self._size.words,
            "bytes": self._size.bytes,
            "characters_per_token": self._characters / tokens,
            "unknown_fraction": self._unknown / tokens,
            "seconds": round(self._seconds, 3),
        }
        return facts | {"tokenizer": self._tokenizer.fingerprint, "source": source.fingerprint}


class TextSize:
    """Words of a text, separated by white space, and its bytes in UTF-8; of a document that comes in parts, too."""

    def __init__(self) -> None:
        self.words = self.bytes = 0
        self._within_word = False

    def add(self, text: str, ends: bool) -> None:
        """A part of a document; ends: whether the document ends there."""
        continued = self._within_word and bool(text) and not text[0].isspace()
        self.words += len(text.split()) - continued
        self.bytes += len(text.encode("utf-8", "surrogatepass"))
        self._within_word = not ends and (not text[-1].isspace() if text else self._within_word)


def _portions(parts: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    portion: list[tuple[str, bool]] = []
    size = 0
    for text, ends in parts:
        portion.append((text, ends))
        size += len(text)
        if size >= _PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
