"""Replacements for parts of Hydra: which plugins it imports, and how it reads YAML.

Hydra imports every installed plugin before it composes anything, optuna and submitit among them. Here it sees only its
own plugins and the selected launcher or sweeper, in this process and in those that launchers start.

Hydra also parses all YAML in Python, again for each composition, which takes half of its time. It expands every
defaults list for interpolations, which takes a quarter of the rest. Here each file is parsed once, and checked like a
user's file; only defaults lists with interpolations are expanded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra.conf
import yaml
from hydra._internal import defaults_list as lists
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from lmtool.config import saved
from lmtool.config.base import JsonObject
from lmtool.config.nearest import nearest
from lmtool.config.overrides import GRID, SWEEP_KEYS
from lmtool.errors import UserError

# --- launchers and sweepers ----------------------------------------------------------------------------------------

_PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra_joblib_launcher",
        "submitit_local": "hydra_submitit_launcher",
        "submitit_slurm": "hydra_submitit_launcher",
    },
    "hydra/sweeper": {"optuna": "hydra_optuna_sweeper"},
}
"""Packages of the extra `sweeps` by group and option."""
_scan = Plugins._scan_all_plugins


def _own_plugins(modules: list[ModuleType]) -> Any:
    """Returns Hydra's own plugins, which are in the first module."""
    return _scan(modules[:1])


Plugins._scan_all_plugins = staticmethod(_own_plugins)  # type: ignore[method-assign]


def require(group: str, name: str) -> None:
    """Registers the launcher or sweeper of a name with Hydra. group: hydra/launcher or hydra/sweeper. Raises UserError
    if the name is unknown or its package is not installed."""
    if name in _registered(group):
        return
    package = _PACKAGES[group].get(name)
    # The package of a plugin that lmtool does not know is found only by importing all of them.
    module = "hydra_plugins" if package is None else f"hydra_plugins.{package}"
    try:
        plugins, _ = _scan([importlib.import_module(module)])
    except ImportError as error:
        if package is not None:
            raise UserError(f"{group}={name} is not installed", "pip install 'lmtool[sweeps]'") from error
        plugins = []
    for plugin in plugins:
        Plugins.instance().register(plugin)
    if name not in _registered(group):
        offered = sorted({*_registered(group), *_PACKAGES[group]})
        close = nearest(name, offered)
        hint = f"did you mean {group}={close}?" if close else "use one of these, or install its plugin"
        raise UserError(f"{group}={name} is not one of {', '.join(offered)}", hint)


def _registered(group: str) -> set[str]:
    """Returns the names of the launchers or sweepers that are registered with Hydra."""
    nodes: JsonObject = ConfigStore.instance().repo
    for part in group.split("/"):
        nodes = nodes.get(part, {})
    return {name.removesuffix(".yaml") for name in nodes if name.endswith(".yaml")}


# --- folders of YAML -----------------------------------------------------------------------------------------------


class LimitedFiles(FileConfigSource):
    """A folder of YAML whose files are checked before Hydra uses them."""

    @staticmethod
    def scheme() -> str:
        return "limited"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text, data = saved.read_yaml(path, parse=_parse)
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


def _refuse_unused_keys(path: Path, data: dict[Any, Any]) -> None:
    """Raises UserError if a YAML sets keys of Hydra itself that lmtool does not use: all but sweep values."""
    section = data.get("hydra") or {}
    keys = [f"hydra.{key}" for key in _dotted_keys(section)] if isinstance(section, dict) else ["hydra"]
    selected_groups = [str(group) for item in data.get("defaults") or () if isinstance(item, dict) for group in item]
    keys += [
        group.split()[-1].lstrip("/") for group in selected_groups if group.split()[-1].lstrip("/").startswith("hydra/")
    ]
    unused = [key for key in keys if not f"{key}.".startswith(f"{GRID}.")]
    if unused:
        advice = f", and type it on the command line: -m {unused[0]}=VALUE" if unused[0].startswith(SWEEP_KEYS) else ""
        raise UserError(
            f"{path}: {unused[0]} cannot be set in YAML; the only key of Hydra that can is {GRID}",
            f"remove it from the file{advice}",
        )


def _dotted_keys(section: dict[Any, Any]) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{nested}" for nested in _dotted_keys(value))
        else:
            yield str(key)


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
_LOADER = type(
    "Loader",
    (yaml.CSafeLoader, _OMEGACONF) if yaml.__with_libyaml__ else (_OMEGACONF,),
    {"yaml_constructors": yaml.SafeLoader.yaml_constructors},
)


@lru_cache(maxsize=1000)
def _parse(text: str) -> tuple[str, Any]:
    """Returns a document as plain data. Shared by all callers, because OmegaConf.create copies."""
    return text, saved.load(text, _LOADER)
