"""The keys and choices of every command as plain data, for completion. They are cached in a file, since importing the
configuration classes takes too long for a TAB. Imports only the standard library while the file is up to date."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypedDict, Union, get_args, get_origin

from lmtool import __version__
from lmtool.config import groups
from lmtool.resolver.schema.verbs import COMMANDS, VERBS, keys_of
from lmtool.system.files import replace_bytes

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lmtool.config.base import Config

CACHE = "~/.cache/lmtool"
_PACKAGE = Path(__file__).resolve().parents[2]
# Words in the description of a field whose value is a path, or a run.
_PATH = re.compile(r"\b(file|folder)s?\b", re.IGNORECASE)
_RUN = re.compile(r"\b(a run|runs|checkpoint)\b", re.IGNORECASE)


class KeyNode(TypedDict, total=False):
    """A key: a choice of a group, several choices of a group, a section with keys, or a value. options: fixed values.
    path, run: whether a value may be a path or a run."""

    group: str
    several: str
    keys: KeyNodes
    options: list[str]
    path: bool
    run: bool


KeyNodes: TypeAlias = dict[str, KeyNode]


class CompletionTable(TypedDict):
    """verbs: keys by command. components: keys by group and component. options: by group and option, the component that
    the option configures. own: for commands about a run, the names of their additional keys."""

    verbs: dict[str, KeyNodes]
    components: dict[str, dict[str, KeyNodes]]
    options: dict[str, dict[str, str]]
    own: dict[str, list[str]]


def table(config_dirs: Sequence[Path] = (), plugins: Sequence[str] = ()) -> CompletionTable:
    """The table of this installation: from the file, or built and saved there."""
    file = Path(CACHE).expanduser() / "completion" / f"{_fingerprint(config_dirs, plugins)}.json"
    with suppress(OSError, ValueError):
        saved: CompletionTable = json.loads(file.read_text(encoding="utf-8"))
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
    """Changes whenever a file of lmtool, of the configuration folders or of the plugins changes."""
    files = [
        *_PACKAGE.rglob("*.py"),
        *(path for folder in groups.folders(config_dirs) for path in folder.rglob("*.yaml")),
    ]
    files += [path for name in plugins if (path := Path(f"{name.replace('.', '/')}.py").resolve()).is_file()]
    marks = sorted(f"{path}\0{path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256("\n".join([__version__, *plugins, *marks]).encode("utf-8", "replace")).hexdigest()[:32]


def _build(config_dirs: Sequence[Path], plugins: Sequence[str]) -> CompletionTable:
    from lmtool.config import plugins as loading
    from lmtool.config import saved as yaml_files
    from lmtool.config import tables

    loading.load(plugins)
    options = {group: _options(group, config_dirs) for group in groups.all_groups(config_dirs)}
    for group, name in loading.nodes(config_dirs):
        options.setdefault(group, {})[name] = name
    verbs: dict[str, KeyNodes] = {}
    for verb, command in COMMANDS.items():
        keys = dict(_keys(command))
        defaults = yaml_files.read_yaml(groups.conf_dir() / f"{VERBS[verb].primary}.yaml").get("defaults", [])
        named = {str(key).split()[-1] for item in defaults if isinstance(item, dict) for key in item}
        verbs[verb] = {name: KeyNode(group=name) for name in sorted(named & options.keys())} | keys
    components = {
        group: {entry.name: dict(_keys(entry.config)) for entry in tables.entries(group)} for group in tables.groups()
    }
    own = {verb: list(of_run.names()) for verb in VERBS if (of_run := keys_of(verb)) is not None}
    return {"verbs": verbs, "components": components, "options": options, "own": own}


def _options(group: str, config_dirs: Sequence[Path]) -> dict[str, str]:
    """The component that each option of a group configures, according to the YAML of the option."""
    from lmtool.config import saved as yaml_files

    named = {}
    for option in groups.options(group, config_dirs):
        base: str = option
        for _ in range(10):
            path = groups.yaml_file(group, base, config_dirs)
            written = {} if path is None else yaml_files.read_yaml(path)
            above = next(
                (item for item in written.get("defaults", []) if isinstance(item, str) and item != "_self_"), None
            )
            if above is None:
                base = str(written.get("kind") or written.get("name") or base)
                break
            base = above
        named[option] = base
    return named


def _keys(config: type[Config]) -> Iterator[tuple[str, KeyNode]]:
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


def _value(field: FieldInfo) -> KeyNode:
    kinds = list(_kinds(field.annotation))
    options = [str(option) for option in kinds if isinstance(option, str | int) and not isinstance(option, bool)]
    options += ["true", "false"] * (bool in kinds) + ["null"] * (type(None) in kinds)
    text, about = str in kinds, field.description or ""
    node: KeyNode = {"options": options}
    if text and _PATH.search(about):
        node["path"] = True
    if text and _RUN.search(about):
        node["run"] = True
    return node


def _kinds(annotation: object) -> Iterator[object]:
    """The types of a value, and the values of a Literal."""
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
