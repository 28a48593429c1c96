"""Weights & Biases. One run of it is one run folder, which holds its id: a resumed run continues it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtool.reporting.trackers.base import RunMetadata, Tracker, numbers
from lmtool.reporting.trackers.configs import Mode, WandbConfig, mode_of
from lmtool.system.files import draft_of, real_folder
from lmtool.system.secrets import masked_data

INIT_SECONDS = 5.0
# Nothing but rows is collected: no sources, git state, command line, installed packages or screen.
_SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "silent": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
}


class Wandb(Tracker):
    """Rows as they come, by the step of training; the result as the summary."""

    config: WandbConfig

    def __init__(self, config: WandbConfig, run: RunMetadata):
        super().__init__(config, run)
        self._run: Any = None
        self._memory = WrittenSteps(run.path / "wandb" / "run.json")
        self._mode: Mode = "disabled"

    def begin(self) -> str | None:
        self._mode, reason = mode_of(self.config.mode, self.run.offline, os.environ)
        if self._mode == "disabled":
            return f"disabled ({reason})"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's own, to its makers
        import wandb

        os.chdir(self.run.folder)  # wandb notes the paths of its files; what lies above may hold a secret
        known = {name: value for name, value in _SETTINGS.items() if name in wandb.Settings.model_fields}
        machine = {"x_disable_stats": self._mode == "offline"}  # looks for its numbers on the network too
        self._memory.save()  # an attempt that fails has the id of the one after it
        typed = masked_data(self.config.model_dump(mode="json"))
        self._run = wandb.init(
            project=typed["project"] or os.environ.get("WANDB_PROJECT") or "lmtool",
            entity=typed["entity"],
            group=typed["group"] or self.run.group,
            tags=typed["tags"] or None,
            name=self.run.name,
            id=self._memory.id,
            resume="allow",
            mode=self._mode,
            dir=".",
            job_type=self.run.command,
            config=dict(self.run.config),
            settings=wandb.Settings(**known, **machine, init_timeout=INIT_SECONDS),
        )
        if self._mode == "online":
            return str(self._run.url)
        return f"offline ({reason})"

    def write(self, row: Mapping[str, Any]) -> None:
        split, step = str(row["split"]), int(row["step"])
        if self._run is None or not self._memory.is_new(split, step):
            return
        self._run.log({f"{split}/{name}": value for name, value in numbers(row)}, step=step)
        self._memory.note(split, step)

    def end(self, result: Mapping[str, Any] | None) -> str | None:
        if self._run is None:
            return None
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=0 if result is not None else 1)
        return f"`wandb sync {self.run.folder}/wandb/offline-run-*` uploads it" if self._mode == "offline" else None


class WrittenSteps:
    """The id of a run of wandb and the steps of the rows that it has, in a file of the run folder: rows that a resumed
    run takes again are not written again."""

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
        draft = draft_of(real_folder(self.path.parent) / self.path.name)
        draft.write_text(json.dumps({"id": self.id, "steps": self._steps}) + "\n", encoding="utf-8")
        draft.replace(self.path)  # without waiting for the disk: a row twice after a power cut costs nothing
