"""Every command's keys and choices as plain data, for completing what is typed: kept in a file, since importing the
classes takes longer than a person waits for a TAB. Imports the standard library only until the file is out of date."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lmtool import __version__
from lmtool.config import groups
from lmtool.resolver.schema.verbs import COMMANDS, VERBS, keys_of
from lmtool.system.files import replace_bytes

CACHE = "~/.cache/lmtool"
_PACKAGE = Path(__file__).resolve().parents[2]
# What a field's description says of a value that is a path, or a run.
_PATH = re.compile(r"\b(file|folder)s?\b", re.IGNORECASE)
_RUN = re.compile(r"\b(a run|runs|checkpoint)\b", re.IGNORECASE)

Table = dict[str, Any]
"""verbs: by command its keys; components: by group and name their keys; options: by group its options, each with the
component that it is of; own: by a command about a run the names of its own keys. A key is {"group": G}, {"several": G},
{"keys": {...}}, or a value, {"options": [...], "path": true, "run": true}."""


def table(config_dirs: Sequence[Path] = (), plugins: Sequence[str] = ()) -> Table:
    """The table of this installation: from the file, or made and kept."""
    file = Path(CACHE).expanduser() / "completion" / f"{_fingerprint(config_dirs, plugins)}.json"
    with suppress(OSError, ValueError):
        saved: Table = json.loads(file.read_text(encoding="utf-8"))
        return saved
    fresh = _build(config_dirs, plugins)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        old = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-20]
        replace_bytes(file, json.dumps(fresh).encode())
        for path in old:
            path.unlink(missing_ok=True)
    return fresh


def _fingerprint(config_dirs: Sequence[Path], plugins: Sequence[str]) -> str:
    """Changes with lmtool's files and the user's."""
    files = [
        *_PACKAGE.rglob("*.py"),
        *(path for folder in groups.folders(config_dirs) for path in folder.rglob("*.yaml")),
    ]
    files += [path for name in plugins if (path := Path(f"{name.replace('.', '/')}.py").resolve()).is_file()]
    marks = sorted(f"{path}\0{path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256("\n".join([__version__, *plugins, *marks]).encode("utf-8", "replace")).hexdigest()[:32]


def _build(config_dirs: Sequence[Path], plugins: Sequence[str]) -> Table:
    from lmtool.config import plugins as loading
    from lmtool.config import saved as yaml_files
    from lmtool.config import tables

    loading.load(plugins)
    options = {group: _options(group, config_dirs) for group in groups.all_groups(config_dirs)}
    for group, name in loading.nodes(config_dirs):
        options.setdefault(group, {})[name] = name
    verbs = {}
    for verb, command in COMMANDS.items():
        keys = dict(_keys(command))
        defaults = yaml_files.read_yaml(groups.conf_dir() / f"{VERBS[verb].primary}.yaml").get("defaults", [])
        named = {str(key).split()[-1] for item in defaults if isinstance(item, dict) for key in item}
        verbs[verb] = {name: {"group": name} for name in sorted(named & options.keys())} | keys
    components = {
        group: {entry.name: dict(_keys(entry.config)) for entry in tables.entries(group)} for group in tables.groups()
    }
    own = {verb: list(of_run.names()) for verb in VERBS if (of_run := keys_of(verb)) is not None}
    return {"verbs": verbs, "components": components, "options": options, "own": own}


def _options(group: str, config_dirs: Sequence[Path]) -> dict[str, str]:
    """The options of a group with the components that they are of, by the defaults list or the name in their YAML."""
    from lmtool.config import saved as yaml_files

    named = {}
    for option in groups.options(group, config_dirs):
        base: Any = option
        for _ in range(10):
            path = groups.yaml_file(group, base, config_dirs)
            written = {} if path is None else yaml_files.read_yaml(path)
            above = next(
                (item for item in written.get("defaults", []) if isinstance(item, str) and item != "_self_"), None
            )
            if above is None:
                base = written.get("kind") or written.get("name") or base
                break
            base = above
        named[option] = str(base)
    return named


def _keys(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    from lmtool.config.problems import choice_of, section_class, several_of

    for name, field in config.model_fields.items():
        choice, several, section = choice_of(field), several_of(field), section_class(field)
        if choice is not None:
            yield name, {"group": choice.group}
        elif several is not None:
            yield name, {"several": several.group}
        elif section is not None:
            yield name, {"keys": dict(_keys(section))}
        elif name != "plugins":  # typed with --plugin
            yield name, _value(field)


def _value(field: Any) -> dict[str, Any]:
    kinds = list(_kinds(field.annotation))
    options = [str(option) for option in kinds if isinstance(option, str | int) and not isinstance(option, bool)]
    options += ["true", "false"] * (bool in kinds) + ["null"] * (type(None) in kinds)
    text, about = str in kinds, field.description or ""
    marks = {"path": bool(text and _PATH.search(about)), "run": bool(text and _RUN.search(about))}
    return {"options": options} | {name: True for name, holds in marks.items() if holds}


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types a value may have, and the values of a Literal."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    elif origin in (tuple, list):
        yield from (kind for item in arguments[:1] for kind in _kinds(item) if kind is str)
    else:
        yield annotation
