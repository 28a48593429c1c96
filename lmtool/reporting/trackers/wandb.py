"""Weights & Biases: its configuration, whether its server can be used, and its tracker.

A run folder stores the id of its run on the site, so that a resumed run continues it. Whether the server can be used is
decided before wandb is imported: a connection that fails while wandb starts may leave it unable to work offline.
"""

from __future__ import annotations

import json
import netrc
import os
import urllib.parse
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import JsonMapping
from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.reporting.trackers.base import RunMetadata, Tracker, TrackerConfig, numbers
from lmtool.system.files import draft_path, real_folder, user_path
from lmtool.system.secrets import masked_data

if TYPE_CHECKING:
    from wandb import Run


@component("logger", "wandb", builder="lmtool.reporting.trackers.wandb:Wandb")
class WandbConfig(TrackerConfig):
    """Weights & Biases. Set the API key in WANDB_API_KEY or with `wandb login`, never in the configuration."""

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

    def unwritten_rows(self, folder: str) -> str:
        return f"`wandb sync {folder}/wandb/*run-*` uploads the rows written so far"


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
    """Returns wandb's mode (online, offline or disabled) and the reason for it.

    Args:
        mode: the configured mode.
        offline: whether the run opens no connection.
        environ: may set WANDB_DISABLED and WANDB_MODE, which are read if mode is auto, WANDB_API_KEY and
            WANDB_BASE_URL.
    """
    if mode == "auto" and environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled", "WANDB_DISABLED"
    requested = environ.get("WANDB_MODE", "").strip().lower()
    reason = f"logger.wandb.mode={mode}"
    if mode == "auto" and requested in _MODES:
        mode, reason = _MODES[requested], f"WANDB_MODE={requested}"
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
    """Returns the address of wandb's server."""
    return environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def has_key(server: str, environ: Mapping[str, str]) -> bool:
    """Whether wandb finds an API key for this server: in the environment, or in the file that `wandb login` writes."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for name in (environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            host = urllib.parse.urlsplit(server).hostname
            if name and host and netrc.netrc(user_path(name)).authenticators(host):
                return True
        except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):
            continue
    return False


def replies(server: str, seconds: float = PATIENCE) -> bool:
    """Whether a server replies to a request, not only accepts a connection; through the proxy of the environment."""
    # Imported late: only runs that a server shows need these modules.
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


INIT_SECONDS = 5.0
# Only rows are collected: no source code, git state, command line, installed packages or terminal output.
_SETTINGS: dict[str, str | bool] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "silent": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
}


class Wandb(Tracker):
    """Logs each row at its training step, and the result as the summary."""

    config: WandbConfig

    def __init__(self, config: WandbConfig, run: RunMetadata):
        super().__init__(config, run)
        self._run: Run | None = None
        self._memory = WrittenSteps(Path(run.folder) / "wandb" / "run.json")
        self._mode: Mode = "disabled"

    def start(self) -> str | None:
        self._mode, reason = mode_of(self.config.mode, self.run.offline, os.environ)
        if self._mode == "disabled":
            return f"disabled ({reason})"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to wandb's developers
        import wandb

        os.chdir(self.run.folder)  # wandb records the paths of its files, and a parent folder's name may be secret
        settings = {name: value for name, value in _SETTINGS.items() if name in wandb.Settings.model_fields}
        machine = {"x_disable_stats": self._mode == "offline"}  # collecting statistics uses the network
        self._memory.save()  # so that the next attempt uses the same id
        config = masked_data(self.config.model_dump(mode="json"))
        self._run = wandb.init(
            project=config["project"] or os.environ.get("WANDB_PROJECT") or "lmtool",
            entity=config["entity"],
            group=config["group"] or self.run.group,
            tags=config["tags"] or None,
            name=self.run.name,
            id=self._memory.id,
            resume="allow",
            mode=self._mode,
            dir=".",
            job_type=self.run.command,
            config=dict(self.run.config),
            settings=wandb.Settings(**settings, **machine, init_timeout=INIT_SECONDS),
        )
        if self._mode == "online":
            return str(self._run.url)
        return f"offline ({reason})"

    def write(self, row: JsonMapping) -> None:
        split, step = str(row["split"]), int(row["step"])
        if self._run is None or not self._memory.is_new(split, step):
            return
        self._run.log({f"{split}/{name}": value for name, value in numbers(row)}, step=step)
        self._memory.note(split, step)

    def end(self, result: JsonMapping | None) -> str | None:
        if self._run is None:
            return None
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=0 if result is not None else 1)
        return f"`wandb sync {self.run.folder}/wandb/offline-run-*` uploads it" if self._mode == "offline" else None


class WrittenSteps:
    """The id of a wandb run and the last step written to each split, saved in the run folder, so that a resumed run
    does not write a row twice."""

    def __init__(self, path: Path):
        self.path = path
        self.id, self._steps = uuid.uuid4().hex[:12], dict[str, int]()
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            saved = json.loads(path.read_text(encoding="utf-8"))
            self.id, self._steps = str(saved["id"]), {str(name): int(step) for name, step in saved["steps"].items()}

    def is_new(self, split: str, step: int) -> bool:
        return step > self._steps.get(split, -1)

    def note(self, split: str, step: int) -> None:
        self._steps[split] = step
        self.save()

    def save(self) -> None:
        draft = draft_path(real_folder(self.path.parent) / self.path.name)
        draft.write_text(json.dumps({"id": self.id, "steps": self._steps}) + "\n", encoding="utf-8")
        draft.replace(self.path)  # without sync: writing a row twice after a power failure is harmless
