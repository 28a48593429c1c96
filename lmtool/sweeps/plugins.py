"""The launchers and sweepers of Hydra: its own, those of the extra `sweeps`, and other installed ones."""

from __future__ import annotations

import importlib

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from lmtool.config.base import JsonObject
from lmtool.config.compose import scan_plugins
from lmtool.errors import UserError, nearest

_PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra_joblib_launcher",
        "submitit_local": "hydra_submitit_launcher",
        "submitit_slurm": "hydra_submitit_launcher",
    },
    "hydra/sweeper": {"optuna": "hydra_optuna_sweeper"},
}
"""Packages of the extra `sweeps` by group and option."""


def require_plugin(group: str, name: str) -> None:
    """Registers the launcher or sweeper of a name with Hydra. group: hydra/launcher or hydra/sweeper. Raises UserError
    if the name is unknown or its package is not installed."""
    if name in _registered(group):
        return
    package = _PACKAGES[group].get(name)
    # The package of a plugin that lmtool does not know is found only by importing all of them.
    module = "hydra_plugins" if package is None else f"hydra_plugins.{package}"
    try:
        plugins, _ = scan_plugins([importlib.import_module(module)])
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
    nodes: JsonObject = ConfigStore.instance().repo
    for part in group.split("/"):
        nodes = nodes.get(part, {})
    return {name.removesuffix(".yaml") for name in nodes if name.endswith(".yaml")}
