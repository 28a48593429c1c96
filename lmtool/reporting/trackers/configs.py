"""The configurations of trackers. Imports no torch, and no tracker."""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.reporting.trackers.reach import has_key, server_of


class TrackerConfig(Config):
    """Base of every tracker's configuration: a run has any number of them, each under its name in `logger`."""

    many: ClassVar[bool] = True
    package: ClassVar[str | None] = None
    """The Python package it needs beyond lmtool's own."""
    extra: ClassVar[str] = "trackers"
    """The extra of lmtool that installs the package."""

    @property
    def needs_network(self) -> bool:
        """Whether it cannot do without a connection."""
        return False

    def missing(self, key: str) -> Problem | None:
        """What this machine lacks for it, if anything: looked for without importing it."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        message = f"{key} needs the Python package {self.package}, which is not installed"
        return Problem(key, message, f"pip install 'lmtool[{self.extra}]'")

    def fallback(self) -> TrackerConfig | None:
        """What to try where this one cannot begin; None: nothing."""
        return None

    def left(self, folder: str) -> str:
        """What becomes of what it was not done with when its run ended. folder: of the run."""
        return "its last rows may be missing there, metrics.jsonl has every row"


@component("logger", "wandb", builder="lmtool.reporting.trackers.wandb:Wandb")
class WandbConfig(TrackerConfig):
    """Weights & Biases. Its key stands in WANDB_API_KEY, or where `wandb login` puts it; never here."""

    package: ClassVar[str | None] = "wandb"

    project: str | None = Field(
        None, description="Name of the project. Null: WANDB_PROJECT, else lmtool.", min_length=1, max_length=128
    )
    entity: str | None = Field(
        None, description="User or team that owns the project. Null: WANDB_ENTITY, else the key's own.", min_length=1
    )
    group: str | None = Field(
        None,
        description="Runs that are shown together. Null: of a sweep's job the sweep's name, else none.",
        min_length=1,
    )
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), description="Words to find the run by, of up to 64 characters."
    )
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        "auto",
        description="online, offline (files for `wandb sync`), disabled. auto: WANDB_MODE, else online where there is "
        "a key and the server answers within 2 seconds, else offline.",
    )

    @property
    def needs_network(self) -> bool:
        return self.mode == "online"

    def missing(self, key: str) -> Problem | None:
        server = server_of(os.environ)
        if (problem := super().missing(key)) is not None or self.mode != "online" or has_key(server, os.environ):
            return problem
        hint = f"set WANDB_API_KEY, type `wandb login`, or give {key}.mode=offline"
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
        description="Folder of the event files, one below it for each run. Null: the run's own, runs/NAME/tensorboard.",
        min_length=1,
    )
