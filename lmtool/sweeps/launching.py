"""Passes the unfinished jobs of a sweep to a launcher of Hydra.

A job receives its complete configuration, resolved here. A launcher whose jobs start later runs them on a copy of the
code.
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
from lmtool.runs import identity
from lmtool.sweeps import folders as records
from lmtool.sweeps.folders import JobEntry, SweepFolder
from lmtool.sweeps.job import STOPPED, Run, SweepJob, perform
from lmtool.sweeps.table import Watch
from lmtool.system.environment import SAFE_PATH, inherited
from lmtool.system.files import real_folder
from lmtool.system.signals import STATUS
from lmtool.system.terminal import counted, say, say_error

if TYPE_CHECKING:
    from submitit import Job

_ASK_EVERY = 5.0
"""Seconds between two queries to SLURM about a job."""


class SubmittedJob:
    """A job that was submitted with submitit. folder: of the job in its sweep."""

    def __init__(self, submitted: Job[object], folder: Path, by_slurm: bool):
        self.submitted, self.folder, self.by_slurm = submitted, folder, by_slurm
        self._asked = time.monotonic()

    def results(self) -> list[None]:
        """Waits until the job has ended; its outcome is in `job.json`."""
        while not self.ended():
            time.sleep(0.2)
        return [None]

    def ended(self) -> bool:
        if self.submitted.paths.result_pickle.exists():
            return True
        if not self.by_slurm:
            return bool(self.submitted.done())
        if time.monotonic() - self._asked < _ASK_EVERY:
            return False
        self._asked = time.monotonic()
        return records.queue_state(self.submitted.job_id) is None

    def interrupt(self) -> None:
        """Ends the job: a training saves a checkpoint first, and a pending job never starts."""
        if self.by_slurm:
            for command in (["--signal=INT"], ["--state=PENDING"]):
                with suppress(OSError):
                    words = ["scancel", *command, self.submitted.job_id]
                    subprocess.run(words, capture_output=True, check=False)
            return
        interrupt(self.folder, signal.SIGINT)


def interrupt(folder: Path, number: int) -> None:
    """Sends a signal to the process on this machine that runs the job of a folder."""
    record = records.read(folder)
    owner = record.get("owner")
    if isinstance(owner, dict) and "slurm" not in record and records.under_way(record):
        with suppress(OSError):
            os.kill(owner["pid"], number)


@contextmanager
def collected_jobs(folders: Sequence[Path]) -> Iterator[list[SubmittedJob]]:
    """Makes submitit's launcher wait for each job with `SubmittedJob`. Yields the list to which the jobs are added.
    folders: of the jobs."""
    import submitit
    from submitit.local import local

    known, jobs = submitit.AutoExecutor, list[SubmittedJob]()

    class Executor(known):  # type: ignore[misc, valid-type]
        """An executor that returns jobs of this module's class."""

        def map_array(self, *arguments: object) -> list[SubmittedJob]:
            submitted = super().map_array(*arguments)
            by_slurm = self.cluster == "slurm"
            jobs.extend(SubmittedJob(job, folder, by_slurm) for job, folder in zip(submitted, folders, strict=True))
            return jobs

    submitit.AutoExecutor = Executor  # type: ignore[misc]
    # In another process group than the terminal: Ctrl-C would end the job's supervisor, which then kills the job.
    spawn = partial(subprocess.Popen, process_group=0)
    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": spawn})  # type: ignore[assignment]
    try:
        yield jobs
    finally:
        local.subprocess = subprocess
        submitit.AutoExecutor = known  # type: ignore[misc]


LOCAL = ("basic", "joblib", "submitit_local")
"""Launchers whose jobs run on this machine and start immediately."""


class JobLoader:
    """Replaces Hydra's loader, which would read YAML when a job starts. The overrides of a job are the name of its
    folder and the packed job."""

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        subdir, packed = sweep_overrides
        config: DictConfig = OmegaConf.masked_copy(master_config, ["hydra"])
        OmegaConf.set_readonly(config, False)
        OmegaConf.set_struct(config, False)
        config.hydra.sweep.subdir, config.job = subdir, packed
        return config


@dataclass
class Launch:
    """The start of a sweep by a launcher of Hydra.

    config: Hydra's composed configuration. run: the function of a job. plugins: typed modules. has_result: whether the
    command writes a result.json. interrupted: exit status for the signal that ended the sweep; DONE without one.
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
        self.identity = uuid.uuid4().hex[:12]
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=JobLoader(), callbacks=self.callbacks),  # type: ignore[arg-type]
            task_function=partial(perform, self.run),
            config=self.config,
        )

    def start(self, entries: Sequence[JobEntry], batch_size: int | None = None) -> list[float]:
        """Runs the unfinished jobs and waits for them. Returns the value of each job's metric, nan if there is none.
        batch_size: number of jobs passed to the launcher at a time; None for all."""
        self.sweep.claim(entries)
        self.entries |= {entry.folder: entry for entry in entries}
        self.batch_size = batch_size or len(self.entries)
        left = [entry for entry in entries if self._is_left(entry)]
        for first in range(0, len(left), self.batch_size):
            if not self.interrupted:
                batch = left[first : first + self.batch_size]
                self._announce(batch)
                with self._surroundings():
                    self._launch(batch)
        values = [records.read(entry.folder).get("value") for entry in entries]
        return [float(value) if isinstance(value, int | float) else math.nan for value in values]

    def _is_left(self, entry: JobEntry) -> bool:
        """Whether a job must run. Reports jobs that are skipped or were started before."""
        record = records.read(entry.folder)
        name = f"job {entry.number} ({entry.folder.name})"
        if records.done(entry.folder, self.has_result):
            records.write(entry.folder, records.JOB, record | {"skipped": True})
            say(f"{name}: already done, skipped")
            return False
        if where := records.under_way(record):
            say(f"{name}: already running ({where}), skipped")
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

    def _announce(self, left: Sequence[JobEntry]) -> None:
        if not self._parallel:
            return
        threads, at_once = self._threads()
        threads_text = "" if threads is None else f", {counted(threads, 'thread')} each (OMP_NUM_THREADS)"
        say(
            f"{counted(len(left), 'job')} by {self.name}"
            + (f", {min(at_once, len(left))} at a time{threads_text}" if at_once else "")
        )

    def _threads(self) -> tuple[int | None, int]:
        """The numbers of threads per job (None: decided where it runs) and of jobs at a time (0 if unknown). Neither
        depends on which jobs are done, since floating-point sums depend on the number of threads."""
        cores = len(os.sched_getaffinity(0))
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
    def _surroundings(self) -> Iterator[None]:
        """Sets the environment that the processes of the jobs inherit."""
        threads, _ = self._threads()
        changed: dict[str, str] = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        changed |= SAFE_PATH if self._parallel else {}
        if self.name.startswith("submitit"):
            os.chmod(real_folder(self.sweep.path / ".submitit"), 0o700)  # its files are executed and unmasked
            path = [
                str(identity.copy_code(self.sweep.path, self.plugins)),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
            changed["PYTHONPATH"] = os.pathsep.join(path)
        with inherited(changed):
            yield

    def _launch(self, left: Sequence[JobEntry]) -> None:
        fingerprint = identity.fingerprint(self.plugins)
        overrides = [[entry.folder.name, self._job(entry, fingerprint).packed()] for entry in left]
        if not self._parallel:
            self.launcher.launch(overrides, initial_job_idx=0)
            return
        before = [records.read(entry.folder) for entry in left]
        queued: AbstractContextManager[list[SubmittedJob]] = nullcontext([])
        if self.name.startswith("submitit"):
            queued = collected_jobs([entry.folder for entry in left])
        with queued as queue, self._interruptible(left, queue), Watch(left, Output()):
            try:
                self.launcher.launch(overrides, initial_job_idx=0)
            except Exception as error:
                began = before != [records.read(entry.folder) for entry in left]
                self._ended_early(began, error)
        for entry in left:
            self._settle(entry)

    def _job(self, entry: JobEntry, fingerprint: str) -> SweepJob:
        return SweepJob(
            number=entry.number,
            folder=str(entry.folder),
            overrides=list(entry.overrides),
            varied=entry.varied,
            data=entry.data,
            launch=self.identity,
            launcher=self.name,
            code=fingerprint,
            plugins=list(self.plugins),
            has_result=self.has_result,
            parent=os.getpid(),
        )

    def _ended_early(self, began: bool, error: Exception) -> None:
        """Handles the failure of a launcher: an error of the user if no job has begun, otherwise a warning."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not self.interrupted and not began:
            raise UserError(f"hydra/launcher={self.name}: {reason}", "check the keys hydra.launcher.*") from error
        if not self.interrupted:
            say_error(f"hydra/launcher={self.name} ended before its jobs: {reason}")

    def _settle(self, entry: JobEntry) -> None:
        """Records the end of a job that could not record it itself."""
        record = records.read(entry.folder)
        if record and not records.is_finished(record) and not record.get("error") and not records.under_way(record):
            error = "it ended without a report: killed, or out of memory"
            records.write(entry.folder, records.JOB, record | {"error": error})

    @contextmanager
    def _interruptible(self, left: Sequence[JobEntry], queue: list[SubmittedJob]) -> Iterator[None]:
        """Handles signals to this process: the first asks the jobs to save checkpoints and stop, the second ends them
        immediately, the third ends this process."""
        count = 0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal count
            count += 1
            if count > 2:
                raise KeyboardInterrupt
            self.interrupted = STATUS[signal.Signals(number)]
            if count == 1:
                (real_folder(self.sweep.path / STOPPED) / self.identity).touch()
                say(f"{signal.Signals(number).name}: the jobs save checkpoints and stop")
            for submitted in queue:
                submitted.interrupt()
            for entry in left if not queue else ():
                interrupt(entry.folder, number)

        # Jobs in a cluster's queue continue when the terminal is closed.
        numbers = [number for number in STATUS if self.name in LOCAL or number != signal.SIGHUP]
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def statuses(self) -> list[int]:
        """The exit statuses of the jobs that have started and are not running in another process."""
        known = [records.read(folder) for folder in self.entries]
        return [record["exit_status"] for record in known if record and not records.under_way(record)]


class AsLauncher:
    """A launch as the launcher of a sweeper of Hydra that chooses its jobs while running. prepare(overrides) returns
    the entry of a job."""

    def __init__(self, launch: Launch, prepare: Callable[[list[str]], JobEntry]):
        self.launch_of_sweep, self.prepare = launch, prepare

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        entries = [self.prepare(list(overrides)) for overrides in job_overrides]
        values = self.launch_of_sweep.start(entries)
        if self.launch_of_sweep.interrupted:
            raise KeyboardInterrupt
        returned = [JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED) for overrides in job_overrides]
        for result, value in zip(returned, values, strict=True):
            result.return_value = value
        return returned


class FirstJobs(Exception):  # noqa: N818 - ends a sweeper, and is not an error
    """The overrides of the first jobs of a sweeper."""

    def __init__(self, jobs: Sequence[Sequence[str]]):
        self.jobs = jobs


class NoLauncher:
    """A launcher that runs nothing: it raises FirstJobs with the jobs that a sweeper chooses."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> NoReturn:
        raise FirstJobs(job_overrides)
