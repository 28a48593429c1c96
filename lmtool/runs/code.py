"""The code that a command runs: its fingerprint, and a copy of it for the jobs of a sweep that start later."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lmtool.config.groups import conf_dir
from lmtool.drafts import draft_of, real_folder, remove
from lmtool.manifest import sha256

_PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")


def _sources(plugins: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """What a job imports and reads of lmtool, and of plugins that were typed: each with its place in the copy."""
    yield _PACKAGE, "lmtool"
    if conf_dir().parent != _PACKAGE:
        yield conf_dir(), "lmtool/conf"
    for name in dict.fromkeys(plugin.partition(".")[0] for plugin in plugins):
        spec = importlib.util.find_spec(name)
        for place in [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []:
            if place is not None and Path(place).exists() and name != "lmtool":
                yield Path(place), name if Path(place).is_dir() else Path(place).name
                break


def fingerprint(plugins: Sequence[str] = ()) -> str:
    """A hash of the contents of lmtool's files, its YAML and the plugins that were typed."""
    digest = hashlib.sha256()
    for source, name in _sources(plugins):
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".yaml") and file.is_file():
                digest.update(f"{name}/{file.relative_to(source)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def copied(folder: Path, plugins: Sequence[str]) -> Path:
    """A copy of the code below a folder, one for each state of it; the folder to put first on a job's path. It is run:
    one that is there, in a folder that may come from a stranger, is used where it is this code and nothing more."""
    target = real_folder(folder / ".code") / fingerprint(plugins)
    draft = draft_of(target)
    for source, name in _sources(plugins):
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, draft / name, ignore=_LEFT_OUT, dirs_exist_ok=True)
        else:
            shutil.copy2(source, draft / name)
    for compiled in target.rglob("__pycache__"):
        remove(compiled)
    if target.is_symlink() or _contents(target) != _contents(draft):
        remove(target)
        with suppress(OSError):  # another process was first
            draft.rename(target)
    remove(draft)
    return target.resolve()


def _contents(folder: Path) -> dict[str, str | None]:
    """A hash of each file below a folder, by its place; None of what is no file."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {
        str(path.relative_to(folder)): None if path.is_symlink() or not path.is_file() else sha256(path)
        for path in paths
        if "__pycache__" not in path.parts
    }
