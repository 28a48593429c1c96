"""Components of other packages: entry points of installed packages, and modules of --plugin."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lmtool.config import groups
from lmtool.config.base import JsonObject
from lmtool.config.tables import Entry, added
from lmtool.errors import UserError
from lmtool.system.files import user_path

ENTRY_POINTS = "lmtool.plugins"

_typed: tuple[str, ...] = ()


def typed_plugins() -> tuple[str, ...]:
    """Returns the modules that were given with --plugin and imported."""
    return _typed


def command_line(verb: str, *words: str, modules: Sequence[str] | None = None) -> str:
    """Returns an lmtool command line for the user, with the plugins that it needs. modules: the plugins to include;
    None means the plugins given with --plugin."""
    options = [part for module in (_typed if modules is None else modules) for part in ("--plugin", module)]
    return shlex.join(["lmtool", verb, *options, *words])


def load(modules: Sequence[str]) -> None:
    """Imports the plugins: those of installed packages, then the modules of --plugin (also from the working folder).

    Raises UserError if one cannot be imported.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        _import(point.module, f"the installed plugin {point.name} ({point.module})", "update or uninstall its package")
    for module in modules:
        if "/" in module or module.startswith(".") or module.endswith(".py"):
            raise _path_error(module)
        folder = str(Path.cwd())
        if folder not in sys.path:
            sys.path.append(folder)
        _import(
            module,
            f"--plugin {module}",
            "use the dotted name of a module that Python can import from here, and fix any error in it",
        )
    global _typed
    _typed = tuple(modules)


def _path_error(module: str) -> UserError:
    """Returns the error for a path instead of the name of a module."""
    path, folder = user_path(module).absolute(), Path.cwd()
    path = Path(os.path.normpath(path)).with_suffix("")
    if path.is_relative_to(folder):
        name = ".".join(path.relative_to(folder).parts) or "NAME"
        hint = f"use --plugin {name}, which Python can import from this folder"
    else:
        hint = f"run PYTHONPATH={path.parent} lmtool ... --plugin {path.name}"
    return UserError(f"--plugin {module} is a path, not the dotted name of a module", hint)


def _import(module: str, subject: str, hint: str) -> None:
    try:
        importlib.import_module(module)
    # A plugin can raise any exception; the error names the plugin.
    except Exception as error:
        raise UserError(f"{subject} cannot be imported: {type(error).__name__}: {error}", hint) from error


def nodes(config_dirs: Sequence[Path] = ()) -> dict[tuple[str, str], tuple[Entry, JsonObject]]:
    """Returns the components without a YAML file, each with its default values, by (group, name). Only components of
    plugins have no YAML file. A required value is `???`."""
    options = groups.all_options(config_dirs)
    without_yaml = [entry for entry in added() if entry.name not in options.get(entry.group, ())]
    return {(entry.group, entry.name): (entry, defaults(entry)) for entry in without_yaml}


def defaults(entry: Entry) -> JsonObject:
    """Returns the default values of a component as plain data."""
    data: JsonObject = {}
    for name, field in entry.config.model_fields.items():
        if field.is_required():
            data[name] = "???"
        else:
            value = field.get_default(call_default_factory=True)
            data[name] = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return data
