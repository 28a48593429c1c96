"""The identity of a run: its folder, the keys that may differ on resume, its result, and its code. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.groups import conf_dir
from lmtool.errors import UserError
from lmtool.runs.files import LONGEST_ROW, to_json, write_errors
from lmtool.system.files import draft_path, real_folder, remove, sha256, user_path

# Keys that change neither the result nor its cost: names, folders, and what is logged and kept.
NEUTRAL_KEYS = frozenset(
    {
        "name", "run_dir", "log_every", "checkpoint_every", "checkpoint_at", "keep", "keep_every", "keep_optimizer",
        "cache_dir", "offline", "logger",
    }
)  # fmt: skip
# Keys that may differ on resume: also those of devices and speed, and a score that selects nothing. Everything else
# affects the result, including evaluate_every and patience, which decide when a run ends and which weights are best.
FREE_KEYS = NEUTRAL_KEYS | {
    "device", "devices", "parallel", "precision", "micro_batch_tokens", "gradient_checkpointing", "compile",
    "minimal_pairs",
}  # fmt: skip
SUBMITTED = "submitted.json"
"""The file that describes a sweep's job, in the job's folder."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BUDGETS = frozenset({"max_steps", "max_epochs", "max_tokens", "max_words", "max_minutes", "max_flops"})
# Keys that may differ in a branch.
BRANCH_KEYS = FREE_KEYS | BUDGETS | {"branch", "schedule", "evaluate_every", "evaluate_rows", "patience"}


def require_name(name: str) -> None:
    """Raises UserError if a name is not a plain folder name."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"name={name!r} is not a valid name: up to 100 letters, digits, '.', '_' and '-', starting with a letter "
            "or digit",
            f"name={re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.-')[:100] or 'my-run'}",
        )


def select_folder(root: Path, name: str | None, run_dir: str | None, stem: str) -> Path:
    """Returns the folder of a run: `run_dir`, otherwise root/NAME, otherwise root/STEM-NUMBER with the next free
    number. Creates the numbered folder, so that only one of several processes gets it. Raises UserError if the name is
    invalid or the folder cannot be created."""
    if run_dir is not None:
        return user_path(run_dir)
    if name is not None:
        require_name(name)
        return root / name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "run"
    with write_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        suffixes = [path.name[len(stem) + 1 :] for path in root.glob(f"{stem}-*")]
        number = max((int(suffix) for suffix in suffixes if suffix.isdigit()), default=0) + 1
        while True:
            folder = root / f"{stem}-{number:04d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1


def require_own_folder(folder: Path, marks: Sequence[str], kind: str, key: str) -> None:
    """Raises UserError if a folder is not empty and was not written by lmtool, so that no file of the user is replaced.

    marks: names of files that lmtool writes first; one of them, which is not a link, marks a folder of lmtool. LOCK and
    drafts alone, which a killed process leaves in a new folder, need no mark. kind: what the folder would become
    ("run"), for the message. key: the key that sets the folder.
    """
    names = sorted(os.listdir(folder)) if folder.exists() else []
    if any(name in names and (folder / name).is_file() and not (folder / name).is_symlink() for name in marks):
        return
    other = next((name for name in names if name != "LOCK" and not name.startswith(".tmp-")), None)
    if other is not None:
        raise UserError(
            f"{folder} is not empty and not a {kind} of lmtool: it has {other}, but no {marks[0]} that lmtool wrote",
            f"set another {key}= (a new or an empty folder); or restore {folder / marks[0]}, if it was deleted",
        )


def changed_values(
    before: Mapping[str, object], now: Mapping[str, object], free: Collection[str] = FREE_KEYS
) -> list[str]:
    """Returns `KEY OLD -> NEW` for each key in which two configurations differ, except the keys in `free`. A missing
    key equals null."""
    old, new = flatten(before), flatten(now)
    if old.get("command") != new.get("command"):
        # Commands have few keys in common, so a list of all differences would not help.
        old, new = ({"command": values.get("command")} for values in (old, new))
    return [
        f"{key} {_json_value(old, key)} -> {_json_value(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if key.split(".")[0] not in free and old.get(key) != new.get(key)
    ]


def budgets(config: JsonMapping) -> JsonObject:
    """Returns the budgets that a configuration sets."""
    return {key: config[key] for key in sorted(BUDGETS) if config.get(key) is not None}


def extends_budgets(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether two configurations differ only in their budgets, and no budget is new or smaller."""
    old, new = budgets(before), budgets(now)
    larger = all(key in old and new[key] >= old[key] for key in new)
    return larger and old != new and not changed_values(before, now, FREE_KEYS | BUDGETS)


def finished_result(path: Path) -> dict[str, object] | None:
    """Returns the result in the folder of a finished run, otherwise None."""
    try:
        with (path / "result.json").open(encoding="utf-8") as file:
            result = json.loads(file.read(LONGEST_ROW))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "done" else None


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """Converts `{"model": {"name": "bert"}}` to `{"model.name": "bert"}`. Lists are values."""
    if not isinstance(config, Mapping) or not config:
        return {prefix: config}
    flat: dict[str, object] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _json_value(flat: Mapping[str, object], key: str) -> str:
    return to_json(flat[key], indent=None) if key in flat else "(absent)"


# The code that a command runs: its fingerprint, and a copy for jobs of a sweep that start later.

_PACKAGE = Path(__file__).resolve().parents[1]
_EXCLUDED = shutil.ignore_patterns("__pycache__", ".*")


def _sources(plugins: Sequence[str]) -> Iterator[tuple[Path, str]]:
    yield _PACKAGE, "lmtool"
    if conf_dir().parent != _PACKAGE:
        yield conf_dir(), "lmtool/conf"
    for name in dict.fromkeys(plugin.partition(".")[0] for plugin in plugins):
        spec = importlib.util.find_spec(name)
        for location in [*(spec.submodule_search_locations or []), spec.origin] if spec is not None else []:
            if location is not None and Path(location).exists() and name != "lmtool":
                yield Path(location), name if Path(location).is_dir() else Path(location).name
                break


def fingerprint(plugins: Sequence[str] = ()) -> str:
    """Returns a hash of lmtool's code and YAML and of the plugins."""
    digest = hashlib.sha256()
    for source, name in _sources(plugins):
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".yaml") and file.is_file():
                digest.update(f"{name}/{file.relative_to(source)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def copy_code(folder: Path, plugins: Sequence[str]) -> Path:
    """Copies lmtool and the plugins into a folder and returns the path to import them from. An existing copy is used
    only if it is identical, since a stranger may have written the folder."""
    target = real_folder(folder / ".code") / fingerprint(plugins)
    draft = draft_path(target)
    for source, name in _sources(plugins):
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, draft / name, ignore=_EXCLUDED, dirs_exist_ok=True)
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
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {
        str(path.relative_to(folder)): None if path.is_symlink() or not path.is_file() else sha256(path)
        for path in paths
        if "__pycache__" not in path.parts
    }
