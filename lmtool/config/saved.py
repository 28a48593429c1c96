"""Saved configurations: written resolved and with secrets masked, read without Hydra and without imports."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmtool.config import yaml_files
from lmtool.config.base import Config
from lmtool.errors import UserError
from lmtool.manifest import verify_beside
from lmtool.secrets import masked_data, masker
from lmtool.terminal import visible

VERSION = 1


def save(config: Config, command: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The configuration as plain data that `decode` takes again: {"version", "command", keys and sections...}."""
    data = {"version": VERSION, "command": command, **json.loads(config.model_dump_json())}
    masks: dict[str, Any] = masked_data(data, masker(environ))
    return masks


def to_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML text, in their own order. Where a text has characters that no terminal should be sent, YAML's
    own escapes stand for them, so that what is printed is still the same data."""
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    if all(visible(line) == line for line in text.split("\n")):
        return text
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=False, width=120)


def read(path: Path) -> dict[str, Any]:
    """A saved configuration (YAML or JSON) as plain data, `version` and `command` still in it.

    Raises UserError for a file that is absent, too large, not UTF-8, not YAML, no mapping or of another version, and
    for a checkpoint's config.json that is not as it was written.
    """
    if path.name == "config.json":
        verify_beside(path.parent, [path.name])
    hint = "give the config.yaml of a run folder"
    if os.path.lexists(path) and not path.is_file():  # reading a pipe would wait for ever
        raise UserError(f"{path} is no regular file", hint)
    try:
        # YAML reads JSON's 1e-12 as text.
        data = _read_json(path) if path.suffix == ".json" else yaml_files.read(path, hint)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint) from error
    return of_this_version(data, path)


def _read_json(path: Path) -> Any:
    hint = "give the config.json of a checkpoint"
    try:
        size = path.stat().st_size
        if size > yaml_files.MAX_BYTES:
            raise UserError(f"{path}: {size} bytes; a configuration has at most {yaml_files.MAX_BYTES}", hint)
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}", hint) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8", hint) from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{path}: {error}", hint) from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deep", hint) from error


def of_this_version(data: Any, path: Path) -> dict[str, Any]:
    """What was read from a saved configuration. UserError where it is no mapping, or of another version."""
    if not isinstance(data, dict):
        raise UserError(f"{path}: no keys and values in it", "give the config.yaml of a run folder")
    version = data.get("version", VERSION)
    if version != VERSION:
        raise UserError(
            f"{path}: version {version} of the configuration; this lmtool reads version {VERSION}",
            "use the lmtool that wrote it",
        )
    return data


def body(data: dict[str, Any]) -> dict[str, Any]:
    """Saved data without `version` and `command`: what the decoder takes."""
    return {key: value for key, value in data.items() if key not in ("version", "command")}
