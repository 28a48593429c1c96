"""`data=pydocs`: docstrings as text, and `pydocs_rows`: docstrings with the package they come from.

English that every machine has. The same on every run in one environment, and another corpus in another one: the hash
of what was read is recorded. Everything is parsed, nothing imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmtool import random_streams
from lmtool.config.tables import nearest
from lmtool.data import docstrings, packages
from lmtool.data.configs import PydocsConfig
from lmtool.data.sources import OnStage, held_out, splits_of
from lmtool.data.store import locked, rebuilding, writing
from lmtool.errors import UserError
from lmtool.system.files import Damaged, replace_bytes

_SHORTEST = 20  # characters of a docstring that is kept


class PydocsSource:
    """The docstrings of a module, a blank line between them, are one document. A docstring that came before (vendored
    copies) is left out. Collecting stops at `max_bytes`.

    UserError: a package that is not installed, no docstrings at all.
    """

    def __init__(self, config: PydocsConfig, cache_dir: str | Path | None = None, progress: OnStage | None = None):
        self._config = config
        self._documents = _collected(config, cache_dir, progress)
        if len(self._documents) < 2:
            raise UserError(
                f"data.packages={list(config.packages) or 'all'}: {len(self._documents)} modules with docstrings found",
                "omit data.packages, or give text of your own: data=text data.path=PATH",
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


def _collected(config: PydocsConfig, cache_dir: str | Path | None, progress: OnStage | None) -> list[tuple[str, str]]:
    """(package:module, text) of each document; from the cache folder where the same was collected before."""
    names = list(config.packages) or [packages.STANDARD, *packages.installed()]
    key = _key("documents", config.max_bytes, names)
    cached = None if cache_dir is None else Path(cache_dir).expanduser() / "pydocs" / f"{key[:32]}.json"
    documents = None if cached is None else _load(cached, key, progress)
    if documents is None:
        if config.packages:
            _check_installed(config.packages)
        documents = list(_collect(names, config.max_bytes, progress))
        if cached is not None:
            _save(cached, key, documents, cache_dir)
    return [(name, text) for name, text in documents]


def _collect(names: list[str], max_bytes: int, progress: OnStage | None) -> Iterator[tuple[str, str]]:
    seen: set[bytes] = set()
    left = max_bytes
    for docs in packages.read(module for name in names for module in packages.modules(name)):
        retained: list[str] = []
        for _, text in docs.texts:
            text = _clean(text)
            mark = hashlib.sha256(text.encode()).digest()
            if len(text) < _SHORTEST or mark in seen:
                continue
            seen.add(mark)
            left -= len(text.encode()) + 2
            if left < 0:
                break
            retained.append(text)
        if retained:
            yield f"{docs.module.package}:{docs.module.name}", "\n\n".join(retained)
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


def _key(*parts: object) -> str:
    """A key of what is collected, from which packages, by which code."""
    code = [
        hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in (__file__, packages.__file__, docstrings.__file__)
    ]
    return _hash([code, packages.versions(), packages.installed(), *parts])


def _load(path: Path, key: str, progress: OnStage | None = None) -> list[Any] | None:
    """What was saved under the key, or None where it is not there, or damaged, which is reported."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] == key and content["sha256"] == _hash(content["content"]):
            return content["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    rebuilding(Damaged(path, "is not as it was written"), progress)
    return None


def _save(path: Path, key: str, content: list[Any], cache_dir: str | Path | None) -> None:
    with writing(cache_dir or path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            text = json.dumps({"key": key, "sha256": _hash(content), "content": content})
            replace_bytes(path, text.encode())


def _hash(content: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# Packages that come with every install, most first, and parts of the standard library where one of them is missing.
_CLASSES = (
    *("torch", "numpy", "matplotlib", "sympy", "networkx", "pandas", "huggingface_hub", "pydantic"),
    *("fsspec", "datasets", "asyncio", "email", "unittest", "xml", "importlib", "multiprocessing"),
)
_ALIASES = frozenset(("np", "pd", "plt", "mpl", "nx", "hf", "hugging", "huggingface"))
_NUMBER_OF_CLASSES = 8
_MODULES = (25, 150)  # of a package: it has so many at least, and so many are read; torch has two thousand
_PER_MODULE = 6  # rows at most, so that no single file makes a class
_TEXT = (60, 400)  # characters of a row's text, at least and at most
_MASKED = "_"
_WORD = re.compile(r"[\w.]*\w")
_PLAIN_WORD = re.compile(r"(?<![\w.])[^\W\d_]{2,}(?![\w.]*\w)")
# Where prose ends in a docstring: code, fields, sections, underlines.
_END_OF_PROSE = re.compile(
    r"^\s*(>>>|\.\. |:\w+|[-=~]{3,}|@\w|```|(Parameters|Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|"
    r"References|See Also|Attributes|Usage|Warnings?|Keyword Args)\b)",
    re.MULTILINE,
)

Found = tuple[dict[str, list[object]], list[tuple[str, int]]]


def pydocs_rows(
    cache_dir: str | Path | None = None,
    seed: int = 0,
    per_class_train: int = 40,
    per_class_validation: int = 60,
) -> dict[str, Found]:
    """`task=pydocs`: docstrings with the package they come from, as {"train": (columns, origin), "dev": ...}.

    columns: "text", the prose of a docstring on one line, and "label", the package; as many rows of each. Names of
    the packages and of their direct submodules are masked in all texts alike. A source file gives rows to one side
    only, and a text occurs once. seed: of which files and docstrings are drawn.
    UserError where fewer than two packages have enough.
    """
    names = [name for name in _CLASSES if len(packages.modules(name)) >= _MODULES[0]][:_NUMBER_OF_CLASSES]
    key = _key("rows", names)
    cached = None if cache_dir is None else Path(cache_dir).expanduser() / "pydocs" / f"{key[:32]}.json"
    labelled = None if cached is None else _load(cached, key)
    if labelled is None:
        labelled = _labelled(names)
        if cached is not None:
            _save(cached, key, labelled, cache_dir)
    sampled = []
    for name in names:
        rows = _draw([row for row in labelled if row[0] == name], seed, per_class_train, per_class_validation)
        if rows is not None:
            sampled.append(rows)
    if len(sampled) < 2:
        raise UserError(
            "task=pydocs: too few packages with docstrings are installed here",
            "use a task with data of its own: lmtool finetune task=custom task.path=FOLDER",
        )
    return {split: _table([row for rows in sampled for row in rows[split]]) for split in ("train", "dev")}


def _labelled(names: list[str]) -> list[list[object]]:
    """[package, path, line, text] of every docstring that can be a row."""
    modules = {name: [module for module in packages.modules(name) if module.name != name] for name in names}
    chosen: list[packages.Module] = []
    for of_package in modules.values():
        chosen += sorted(of_package, key=lambda module: hashlib.sha256(module.name.encode()).digest())[: _MODULES[1]]
    prose = [(docs.module, line, _prose(_clean(text))) for docs in packages.read(chosen) for line, text in docs.texts]
    words = _telling(modules, ((module.package, text) for module, _, text in prose))
    rows: dict[str, list[object]] = {}
    twice: set[str] = set()
    for module, line, text in prose:
        if len(text) < _TEXT[0]:
            continue
        # Cut twice: masking is the dear part, and shortens.
        text = _WORD.sub(lambda match: _masked(match.group(), names, words), text[: 4 * _TEXT[1]])
        text = _cut(" ".join(text.split()))
        if len(text) >= _TEXT[0] and sum(map(str.isalpha, text)) > len(text) / 2:
            twice.update([text] if text in rows else [])
            rows[text] = [module.package, module.path, line, text]
    return [row for text, row in rows.items() if text not in twice]


def _prose(text: str) -> str:
    """What a docstring begins with, up to code, fields or sections."""
    end = _END_OF_PROSE.search(text)
    return text[: end.start()] if end else text


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT[1] else text[: _TEXT[1]].rsplit(" ", 1)[0]


def _telling(modules: dict[str, list[packages.Module]], texts: Iterable[tuple[str, str]]) -> set[str]:
    """Names of direct submodules that tell a package. A name that three of them use as a word ("this", "context")
    tells nothing."""
    names = {
        parts[1].strip("_").lower() for own in modules.values() for module in own if (parts := module.name.split("."))
    }
    users: dict[str, set[str]] = {name: set() for name in names if len(name) > 1}
    for package, text in texts:
        for word in _PLAIN_WORD.findall(text.lower()):
            if word in users:
                users[word].add(package)
    return {name for name, packages_of in users.items() if len(packages_of) < 3}


def _masked(word: str, names: list[str], words: set[str]) -> str:
    """`_` for whatever names a package: a dotted name, an identifier with a package or an alias in it, or a telling
    submodule. One rule for all packages, so that none is known by what is masked."""
    plain = word.lower()
    dotted = sum(len(part) > 1 and not part.isdigit() for part in plain.split(".")) > 1
    named = any(name in plain for name in names) or plain.strip("_").split("_")[0] in _ALIASES
    return _MASKED if dotted or named or plain.strip("_.") in words else word


def _draw(rows: list[list[Any]], seed: int, train: int, dev: int) -> dict[str, list[list[Any]]] | None:
    """Rows of one package for both sides, files in a seeded order; None where it has too few."""
    files: dict[str, list[list[object]]] = {}
    for row in rows:
        files.setdefault(row[1], []).append(row)
    paths = sorted(files)
    selected: dict[str, list[list[object]]] = {"dev": [], "train": []}
    for place in random_streams.Permutation(len(paths), seed, "sample", 0)(np.arange(len(paths))).tolist():
        own = files[paths[place]]
        order = random_streams.Permutation(len(own), seed, "sample", 1 + place)(np.arange(min(len(own), _PER_MODULE)))
        side, requested = ("dev", dev) if len(selected["dev"]) < dev else ("train", train)
        selected[side] += [own[number] for number in order.tolist()][: requested - len(selected[side])]
    return selected if len(selected["train"]) == train else None


def _table(rows: list[list[Any]]) -> Found:
    columns = {"text": [row[3] for row in rows], "label": [row[0] for row in rows]}
    return columns, [(row[1], row[2]) for row in rows]
