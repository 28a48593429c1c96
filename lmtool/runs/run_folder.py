"""The run folder: its lock, configuration, rows of metrics, and results.

runs/NAME/  LOCK  config.yaml  environment.json  log.txt  metrics.jsonl  checkpoints/  result.json
runs/latest  a link to the run that was started last
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch

from lmtool.config import saved as yaml_files
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.runs.checkpoints import resume_point
from lmtool.runs.files import plain_data, read_rows, replace_link, replace_text, to_json, write_errors, write_rows
from lmtool.runs.finding import read_config, saved_steps, step_of
from lmtool.runs.identity import (
    BRANCH_KEYS,
    SUBMITTED,
    changed_values,
    extends_budgets,
    finished_result,
    require_own_folder,
)
from lmtool.runs.locks import Lock
from lmtool.system.files import open_to_append
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import safe_line, say

_FILES = (
    "config.yaml", "environment.json", "facts.json", "log.txt", "metrics.jsonl", "predictions.jsonl", "report.html",
    "result.json", "samples.json",
)  # fmt: skip
_WRITTEN_IN_PLACE = ("LOCK", "log.txt")
_FOLDERS = ("checkpoints", "diverged", "plots", "tensorboard", "wandb")
_METRICS = "metrics.jsonl"
_OTHER_NAME = "set another name=; if the folder is a run, restore its config.yaml"
_PACKAGES = ("lmtool", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "hydra-core", "omegaconf", "datasets")


class RunFolder:
    """The locked folder of a run, used as a context. The end of the context releases the lock; it also removes the
    folder if the run ended with a UserError before the first step.

    config: the resolved configuration as plain data, masked. Everything else is masked when it is written. config_text:
    the same configuration as YAML, with comments. require_same_past: called with this folder and the resume point if
    budgets were increased; raises UserError if the past steps would have been different. None means that budgets may
    not be increased. add_new_keys: adds the keys of newer versions to a saved configuration. Raises UserError if
    another process uses the folder, if it cannot be written, if it is not empty and lmtool did not write it, if it
    holds a run of another configuration, or if the configuration exceeds the limits of `yaml_files.load`.
    """

    writes: ClassVar[bool] = True

    def __init__(
        self,
        path: Path,
        config: Mapping[str, object],
        config_text: str,
        require_same_past: Callable[[Path, Path], None] | None = None,
        add_new_keys: Callable[[Mapping[str, object]], Mapping[str, object]] = dict,
    ):
        self.path = path
        self._require_same_past, self._add_new_keys = require_same_past, add_new_keys
        self._extended_text: str | None = None
        self._first_step: int | None = None
        self._has_rows = False
        self.config: dict[str, object] = plain_data(dict(config))
        self._unwritten_rows = ""
        self.row_counts: Counter[str] = Counter()
        self._resume_point_selected = False
        self._resume_point: Path | None = None
        with write_errors(path):
            self._was_empty = not path.exists() or not any(path.iterdir())
            _require_files(path)
            require_own_folder(path, ("config.yaml", SUBMITTED), "run", "name= or run_dir")
            path.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(path / "LOCK")
        try:
            self.lock.acquire()
            self._save_or_check_config(config_text)
        except BaseException:
            self.lock.release()
            with suppress(OSError):
                path.rmdir()  # succeeds only if nothing was written
            raise

    def _save_or_check_config(self, config_text: str) -> None:
        saved = self.path / "config.yaml"
        if saved.exists():
            self._check_config(saved, config_text)
            return
        try:
            written = yaml_files.load(config_text)
        except yaml_files.TooLarge as error:  # no command would read it again
            hint = "shorten its lists; a folder or a pattern names many files"
            raise UserError(f"{saved}: the configuration has {error.problem}", hint) from error
        if plain_data(written) != self.config:
            raise ValueError("config_text is not the same configuration as config")
        with write_errors(saved):
            replace_text(saved, config_text)

    def _check_config(self, saved: Path, config_text: str) -> None:
        values = yaml_files.read_yaml(saved, _OTHER_NAME)
        if not isinstance(values, dict) or ("command" in self.config and "command" not in values):
            problem = "is empty" if values is None else "is not a configuration of lmtool: it names no command"
            raise UserError(f"{saved} {problem}", _OTHER_NAME)
        try:
            before = self._add_new_keys(plain_data(values))
        except TypeError as error:  # a date
            raise UserError(f"{saved}: {error}", _OTHER_NAME) from error
        if self._require_same_past is not None and extends_budgets(before, self.config):
            self._extended_text = config_text
            return
        hint = "repeat the command that started the run"
        if changed_values(before, self.config) and not changed_values(before, self.config, BRANCH_KEYS):
            hint += f"; branch={self.path}@last starts another run from it, with these values"
        self._require_same(before, str(self.path), hint)

    def _require_same(self, before: Mapping[str, object], origin: str, hint: str) -> None:
        if keys := changed_values(before, self.config):
            raise UserError(
                f"{origin} holds a run of another configuration: {'; '.join(keys)}",
                f"set another name=, or {hint}",
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError) and self._was_empty and not self._has_trained():
            shutil.rmtree(self.path, ignore_errors=True)
        self.lock.release()

    def _has_trained(self) -> bool:
        if self._first_step is None:
            return (self.path / _METRICS).exists() or self.checkpoints.exists()
        return self._has_rows or any(step_of(folder) != self._first_step for folder in saved_steps(self.checkpoints))

    @property
    def extends(self) -> bool:
        """Whether the run's budgets are larger than in its config.yaml."""
        return self._extended_text is not None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def resume_point(self, report: Callable[[str], None] | None = None) -> Path | None:
        """Returns the checkpoint that this run resumes from, see `runs.checkpoints.resume_point`. The first call
        selects it, so that everything is read from the same checkpoint. Raises UserError if the checkpoint has another
        configuration, because config.yaml was changed or removed. report: prints a line about a damaged checkpoint;
        None means log.txt."""
        if not self._resume_point_selected:
            folder = resume_point(self.checkpoints, report or self.log)
            if folder is not None:
                before = self._add_new_keys(read_config(folder))
                if self._require_same_past is not None and extends_budgets(before, self.config):
                    self._require_same_past(self.path, folder)
                else:
                    self._require_same(before, str(folder), f"restore {self.path / 'config.yaml'}")
            self._resume_point, self._resume_point_selected = folder, True
        return self._resume_point

    def announce(self) -> None:
        """Links `latest`, next to the folder, to this run. If budgets were increased, saves them, and keeps the earlier
        result with the status "extended"."""
        with write_errors(self.path.parent / "latest"):
            if self._extended_text is not None:
                if (result := finished_result(self.path)) is not None:
                    self.write_json("result.json", {**result, "status": "extended"})
                replace_text(self.path / "config.yaml", self._extended_text)
                self._extended_text = None
            if not (self.path / SUBMITTED).is_file():  # jobs of a sweep are not linked
                with suppress(IsADirectoryError):  # a folder in place of the link, from a copy of runs/, stays
                    replace_link(self.path.parent / "latest", self.path.name)

    def write_environment(self, arguments: Sequence[str], metadata: Mapping[str, object] | None = None) -> None:
        """Writes environment.json: versions, processor, threads, the masked command line and `metadata` (device,
        precision). Never writes environment variables."""
        content: dict[str, object] = {
            "arguments": list(arguments),
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        content["packages"] = {name: version for name in _PACKAGES if (version := _version(name))}
        content |= {"processor": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
        self.write_json("environment.json", content | dict(metadata or {}))

    def write_json(self, name: str, content: object) -> None:
        """Writes a JSON file of the run atomically, with secrets masked."""
        with write_errors(self.path / name):
            replace_text(self.path / name, to_json(masked_data(plain_data(content))) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Writes a file of JSON lines atomically, row by row, with secrets masked."""
        with write_errors(self.path / name):
            write_rows(self.path / name, rows, named_by_user=False)

    def append_log(self, line: str) -> None:
        """Appends a line to log.txt, with secrets masked. Raises OSError if writing fails."""
        with os.fdopen(open_to_append(self.path / "log.txt"), "ab", buffering=0) as file:
            file.write(f"{safe_line(line)}\n".encode())

    def log(self, text: str) -> None:
        """Appends a line with the time to log.txt. If that fails, prints the line to stderr instead."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"
        try:
            self.append_log(line)
        except OSError as error:
            say(f"log.txt: {error.strerror}: {line}", sys.stderr)

    def begin_at(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Starts this run after a step of another run, whose rows up to that step become the first rows."""
        self._first_step = step
        self._replace_rows(rows)

    def _replace_rows(self, rows: Iterable[Mapping[str, object]]) -> None:
        with write_errors(self.path / _METRICS):
            replace_text(self.path / _METRICS, "".join(to_json(row, indent=None) + "\n" for row in rows))

    def append(self, row: JsonMapping) -> None:
        """Appends a row to metrics.jsonl. A row that cannot be written is retried with the next row and by `sync`."""
        self._has_rows = True
        self.row_counts[row.get("split", "")] += 1
        self._unwritten_rows += to_json(masked_data(plain_data(dict(row))), indent=None) + "\n"
        try:
            self._flush()
        except OSError as error:
            self.log(f"{_METRICS} cannot be written: {error}")

    def _flush(self, sync: bool = False) -> None:
        if not self._unwritten_rows and not sync:
            return
        content = self._unwritten_rows.encode()
        handle = open_to_append(self.path / _METRICS)
        try:
            end = os.fstat(handle).st_size
            count = os.write(handle, content)
            if count < len(content):  # the disk is full: remove the incomplete row
                os.ftruncate(handle, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten_rows = ""
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)

    def sync(self) -> None:
        """Writes all rows to the disk, before a checkpoint that counts them. Raises OSError if writing fails."""
        self._flush(sync=True)

    def rows(self) -> list[JsonObject]:
        """Reads metrics.jsonl, see `read_rows`."""
        return read_rows(self.path / _METRICS)

    def missing_rows(self, expected: Mapping[str, int], step: int) -> str | None:
        """Returns a sentence about missing or damaged rows up to a step; None if all are there. expected: the number of
        rows by split."""
        try:
            counts = Counter(row.get("split", "") for row in self.rows() if row["step"] <= step)
        except UserError as error:
            return error.message
        lacking = [
            f"{count - counts[split]:,} of {count:,} {split} rows"
            for split, count in expected.items()
            if count > counts[split]
        ]
        if not lacking:
            return None
        return (
            f"{self.path / _METRICS} lacks {' and '.join(lacking)} up to step {step:,}: it was deleted or "
            "changed; the curves of the report begin later or have gaps, nothing else is affected"
        )

    def drop_rows_after(self, step: int) -> None:
        """Removes the rows of steps that will be repeated."""
        rows = [row for row in self.rows() if row["step"] <= step]
        self.row_counts = Counter(row.get("split", "") for row in rows)
        if (self.path / _METRICS).exists():
            self._replace_rows(rows)

    def write_result(self, result: Mapping[str, object]) -> None:
        """Writes result.json. The `status` "done" marks the run as finished."""
        self.write_json("result.json", dict(result))

    def result(self) -> dict[str, object] | None:
        """Reads result.json of a finished run; returns None if the run is unfinished or its budgets were increased."""
        return None if self.extends else finished_result(self.path)


class FollowedFolder(RunFolder):
    """The run folder in ranks above 0, which read its checkpoints but write nothing. Rank 0 holds the lock and writes.
    result: the result that rank 0 read, if the run is finished."""

    writes: ClassVar[bool] = False

    def __init__(self, path: Path, config: Mapping[str, object], result: dict[str, object] | None):
        self.path, self._result = path, result
        self.config = plain_data(dict(config))
        self._resume_point: Path | None = None
        self.row_counts = Counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def extends(self) -> bool:
        return False

    def follow(self, resume_point: Path | None) -> None:
        """Resumes from the checkpoint that rank 0 selected."""
        self._resume_point = resume_point

    def resume_point(self, report: Callable[[str], None] | None = None) -> Path | None:
        return self._resume_point

    def result(self) -> dict[str, object] | None:
        return self._result

    def announce(self) -> None: ...

    def write_environment(self, arguments: Sequence[str], metadata: Mapping[str, object] | None = None) -> None: ...

    def write_json(self, name: str, content: object) -> None: ...

    def write_rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> None: ...

    def append_log(self, line: str) -> None: ...

    def log(self, text: str) -> None: ...

    def begin_at(self, step: int, rows: Iterable[Mapping[str, object]]) -> None: ...

    def append(self, row: Mapping[str, object]) -> None: ...

    def sync(self) -> None: ...

    def missing_rows(self, expected: Mapping[str, int], step: int) -> str | None:
        return None

    def drop_rows_after(self, step: int) -> None: ...


def _require_files(path: Path) -> None:
    """Raises UserError, before training, if a folder, a pipe or a broken link has the name of a file that a run writes.
    Links to files are allowed, since they are replaced; but a link in place of a folder, or of a file that is written
    in place, would make the run write outside its folder."""
    for name in (*_WRITTEN_IN_PLACE, *_FOLDERS):
        if (path / name).is_symlink():
            raise UserError(
                f"{path / name} is a link; a run writes only inside its own folder",
                f"rm {path / name}, or set another name=; run_dir= puts a run on another disk",
            )
    for name in _FILES:
        file = path / name
        if os.path.lexists(file) and not file.is_file():
            kind = "a folder" if file.is_dir() else "a link to nothing" if not file.exists() else "no regular file"
            raise UserError(f"{file} is {kind}; a run writes a file there", "move it away, or set another name=")


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
