"""`runs/latest` in a run's configuration, where it stands for the run that it names now: as soon as this run begins it
names this one, and what is resumed, or repeated from its config.yaml, must not begin with another. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtool.config import saved
from lmtool.config.checkpoint import RUNS, run_folder
from lmtool.errors import UserError

_LINK = "latest"
_OWN = ("name", "run_dir")  # the run's, which is not read


def begun(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run of this configuration was started with; of one that has no name, or has not been started, nothing."""
    folder = _folder(config)
    if folder is None or not (folder / "config.yaml").is_file():
        return {}
    return saved.read(folder / "config.yaml")


def settled(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every path through `latest` as that of the run it names. One that names the run of this
    configuration itself, which was started before, stands for what the run began with."""
    if _LINK not in repr(config):
        return config
    try:
        before = begun(config)
    except UserError:  # who opens the run says what is wrong
        before = {}
    folder = _folder(config)
    own = None if folder is None else folder.absolute()
    return {key: value if key in _OWN else _settled(value, before.get(key), own) for key, value in config.items()}


def _folder(config: Mapping[str, Any]) -> Path | None:
    if config.get("run_dir"):
        return Path(str(config["run_dir"])).expanduser()
    return RUNS / str(config["name"]) if config.get("name") else None


def _settled(value: Any, before: Any, own: Path | None) -> Any:
    """before: the value with which the run was started, where it was."""
    if isinstance(value, dict):
        known = before if isinstance(before, dict) else {}
        return {key: _settled(inner, known.get(key), own) for key, inner in value.items()}
    if isinstance(value, list):
        each = before if isinstance(before, list) and len(before) == len(value) else [None] * len(value)
        return [_settled(inner, was, own) for inner, was in zip(value, each, strict=True)]
    if not _linked(value):
        return value
    parts = Path(value).parts
    behind = parts.index(_LINK) + 1
    run = run_folder(Path(*parts[:behind]))
    if own is not None and run.absolute() == own and isinstance(before, str):
        return before
    return str(run.joinpath(*parts[behind:])) if run.name != _LINK and run.is_dir() else value


def _linked(value: Any) -> bool:
    return isinstance(value, str) and _LINK in value and "://" not in value and _LINK in Path(value).parts
