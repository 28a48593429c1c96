"""`data=pydocs`: docstrings as text, and `pydocs_rows`: docstrings with the package they come from.

English that every machine has. The same on every run in one environment, and another corpus in another one: the hash
of what was read is recorded. Everything is parsed, nothing imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmtool.config.tables import nearest
from lmtool.data import packages
from lmtool.data.configs import PydocsConfig
from lmtool.data.sources import Progress, held_out, splits_of
from lmtool.data.store import locked, writing
from lmtool.errors import UserError

VERSION = 1  # of what is read and how it is put together: raise it when either changes
_SHORTEST = 20  # characters of a docstring that is kept


class PydocsSource:
    """The docstrings of a module, a blank line between them, are one document. A docstring that came before (vendored
    copies) is left out. Collecting stops at `max_bytes`.

    UserError: a package that is not installed, no docstrings at all.
    """

    def __init__(self, config: PydocsConfig, cache_dir: str | Path | None = None, progress: Progress | None = None):
        self._config = config
        self._documents = _collected(config, cache_dir, progress)
        if len(self._documents) < 2:
            raise UserError(
                f"data.packages={list(config.packages) or 'all'}: {len(self._documents)} modules with docstrings found",
                "leave data.packages out, or give text of your own: data=text data.path=PATH",
            )
        digest = hashlib.sha256(f"pydocs {VERSION} {config.validation_fraction}".encode())
        for name, text in self._documents:
            digest.update(f"\n{name} {len(text)}\n{text}".encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()
        sizes = np.array([len(text) for _, text in self._documents])
        self._held_out = held_out(sizes, config.validation_fraction)

    def documents(self, split: str) -> Iterator[str]:
        wanted = splits_of(split) == "validation"
        for (_, text), out in zip(self._documents, self._held_out.tolist(), strict=True):
            if out == wanted:
                yield text

    def count(self, split: str) -> int:
        return int((self._held_out == (splits_of(split) == "validation")).sum())

    def facts(self) -> dict[str, Any]:
        return {
            "source": "pydocs",
            "bytes": sum(len(text.encode()) for _, text in self._documents),
            "documents": self.count("train"),
            "validation_documents": self.count("validation"),
            "document": "module",
            "packages": len({name.partition(":")[0] for name, _ in self._documents}),
            "held_out": True,
            "fingerprint": self.fingerprint,
        }


def _collected(config: PydocsConfig, cache_dir: str | Path | None, progress: Progress | None) -> list[tuple[str, str]]:
    """(package:module, text) of each document; from the cache folder where the same was collected before."""
    names = list(config.packages) or [packages.STANDARD, *packages.installed()]
    key = _key("documents", config.max_bytes, names)
    cached = None if cache_dir is None else Path(cache_dir).expanduser() / "pydocs" / f"{key[:32]}.json"
    documents = None if cached is None else _load(cached, key)
    if documents is None:
        if config.packages:
            _check_installed(config.packages)
        documents = list(_collect(names, config.max_bytes, progress))
        if cached is not None:
            _save(cached, key, documents, cache_dir)
    return [(name, text) for name, text in documents]


def _collect(names: list[str], max_bytes: int, progress: Progress | None) -> Iterator[tuple[str, str]]:
    seen: set[bytes] = set()
    left = max_bytes
    for docs in packages.read(module for name in names for module in packages.modules(name)):
        kept: list[str] = []
        for _, text in docs.texts:
            text = _clean(text)
            mark = hashlib.sha256(text.encode()).digest()
            if len(text) < _SHORTEST or mark in seen:
                continue
            seen.add(mark)
            left -= len(text.encode()) + 2
            if left < 0:
                break
            kept.append(text)
        if kept:
            yield f"{docs.module.package}:{docs.module.name}", "\n\n".join(kept)
        if progress is not None:
            progress("reading docstrings", max_bytes - max(left, 0), max_bytes)
        if left < 0:
            return


def _check_installed(names: Iterable[str]) -> None:
    for name in names:
        if not packages.modules(name):
            like = nearest(name, [packages.STANDARD, *packages.installed()])
            raise UserError(
                f"data.packages: no sources of {name} are installed",
                f"did you mean {like}?" if like else "give names as they are imported; python is the standard library",
            )


def _clean(text: str) -> str:
    """Without characters that are no text: NUL, and halves of surrogate pairs written as escapes in a source."""
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


def _key(*what: Any) -> str:
    return hashlib.sha256(json.dumps(["pydocs", VERSION, packages.versions(), *what]).encode()).hexdigest()


def _load(path: Path, key: str) -> list[Any] | None:
    """What was saved under the key, or None where it is not there or not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["key"] == key and content["sha256"] == _hash(content["content"])
        return content["content"] if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(path: Path, key: str, content: list[Any], cache_dir: str | Path | None) -> None:
    with writing(cache_dir or path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            made = path.with_suffix(f".{os.getpid()}")
            try:
                text = json.dumps({"key": key, "sha256": _hash(content), "content": content})
                made.write_text(text, encoding="utf-8")
                os.replace(made, path)
            finally:
                made.unlink(missing_ok=True)


def _hash(content: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
