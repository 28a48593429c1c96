"""Sweeps: one command run many times by Hydra's launchers and sweepers.

A sweep's folder has a subfolder per job. The `job.json` there records the varied keys and the outcome of the job, so
that the summary does not depend on the process that ran the job, and rerunning the command resumes the sweep.
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
import itertools
import json
import shlex
import shutil
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import cast

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from lmtool.config import compose
from lmtool.config.base import Config, JsonObject
from lmtool.config.compose import AcceptedOverrides, CheckedOverrides, key_of
from lmtool.config.saved import save, to_yaml
from lmtool.errors import ConfigError, LmtoolError, Problem
from lmtool.reporting.text import lower_is_better
from lmtool.runs.finding import SWEEP
from lmtool.runs.identity import require_name, require_own_folder
from lmtool.sweeps.folders import Sweeper
from lmtool.sweeps.plugins import require_plugin
from lmtool.sweeps.table import write_plan
from lmtool.system.files import RUNS, user_path
from lmtool.system.signals import stop_error

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
        elif (entry.folder / JOB).exists():
            say(f"{name}: {entry.folder / JOB} is damaged, runs again")
        return True

    @property
    def _parallel(self) -> bool:
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


def with_grid(
    words: Sequence[str], accepted: AcceptedOverrides, primary: str, config_dirs: Sequence[Path]
) -> CheckedOverrides:
    """Checks the typed overrides. Adds the sweep values that the selected YAML files set for other keys."""
    checked = compose.read_overrides(words, accepted, multirun=True)
    if checked.problems:
        return checked
    grid = compose.grid(primary, checked, config_dirs)
    typed_keys = {key_of(text) for text in words}
    from_yaml = [f"{key}={values}" for key, values in grid.items() if key_of(key) not in typed_keys]
    return compose.read_overrides([*from_yaml, *words], accepted, multirun=True) if from_yaml else checked


BATCH_SIZE = "hydra.sweeper.max_batch_size"
"""The key for the number of jobs that the plain sweeper passes to its launcher at a time."""
# Exit statuses from best to worst.
_SEVERITY = (
    errors.DONE,
    errors.REQUEUE,
    errors.CHECK_FAILED,
    errors.USER_ERROR,
    errors.DIVERGED,
    errors.FAULT,
    errors.TERMINATED,
    errors.INTERRUPTED,
)
_SWEEPER_ERRORS = (AssertionError, ValueError, RuntimeError)
"""Exceptions that Hydra's sweepers raise."""
# Hydra must not write a log or a copy of the configuration, nor change the working directory: lmtool writes the run
# folder.
_QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.job.chdir=false"]


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as typed.

    verb: the command. primary: the command's primary YAML file. accepted: the keys and groups that the command accepts.
    decode(data, problems, running) returns a job's configuration; running: whether the job will run on this machine.
    run(data) runs a job with its complete configuration and returns the result; launchers can pickle it. show(folder)
    prints the final summary. typed: the arguments of the command line, for the command that resumes the sweep.
    has_result: whether the command writes a result.json.
    """

    verb: str
    primary: str
    accepted: AcceptedOverrides
    overrides: Sequence[str]
    config_dirs: Sequence[Path]
    decode: Callable[[JsonObject, Sequence[Problem], bool], Config]
    run: Run
    show: Callable[[Path], object]
    plugins: Sequence[str] = ()
    typed: Sequence[str] = ()
    has_result: bool = True


def run(request: SweepRequest, *, print_config: bool = False, root: Path = RUNS) -> int:
    """Runs a sweep, prints the summary, and returns the worst exit status of the jobs.

    If the jobs are known in advance, all are decoded before the first job starts, so that an error in any job leaves no
    files behind. If the sweeper chooses jobs by the scores of earlier jobs, each job is decoded before it starts.
    print_config: only print the configurations of the jobs (or of the jobs that the sweeper could start with). root:
    the parent of the sweep's folder.
    """
    checked = with_grid(request.overrides, request.accepted, request.primary, request.config_dirs)
    hydra_keys = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in checked.hydra}
    launcher, sweeper = hydra_keys.get("hydra/launcher", "basic"), hydra_keys.get("hydra/sweeper", "basic")
    is_grid = sweeper == "basic"
    checked = _with_sweep_problems(checked, hydra_keys)
    if checked.problems and not is_grid:
        raise ConfigError(checked.problems)
    require_plugin("hydra/launcher", launcher)
    require_plugin("hydra/sweeper", sweeper)
    checked, name = _pop_name(checked)
    jobs = _decoded_jobs(request, checked, running=launcher in LOCAL and not print_config) if is_grid else None
    if print_config:
        configs = _first_configs(request, checked, hydra_keys) if jobs is None else [config for _, config in jobs]
        if jobs is None:
            say(f"# hydra/sweeper={sweeper} chooses jobs by the scores of earlier jobs; it could start with these")
        say("---\n".join(to_yaml(save(config, request.verb)) for config in configs).removesuffix("\n"))
        return errors.DONE
    folder = _create_folder(request, name, hydra_keys.get("hydra.sweep.dir"), root)
    was_empty = not any(folder.iterdir())
    resume = _resume_command(request, folder, name or hydra_keys.get("hydra.sweep.dir"))
    try:
        sweep = SweepFolder(folder, request.verb, checked)
        statuses = _run_jobs(request, checked, sweep, hydra_keys, jobs, resume)
    except (LmtoolError, OSError):
        if was_empty and not any(folder.glob(f"*/{JOB}")):  # an error leaves no files behind
            shutil.rmtree(folder, ignore_errors=True)
            if folder.parent == root and not any(root.iterdir()):
                root.rmdir()
        raise
    request.show(folder)
    worst = max([errors.DONE, *statuses], key=lambda status: (*_SEVERITY, status).index(status))
    if worst != errors.DONE:
        say(f"to resume or repeat the unfinished jobs: {resume}")
    return worst


def _run_jobs(
    request: SweepRequest,
    checked: CheckedOverrides,
    sweep: SweepFolder,
    hydra_keys: dict[str, str],
    jobs: Sequence[tuple[list[str], Config]] | None,
    resume: str,
) -> list[int]:
    submitted = sweep.submitted()
    entries = [_entry(request, sweep, job, config) for job, config in jobs or ()]
    requested = submitted | {entry.folder: entry.overrides for entry in entries}
    write_plan(sweep.path, request.verb, None if jobs is None else list(requested.values()))
    launch: Launch | None = None
    try:
        with _composition(request, checked, sweep.path, hydra_keys) as (hydra, config):
            launch = Launch(sweep, config, Callbacks(config), request.run, request.plugins, request.has_result)
            say(f"{sweep.path}: {'a sweep' if jobs is None else counted(len(jobs), 'job')}; to resume it: {resume}")
            if jobs is None:
                _search(request, sweep, checked, hydra, launch)
            else:
                launch.start(entries, config.hydra.sweeper.max_batch_size)
    except KeyboardInterrupt as interrupt:
        status = (launch.interrupted if launch else 0) or stop_error(interrupt).exit_status
        return [status, *(launch.statuses() if launch else [])]
    except SystemExit as system_exit:
        return [system_exit.code if isinstance(system_exit.code, int) else errors.FAULT]
    return [launch.interrupted, *launch.statuses()]


@contextmanager
def _composition(
    request: SweepRequest, checked: CheckedOverrides, folder: Path, hydra_keys: dict[str, str]
) -> Iterator[tuple[Hydra, DictConfig]]:
    words = [*checked.all, *_hydra_defaults(folder, hydra_keys), *compose.search_path(request.config_dirs)]
    with compose.translated_errors(), compose.initialized_hydra() as hydra:
        try:
            config = hydra.compose_config(request.primary, words, RunMode.MULTIRUN, with_log_configuration=False)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"the configuration cannot be composed: {error}", "set the whole of a list: KEY=[A,B]"
            ) from error
        yield hydra, config


def _sweeper(hydra: Hydra, config: DictConfig, callbacks: Callbacks) -> Sweeper:
    sweeper = Plugins.instance().instantiate_sweeper(
        config=config,
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
        task_function=float,  # never called, since the launcher is replaced
    )
    return cast(Sweeper, getattr(sweeper, "sweeper", sweeper))


def _search(request: SweepRequest, sweep: SweepFolder, checked: CheckedOverrides, hydra: Hydra, launch: Launch) -> None:
    config = launch.config

    def prepare(job: list[str]) -> JobEntry:
        return _entry(request, sweep, job, _job_config(request, checked, job, running=launch.name in LOCAL))

    sweeper = _sweeper(hydra, config, launch.callbacks)
    sweeper.launcher = LaunchAdapter(launch, prepare)
    arguments = [str(text) for text in config.hydra.overrides.task]
    if config.hydra.runtime.choices["hydra/sweeper"] == "optuna":
        if not any(text.startswith("hydra.sweeper.direction=") for text in checked.hydra):
            sweeper.direction = _direction(request, checked, sweep)
        folders.resume_search(sweeper, arguments, sweep.entries, request.has_result)
    try:
        sweeper.sweep(arguments=arguments)
    except LmtoolError:
        raise
    except _SWEEPER_ERRORS as error:
        if not any(sweep.path.glob(f"*/{JOB}")):
            raise _no_first_job(config, error) from error
        # A sweeper fails if all jobs have failed; the summary shows the errors of the jobs.
        say(f"warning: the sweeper ended early: {_error_text(error)}")


def _first_configs(request: SweepRequest, checked: CheckedOverrides, hydra_keys: dict[str, str]) -> list[Config]:
    with (
        TemporaryDirectory(prefix="lmtool-sweep-") as folder,
        _composition(request, checked, Path(folder), hydra_keys) as (hydra, config),
    ):
        sweeper = _sweeper(hydra, config, Callbacks(config))
        sweeper.launcher = DryLauncher()
        if config.hydra.runtime.choices["hydra/sweeper"] == "optuna":
            folders.start_new_search(sweeper)
        try:
            sweeper.sweep(arguments=[str(text) for text in config.hydra.overrides.task])
        except FirstJobs as first:
            return [_job_config(request, checked, job, running=False) for job in first.jobs]
        except _SWEEPER_ERRORS as error:
            raise _no_first_job(config, error) from error
    raise UserError("the sweeper chose no job", "check the keys hydra.sweeper.*")


def _job_config(request: SweepRequest, checked: CheckedOverrides, job: Sequence[str], running: bool) -> Config:
    job_overrides = replace(checked, choices=[text for text in job if text[:1] != "+"], hydra=[])
    job_overrides.values = [text for text in job if text[:1] == "+"]
    return request.decode(compose.compose(request.primary, job_overrides, request.config_dirs), (), running)


def _no_first_job(config: DictConfig, error: Exception) -> UserError:
    name = config.hydra.runtime.choices["hydra/sweeper"]
    message = f"hydra/sweeper={name} failed before its first job: {_error_text(error)}"
    return UserError(message, "check the keys hydra.sweeper.*; --debug prints the traceback")


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _direction(request: SweepRequest, checked: CheckedOverrides, sweep: SweepFolder) -> str:
    choices, values = (
        [text for text in texts if text.lstrip("+").partition("=")[0] in sweep.fixed]
        for texts in (checked.choices, checked.values)
    )
    data = compose.compose(request.primary, replace(checked, choices=choices, values=values), request.config_dirs)
    task = data.get("task")
    metric = str(task.get("metric")) if isinstance(task, dict) and task.get("metric") else "loss"
    direction = "minimize" if lower_is_better(metric) else "maximize"
    say(f"hydra.sweeper.direction={direction}, for the metric {metric}")
    return direction


def _entry(request: SweepRequest, sweep: SweepFolder, job: Sequence[str], config: Config) -> JobEntry:
    return sweep.entry(job, save(config, request.verb), json.loads(config.model_dump_json()))


def _hydra_defaults(folder: Path, hydra_keys: dict[str, str]) -> list[str]:
    quoted = str(folder).replace("'", "\\'")
    # GRID is cleared because `with_grid` has already added its values to the overrides.
    settings = [*_QUIET, f"hydra.sweep.dir='{quoted}'", f"{compose.GRID}=null"]
    return [setting for setting in settings if setting.partition("=")[0] not in hydra_keys]


def _with_sweep_problems(checked: CheckedOverrides, hydra_keys: dict[str, str]) -> CheckedOverrides:
    problems = list(checked.problems)
    size = hydra_keys.get(BATCH_SIZE, "null")
    if size != "null" and (not size.isdecimal() or int(size) < 1):
        problems.append(
            Problem(BATCH_SIZE, f"{BATCH_SIZE}={size} is not a positive integer", "omit it to start all jobs together")
        )
    if "hydra.sweep.subdir" in hydra_keys:
        subdir = hydra_keys["hydra.sweep.subdir"]
        message = f"hydra.sweep.subdir={subdir}: folders of jobs are named after the varied keys"
        problems.append(Problem("hydra.sweep.subdir", message, "omit it; set name=NAME to name the sweep"))
    for text in checked.values:
        key, _, value = text.lstrip("+").partition("=")
        if key == "run_dir":
            message = f"run_dir={value}: each job of a sweep has a separate folder"
            problems.append(Problem("run_dir", message, "set name=NAME or hydra.sweep.dir=FOLDER for the sweep"))
        if key == "name" and OverridesParser.create().parse_override(text).is_sweep_override():
            problems.append(Problem("name", f"name={value}: a sweep has one name", "set a single name=NAME"))
    return replace(checked, problems=problems)


def _pop_name(checked: CheckedOverrides) -> tuple[CheckedOverrides, str | None]:
    names = [text.partition("=")[2].strip("'\"") for text in checked.values if text.startswith("++name=")]
    name = names[-1] if names and names[-1] != "null" else None
    if name is not None and not any(problem.key == "name" for problem in checked.problems):
        require_name(name)
    return replace(checked, values=[text for text in checked.values if not text.startswith("++name=")]), name


def _resume_command(request: SweepRequest, folder: Path, location: str | None) -> str:
    words = [word for word in request.typed if not word.startswith("name=")]
    is_named = len(words) < len(request.typed)  # otherwise a location was typed as hydra.sweep.dir=
    name = [] if location and not is_named else [f"name={folder.name}"]
    return shlex.join(["lmtool", request.verb, *words, *name])


def _decoded_jobs(request: SweepRequest, checked: CheckedOverrides, running: bool) -> list[tuple[list[str], Config]]:
    problems: dict[str, Problem] = {problem.message: problem for problem in checked.problems}
    jobs = []
    for job in jobs_of(checked):
        try:
            data = compose.compose(request.primary, job, request.config_dirs)
            words = [*job.choices, *job.values, *(f"{key}={value}" for key, value in job.verbatim.items())]
            jobs.append((words, request.decode(data, checked.problems, running)))
        except ConfigError as error:
            problems |= {problem.message: problem for problem in error.problems if problem.message not in problems}
    if problems:
        raise ConfigError(list(problems.values()))
    return jobs


def jobs_of(checked: compose.CheckedOverrides) -> Iterator[compose.CheckedOverrides]:
    """Yields the jobs of a plain sweep: every combination of the values, in Hydra's order (the last key varies
    fastest). If a group varies, jobs with GROUP=none omit the group's keys: with `distill=soft,none distill.teacher=X`,
    the second job has no teacher."""
    parser = OverridesParser.create()
    is_choice, alternatives = [], []
    for text in checked.all:
        override = parser.parse_override(text)
        if text in checked.hydra or not override.is_sweep_override():
            alternatives.append([text])
        elif override.is_discrete_sweep():
            alternatives.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            message = f"{text.lstrip('+')}: the plain sweeper accepts only lists of values"
            raise UserError(message, "separate the values by commas, or use a range such as range(1,4)")
        is_choice.append(text in checked.choices)
    for combination in itertools.product(*alternatives):
        selected = [text for text, chosen in zip(combination, is_choice, strict=True) if chosen]
        omitted_prefixes = tuple(
            f"{key_of(text)}."
            for text, options in zip(combination, alternatives, strict=True)
            if text in selected and len(options) > 1 and text.endswith("=none")
        )
        values = [text for text in combination if text not in selected and not text.startswith(("hydra.", "hydra/"))]
        values = [text for text in values if not key_of(text).startswith(omitted_prefixes)]
        yield replace(checked, choices=selected, values=values, sweeps=False)


def _create_folder(request: SweepRequest, name: str | None, sweep_dir: str | None, root: Path) -> Path:
    try:
        if sweep_dir is not None or name is not None:
            folder = user_path(sweep_dir.strip("'\"")) if sweep_dir is not None else root / str(name)
            key = "name" if sweep_dir is None else "hydra.sweep.dir"
            require_own_folder(folder, (folders.SUBMISSION, SWEEP), "sweep", key)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for number in itertools.count(1):
            folder = root / f"{request.verb}-sweep-{number:04d}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        hint = "set hydra.sweep.dir= to a folder that you can write to"
        raise UserError(f"cannot create the sweep's folder {error.filename or root}: {error.strerror}", hint) from error
    raise AssertionError("itertools.count never ends")
