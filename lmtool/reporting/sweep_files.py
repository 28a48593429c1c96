"""Reads the folder of a sweep as plain data: one subfolder per job. The sweep may still be running. A missing or
damaged file is reported as the reason of its job.

runs/NAME/sweep.json                 the requested jobs: their overrides, if known, and the time
runs/NAME/3_lr-0.001/submitted.json  the job; it has not started if there is no job.json
runs/NAME/3_lr-0.001/job.json        the job's state; without error and exit status it is running or was killed
runs/NAME/3_lr-0.001/result.json     as in every run
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import DONE, FAULT, INTERRUPTED, REQUEUE, TERMINATED, UserError
from lmtool.reporting.run_files import RunFiles, as_object, read_object, read_result, scored_rows
from lmtool.reporting.scores import score_of
from lmtool.reporting.text import is_number
from lmtool.runs.files import SCORED_ROWS
from lmtool.runs.finding import SWEEP
from lmtool.runs.identity import SUBMITTED as SUBMITTED
from lmtool.runs.locks import Owner, is_held

JOB = "job.json"
DONE_JOB, NO_SCORE, RUNNING, STOPPED = "done", "no score", "running", "stopped"
FAILED, NOT_STARTED, DAMAGED, REPEATED = "failed", "not started", "damaged", "repeated"
_STOP_STATUSES = (REQUEUE, INTERRUPTED, TERMINATED)
# Bytes at the end of metrics.jsonl in which the last step is looked for.
_TAIL_BYTES = 4096
# Keys that do not affect training.
_LOCATION_KEYS = ("name", "run_dir")


@dataclass(frozen=True)
class ReportedJob:
    """A job of a sweep.

    status: done, no score, running, stopped, failed, not started, damaged or repeated. reason: explains the status.
    value: the finite score of a job that is done, otherwise None. rows: the digest of the rows that the value is a
    score on, "" for scores on text, None if unknown. result: result.json, or {}."""

    number: int
    folder: Path
    overrides: dict[str, str]
    status: str
    reason: str = ""
    exit_status: int = FAULT
    metric: str | None = None
    value: float | None = None
    rows: str | None = ""
    standard_error: float | None = None
    seconds: float | None = None
    result: JsonObject = field(default_factory=dict)

    @property
    def seed(self) -> str:
        """The job's seed; "" if unknown."""
        return self.overrides.get("seed", str(self.result.get("seed", "")))

    @property
    def task(self) -> str:
        """The task or objective. Only scores on the same task or objective are compared."""
        sources = [(values, key) for key in ("task", "objective") for values in (self.result, self.overrides)]
        return next((str(values[key]) for values, key in sources if values.get(key)), "")


@dataclass
class SweepFiles:
    """The jobs of a sweep by number, including those not started. requested: number of requested jobs; None if unknown.
    problems: sentences about files that could not be read."""

    folder: Path
    jobs: list[ReportedJob] = field(default_factory=list)
    command: str = ""
    requested: int | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds the jobs of a sweep."""
    return (folder / SWEEP).is_file() or next(folder.glob(f"*/{JOB}"), None) is not None


def read_sweep(folder: str | Path) -> SweepFiles:
    """Reads the folder of a sweep. Raises UserError if it is not one."""
    sweep = SweepFiles(Path(folder))
    if not is_sweep(sweep.folder):
        problem = "is not a sweep: no subfolder has a job.json" if sweep.folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {problem}", "name the folder of a sweep, such as runs/finetune-sweep-0001")
    sweep.jobs = _without_repetitions([_job(path) for path in sweep.folder.glob(f"*/{JOB}")])
    _add_unstarted(sweep)
    sweep.jobs.sort(key=lambda job: (job.number, str(job.folder)))
    return sweep


def count_finished(folder: Path) -> int:
    """Returns the number of jobs of a sweep that have ended, successfully or not."""
    return sum(is_finished(read_object(RunFiles(path.parent), JOB)) for path in folder.glob(f"*/{JOB}"))


def is_finished(record: JsonMapping) -> bool:
    """Whether a job has ended according to its job.json; a requeued job has not."""
    return record.get("exit_status") == DONE or (bool(record.get("error")) and record.get("exit_status") != REQUEUE)


def final_status(exit_status: object) -> str:
    """Returns the status of a finished job."""
    return DONE_JOB if exit_status == DONE else STOPPED if exit_status in _STOP_STATUSES else FAILED


def _job(path: Path) -> ReportedJob:
    files = RunFiles(path.parent)
    record = read_object(files, JOB)
    result = read_result(files, required=False)
    number = record.get("job")
    if not result and isinstance(record.get("metrics"), dict):
        result = {"metrics": record["metrics"]}  # for commands that write no result.json
    submitted = read_object(RunFiles(path.parent), SUBMITTED, required=False)
    overrides = record.get("overrides") or submitted.get("overrides")
    job = ReportedJob(
        number=number if isinstance(number, int) else _number(path.parent),
        folder=path.parent,
        overrides=overrides_of(overrides),
        status=DAMAGED,
        seconds=_finite(result.get("seconds")) or _finite(record.get("seconds")),
        result=result,
    )
    if not record:
        return replace(job, reason=" ".join(files.problems) or "its job.json is empty")
    status = record.get("exit_status")
    job = replace(job, exit_status=status if isinstance(status, int) and not isinstance(status, bool) else FAULT)
    if not is_finished(record):
        running = is_held(path.parent / "LOCK") or _is_alive(record.get("owner"))
        reason = last_step_text(path.parent) if running else "it did not end"
        return replace(job, status=RUNNING if running else STOPPED, reason=reason)
    if job.exit_status != DONE:
        return replace(job, status=final_status(job.exit_status), reason=str(record.get("error")))
    return _with_score(job, record)


def _without_repetitions(jobs: list[ReportedJob]) -> list[ReportedJob]:
    first: dict[frozenset[tuple[str, str]], ReportedJob] = {}
    counted = []
    for job in sorted(jobs, key=lambda job: (job.value is None, job.number)):
        original = first.setdefault(frozenset(job.overrides.items()), job)
        if job.overrides and original is not job:
            reason = f"it is the same job as {original.folder.name}, which is counted"
            job = replace(job, status=REPEATED, reason=reason, metric=None, value=None)
        counted.append(job)
    return counted


def _number(folder: Path) -> int:
    """Returns the number at the start of a job's folder (3_lr-0.001); -1 if there is none."""
    first = folder.name.partition("_")[0]
    return int(first) if first.isdecimal() and len(first) < 10 else -1


def last_step_text(folder: Path) -> str:
    """Returns 'at step N', from the last complete rows of metrics.jsonl; "" if there are none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError):
            return f"at step {int(json.loads(line)['step'])}"
    return ""


def _is_alive(owner: object) -> bool:
    with suppress(TypeError):
        return Owner(**as_object(owner)).alive()
    return False


def _with_score(job: ReportedJob, record: JsonObject) -> ReportedJob:
    metric = record.get("metric") or job.result.get("metric")
    value = _finite(record.get("value", job.result.get("value")))
    job = replace(job, metric=str(metric) if metric else None, value=value, status=DONE_JOB, rows=_rows(job, record))
    if value is None:
        return replace(job, status=NO_SCORE, reason=f"its {metric} is not finite" if metric else "it has no score")
    score = score_of({**job.result, "metric": metric, "value": value}, None)
    return replace(job, standard_error=_finite(None if score is None else score.standard_error))


def _rows(job: ReportedJob, record: JsonObject) -> str | None:
    if isinstance(recorded := record.get(SCORED_ROWS), str):  # of a command that writes no result.json
        return recorded
    scores_rows = job.result.get("task") or job.overrides.get("task")
    return scored_rows(RunFiles(job.folder, result=job.result)) if scores_rows else ""


def _finite(value: object) -> float | None:
    try:
        return float(value) if is_number(value) and math.isfinite(value) else None
    except OverflowError:
        return None


def overrides_of(override_list: object) -> dict[str, str]:
    """Returns the overrides by key, in the order typed, without name and run_dir."""
    words = override_list if isinstance(override_list, list) else []
    pairs = (str(word).lstrip("+").partition("=") for word in words)
    return {key: value for key, equals, value in pairs if equals and key not in _LOCATION_KEYS}


def _add_unstarted(sweep: SweepFiles) -> None:
    for folder in (path.parent for path in sweep.folder.glob(f"*/{SUBMITTED}")):
        if not (folder / JOB).is_file():
            overrides = overrides_of(read_object(RunFiles(folder), SUBMITTED).get("overrides"))
            sweep.jobs.append(ReportedJob(_number(folder), folder, overrides, NOT_STARTED))
    files = RunFiles(sweep.folder)
    plan = read_object(files, SWEEP, required=False)
    sweep.problems += files.problems
    commands = (job.result["command"] for job in sweep.jobs if job.result.get("command"))
    sweep.command = str(plan.get("command") or next(commands, ""))
    requested = plan.get("jobs")
    if not isinstance(requested, list):
        return
    sweep.requested = len(requested)
    existing = [job.overrides for job in sweep.jobs]
    for number, typed in enumerate(requested):
        if (overrides := overrides_of(typed)) not in existing:
            sweep.jobs.append(ReportedJob(number, sweep.folder / str(number), overrides, NOT_STARTED))
