"""Passes the unfinished jobs of a sweep to a launcher of Hydra.

A job receives its complete configuration, which is resolved here. Jobs of submitit may start later, so they run a copy
of the code.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from lmtool import errors
from lmtool.errors import UserError
from lmtool.reporting.console import Output
from lmtool.reporting.sweep_files import JOB, is_finished
from lmtool.runs import identity
from lmtool.sweeps import folders
from lmtool.sweeps.folders import JobEntry, SweepFolder
from lmtool.sweeps.job import STOPPED, Run, SweepJob, perform
from lmtool.sweeps.table import Watch
from lmtool.system.environment import SAFE_PATH, available_cores, child_environment
from lmtool.system.files import real_folder
from lmtool.system.signals import STATUS
from lmtool.system.terminal import counted, say, say_error

if TYPE_CHECKING:
    from submitit import Job

_QUERY_SECONDS = 5.0
"""Time between two queries to SLURM about a job."""


class SubmittedJob:
    """A job that was submitted with submitit. folder: the job's folder in the sweep. by_slurm: whether SLURM runs the
    job; otherwise this machine runs it."""

    def __init__(self, submitted: Job[object], folder: Path, by_slurm: bool):
        self.submitted, self.folder, self.by_slurm = submitted, folder, by_slurm
        self._queried_at = time.monotonic()

    def results(self) -> list[None]:
        """Waits until the job has ended. Returns [None], because the job's outcome is in job.json."""
        while not self.has_ended():
            time.sleep(0.2)
        return [None]

    def has_ended(self) -> bool:
        if self.submitted.paths.result_pickle.exists():
            return True
        if not self.by_slurm:
            return bool(self.submitted.done())
        if time.monotonic() - self._queried_at < _QUERY_SECONDS:
            return False
        self._queried_at = time.monotonic()
        return folders.queue_state(self.submitted.job_id) is None

    def interrupt(self) -> None:
        """Ends the job. A run in training saves a checkpoint first; a pending job never starts."""
        if self.by_slurm:
            for option in ("--signal=INT", "--state=PENDING"):
                with suppress(OSError):
                    command = ["scancel", option, self.submitted.job_id]
                    subprocess.run(command, capture_output=True, check=False)
            return
        send_signal(self.folder, signal.SIGINT)


def send_signal(folder: Path, signal_number: int) -> None:
    """Sends a signal to the process that runs the job in a folder, if it runs on this machine."""
    record = folders.read_record(folder)
    owner = record.get("owner")
    if isinstance(owner, dict) and "slurm" not in record and folders.running_process(record):
        with suppress(OSError):
            os.kill(owner["pid"], signal_number)


@contextmanager
def collected_jobs(job_folders: Sequence[Path]) -> Iterator[list[SubmittedJob]]:
    """Makes submitit's launcher wait for each job by means of `SubmittedJob`. Yields the list to which the submitted
    jobs are added."""
    import submitit
    from submitit.local import local

    original, jobs = submitit.AutoExecutor, list[SubmittedJob]()

    class Executor(original):  # type: ignore[misc, valid-type]
        """An executor that returns instances of SubmittedJob."""

        def map_array(self, *arguments: object) -> list[SubmittedJob]:
            submitted = super().map_array(*arguments)
            by_slurm = self.cluster == "slurm"
            jobs.extend(SubmittedJob(job, folder, by_slurm) for job, folder in zip(submitted, job_folders, strict=True))
            return jobs

    submitit.AutoExecutor = Executor  # type: ignore[misc]
    # In the terminal's process group, Ctrl-C would end the job's supervisor, which then kills the job.
    spawn = partial(subprocess.Popen, process_group=0)
    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": spawn})  # type: ignore[assignment]
    try:
        yield jobs
    finally:
        local.subprocess = subprocess
        submitit.AutoExecutor = original  # type: ignore[misc]


LOCAL = ("basic", "joblib", "submitit_local")
"""Launchers whose jobs run on this machine and start immediately."""


class JobLoader:
    """Replaces Hydra's config loader, which would read YAML when a job starts. The "overrides" that it gets for
    a job are the name of the job's folder and the encoded job."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        folder_name, encoded_job = sweep_overrides
        config: DictConfig = OmegaConf.masked_copy(master_config, ["hydra"])
        OmegaConf.set_readonly(config, False)
        OmegaConf.set_struct(config, False)
        config.hydra.sweep.subdir, config.job = folder_name, encoded_job
        return config


@dataclass
class Launch:
    """One start of a sweep, whose jobs run under a launcher of Hydra.

    sweep: the sweep's folder. config: Hydra's composed configuration. run: the function that runs a job. plugins: the
    modules given with --plugin. has_result: whether the command writes a result.json. entries: the jobs, by folder.
    interrupted: the exit status for the signal that ended the sweep; DONE without a signal. batch_size: the number of
    jobs that the launcher gets at a time.
    """

    sweep: SweepFolder
    config: DictConfig
    callbacks: Callbacks
    run: Run
    plugins: Sequence[str]
    has_result: bool
    entries: dict[Path, JobEntry] = field(default_factory=dict)
    interrupted: int = errors.DONE
    batch_size: int = 0

    def __post_init__(self) -> None:
        choices = OmegaConf.to_container(self.config.hydra.runtime.choices)
        assert isinstance(choices, dict)
        self.name = str(choices.get("hydra/launcher") or "basic")
        self.launch_id = uuid.uuid4().hex[:12]
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=JobLoader(), callbacks=self.callbacks),  # type: ignore[arg-type]
            task_function=partial(perform, self.run),
            config=self.config,
        )

    def start(self, entries: Sequence[JobEntry], batch_size: int | None = None) -> list[float]:
        """Runs the unfinished jobs and waits for them. Returns the value of each job's metric; nan without a metric.
        batch_size: the number of jobs that the launcher gets at a time; None means all."""
        self.sweep.claim(entries)
        self.entries |= {entry.folder: entry for entry in entries}
        self.batch_size = batch_size or len(self.entries)
        unfinished = [entry for entry in entries if self._must_run(entry)]
        for batch_start in range(0, len(unfinished), self.batch_size):
            if not self.interrupted:
                batch = unfinished[batch_start : batch_start + self.batch_size]
                self._announce(batch)
                with self._job_environment():
                    self._launch(batch)
        values = [folders.read_record(entry.folder).get("value") for entry in entries]
        return [float(value) if isinstance(value, int | float) else math.nan for value in values]

    def _must_run(self, entry: JobEntry) -> bool:
        """Returns whether a job must run. Prints a line if the job is skipped or was started before."""
        record = folders.read_record(entry.folder)
        name = f"job {entry.number} ({entry.folder.name})"
        if folders.is_done(entry.folder, self.has_result):
            folders.write_record(entry.folder, JOB, record | {"skipped": True})
            say(f"{name}: already done, skipped")
            return False
        if process := folders.running_process(record):
            say(f"{name}: already running ({process}), skipped")
            return False
        if record and record.get("exit_status") in (errors.REQUEUE, errors.INTERRUPTED, errors.TERMINATED):
            say(f"{name}: was stopped, resumes")
        elif record and record.get("error"):
            say(f"{name}: runs again after an error: {record['error']}")
        elif record:
            say(f"{name}: did not finish, resumes")
        return True

    @property
    def _parallel(self) -> bool:
        """Whether jobs run in separate processes; joblib with n_jobs=1 uses none."""
        return self.name != "basic" and not (self.name == "joblib" and self.config.hydra.launcher.n_jobs == 1)

    def _announce(self, batch: Sequence[JobEntry]) -> None:
        if not self._parallel:
            return
        threads, at_once = self._threads()
        threads_text = "" if threads is None else f", {counted(threads, 'thread')} each (OMP_NUM_THREADS)"
        at_once_text = f", {min(at_once, len(batch))} at a time{threads_text}" if at_once else ""
        say(f"{counted(len(batch), 'job')} by {self.name}{at_once_text}")

    def _threads(self) -> tuple[int | None, int]:
        """Returns the number of threads per job (None: the machine of the job decides) and the number of jobs at a time
        (0 if unknown). Neither depends on which jobs are done, since floating-point sums depend on the threads."""
        cores = available_cores()
        if not self._parallel:
            return None, 1
        if self.name == "joblib":
            n_jobs = int(self.config.hydra.launcher.n_jobs)
            at_once = n_jobs if n_jobs > 0 else max(1, cores + 1 + n_jobs)
        elif self.name == "submitit_local":
            at_once = min(self.batch_size, len(self.entries))
        else:
            return None, 0
        threads_text = os.environ.get("OMP_NUM_THREADS", "")
        return int(threads_text) if threads_text.isdecimal() else max(1, cores // at_once), at_once

    @contextmanager
    def _job_environment(self) -> Iterator[None]:
        threads, _ = self._threads()
        variables: dict[str, str] = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        variables |= SAFE_PATH if self._parallel else {}
        if self.name.startswith("submitit"):
            os.chmod(real_folder(self.sweep.path / ".submitit"), 0o700)  # it holds code and unmasked secrets
            code, path = str(identity.copy_code(self.sweep.path, self.plugins)), os.environ.get("PYTHONPATH")
            variables["PYTHONPATH"] = f"{code}{os.pathsep}{path}" if path else code
        with child_environment(variables):
            yield

    def _launch(self, batch: Sequence[JobEntry]) -> None:
        fingerprint = identity.fingerprint(self.plugins)
        overrides = [[entry.folder.name, self._job(entry, fingerprint).to_base64()] for entry in batch]
        if not self._parallel:
            self.launcher.launch(overrides, initial_job_idx=0)
            return
        before = [folders.read_record(entry.folder) for entry in batch]
        collected: AbstractContextManager[list[SubmittedJob]] = nullcontext([])
        if self.name.startswith("submitit"):
            collected = collected_jobs([entry.folder for entry in batch])
        with collected as submitted, self._interruptible(batch, submitted), Watch(batch, Output()):
            try:
                self.launcher.launch(overrides, initial_job_idx=0)
            except Exception as error:
                started = before != [folders.read_record(entry.folder) for entry in batch]
                self._report_failure(started, error)
        for entry in batch:
            self._record_end(entry)

    def _job(self, entry: JobEntry, fingerprint: str) -> SweepJob:
        return SweepJob(
            number=entry.number,
            folder=str(entry.folder),
            overrides=list(entry.overrides),
            varied=entry.varied,
            data=entry.data,
            launch=self.launch_id,
            launcher=self.name,
            code=fingerprint,
            plugins=list(self.plugins),
            has_result=self.has_result,
            parent=os.getpid(),
        )

    def _report_failure(self, started: bool, error: Exception) -> None:
        """Raises UserError for the failure of a launcher; if a job has started, only prints the failure."""
        if self.interrupted:
            return
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not started:
            raise UserError(f"hydra/launcher={self.name}: {reason}", "check the keys hydra.launcher.*") from error
        say_error(f"hydra/launcher={self.name} ended before its jobs: {reason}")

    def _record_end(self, entry: JobEntry) -> None:
        record = folders.read_record(entry.folder)
        if record and not is_finished(record) and not record.get("error") and not folders.running_process(record):
            error = "it ended without a report: killed, or out of memory"
            folders.write_record(entry.folder, JOB, record | {"error": error})

    @contextmanager
    def _interruptible(self, batch: Sequence[JobEntry], submitted: list[SubmittedJob]) -> Iterator[None]:
        """Handles signals to this process: the first tells the jobs to save checkpoints and stop, the second ends the
        jobs immediately, the third ends this process."""
        signals_received = 0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal signals_received
            signals_received += 1
            if signals_received > 2:
                raise KeyboardInterrupt
            self.interrupted = STATUS[signal.Signals(number)]
            if signals_received == 1:
                (real_folder(self.sweep.path / STOPPED) / self.launch_id).touch()
                say(f"{signal.Signals(number).name}: the jobs save checkpoints and stop")
            for job in submitted:
                job.interrupt()
            for entry in batch if not submitted else ():
                send_signal(entry.folder, number)

        # Jobs in a cluster's queue continue when the terminal is closed.
        numbers = [number for number in STATUS if self.name in LOCAL or number != signal.SIGHUP]
        previous_handlers = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def statuses(self) -> list[int]:
        """Returns the exit statuses of the jobs that have started and are not running now."""
        job_records = [folders.read_record(folder) for folder in self.entries]
        return [record["exit_status"] for record in job_records if record and not folders.running_process(record)]


class LaunchAdapter:
    """Gives a Launch the interface of Hydra's launchers, for sweepers that choose jobs while running.
    prepare(overrides) returns the entry of a job."""

    def __init__(self, launch: Launch, prepare: Callable[[list[str]], JobEntry]):
        self.adapted, self.prepare = launch, prepare

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        entries = [self.prepare(list(overrides)) for overrides in job_overrides]
        values = self.adapted.start(entries)
        if self.adapted.interrupted:
            raise KeyboardInterrupt
        returned = [JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED) for overrides in job_overrides]
        for result, value in zip(returned, values, strict=True):
            result.return_value = value
        return returned


class FirstJobs(Exception):  # noqa: N818 - ends a sweeper, and is not an error
    """Raised with the overrides of the first jobs that a sweeper chooses."""

    def __init__(self, jobs: Sequence[Sequence[str]]):
        self.jobs = jobs


class DryLauncher:
    """A launcher that runs nothing: it raises FirstJobs with the overrides that it gets from a sweeper."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> NoReturn:
        raise FirstJobs(job_overrides)
