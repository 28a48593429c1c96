"""The folder of a sweep read as plain data: a child a job, each with what was varied and how it ended.

The sweep may be running in another process: a file that is missing, damaged or half written becomes the reason of its
job.

runs/NAME/sweep.json                 what was asked for: the overrides of each job, where they are known, and when
runs/NAME/3_lr-0.001/submitted.json  what the job is; without a job.json it has not started
runs/NAME/3_lr-0.001/job.json        how it stands, or ended; no error and no end: it runs, or was killed
runs/NAME/3_lr-0.001/result.json     as every run has it
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtool.errors import DONE, FAULT, INTERRUPTED, REQUEUE, TERMINATED, UserError
from lmtool.reporting.run_files import RunFiles, read_object
from lmtool.reporting.scores import score_of
from lmtool.runs.identity import SUBMITTED as SUBMITTED
from lmtool.runs.locks import Owner, is_held

PLAN, JOB = "sweep.json", "job.json"
DONE_JOB, NO_SCORE, RUNNING, STOPPED, FAILED, NOT_STARTED, DAMAGED = (
    "done", "no score", "running", "stopped", "failed", "not started", "damaged",
)  # fmt: skip
_STOPPED = (REQUEUE, INTERRUPTED, TERMINATED)
_TAIL = 4096
# Keys that do not change what a job learns.
_LOCATION_KEYS = ("name", "run_dir")


@dataclass(frozen=True)
class ReportedJob:
    """A job of a sweep. value: its score, finite, of a job that is done; None else. status: done, no score, running,
    stopped, failed, not started or damaged, with its reason. result: result.json, {} where there is none."""

    number: int
    folder: Path
    overrides: dict[str, str]
    status: str
    reason: str = ""
    exit_status: int = FAULT
    metric: str | None = None
    value: float | None = None
    standard_error: float | None = None
    seconds: float | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> str:
        """The seed it ran with; "" where nothing says."""
        return self.overrides.get("seed", str(self.result.get("seed", "")))

    @property
    def learns(self) -> str:
        """The task, else the objective: what scores are compared within."""
        return str(
            self.result.get("task")
            or self.overrides.get("task")
            or self.result.get("objective")
            or self.overrides.get("objective")
            or ""
        )


@dataclass
class SweepFiles:
    """The jobs of a sweep by number, those that have not started too. planned: how many were asked for; None: unknown.
    problems: sentences about what could not be read."""

    folder: Path
    jobs: list[ReportedJob] = field(default_factory=list)
    command: str = ""
    planned: int | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds the jobs of a sweep."""
    return (folder / PLAN).is_file() or next(folder.glob(f"*/{JOB}"), None) is not None


def read_sweep(folder: str | Path) -> SweepFiles:
    """Read what is there. UserError where the folder holds no sweep."""
    sweep = SweepFiles(Path(folder))
    if not is_sweep(sweep.folder):
        what = "holds no sweep: no job.json in a folder of it" if sweep.folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {what}", "give the folder of a sweep: runs/finetune-sweep-0001")
    sweep.jobs = [_job(path) for path in sweep.folder.glob(f"*/{JOB}")]
    _add_planned(sweep)
    sweep.jobs.sort(key=lambda job: (job.number, str(job.folder)))
    return sweep


def count_ended(folder: Path) -> int:
    """The number of jobs of a sweep that have ended, in whatever way."""
    return sum(has_ended(read_object(RunFiles(path.parent), JOB)) for path in folder.glob(f"*/{JOB}"))


def has_ended(record: Mapping[str, Any]) -> bool:
    """Whether a job.json says how its job ended; one that waits in a queue to be started again has not."""
    return record.get("exit_status") == DONE or (bool(record.get("error")) and record.get("exit_status") != REQUEUE)


def ended_as(exit_status: Any) -> str:
    """The status of a job that has ended."""
    return DONE_JOB if exit_status == DONE else STOPPED if exit_status in _STOPPED else FAILED


def _job(path: Path) -> ReportedJob:
    files = RunFiles(path.parent)
    record = read_object(files, JOB)
    result = read_object(files, "result.json", needed=False)
    number = record.get("job")
    number = number if isinstance(number, int) else _number(path.parent)
    if not result and isinstance(record.get("metrics"), dict):
        result = {"metrics": record["metrics"]}  # of a command that leaves no result.json
    typed = record.get("overrides") or read_object(RunFiles(path.parent), SUBMITTED, needed=False).get("overrides")
    job = ReportedJob(number, path.parent, overrides_of(typed), DAMAGED, result=result)
    if not record:
        return _with(job, reason=" ".join(files.problems) or "its job.json is empty")
    status = record.get("exit_status")
    exit_status = status if isinstance(status, int) and not isinstance(status, bool) else FAULT
    job = _with(job, exit_status=exit_status, seconds=_finite(result.get("seconds")) or _finite(record.get("seconds")))
    if not has_ended(record):
        running = is_held(path.parent / "LOCK") or _alive(record.get("owner"))
        reason = last_step_text(path.parent) if running else "it did not end"
        return _with(job, status=RUNNING if running else STOPPED, reason=reason)
    if exit_status != DONE:
        return _with(job, status=ended_as(exit_status), reason=str(record.get("error")))
    return _scored(job, record)


def _number(folder: Path) -> int:
    """The number that a job's folder begins with (3_lr-0.001), -1 where there is none."""
    first = folder.name.partition("_")[0]
    return int(first) if first.isdecimal() and len(first) < 10 else -1


def last_step_text(folder: Path) -> str:
    """'at step N', from the last complete rows of metrics.jsonl; "" if there are none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
            lines = file.read(_TAIL).splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError):
            return f"at step {int(json.loads(line)['step'])}"
    return ""


def _alive(owner: Any) -> bool:
    """Whether the process that a job.json names may still be at work."""
    try:
        return Owner(**owner).alive()
    except TypeError:
        return False


def _scored(job: ReportedJob, record: dict[str, Any]) -> ReportedJob:
    """A job that is done, with its score."""
    metric = record.get("metric") or job.result.get("metric")
    value = _finite(record.get("value", job.result.get("value")))
    job = _with(job, metric=str(metric) if metric else None, value=value, status=DONE_JOB)
    if value is None:
        reason = f"its {metric} is no finite number" if metric else "it gave no score"
        return _with(job, status=NO_SCORE, reason=reason)
    examples = job.result.get("validation_examples")
    row = {"metric": metric, "value": value, "standard_error": job.result.get("standard_error")}
    score = score_of(row, None, examples if isinstance(examples, int) else None)
    return _with(job, standard_error=_finite(None if score is None else score.standard_error))


def _with(job: ReportedJob, **changes: Any) -> ReportedJob:
    return ReportedJob(**{**vars(job), **changes})


def _finite(value: Any) -> float | None:
    """A finite number as a float, None for anything else."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if known and math.isfinite(value) else None
    except OverflowError:
        return None


def overrides_of(typed: Any) -> dict[str, str]:
    """Overrides by key, in the order typed; what stands for no learning (name, run_dir) left out."""
    words = typed if isinstance(typed, list) else []
    pairs = (str(word).lstrip("+").partition("=") for word in words)
    return {key: value for key, equals, value in pairs if equals and key not in _LOCATION_KEYS}


def _add_planned(sweep: SweepFiles) -> None:
    """The command, and the jobs that were asked for and have not started."""
    waiting = [path.parent for path in sweep.folder.glob(f"*/{SUBMITTED}") if not (path.parent / JOB).is_file()]
    for folder in waiting:
        overrides = overrides_of(read_object(RunFiles(folder), SUBMITTED).get("overrides"))
        sweep.jobs.append(ReportedJob(_number(folder), folder, overrides, NOT_STARTED))
    files = RunFiles(sweep.folder)
    plan = read_object(files, PLAN, needed=False)
    sweep.problems += files.problems
    sweep.command = str(plan.get("command") or next(iter(_commands(sweep.jobs)), ""))
    planned = plan.get("jobs")
    if not isinstance(planned, list):
        return
    sweep.planned = len(planned)
    existing = {_words(job.overrides) for job in sweep.jobs}
    for number, typed in enumerate(planned):
        overrides = overrides_of(typed)
        if _words(overrides) not in existing:
            sweep.jobs.append(ReportedJob(number, sweep.folder / str(number), overrides, NOT_STARTED))


def _commands(jobs: Sequence[ReportedJob]) -> Iterator[str]:
    return (str(job.result["command"]) for job in jobs if job.result.get("command"))


def _words(overrides: dict[str, str]) -> tuple[str, ...]:
    return tuple(sorted(f"{key}={value}" for key, value in overrides.items()))
