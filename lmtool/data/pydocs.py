"""`data=pydocs`: docstrings as text, and `task=pydocs`: docstrings with the package that they come from.

This is English text on every machine. It is the same in every run of an environment, but differs between environments,
so a hash of the text is recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmtool import random_streams
from lmtool.data import docstrings
from lmtool.data.configs import PydocsConfig
from lmtool.data.sources import OnStage, held_out, splits_of
from lmtool.data.store import hold_lock, rebuilding, writing
from lmtool.errors import UserError, nearest
from lmtool.system.files import Damaged, replace_bytes, user_path

_SHORTEST = 20  # minimum number of characters of a docstring

Documents = list[tuple[str, str]]
"""The name, package:module, and the text of each document."""


class PydocsSource:
    """A source with one document per module: its docstrings, with a blank line between them. Copies of earlier
    docstrings (vendored packages) are omitted. Collecting stops at `max_bytes`. Raises UserError if a package is not
    installed, or if there are no docstrings."""

    def __init__(self, config: PydocsConfig, cache_dir: str | Path | None = None, progress: OnStage | None = None):
        self._config = config
        self._documents = _documents_of(config, cache_dir, progress)
        if len(self._documents) < 2:
            raise UserError(
                f"data.packages={list(config.packages) or 'all'}: at least two modules with docstrings are required, "
                f"and {len(self._documents) or 'none'} was found",
                f"{'omit data.packages, or use' if config.packages else 'use'} your own text: data=text data.path=PATH",
            )
        digest = hashlib.sha256(f"pydocs {config.validation_fraction}".encode())
        for name, text in self._documents:
            digest.update(f"\n{name} {len(text)}\n{text}".encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()
        sizes = np.array([len(text) for _, text in self._documents])
        self._held_out = held_out(sizes, config.validation_fraction)

    def parts(self, split: str) -> Iterator[tuple[str, bool]]:
        for text in self._texts(split):
            yield text, True

    def count(self, split: str) -> int:
        return sum(1 for _ in self._texts(split))

    def characters(self, split: str) -> int:
        return sum(map(len, self._texts(split)))

    def _texts(self, split: str) -> Iterator[str]:
        requested = splits_of(split) == "validation"
        return (text for (_, text), out in zip(self._documents, self._held_out, strict=True) if out == requested)

    def metadata(self) -> dict[str, object]:
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


def _documents_of(config: PydocsConfig, cache_dir: str | Path | None, progress: OnStage | None) -> Documents:
    names = list(config.packages) or [docstrings.STANDARD, *docstrings.installed()]

    def collect() -> Iterator[tuple[str, str]]:
        _check_installed(config.packages)
        return _collect(names, config.max_bytes, progress)

    return [
        (name, text)
        for name, text in _cached_rows(["documents", config.max_bytes, names], collect, cache_dir, progress)
    ]


def _collect(names: list[str], max_bytes: int, progress: OnStage | None) -> Iterator[tuple[str, str]]:
    digests: set[bytes] = set()
    remaining_bytes = max_bytes
    for module, texts in docstrings.read(module for name in names for module in docstrings.modules(name)):
        retained: list[str] = []
        for _, text in texts:
            text = _clean(text)
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) < _SHORTEST or digest in digests:
                continue
            digests.add(digest)
            remaining_bytes -= len(text.encode()) + 2
            if remaining_bytes < 0:
                break
            retained.append(text)
        if retained:
            yield f"{module.package}:{module.name}", "\n\n".join(retained)
        if progress is not None:
            progress("reading docstrings", max_bytes - max(remaining_bytes, 0), max_bytes)
        if remaining_bytes < 0:
            return


def _check_installed(names: Iterable[str]) -> None:
    for name in names:
        if not docstrings.modules(name):
            like = nearest(name, [docstrings.STANDARD, *docstrings.installed()])
            raise UserError(
                f"data.packages: no sources of {name} are installed",
                f"did you mean {like}?" if like else "use names as they are imported; python is the standard library",
            )


def _clean(text: str) -> str:
    """A source may contain NUL and lone surrogates as escapes."""
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


def _cached_rows(
    parts: Sequence[object],
    collect: Callable[[], Iterable[tuple[object, ...]]],
    cache_dir: str | Path | None,
    progress: OnStage | None = None,
) -> list[list[Any]]:
    """Collects rows, or reads them from the cache folder. Their key consists of `parts`, the installed packages and
    this code."""
    code = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (__file__, docstrings.__file__)]
    key = _hash([code, docstrings.versions(), docstrings.installed(), *parts])
    path = None if cache_dir is None else user_path(cache_dir) / "pydocs" / f"{key[:32]}.json"
    if path is not None and path.exists():
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["key"] == key and saved["sha256"] == _hash(saved["content"]):
                return saved["content"]
        rebuilding(Damaged(path, "is not as it was written"), progress)
    content = [list(row) for row in collect()]
    if path is not None:
        with writing(cache_dir or path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(path.with_suffix(".lock")):
                replace_bytes(path, json.dumps({"key": key, "sha256": _hash(content), "content": content}).encode())
    return content


def _hash(content: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# Packages of a usual environment, followed by parts of the standard library in case some are not installed.
_CLASSES = (
    *("torch", "numpy", "matplotlib", "sympy", "networkx", "pandas", "huggingface_hub", "pydantic"),
    *("fsspec", "datasets", "asyncio", "email", "unittest", "xml", "importlib", "multiprocessing"),
)
_ALIASES = frozenset(("np", "pd", "plt", "mpl", "nx", "hf", "hugging", "huggingface"))
_NUMBER_OF_CLASSES = 8
_MODULES = (25, 150)  # minimum number of modules of a package, and maximum number read; torch has two thousand
_PER_MODULE = 6  # maximum number of rows, so that no file dominates a class
_TEXT = (60, 400)  # minimum and maximum number of characters of a row's text
_MASKED = "_"
_WORD = re.compile(r"[\w.]*\w")
_PLAIN_WORD = re.compile(r"(?<![\w.])[^\W\d_]{2,}(?![\w.]*\w)")
# The end of prose in a docstring: code, fields, sections or underlines.
_END_OF_PROSE = re.compile(
    r"^\s*(>>>|\.\. |:\w+|[-=~]{3,}|@\w|```|(Parameters|Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|"
    r"References|See Also|Attributes|Usage|Warnings?|Keyword Args)\b)",
    re.MULTILINE,
)

Table = tuple[dict[str, list[object]], list[tuple[str, int]]]
"""Columns by name, and the origin (file, line) of each row."""


class _Row(NamedTuple):
    package: str
    path: str
    line: int
    text: str


def pydocs_rows(
    cache_dir: str | Path | None = None,
    seed: int = 0,
    per_class_train: int = 40,
    per_class_validation: int = 60,
) -> dict[str, Table]:
    """Returns the splits "train" and "dev" of `task=pydocs`: docstrings with the package that they come from.

    The columns are "text", the prose of a docstring on one line, and "label", the package. Each package has
    `per_class_train` rows in "train", and at most `per_class_validation` in "dev". Names of packages and of their
    direct submodules are masked in all texts. The rows of a source file are in one split only, and a text occurs once.
    cache_dir: None: do not cache. Raises UserError if fewer than two packages have enough docstrings.
    """
    names = [name for name in _CLASSES if len(docstrings.modules(name)) >= _MODULES[0]][:_NUMBER_OF_CLASSES]
    labeled = [_Row(*row) for row in _cached_rows(["rows", names], lambda: _docstring_rows(names), cache_dir)]
    by_package = [[row for row in labeled if row.package == name] for name in names]
    samples = [_sample(rows, seed, per_class_train, per_class_validation) for rows in by_package]
    sampled = [rows for rows in samples if rows is not None]
    if len(sampled) < 2:
        raise UserError(
            "task=pydocs: too few packages with docstrings are installed here",
            "use a task with data of its own: lmtool finetune task=custom task.path=FOLDER",
        )
    return {split: _table_of([row for rows in sampled for row in rows[split]]) for split in ("train", "dev")}


def _docstring_rows(names: list[str]) -> list[_Row]:
    modules = {name: [module for module in docstrings.modules(name) if module.name != name] for name in names}
    selected: list[docstrings.Module] = []
    for of_package in modules.values():
        selected += sorted(of_package, key=lambda module: hashlib.sha256(module.name.encode()).digest())[: _MODULES[1]]
    prose = [
        (module, line, _END_OF_PROSE.split(_clean(text), maxsplit=1)[0])
        for module, texts in docstrings.read(selected)
        for line, text in texts
    ]
    words = _revealing_names(modules, ((module.package, text) for module, _, text in prose))
    rows: dict[str, _Row] = {}
    repeated: set[str] = set()
    for module, line, text in prose:
        if len(text) < _TEXT[0]:
            continue
        # Truncate before masking, which is slow, and after it, because it shortens the text.
        text = _WORD.sub(lambda match: _mask_word(match.group(), names, words), text[: 4 * _TEXT[1]])
        text = " ".join(text.split())
        text = text if len(text) <= _TEXT[1] else text[: _TEXT[1]].rsplit(" ", 1)[0]
        if len(text) >= _TEXT[0] and sum(map(str.isalpha, text)) > len(text) / 2:
            repeated.update([text] if text in rows else [])
            rows[text] = _Row(module.package, module.path, line, text)
    return [row for text, row in rows.items() if text not in repeated]


def _revealing_names(modules: dict[str, list[docstrings.Module]], texts: Iterable[tuple[str, str]]) -> set[str]:
    """The names of direct submodules that reveal the package: not those that three packages use as a word ("this",
    "context")."""
    names = {
        parts[1].strip("_").lower()
        for of_package in modules.values()
        for module in of_package
        if (parts := module.name.split("."))
    }
    users: dict[str, set[str]] = {name: set() for name in names if len(name) > 1}
    for package, text in texts:
        for word in _PLAIN_WORD.findall(text.lower()):
            if word in users:
                users[word].add(package)
    return {name for name, packages_of in users.items() if len(packages_of) < 3}


def _mask_word(word: str, names: list[str], words: set[str]) -> str:
    """Masks a dotted name, an identifier that contains a package or an alias, or a revealing submodule. The rule is the
    same for all packages, so that the masks do not reveal the package."""
    plain = word.lower()
    dotted = sum(len(part) > 1 and not part.isdigit() for part in plain.split(".")) > 1
    is_named = any(name in plain for name in names) or plain.strip("_").split("_")[0] in _ALIASES
    return _MASKED if dotted or is_named or plain.strip("_.") in words else word


def _sample(rows: list[_Row], seed: int, train: int, dev: int) -> dict[str, list[_Row]] | None:
    """The rows of one package for both splits, with files in a seeded order; None if there are too few."""
    files: dict[str, list[_Row]] = {}
    for row in rows:
        files.setdefault(row.path, []).append(row)
    paths = sorted(files)
    selected: dict[str, list[_Row]] = {"dev": [], "train": []}
    for number in random_streams.Permutation(len(paths), seed, "sample", 0)(np.arange(len(paths))).tolist():
        in_file = files[paths[number]]
        count = min(len(in_file), _PER_MODULE)
        order = random_streams.Permutation(len(in_file), seed, "sample", 1 + number)(np.arange(count))
        split, requested = ("dev", dev) if len(selected["dev"]) < dev else ("train", train)
        selected[split] += [in_file[row] for row in order.tolist()][: requested - len(selected[split])]
    return selected if len(selected["train"]) == train else None


def _table_of(rows: list[_Row]) -> Table:
    columns: dict[str, list[object]] = {"text": [row.text for row in rows], "label": [row.package for row in rows]}
    return columns, [(row.path, row.line) for row in rows]
