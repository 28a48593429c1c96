"""The keys and choices of every command as plain data, for completion. The data is cached in a file, since importing
the configuration classes takes too long for a TAB. Imports only the standard library if the file is up to date."""

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
from lmtool.resolver.verbs import COMMANDS, VERBS, keys_of
from lmtool.system.files import replace_bytes, user_path

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lmtool.config.base import Config

CACHE = "~/.cache/lmtool"
_PACKAGE = Path(__file__).resolve().parents[1]
# A field whose description contains these words has a path, or a run, as its value.
_PATH = re.compile(r"\b(file|folder)s?\b", re.IGNORECASE)
_RUN = re.compile(r"\b(a run|runs|checkpoint)\b", re.IGNORECASE)


class KeyNode(TypedDict, total=False):
    """A key. Its value is an option of a `group`, `several` options of a group, a section with `keys`, or a plain
    value. options: the allowed plain values. path, run: whether the value may be a path or a run."""

    group: str
    several: str
    keys: KeyNodes
    options: list[str]
    path: bool
    run: bool


KeyNodes: TypeAlias = dict[str, KeyNode]


class CompletionTable(TypedDict):
    """All keys and choices. verbs: keys by command. components: keys by group and component. options: the component
    that an option configures, by group and option. own: the names of the additional keys of commands about a run."""

    verbs: dict[str, KeyNodes]
    components: dict[str, dict[str, KeyNodes]]
    options: dict[str, dict[str, str]]
    own: dict[str, list[str]]


def table(config_dirs: Sequence[Path] = (), plugins: Sequence[str] = ()) -> CompletionTable:
    """Returns the table of this installation: reads the cached file, or builds the table and saves it."""
    file = user_path(CACHE) / "completion" / f"{_fingerprint(config_dirs, plugins)}.json"
    with suppress(OSError, ValueError):
        saved: CompletionTable = json.loads(file.read_text(encoding="utf-8"))
        return saved
    built = _build(config_dirs, plugins)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        outdated = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-20]
        replace_bytes(file, json.dumps(built).encode())
        for path in outdated:
            path.unlink(missing_ok=True)
    return built


def _fingerprint(config_dirs: Sequence[Path], plugins: Sequence[str]) -> str:
    """Returns a hash that changes with the files of lmtool, the configuration folders and the plugins."""
    files = [
        *_PACKAGE.rglob("*.py"),
        *(path for folder in groups.folders(config_dirs) for path in folder.rglob("*.yaml")),
    ]
    files += [path for name in plugins if (path := Path(f"{name.replace('.', '/')}.py").resolve()).is_file()]
    versions = sorted(f"{path}\0{path.stat().st_mtime_ns}" for path in files)
    return hashlib.sha256("\n".join([__version__, *plugins, *versions]).encode("utf-8", "replace")).hexdigest()[:32]


def _build(config_dirs: Sequence[Path], plugins: Sequence[str]) -> CompletionTable:
    from lmtool.config import registry
    from lmtool.config import saved as yaml_files

    registry.load_plugins(plugins)
    options = {group: _options(group, config_dirs) for group in groups.all_groups(config_dirs)}
    for group, name in registry.plugin_nodes(config_dirs):
        options.setdefault(group, {})[name] = name
    verbs: dict[str, KeyNodes] = {}
    for verb, command in COMMANDS.items():
        keys = dict(_keys(command))
        defaults = yaml_files.read_yaml(groups.conf_dir() / f"{VERBS[verb].primary}.yaml").get("defaults", [])
        groups_of_primary = {str(key).split()[-1] for item in defaults if isinstance(item, dict) for key in item}
        verbs[verb] = {name: KeyNode(group=name) for name in sorted(groups_of_primary & options.keys())} | keys
    components = {
        group: {entry.name: dict(_keys(entry.config)) for entry in registry.entries(group)}
        for group in registry.groups()
    }
    own_keys = {verb: list(command_keys.model_fields) for verb in VERBS if (command_keys := keys_of(verb)) is not None}
    return {"verbs": verbs, "components": components, "options": options, "own": own_keys}


def _options(group: str, config_dirs: Sequence[Path]) -> dict[str, str]:
    """Returns the component that each option of a group configures, according to the option's YAML."""
    from lmtool.config import saved as yaml_files

    components = {}
    for option in groups.options(group, config_dirs):
        base: str = option
        for _ in range(10):  # presets may build on presets
            path = groups.yaml_file(group, base, config_dirs)
            content = {} if path is None else yaml_files.read_yaml(path)
            parents = (item for item in content.get("defaults", []) if isinstance(item, str) and item != "_self_")
            parent = next(parents, None)
            if parent is None:
                base = str(content.get("kind") or content.get("name") or base)
                break
            base = parent
        components[option] = base
    return components


def _keys(config: type[Config]) -> Iterator[tuple[str, KeyNode]]:
    from lmtool.config.messages import section_class
    from lmtool.config.registry import choice_of, several_of

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
    allowed = list(_types_and_values(field.annotation))
    options = [str(option) for option in allowed if isinstance(option, str | int) and not isinstance(option, bool)]
    options += ["true", "false"] * (bool in allowed) + ["null"] * (type(None) in allowed)
    takes_text, description = str in allowed, field.description or ""
    node: KeyNode = {"options": options}
    if takes_text and _PATH.search(description):
        node["path"] = True
    if takes_text and _RUN.search(description):
        node["run"] = True
    return node


def _types_and_values(annotation: object) -> Iterator[object]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif origin is Annotated:
        yield from _types_and_values(arguments[0])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _types_and_values(argument)
    elif origin in (tuple, list):
        yield from (kind for item in arguments[:1] for kind in _types_and_values(item) if kind is str)
    else:
        yield annotation
