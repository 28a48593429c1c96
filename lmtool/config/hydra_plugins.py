"""Hydra's launchers and sweepers: only the one that was named is imported.

Hydra imports every plugin that is installed before it composes anything, optuna and submitit among them; here it sees
its own alone, in this process and in those that its launchers start.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from lmtool.config.nearest import nearest
from lmtool.errors import UserError

_PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra_joblib_launcher",
        "submitit_local": "hydra_submitit_launcher",
        "submitit_slurm": "hydra_submitit_launcher",
    },
    "hydra/sweeper": {"optuna": "hydra_optuna_sweeper"},
}
"""The packages of the extra `sweeps`, by what chooses them."""
_scan = Plugins._scan_all_plugins


def _own_plugins(modules: list[ModuleType]) -> Any:
    """Hydra's own plugins, which come first."""
    return _scan(modules[:1])


Plugins._scan_all_plugins = staticmethod(_own_plugins)  # type: ignore[method-assign]


def require(group: str, name: str) -> None:
    """Let Hydra know the launcher or sweeper of a name. group: hydra/launcher or hydra/sweeper. UserError where none
    has the name, or its package is not installed."""
    if name in _known(group):
        return
    package = _PACKAGES[group].get(name)
    # Of a plugin that lmtool does not know, only importing them all says which package it is in.
    module = "hydra_plugins" if package is None else f"hydra_plugins.{package}"
    try:
        plugins, _ = _scan([importlib.import_module(module)])
    except ImportError as error:
        if package is not None:
            raise UserError(f"{group}={name} is not installed", "pip install 'lmtool[sweeps]'") from error
        plugins = []
    for plugin in plugins:
        Plugins.instance().register(plugin)
    if name not in _known(group):
        offered = sorted({*_known(group), *_PACKAGES[group]})
        close = nearest(name, offered)
        hint = f"did you mean {group}={close}?" if close else "take one of these, or install its plugin"
        raise UserError(f"{group}={name} is not one of {', '.join(offered)}", hint)


def _known(group: str) -> set[str]:
    nodes: dict[str, Any] = ConfigStore.instance().repo
    for part in group.split("/"):
        nodes = nodes.get(part, {})
    return {name.removesuffix(".yaml") for name in nodes if name.endswith(".yaml")}
