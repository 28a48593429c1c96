"""Saved configurations: written resolved and with secrets masked, read without Hydra and without imports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmtool.config.base import Config
from lmtool.errors import UserError
from lmtool.secrets import masked_data, masker

VERSION = 1
MAX_BYTES = 1_000_000


def save(config: Config, command: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The configuration as plain data that `decode` takes again: {"version", "command", keys and sections...}."""
    data = {"version": VERSION, "command": command, **json.loads(config.model_dump_json())}
    masks: dict[str, Any] = masked_data(data, masker(environ))
    return masks


def to_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML text, in their own order."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def read(path: Path) -> dict[str, Any]:
    """A saved configuration (YAML or JSON) as plain data, `version` and `command` still in it.

    Raises UserError for a file that is absent, too large, not UTF-8, not YAML, no mapping or of another version.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{path}: {size} bytes; a saved configuration has at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
        # YAML reads JSON's 1e-12 as text.
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not JSON: {error.msg}", "give the config.json of a checkpoint"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "give the config.yaml of a run folder") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8", "give the config.yaml of a run folder") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UserError(f"{where}: {getattr(error, 'problem', None) or 'not plain YAML'}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: no keys and values in it", "give the config.yaml of a run folder")
    version = data.get("version", VERSION)
    if version != VERSION:
        raise UserError(f"{path}: version {version} of the configuration; this lmtool reads version {VERSION}")
    return data


def body(data: dict[str, Any]) -> dict[str, Any]:
    """Saved data without `version` and `command`: what the decoder takes."""
    return {key: value for key, value in data.items() if key not in ("version", "command")}


_GIVE = (
    "give a run (runs/NAME) or one of its checkpoints, a folder with config.json and model.safetensors, or "
    "hf://org/name@revision"
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def run_folder(path: str | Path) -> Path:
    """The folder of the run a user means: that which `runs/latest` names, else what was typed, there or not."""
    given = Path(path).expanduser()
    return given.parent / _line(given) if given.name == "latest" and given.is_file() else given


def checkpoint_folder(path: str | Path) -> Path:
    """The folder of the checkpoint a user means: a checkpoint, `checkpoints/best` or `last`, a run (its best, else its
    last, else its newest checkpoint) or `runs/latest`. Whether its files are whole is seen when they are read.

    Raises UserError where there is none.
    """
    given = run_folder(path)
    if given.name in ("best", "last") and given.is_file():
        given = given.parent / _line(given)
    if not given.exists():
        raise UserError(f"checkpoint={path}: no such folder", _GIVE)
    if not given.is_dir():
        pickled = "; pickled weights can run code when they are read" if given.suffix in _PICKLED else ""
        raise UserError(f"checkpoint={path}: a file, and lmtool reads checkpoint folders{pickled}", _GIVE)
    if (given / "manifest.json").is_file():
        return given
    checkpoints = given if given.name == "checkpoints" else given / "checkpoints"
    pointed = [checkpoints / _line(checkpoints / name) for name in ("best", "last") if (checkpoints / name).is_file()]
    newest = sorted(checkpoints.glob("step_*"), key=lambda one: (len(one.name), one.name), reverse=True)
    for folder in [*pointed, *newest]:
        if (folder / "config.json").is_file():
            return folder
    raise UserError(f"checkpoint={path}: neither a checkpoint of lmtool nor a published config.json in it", _GIVE)


def _line(path: Path) -> str:
    """What a pointer file holds, as one plain name."""
    return Path(path.read_text(encoding="utf-8", errors="replace")[:300].strip() or "-").name


def read_checkpoint(path: str) -> dict[str, Any]:
    """The saved configuration of the checkpoint a `checkpoint=` names: the `config.json` beside its weights."""
    if "://" in path:
        raise UserError(f"checkpoint={path}: lmtool reads its own runs, on this machine", _GIVE)
    data = read(checkpoint_folder(path) / "config.json")
    if not isinstance(data.get("model"), dict):
        raise UserError(f"checkpoint={path}: its config.json is not one of lmtool", _GIVE)
    return data
