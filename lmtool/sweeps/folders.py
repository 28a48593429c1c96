"""The folders of a sweep and its jobs, so that rerunning the command resumes the sweep.

A job is identified by its configuration or its varied keys, never by its number, since the user may extend the grid.
The job's folder keeps its first name, NUMBER_key-value_..., and is found again by its submitted.json; if that is lost,
by the configuration that ran there (config.yaml), or by the overrides in its job.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.compose import CheckedOverrides
from lmtool.config.saved import read_yaml
from lmtool.errors import DONE, TERMINATED, UserError, cannot_write
from lmtool.reporting.sweep_files import JOB, is_finished
from lmtool.runs.files import replace_text
from lmtool.runs.identity import FREE_KEYS, SUBMITTED, changed_values, finished_result
from lmtool.runs.locks import Owner
from lmtool.system.files import real_folder, require_no_link
from lmtool.system.secrets import masked_data
from lmtool.system.terminal import say

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LOG = "job.log"


def write_record(folder: Path, name: str, record: Mapping[str, object]) -> None:
    """Writes a JSON file atomically, with secrets masked."""
    text = json.dumps(masked_data(dict(record)), indent=1, ensure_ascii=False)
    replace_text(folder / name, text + "\n")


def read_record(folder: Path, name: str = JOB) -> JsonObject:
    """Reads the JSON object in a file; returns {} if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return {}


def is_done(folder: Path, has_result: bool) -> bool:
    """Whether the job in a folder succeeded. has_result: whether the job's command writes a result.json."""
    return read_record(folder).get("exit_status") == DONE and (not has_result or finished_result(folder) is not None)


def running_process(record: JsonMapping) -> str | None:
    """Returns "process ID" or "SLURM job ID" if a job is certainly running or queued, otherwise None."""
    queued = record.get("slurm")
    if isinstance(queued, str) and (not is_finished(record) or record.get("exit_status") == TERMINATED):
        return f"SLURM job {queued}" if queue_state(queued) else None
    if not record or is_finished(record):
        return None
    with suppress(TypeError):
        owner = Owner(**record.get("owner", {}))
        if owner == Owner(**{**asdict(owner), "host": Owner.me().host}) and owner.alive():
            return f"process {owner.pid}"
    return None


def queue_state(job_id: str) -> str | None:
    """Returns the state of a SLURM job (RUNNING, PENDING, ...); None if it has ended, "" if SLURM does not answer."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return ""
    return answer.stdout.split()[0] if answer.stdout.split() else None


SUBMISSION = "submission.json"
MAX_FOLDER_NAME = 120
"""Maximum number of characters in the name of a job's folder; file systems allow 255 bytes."""
_RUN_CONFIG = "config.yaml"
_SUBMITTED_KEYS = {"overrides": list, "varied": dict, "config": dict}
_OTHER_SWEEP = "set another name=, or repeat the command that started the sweep"


@dataclass(frozen=True)
class JobEntry:
    """A job and its folder.

    overrides: all overrides. varied: the overrides that differ between jobs, by key. config: the configuration with
    secrets masked. data: the configuration with secrets.
    """

    number: int
    folder: Path
    overrides: tuple[str, ...]
    varied: dict[str, str]
    config: dict[str, object]
    data: dict[str, object]


def split_overrides(checked: CheckedOverrides) -> tuple[dict[str, str], list[str]]:
    """Returns the typed overrides with a single value, by key, and the keys with several values."""
    parser = OverridesParser.create()
    fixed: dict[str, str] = {}
    varied: list[str] = []
    for text in [*checked.choices, *checked.values]:
        key, _, value = text.lstrip("+").partition("=")
        if parser.parse_override(text).is_sweep_override():
            varied.append(key)
        else:
            fixed[key] = value
    return fixed | dict(checked.verbatim), varied


class SweepFolder:
    """The folder of a sweep. Nothing is written before `claim`."""

    def __init__(self, path: Path, command: str, checked: CheckedOverrides):
        self.path, self.command = path, command
        self.fixed, self.varied = split_overrides(checked)
        self.previous = read_record(path, SUBMISSION)
        if not self.previous and os.path.lexists(path / SUBMISSION):
            raise UserError(
                f"{path / SUBMISSION} is damaged: it has the values that all jobs of the sweep share",
                f"rm {path / SUBMISSION}; the jobs that are done are still recognized",
            )
        self._unrecorded: set[Path] = set()  # folders whose submitted.json must be written
        folders = sorted(folder for folder in path.glob("*/") if folder.name.partition("_")[0].isdecimal())
        self.entries = {folder: job for folder in folders if (job := self._job_in(folder)) is not None}
        self._next_number = 1 + max((int(folder.name.partition("_")[0]) for folder in self.entries), default=-1)
        self._require_same()

    def _job_in(self, folder: Path) -> JsonObject | None:
        present = [name for name in (SUBMITTED, _RUN_CONFIG, JOB) if os.path.lexists(folder / name)]
        if not present:
            return None
        submitted = read_record(folder, SUBMITTED)
        if all(isinstance(submitted.get(key), kind) for key, kind in _SUBMITTED_KEYS.items()):
            return submitted
        problem = f"{folder / SUBMITTED} is {'damaged' if SUBMITTED in present else 'missing'}"
        record, config = read_record(folder), None
        with suppress(OSError, UserError):
            config = read_yaml(folder / _RUN_CONFIG)
        job = {"overrides": record.get("overrides"), "varied": record.get("varied"), "config": config}
        job = {key: job[key] if isinstance(job[key], kind) else kind() for key, kind in _SUBMITTED_KEYS.items()}
        source = _RUN_CONFIG if job["config"] else JOB
        if not job["config"] and not job["overrides"]:
            raise UserError(
                f"{problem}, and neither {_RUN_CONFIG} nor {JOB} there says which job it was",
                f"restore the file, or rm -r {folder}: then the job runs again",
            )
        say(f"warning: {problem}; the job is recognized by {source}", sys.stderr)
        self._unrecorded.add(folder)
        return job

    def _require_same(self) -> None:
        if not self.previous:
            return
        if self.previous.get("command") != self.command:
            message = f"{self.path} holds a sweep of lmtool {self.previous.get('command')}, not of {self.command}"
            raise UserError(message, _OTHER_SWEEP)
        old: dict[str, str] = self.previous.get("fixed", {})
        new: dict[str, str] = masked_data(self.fixed)
        swept = {*self.varied, *self.previous.get("varied", ())}
        changed_keys = [
            f"{key} {old.get(key, '(not typed)')} -> {new.get(key, '(not typed)')}"
            for key in sorted({*old, *new} - swept)
            if key.split(".")[0] not in FREE_KEYS and old.get(key) != new.get(key)
        ]
        if changed_keys:
            raise UserError(f"{self.path} holds a sweep with other values: {'; '.join(changed_keys)}", _OTHER_SWEEP)

    def submitted(self) -> dict[Path, Sequence[str]]:
        """Returns the overrides of all submitted jobs, by folder, as far as they are known."""
        return {folder: job["overrides"] for folder, job in self.entries.items() if job["overrides"]}

    def entry(self, job: Sequence[str], config: dict[str, object], data: dict[str, object]) -> JobEntry:
        """Returns a job with its existing folder, or with the name of a new one. config, data: the job's configuration,
        with secrets masked and with secrets. Raises UserError if a folder with the same varied values has another
        configuration."""
        texts = [text.lstrip("+") for text in job]
        pairs = dict(text.split("=", 1) for text in texts)
        varied = {key: value for key, value in pairs.items() if self.fixed.get(key) != value}
        for folder, submitted in self.entries.items():
            same_overrides = not submitted["config"] and {*submitted["overrides"]} == {*masked_data(texts)}
            if same_overrides or (submitted["config"] and not changed_values(submitted["config"], config)):
                return _entry_in(folder, texts, varied, config, data)
        for folder, submitted in self.entries.items():
            if varied and submitted["config"] and submitted["varied"] == masked_data(varied):
                keys = changed_values(submitted["config"], config)
                raise UserError(f"{folder} holds a job of another configuration: {'; '.join(keys)}", _OTHER_SWEEP)
        folder = self.path / folder_name(self._next_number, masked_data(varied))
        self._next_number += 1
        self._unrecorded.add(folder)
        self.entries[folder] = {"overrides": texts, "varied": masked_data(varied), "config": config}
        return _entry_in(folder, texts, varied, config, data)

    def claim(self, entries: Sequence[JobEntry]) -> None:
        """Writes the submission, and creates the folders of the jobs. Raises UserError if writing fails."""
        submission = {
            "command": self.command,
            "fixed": {**self.previous.get("fixed", {}), **self.fixed},
            "varied": [*dict.fromkeys([*self.previous.get("varied", ()), *self.varied])],
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_record(self.path, SUBMISSION, submission)
            for entry in entries:
                if entry.folder in self._unrecorded:
                    real_folder(entry.folder)
                    submitted = {"overrides": entry.overrides, "varied": entry.varied, "config": entry.config}
                    write_record(entry.folder, SUBMITTED, submitted)
        except OSError as error:
            raise cannot_write(Path(error.filename or self.path), error, "name") from error


def _entry_in(
    folder: Path, texts: Sequence[str], varied: dict[str, str], config: dict[str, object], data: dict[str, object]
) -> JobEntry:
    if not (folder / SUBMITTED).is_file():  # the folder of an earlier job may be a link to another disk
        require_no_link(folder)
    require_no_link(folder / LOG)
    location = {"name": None, "run_dir": str(folder)} if "run_dir" in data else {}
    return JobEntry(int(folder.name.partition("_")[0]), folder, tuple(texts), varied, config, data | location)


def folder_name(number: int, varied: dict[str, str]) -> str:
    """Returns a name such as `3_lr-1e-4_seed-1`: the number, and the last part of each varied key with its value,
    truncated to MAX_FOLDER_NAME. The name can be typed in checkpoint=, so it has no `=` or comma."""
    parts = [(key.rpartition(".")[2], value) for key, value in varied.items()]
    words = ["-".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part).strip("-.") for part in pair).strip("-") for pair in parts]
    return "_".join([str(number), *filter(None, words)])[:MAX_FOLDER_NAME].rstrip("-._")


# An optuna search is resumed by a new study that gets the results in the job folders. Optuna's own storage is not used,
# since the optuna version that Hydra's sweeper needs does not work with current SQLAlchemy.


class Sweeper(Protocol):
    """A sweeper of Hydra. Only the optuna sweeper has the members below `sweep`."""

    launcher: object

    def sweep(self, arguments: list[str]) -> object: ...

    direction: str
    storage: object
    study_name: str | None
    n_trials: int

    def _get_directions(self) -> list[str]: ...

    def _parse_sweeper_params_config(self) -> list[str]: ...


def resume_search(sweeper: Sweeper, arguments: list[str], jobs: Mapping[Path, JsonMapping], has_result: bool) -> None:
    """Passes earlier trials to an optuna sweeper, unless the user configured a storage: finished trials count,
    unfinished trials run first. arguments: the overrides of all jobs. has_result: whether the sweep's command writes a
    result.json."""
    import optuna
    from hydra_plugins.hydra_optuna_sweeper import _impl

    _silence()
    if sweeper.storage is not None or len(sweeper._get_directions()) > 1:
        return
    params = [*sweeper._parse_sweeper_params_config(), *arguments]
    distributions, _ = _impl.create_params_from_overrides(params)
    sweeper.storage, sweeper.study_name = optuna.storages.InMemoryStorage(), sweeper.study_name or "sweep"
    study = optuna.create_study(
        study_name=sweeper.study_name, storage=sweeper.storage, directions=sweeper._get_directions()
    )
    for folder, job in jobs.items():
        varied = job["varied"]
        try:
            values = {
                name: _parse(distribution, varied[name.lstrip("+")]) for name, distribution in distributions.items()
            }
        except (KeyError, ValueError):
            continue  # from another search space
        value = read_record(folder).get("value")
        if is_done(folder, has_result) and isinstance(value, int | float):
            trial = optuna.trial.create_trial(params=values, distributions=distributions, value=float(value))
            study.add_trial(trial)
            sweeper.n_trials -= 1
        else:
            study.enqueue_trial(values)
    if sweeper.n_trials < 1 and not study.trials:
        raise UserError(f"hydra.sweeper.n_trials={sweeper.n_trials} runs no job", "set hydra.sweeper.n_trials=10")


def start_new_search(sweeper: Sweeper) -> None:
    """Makes an optuna sweeper start a new search in memory."""
    _silence()
    sweeper.storage = None


def _silence() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def _parse(distribution: BaseDistribution, text: str) -> object:
    if hasattr(distribution, "choices"):
        choices = [choice for choice in distribution.choices if str(choice) == text]
        if not choices:
            raise ValueError(text)
        return choices[0]
    value = int(text) if type(distribution).__name__.startswith("Int") else float(text)
    if not distribution._contains(distribution.to_internal_repr(value)):
        raise ValueError(text)
    return value
