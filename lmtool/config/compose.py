"""Composition with Hydra: a primary file, its groups and the overrides become plain data.

The Compose API creates no folder and does not touch logging. Exceptions of Hydra are converted into UserError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import hydra.conf
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal import defaults_list as lists
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.conf import RuntimeConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, StringNode, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from lmtool.config import groups, overrides, registry, saved
from lmtool.config.base import JsonObject
from lmtool.config.messages import listed
from lmtool.config.overrides import (
    GRID,
    SWEEP_KEYS,
    AcceptedOverrides,
    CheckedOverrides,
    imports_a_name,
    key_of,
    read_accepted,
)
from lmtool.config.registry import MULTI_SELECT_GROUPS, entries
from lmtool.errors import UserError, nearest

scan_plugins = Plugins._scan_all_plugins
"""Finds the plugins of Hydra in modules. Hydra itself finds only its own; the module of another is scanned when its
launcher or sweeper is used, because importing all of them is slow."""
Plugins._scan_all_plugins = staticmethod(lambda modules: scan_plugins(modules[:1]))  # type: ignore[method-assign]


class LimitedFiles(FileConfigSource):
    """A folder of YAML whose files are checked before Hydra uses them."""

    @staticmethod
    def scheme() -> str:
        return "limited"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text, data = saved.read_yaml(path, parse=_parse_yaml)
        if not isinstance(data, dict | None):
            raise UserError(f"{path} contains no keys and values", "write one KEY: VALUE a line, as in conf/")
        if self.provider != "hydra":
            _refuse_unused_keys(path, data or {})
        return ConfigResult(
            config=OmegaConf.create(data or {}),
            path=source_path(self.path),
            provider=self.provider,
            header=self._get_header_dict(text[:512]),
        )


def _refuse_unused_keys(path: Path, data: JsonObject) -> None:
    """Raises UserError if a YAML sets keys of Hydra itself other than sweep values, or names a class to import."""
    choices = [group for item in data.get("defaults") or () if isinstance(item, dict) for group in item]
    for key in [*_dotted_keys(data), *(str(group).split()[-1].lstrip("/") for group in choices)]:
        if (re.match("hydra(?![^./])", key) and not f"{key}.".startswith(f"{GRID}.")) or imports_a_name(key):
            advice = f", and type it on the command line: -m {key}=VALUE" if key.startswith(SWEEP_KEYS) else ""
            message = f"{path}: {key} cannot be set in YAML; the only key of Hydra that can is {GRID}"
            raise UserError(message, f"remove it from the file{advice}")


def _dotted_keys(value: object) -> Iterator[str]:
    """Yields the keys of a section at any depth, also those in lists."""
    for part in value if isinstance(value, list) else ():
        yield from _dotted_keys(part)
    for key, inside in value.items() if isinstance(value, dict) else ():
        yield from [f"{key}.{name}" for name in _dotted_keys(inside)] or [str(key)]


Plugins.instance().register(LimitedFiles)

_choices_so_far = lists._create_interpolation_map


def _choices_if_interpolated(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    """Returns the options selected so far, which interpolations in a defaults list refer to; empty if there are no
    interpolations."""
    if any(item.is_interpolation() for item in defaults_list if not item.is_self()):
        return _choices_so_far(overrides, defaults_list, self_added)
    return OmegaConf.create()


lists._create_interpolation_map = _choices_if_interpolated


def source_path(folder: Path | str) -> str:
    """Returns the name of a folder in Hydra's search path."""
    return f"{LimitedFiles.scheme()}://{folder}"


def use_limited_files(loader: ConfigLoader, conf: Path) -> None:
    """Makes a loader of Hydra read lmtool's YAML in `conf`, and Hydra's own, through LimitedFiles."""
    assert isinstance(loader, ConfigLoaderImpl)
    folders = {"main": conf, "hydra": Path(hydra.conf.__file__).parent}
    search_path = loader.get_search_path()
    for element in search_path.get_path():
        if element.provider in folders:
            element.path = source_path(folders[element.provider])
    loader.repository.initialize_sources(search_path)


# The loader of OmegaConf decides which texts are numbers, and refuses duplicate keys.
_OMEGACONF = get_yaml_loader()
_YAML_LOADER = type(
    "Loader",
    (yaml.CSafeLoader, _OMEGACONF) if yaml.__with_libyaml__ else (_OMEGACONF,),
    {"yaml_constructors": yaml.SafeLoader.yaml_constructors},
)


@lru_cache(maxsize=1000)
def _parse_yaml(text: str) -> tuple[str, Any]:
    """Returns a document as plain data. Shared by all callers, because OmegaConf.create copies."""
    return text, saved.load(text, _YAML_LOADER)


MAX_REFERENCES = 1_000
MAX_SIZE = 1_000_000
"""Limits for the interpolations of a configuration: references, and the characters of all their values."""


class _TooManyInterpolations(InterpolationResolutionError):
    """The interpolations of a configuration exceed the limits. Its text is a key with one of them."""


@contextmanager
def _limited_interpolations() -> Iterator[None]:
    """Counts what OmegaConf resolves in the `with` block. Raises _TooManyInterpolations beyond the limits."""
    resolve, references, characters = Container.resolve_parse_tree, 0, 0

    def resolve_within_limits(self: Container, parse_tree: Any, node: Any, memo: Any = None, key: Any = None) -> Any:
        nonlocal references, characters
        value = resolve(self, parse_tree, node, memo, key)
        references += 1
        characters += len(str(value)) if isinstance(value, str | StringNode) else 0
        if references > MAX_REFERENCES or characters > MAX_SIZE:
            raise _TooManyInterpolations(self._get_full_key(key))
        return value

    Container.resolve_parse_tree = resolve_within_limits  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


WHOLE_RUN = "# @package _global_"
FIRST_LINE = f"add {WHOLE_RUN} as its first line"


def accepted_overrides(primary: str, config_dirs: Sequence[Path] = ()) -> AcceptedOverrides:
    """Returns the groups and options that a primary file can be composed with, including components of plugins.

    Plugins' components reach Hydra here, as nodes of its ConfigStore. Raises UserError if a plugin's node has the name
    of a shipped YAML.
    """
    extra: dict[str, tuple[str, ...]] = {}
    store = ConfigStore.instance()
    for (group, name), (entry, data) in registry.plugin_nodes(config_dirs).items():
        package = f"{group}.{name}" if group in MULTI_SELECT_GROUPS else None
        store.store(group=group, name=name, node=data, package=package, provider=entry.config.__module__)
    for group, names in _stored_nodes(store.repo).items():
        clash = sorted(set(names) & set(groups.options(group, config_dirs)))
        if clash:
            message = f"a plugin registers {group}={clash[0]}, but lmtool has a YAML of that name"
            raise UserError(message, "rename it in the plugin")
        extra[group] = names
    return read_accepted(groups.conf_dir() / f"{primary}.yaml", config_dirs, extra)


def _stored_nodes(repo: JsonObject, above: str = "") -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for name, nodes in repo.items():
        group = f"{above}/{name}" if above else name
        if isinstance(nodes, dict) and group not in ("hydra", "_dummy_empty_config_"):
            names = tuple(key.removesuffix(".yaml") for key, node in nodes.items() if not isinstance(node, dict))
            options |= ({group: names} if names else {}) | _stored_nodes(nodes, group)
    return options


@contextmanager
def initialized_hydra() -> Iterator[Any]:
    """Initializes Hydra on the shipped folder and restores its global state at the end, because a job of a sweep runs
    inside Hydra."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        conf = groups.conf_dir()
        with initialize_config_dir(str(conf), version_base="1.3", job_name="lmtool"):
            use_limited_files(GlobalHydra.instance().config_loader(), conf)
            yield GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = outer


@cache
def _section_of_a_run() -> DictConfig:
    """Returns the part of Hydra's own section that a single run needs, as plain data. Launcher, the whole sweeper,
    logging and help are composed only for sweeps: they took a fifth of the time of composing."""
    separators = {"kv_sep": "=", "item_sep": ",", "exclude_keys": []}
    job = {"name": None, "config_name": None, "override_dirname": None, "config": {"override_dirname": separators}}
    return OmegaConf.create(
        {
            "searchpath": [],
            "overrides": {"hydra": [], "task": []},
            "job": {**job, "env_copy": [], "env_set": {}},
            "runtime": RuntimeConf(),
            "sweeper": {"params": None},
        }
    )


@contextmanager
def _hydra_for_a_run() -> Iterator[Any]:
    """Initializes Hydra with only the part of its own section that the YAML of a run may use."""
    nodes: JsonObject = ConfigStore.instance().repo["hydra"]
    original = nodes["config.yaml"]
    with initialized_hydra() as hydra:
        nodes["config.yaml"] = replace(original, node=_section_of_a_run())
        try:
            yield hydra
        finally:
            nodes["config.yaml"] = original


@contextmanager
def translated_errors() -> Iterator[None]:
    try:
        yield
    except MissingConfigException as error:
        raise _missing(error) from error
    except RecursionError as error:
        hint = "use fewer nested lists and sections in the overrides and in your YAML"
        raise UserError("the configuration cannot be composed: it is nested too deeply", hint) from error
    except _TooManyInterpolations as error:
        key, limits = str(error).splitlines()[0], f"{MAX_SIZE} characters, or {MAX_REFERENCES} references"
        message = f"{key}: the interpolations of this configuration expand to more than {limits}"
        hint = "remove the interpolations (${...}) of this key, or of the keys that refer to it"
        raise UserError(message, hint) from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
        message = " ".join(lines[:2]) if lines else type(error).__name__
        fault, hint = f"the configuration cannot be composed: {message}", "see `lmtool list` and the YAML you named"
        if unknown_section := re.search(r"In '(\S+)/(\S+)': Could not override '(\S+)'", message):
            group, name, section = unknown_section.groups()
            fault = f"{group}={name} sets {section}, which this command does not have"
            hint = f"`lmtool show {group}={name}` says which command it is for"
        elif unknown_group := re.search(r"Could not override '(\w+)/(\w+)'\. No match", message):
            section, name = unknown_group.groups()
            holders = [entry.name for entry in entries(section) if name in entry.config.model_fields]
            fault = f"{section}/{name} is set, but the selected {section} has no {name}"
            hint = f"omit it, or set {section}={'|'.join(holders)}" if holders else "omit it"
        raise UserError(fault, hint) from error


def set_values(config: DictConfig, values: Sequence[str]) -> None:
    """Sets the overrides of values in a composed configuration. Raises UserError for one that cannot be set, such as an
    item that a list does not have (data.packages.x=0)."""
    for override in OverridesParser.create().parse_overrides(list(values)):
        text = str(override.input_line).lstrip("+")
        key = text.partition("=")[0]
        try:
            OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
        except (ValueError, TypeError, OmegaConfBaseException) as error:
            sections = accumulate(key.split("."), "{}.{}".format)
            items = next((above for above in sections if OmegaConf.is_list(OmegaConf.select(config, above))), None)
            if items is None:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise UserError(f"{text}: {reason}", "`lmtool show KEY` explains a key") from error
            hint = f"set the whole list: {items}=[...]"
            raise UserError(f"{text}: {items} is a list without this item", hint) from error


def _missing(error: MissingConfigException) -> UserError:
    missing_file = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, name = missing_file.rpartition("/")
    offered = tuple(error.options or ()) or groups.options(group)
    close = nearest(name, offered)
    hint = f"did you mean {group}={close}?" if close else f"`lmtool list {group}` prints its options"
    return UserError(f"{group}={name} is not one of {listed(offered)}", hint)


def search_path(config_dirs: Sequence[Path]) -> list[str]:
    """Returns the override that adds the user's folders to Hydra's search path."""
    if not config_dirs:
        return []
    places = [source_path(folder.resolve()).replace("'", "\\'") for folder in config_dirs]
    paths = ",".join(f"'{place}'" for place in places)
    return [f"hydra.searchpath=[{paths}]"]


def compose(primary: str, checked: CheckedOverrides, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns the composed configuration as plain data with interpolations resolved; missing values stay `???`.

    Raises UserError if a selected YAML has several values for a key that is not on the command line, since a run takes
    one.
    """
    _require_package(checked.choices, config_dirs)
    words = [*checked.choices, *search_path(config_dirs)]
    with translated_errors(), _hydra_for_a_run():
        config = hydra_compose(primary, overrides=words, return_hydra_config=True)
        set_values(config, checked.values)
        typed_keys = {key_of(text) for text in [*checked.choices, *checked.values]}
        remaining = {key: values for key, values in _grid(config).items() if key_of(key) not in typed_keys}
        # If there are other problems, they are reported instead.
        if remaining and not checked.problems and not checked.sweeps:
            firsts = {key: "VALUE" if "(" in value else value.partition(",")[0] for key, value in remaining.items()}
            set_first = f"set {' '.join(f'{key}={value}' for key, value in firsts.items())}"
            file = next((text for text in checked.choices if text.startswith(("sweep=", "experiment="))), None)
            message = f"{file or 'the YAML'} has several values for {', '.join(remaining)}, but a run takes one"
            command = f": lmtool {primary} -m {file}" if file else ""
            raise UserError(message, f"add -m to run a job for each{command}; or {set_first}")
        with open_dict(config):
            del config["hydra"]
        return to_data(config) | checked.verbatim


def _require_package(choices: Sequence[str], config_dirs: Sequence[Path]) -> None:
    """Raises UserError if a user's YAML in a group that sets run-wide keys, such as `experiment`, has no `# @package`
    line: Hydra would put its keys below the name of the group."""
    for text in choices:
        group, _, name = text.lstrip("+~").partition("=")
        path = groups.yaml_file(group, name, config_dirs) if name else None
        if path is None or path.is_relative_to(groups.conf_dir()) or b"@package" in saved.beginning(path):
            continue
        shipped = (groups.conf_dir() / group).glob("*.yaml")
        if any(WHOLE_RUN in file.read_text(encoding="utf-8") for file in shipped):
            raise UserError(f"{path} does not declare that its keys belong to the whole run", FIRST_LINE)


def grid(primary: str, checked: CheckedOverrides, config_dirs: Sequence[Path] = ()) -> dict[str, str]:
    """Returns the sweep values of the selected YAML by key, in the syntax of the command line. If a group is swept
    itself (task=a,b), the sweep values in its options are omitted: those in `a` apply only to the jobs of `a`."""
    _require_package([text for text in checked.choices if "," not in text], config_dirs)
    with translated_errors(), _hydra_for_a_run() as hydra:
        words = [*checked.choices, *search_path(config_dirs)]
        config = hydra.compose_config(primary, words, RunMode.MULTIRUN, with_log_configuration=False, from_shell=False)
        return _grid(config)


def _grid(config: Any) -> dict[str, str]:
    params = OmegaConf.select(config, overrides.GRID)
    return {} if params is None else {str(key): str(value) for key, value in params.items()}


def option(group: str, name: str, config_dirs: Sequence[Path] = ()) -> JsonObject:
    """Returns one option of a group as plain data. Raises UserError if the group has no such option."""
    with translated_errors(), _hydra_for_a_run():
        composed = to_data(hydra_compose(f"{group}/{name}", overrides=search_path(config_dirs)))
    section: JsonObject = composed[group]
    return section


def to_data(config: DictConfig) -> JsonObject:
    """Returns a composed configuration as plain data with interpolations resolved."""
    with _limited_interpolations():
        data = OmegaConf.to_container(config, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}
