"""The run folder: its lock, configuration, rows of metrics, and results.

runs/NAME/  LOCK  config.yaml  environment.json  log.txt  metrics.jsonl  checkpoints/  result.json
runs/latest  a link to the newest
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch
import yaml

from lmtool.config import saved as yaml_files
from lmtool.config.checkpoint import read_config, saved_steps
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.errors import UserError, cannot_write
from lmtool.runs.checkpoints import resume_point
from lmtool.runs.files import lines_of, plain_data, replace_link, replace_text, to_json, write_rows
from lmtool.runs.identity import BRANCH_KEYS, SUBMITTED, changed_values, finished, grows, require_name
from lmtool.runs.locks import Lock
from lmtool.system.files import open_to_append
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import say, shown

_FILES = (
    "config.yaml", "environment.json", "facts.json", "log.txt", "metrics.jsonl", "predictions.jsonl", "report.html",
    "result.json", "samples.json",
)  # fmt: skip
_WRITTEN_IN_PLACE = ("LOCK", "log.txt")
_FOLDERS = ("checkpoints", "diverged", "plots", "tensorboard", "wandb")
SamePast = Callable[[Path, Path], None]
Complete = Callable[[Mapping[str, object]], Mapping[str, object]]
_PACKAGES = ("lmtool", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "hydra-core", "omegaconf", "datasets")


def select_folder(root: Path, name: str | None, run_dir: str | None, stem: str) -> Path:
    """The folder of a run: `run_dir`, else root/NAME, else a new root/STEM-0001, -0002, ... made here: mkdir lets one
    of several processes have it. UserError where a name is no plain name or the folder cannot be made."""
    if run_dir is not None:
        return Path(run_dir).expanduser()
    if name is not None:
        require_name(name)
        return root / name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        used = [
            int(path.name[len(stem) + 1 :]) for path in root.glob(f"{stem}-*") if path.name[len(stem) + 1 :].isdigit()
        ]
        number = max(used, default=0) + 1
        while True:
            folder = root / f"{stem}-{number:04d}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise cannot_write(root, error) from error


class RunFolder:
    """A run's folder, locked. Use as a context: it gives up the lock at the end, and takes the folder away again
    where the run ended in a mistake of the user's before anything was trained.

    config: the resolved configuration as plain data; config_text: the same as YAML, with its comments. Both must be
    masked; everything else is masked where it is written. require_same_past: called with this folder and the checkpoint
    that the run resumes from where budgets have grown since; UserError where its past would be another with them.
    Without it they may not grow. complete: gives a configuration that an older version saved the keys that are newer.

    Raises UserError where another process has the folder, where it cannot be written, or where it holds a run of
    another configuration (naming the keys that differ).
    """

    writes: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        config_text: str,
        require_same_past: SamePast | None = None,
        complete: Complete = dict,
    ):
        self.path = path
        self._require_same_past, self._complete = require_same_past, complete
        self._extended_text: str | None = None
        self._first_step: int | None = None
        self._appended = False
        self.config: dict[str, object] = plain_data(dict(config))
        self._pending = ""
        self.row_counts: Counter[str] = Counter()
        self._chosen = False
        self._resume_point: Path | None = None
        try:
            self._fresh = not path.exists() or not any(path.iterdir())
            _require_files(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        self.lock = Lock(path / "LOCK")
        try:
            self.lock.acquire()
            self._claim(config_text)
        except BaseException:
            self.lock.release()
            with suppress(OSError):
                path.rmdir()  # empty only where nothing could be written
            raise

    def _claim(self, config_text: str) -> None:
        saved = self.path / "config.yaml"
        if saved.exists():
            self._compare(saved, config_text)
            return
        if plain_data(yaml.safe_load(config_text)) != self.config:
            raise ValueError("config_text is not the same configuration as config")
        try:
            replace_text(saved, config_text)
        except OSError as error:
            raise cannot_write(saved, error) from error

    def _compare(self, saved: Path, config_text: str) -> None:
        before = self._complete(plain_data(yaml_files.read_yaml(saved, "set another name=")))
        if self._may_extend(before):
            self._extended_text = config_text
            return
        hint = "repeat the command the run was started with"
        if changed_values(before, self.config) and not changed_values(before, self.config, BRANCH_KEYS):
            hint += f"; branch={self.path}@last starts another run from it, with these values"
        self._require_same(before, str(self.path), hint)

    def _require_same(self, before: Mapping[str, object], origin: str, hint: str) -> None:
        """UserError, naming the keys, where a configuration that this run had before differs from its own."""
        if keys := changed_values(before, self.config):
            raise UserError(
                f"{origin} holds a run of another configuration: {'; '.join(keys)}",
                f"set another name=, or {hint}",
            )

    def _may_extend(self, before: Mapping[str, object]) -> bool:
        return self._require_same_past is not None and grows(before, self.config)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError) and self._fresh and not self._trained():
            shutil.rmtree(self.path, ignore_errors=True)
        self.lock.release()

    def _trained(self) -> bool:
        """Whether there is more than what the run began with."""
        if self._first_step is None:
            return (self.path / "metrics.jsonl").exists() or self.checkpoints.exists()
        return self._appended or any(
            int(folder.name[5:]) != self._first_step for folder in saved_steps(self.checkpoints)
        )

    @property
    def extends(self) -> bool:
        """Whether the run has larger budgets than it was started with, and has not started to use them."""
        return self._extended_text is not None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def resume_point(self, report: Callable[[str], None] | None = None) -> Path | None:
        """The checkpoint this run resumes from, as `resuming.resume_point` has it; chosen at the first call, for all
        that is read from it. report: where damaged checkpoints are reported; log.txt by default. UserError where it is
        of another configuration: config.yaml was changed, or is gone."""
        if not self._chosen:
            folder = resume_point(self.checkpoints, report or self.log)
            if folder is not None:
                before = self._complete(read_config(folder))
                if self._require_same_past is not None and grows(before, self.config):
                    self._require_same_past(self.path, folder)
                else:
                    hint = f"restore {self.path / 'config.yaml'}"
                    self._require_same(before, str(folder), hint)
            self._resume_point, self._chosen = folder, True
        return self._resume_point

    # --- what is reported about the run -------------------------------------------------------------------------------

    def announce(self) -> None:
        """Make this the run that `latest`, beside it, names. One that is extended has its larger budgets from now on:
        its earlier result stays until the new end, and says that it is of another."""
        try:
            if self._extended_text is not None:
                if (result := finished(self.path)) is not None:
                    self.write_json("result.json", {**result, "status": "extended"})
                replace_text(self.path / "config.yaml", self._extended_text)
                self._extended_text = None
            if not (self.path / SUBMITTED).is_file():  # of the jobs of a sweep none is the run that was asked for
                with suppress(IsADirectoryError):  # a copy that followed the link; it is not ours to take away
                    replace_link(self.path.parent / "latest", self.path.name)
        except OSError as error:
            raise cannot_write(self.path.parent / "latest", error) from error

    def write_environment(self, arguments: Sequence[str], metadata: Mapping[str, object] | None = None) -> None:
        """environment.json: versions, processor, threads, the masked command line and `metadata` (device, precision).
        Environment variables are never written."""
        content: dict[str, object] = {
            "arguments": list(arguments),
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        content["packages"] = {name: version for name in _PACKAGES if (version := _version(name))}
        content |= {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
        self.write_json("environment.json", content | dict(metadata or {}))

    def write_json(self, name: str, content: object) -> None:
        """A JSON file of the run, replaced in one move and masked."""
        try:
            replace_text(self.path / name, to_json(masked_data(plain_data(content))) + "\n")
        except OSError as error:
            raise cannot_write(self.path / name, error) from error

    def write_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """A file of JSON lines, replaced in one move and masked; the rows are never held all at once."""
        path = self.path / name
        try:
            write_rows(path, rows, typed=False)
        except OSError as error:
            raise cannot_write(path, error) from error

    def append_log(self, line: str) -> None:
        """A line in log.txt, masked. OSError where the disk refuses; nothing is held back for later."""
        with os.fdopen(open_to_append(self.path / "log.txt"), "ab", buffering=0) as file:
            file.write(f"{shown(line)}\n".encode())

    def log(self, text: str) -> None:
        """A line in log.txt, with the time. A full disk costs the line, not the run."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"
        try:
            self.append_log(line)
        except OSError as error:
            say(f"log.txt: {error.strerror}: {line}", sys.stderr)

    # --- rows -----------------------------------------------------------------------------------------------------

    def begin_at(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Begin behind this step of another run, with its rows until there."""
        self._first_step = step
        try:
            replace_text(self.path / "metrics.jsonl", "".join(to_json(row, indent=None) + "\n" for row in rows))
        except OSError as error:
            raise cannot_write(self.path / "metrics.jsonl", error) from error

    def append(self, row: JsonMapping) -> None:
        """A row of metrics.jsonl. Where the disk refuses, it is kept and written with the next one; `sync` tells."""
        self._appended = True
        self.row_counts[row.get("split", "")] += 1
        self._pending += to_json(masked_data(plain_data(dict(row))), indent=None) + "\n"
        try:
            self._flush()
        except OSError as error:
            self.log(f"metrics.jsonl cannot be written: {error}")

    def _flush(self, sync: bool = False) -> None:
        if not self._pending and not sync:
            return
        content = self._pending.encode()
        handle = open_to_append(self.path / "metrics.jsonl")
        try:
            end = os.fstat(handle).st_size
            written = os.write(handle, content)
            if written < len(content):  # the disk is full: no half row may stay
                os.ftruncate(handle, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._pending = ""
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)

    def sync(self) -> None:
        """Wait until all rows are on the disk: before a checkpoint that supposes them. OSError where they are not."""
        self._flush(sync=True)

    def rows(self) -> list[JsonObject]:
        """The rows of metrics.jsonl; a last line torn by a kill is left out. UserError for any other line that is no
        row."""
        return read_rows(self.path)

    def missing_rows(self, expected: Mapping[str, int], step: int) -> str | None:
        """A sentence about the rows up to a step that were written and are not there, or are no rows. expected: by
        split, how many there should be."""
        try:
            found = Counter(row.get("split", "") for row in self.rows() if row["step"] <= step)
        except UserError as error:
            return error.message
        lacking = [
            f"{count - found[split]:,} of {count:,} {split} rows"
            for split, count in expected.items()
            if count > found[split]
        ]
        if not lacking:
            return None
        return (
            f"{self.path / 'metrics.jsonl'} lacks {' and '.join(lacking)} up to step {step:,}: it was deleted or "
            "changed; the curves of the report begin later or have gaps, all else is as it was"
        )

    def drop_rows_after(self, step: int) -> None:
        """Forget the rows of steps that will be taken again."""
        path = self.path / "metrics.jsonl"
        rows = [row for row in self.rows() if row["step"] <= step]
        self.row_counts = Counter(row.get("split", "") for row in rows)
        if not path.exists():
            return
        try:
            replace_text(path, "".join(to_json(row, indent=None) + "\n" for row in rows))
        except OSError as error:
            raise cannot_write(path, error) from error

    # --- the end --------------------------------------------------------------------------------------------------

    def write_result(self, result: Mapping[str, object]) -> None:
        """result.json. `status` "done" makes the run a finished one."""
        self.write_json("result.json", dict(result))

    def result(self) -> dict[str, object] | None:
        """result.json of a run that is done, else None; None too where its budgets have grown."""
        return None if self.extends else finished(self.path)


def read_rows(run: Path) -> list[JsonObject]:
    """The rows of a run's metrics.jsonl, as `RunFolder.rows` has them."""
    rows = []
    with suppress(FileNotFoundError):
        for number, line in enumerate(lines_of(run / "metrics.jsonl"), 1):
            if line.endswith(b"\n"):
                rows.append(_row(line, f"{run / 'metrics.jsonl'}:{number}"))
    return rows


def _row(line: bytes, where: str) -> dict[str, object]:
    """A row of metrics.jsonl. UserError where it is none."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    raise UserError(f"{where} is no row with a step", "move the file away: the run resumes without these rows")


def _require_files(path: Path) -> None:
    """UserError where something else stands under the name of a file that a run writes: a folder, a pipe, a link to
    nothing. It would be met when the training is done. A link to a file is replaced by the run's own; one in the place
    of a folder, or of a file that is written where it stands, would lead out of the run."""
    for name in (*_WRITTEN_IN_PLACE, *_FOLDERS):
        if (path / name).is_symlink():
            raise UserError(
                f"{path / name} is a link; a run writes inside its own folder alone",
                f"rm {path / name}, or set another name=; run_dir= puts a run on another disk",
            )
    for name in _FILES:
        file = path / name
        if os.path.lexists(file) and not file.is_file():
            kind = "a folder" if file.is_dir() else "a link to nothing" if not file.exists() else "no regular file"
            raise UserError(f"{file} is {kind}; a run writes a file there", "move it away, or set another name=")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the processor, as the system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
