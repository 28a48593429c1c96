"""The configurations of trackers, and whether a server can be used. Imports no torch, and no tracker."""

from __future__ import annotations

import importlib.util
import netrc
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.errors import Problem

# Whether a tracker's server can be used, found out before its library is: a connection that fails half-way through
# its own start may leave it unable to work offline.


PATIENCE = 2.0
"""Seconds in which a server must answer."""
Mode = Literal["online", "offline", "disabled"]
_MODES: dict[str, Mode] = {
    "dryrun": "offline",
    "run": "online",
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
}


def mode_of(mode: Mode | Literal["auto"], offline: bool, environ: Mapping[str, str]) -> tuple[Mode, str]:
    """online, offline or disabled, and why, of wandb's mode as configured.

    offline: the run opens no connection. environ: with WANDB_MODE and WANDB_DISABLED, which decide where the
    configuration says auto, WANDB_API_KEY and WANDB_BASE_URL.
    """
    if mode == "auto" and environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled", "WANDB_DISABLED"
    typed = environ.get("WANDB_MODE", "").strip().lower()
    reason = f"logger.wandb.mode={mode}"
    if mode == "auto" and typed in _MODES:
        mode, reason = _MODES[typed], f"WANDB_MODE={typed}"
    if mode in ("disabled", "offline"):
        return mode, reason
    if offline:
        return "offline", "offline=true"
    server = server_of(environ)
    if not has_key(server, environ):
        return "offline", f"no key for {server}: set WANDB_API_KEY, or type `wandb login`"
    if not replies(server):
        return "offline", f"{server} does not answer within {PATIENCE:g} seconds"
    return "online", reason


def server_of(environ: Mapping[str, str]) -> str:
    """The address of wandb's server."""
    return environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def has_key(server: str, environ: Mapping[str, str]) -> bool:
    """Whether wandb finds a key of this server: in the environment, or where `wandb login` puts it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for name in (environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            host = urllib.parse.urlsplit(server).hostname
            if name and host and netrc.netrc(Path(name).expanduser()).authenticators(host):
                return True
        except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):
            continue
    return False


def replies(server: str, seconds: float = PATIENCE) -> bool:
    """Whether a server replies to a request, more than taking the connection; through the proxy of the environment."""
    # Only a run that is shown on a server needs these: every other command would pay for them.
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(server, method="HEAD"), timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


# The configurations of trackers. Imports no torch, and no tracker.


class TrackerConfig(Config):
    """Base of every tracker's configuration: a run has any number of them, each under its name in `logger`."""

    package: ClassVar[str | None] = None
    """The Python package it needs beyond lmtool's own."""
    extra: ClassVar[str] = "trackers"
    """The extra of lmtool that installs the package."""

    @property
    def needs_network(self) -> bool:
        """Whether it cannot do without a connection."""
        return False

    def missing(self, key: str) -> Problem | None:
        """The problem if its package or key is missing here; found without importing the package."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        message = f"{key} needs the Python package {self.package}, which is not installed"
        return Problem(key, message, f"pip install 'lmtool[{self.extra}]'")

    def fallback(self) -> TrackerConfig | None:
        """The configuration to try if this one cannot start; None: nothing."""
        return None

    def left(self, folder: str) -> str:
        """A sentence about rows that were not written when the run ended. folder: of the run."""
        return "its last rows may be missing there, metrics.jsonl has every row"


@component("logger", "wandb", builder="lmtool.reporting.trackers.wandb:Wandb")
class WandbConfig(TrackerConfig):
    """Weights & Biases. Its key stands in WANDB_API_KEY, or where `wandb login` puts it; never here."""

    package: ClassVar[str | None] = "wandb"

    project: str | None = Field(None, description="null: WANDB_PROJECT, else lmtool", min_length=1, max_length=128)
    entity: str | None = Field(
        None,
        description="user or team that owns the project; null: WANDB_ENTITY, else the default of the API key",
        min_length=1,
    )
    group: str | None = Field(
        None,
        description="group of runs on the site; null: the name of the sweep, for jobs of a sweep",
        min_length=1,
    )
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), description="tags for searching runs"
    )
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto",
        description="online, offline, disabled; auto: WANDB_MODE, else online with a key and a reachable server. "
        "auto: WANDB_MODE if it is set, else online if there is an API key and the server answers within 2 seconds, "
        "else offline (files for `wandb sync`)",
    )

    @property
    def needs_network(self) -> bool:
        return self.mode == "online"

    def missing(self, key: str) -> Problem | None:
        server = server_of(os.environ)
        if (problem := super().missing(key)) is not None or self.mode != "online" or has_key(server, os.environ):
            return problem
        hint = f"set WANDB_API_KEY, type `wandb login`, or set {key}.mode=offline"
        return Problem(f"{key}.mode", f"{key}.mode=online: there is no key for {server}", hint)

    def fallback(self) -> TrackerConfig | None:
        return None if self.mode in ("offline", "disabled") else self.model_copy(update={"mode": "offline"})

    def left(self, folder: str) -> str:
        return f"`wandb sync {folder}/wandb/*run-*` uploads what is there"


@component("logger", "tensorboard", builder="lmtool.reporting.trackers.tensorboard:TensorBoard")
class TensorBoardConfig(TrackerConfig):
    """Event files for TensorBoard."""

    package: ClassVar[str | None] = "tensorboard"

    folder: str | None = Field(
        None,
        description="parent folder of the event files, one subfolder per run; null: runs/NAME/tensorboard",
        min_length=1,
    )
