"""Runs one job of a sweep in the process that the launcher chose, records the outcome, and returns the metric."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias, TypedDict

from lmtool import errors
from lmtool.errors import REQUEUE, LmtoolError, Stopped
from lmtool.reporting.console import Output
from lmtool.reporting.sweep_files import JOB
from lmtool.runs import identity
from lmtool.runs.files import SCORED_ROWS
from lmtool.runs.locks import Owner
from lmtool.sweeps import folders
from lmtool.sweeps.table import end_of_job
from lmtool.system.environment import available_cores
from lmtool.system.files import open_to_append, real_folder
from lmtool.system.signals import STATUS, Interrupted, pop_late_signals, stop_error
from lmtool.system.terminal import say, say_error

_GPUS = Path("/proc/driver/nvidia/gpus")
_device_locks: list[int] = []
_shown_launches: set[str] = set()
"""The launches of which a job has printed its screens in this process."""


def visible_devices() -> list[str]:
    """Returns the GPUs that this process may use, without loading CUDA."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(number) for number in range(len(list(_GPUS.iterdir())))] if _GPUS.is_dir() else []


def take_device(sweep: Path, device_key: object) -> None:
    """Restricts this process to the first free GPU until it ends, since CUDA reads CUDA_VISIBLE_DEVICES only once. If
    all GPUs are taken, processes share them. sweep: the sweep's folder, for the locks. device_key: the job's `device`;
    only auto and cuda need a GPU."""
    devices = visible_devices()
    if _device_locks or len(devices) < 2 or device_key not in ("auto", "cuda"):
        return
    locks = real_folder(sweep / ".devices")
    for device in devices:
        handle = os.open(locks / device, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            continue
        _device_locks.append(handle)
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[os.getpid() % len(devices)]


Run = Callable[[dict[str, object]], object]
STOPPED = ".stopped"
"""A subfolder of the sweep's folder, with a file for each stopped launch, whose jobs no longer start."""
_PARENT_WATCHER = "parent of a sweep's job"
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
PREEMPTED_SECONDS = 600
"""How long a SLURM job waits after SIGTERM. Meanwhile SLURM kills a canceled job, or kills and requeues a preempted
job after the partition's GraceTime; it does not requeue a job that exits by itself."""


@dataclass(frozen=True)
class SweepJob:
    """A job as submitted to its process.

    data: the complete configuration. launch: the id of the `Launch`. code: the fingerprint of the code. parent: the
    process that started the launch.
    """

    number: int
    folder: str
    overrides: list[str]
    varied: dict[str, str]
    data: dict[str, object]
    launch: str
    launcher: str
    code: str
    plugins: list[str]
    has_result: bool
    parent: int

    def to_base64(self) -> str:
        """Encodes the job in base64, since Hydra would interpret ${...} in a configuration."""
        return base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def from_base64(cls, text: str) -> SweepJob:
        return cls(**json.loads(base64.b64decode(text)))

    @property
    def is_separate(self) -> bool:
        """Whether the job runs in a separate process."""
        return self.by_submitit or os.getpid() != self.parent

    @property
    def is_orphan(self) -> bool:
        """Whether the parent of this joblib process has ended. Such a process would still take jobs from the queue."""
        return self.launcher == "joblib" and self.is_separate and os.getppid() != self.parent

    @property
    def by_submitit(self) -> bool:
        return self.launcher.startswith("submitit")


class PackedConfig(TypedDict):
    """The configuration that a launcher passes to a job. job: the result of `SweepJob.to_base64`."""

    job: str


def perform(run_command: Run, config: PackedConfig) -> float:
    """Runs a job for a launcher and returns the value of its metric; nan without a metric. Records and reports a failed
    job, without ending the sweep; an interrupt ends the sweep."""
    job = SweepJob.from_base64(config["job"])
    folder = Path(job.folder)
    launch_stopped = (folder.parent / STOPPED / job.launch).exists() or job.is_orphan
    if not launch_stopped and not folders.is_done(folder, job.has_result):
        with _output_to_log(folder) if job.is_separate else contextlib.nullcontext(), _isolated(job):
            _perform(run_command, job, folder)
        if not job.is_separate and (late := pop_late_signals()):  # the job has finished, and no further job may start
            raise SystemExit(STATUS[late[0]])
    if job.is_orphan:  # otherwise loky's process would wait for another job forever
        os._exit(errors.TERMINATED)
    value = folders.read_record(folder).get("value")
    return float(value) if isinstance(value, int | float) else math.nan


def _perform(run_command: Run, job: SweepJob, folder: Path) -> None:
    started = time.monotonic()
    record: dict[str, object] = {
        "job": job.number,
        "overrides": job.overrides,
        "varied": job.varied,
        "folder": job.folder,
        "exit_status": errors.FAULT,
        "resumed": (folder / "checkpoints").exists(),
        "launcher": job.launcher,
        "threads": _threads(),
        "code": job.code,
        "owner": asdict(Owner.me()),
        **({"log": folders.LOG} if job.is_separate else {}),
        **({"slurm": slurm_job} if (slurm_job := _slurm_job()) else {}),
    }
    folders.write_record(folder, JOB, record)
    Output.brief = not job.is_separate and job.launch in _shown_launches
    _shown_launches.add(job.launch)
    varied = [f"{key}={value}" for key, value in job.varied.items()]
    say(f"job {job.number}: {' '.join(varied if Output.brief and varied else job.overrides)}")
    if job.is_separate and job.code != identity.fingerprint(job.plugins):
        say("warning: lmtool or a plugin has changed since the sweep was started", sys.stderr)
    try:
        with errors.system_errors():
            result = run_command(job.data)
        record |= {"exit_status": errors.DONE, **_scores(result)}
    except Stopped as error:
        record |= {"exit_status": error.exit_status, "error": error.message}
        if not job.is_separate:
            # SystemExit, since Hydra catches an Exception and starts the next job.
            raise SystemExit(error.exit_status) from error
        say_error(error.message)
    except KeyboardInterrupt as interrupt:
        end = stop_error(interrupt)
        record |= {"exit_status": end.exit_status, "error": end.message}
        if not job.is_separate:
            raise
    except SystemExit:  # before training has its own handlers, submitit's handler requeues the job and exits
        record |= {"exit_status": REQUEUE, "error": "stopped before its first step and requeued"}
        raise
    except LmtoolError as error:
        record |= {"exit_status": error.exit_status, "error": error.message}
        say_error(f"job {job.number}: {error.message}", error.hint)
    # A failure of one job (memory, a bug) must not stop the other jobs.
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        say(traceback.format_exc().rstrip(), sys.stderr)
    finally:
        Output.brief = False
        record["seconds"] = round(time.monotonic() - started, 3)
        folders.write_record(folder, JOB, record)
        if not job.is_separate:  # the parent reports jobs in other processes
            say(end_of_job(record, folder.parent))
    if job.by_submitit and record["exit_status"] in (REQUEUE, errors.TERMINATED):
        _requeue(folder, record)


def _scores(result: object) -> dict[str, object]:
    if not isinstance(result, dict):
        return {}
    if "metric" in result:
        return {"metric": result["metric"], "value": result.get("value")}
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
    if not numbers:
        return {}
    rows = {SCORED_ROWS: result[SCORED_ROWS]} if result.get(SCORED_ROWS) else {}
    return {"metric": next(iter(numbers)), "value": next(iter(numbers.values())), "metrics": numbers, **rows}


def _requeue(folder: Path, record: dict[str, object]) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    if not callable(handler):
        return
    if record["exit_status"] == errors.TERMINATED:
        if "slurm" in record:
            time.sleep(PREEMPTED_SECONDS)
        return
    try:
        handler(signal.SIGUSR2, None)
    except Exception as error:  # submitit: too many timeouts
        message = f"{record['error']}; {str(error).lower().rstrip('.')}"
        say_error(message, "set a larger hydra.launcher.timeout_min= or hydra.launcher.max_num_timeout=")
        folders.write_record(folder, JOB, record | {"exit_status": errors.TERMINATED, "error": message})


def _slurm_job() -> str | None:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else os.environ.get("SLURM_JOB_ID")


def _threads() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else available_cores()


@contextlib.contextmanager
def _isolated(job: SweepJob) -> Iterator[None]:
    """Prepares a separate process for a job: the process ignores the terminal's Ctrl-C, which the parent forwards once;
    ends when its parent ends; and handles signals outside of training, which installs handlers itself."""
    if not job.is_separate:
        yield
        return
    previous_handlers: dict[signal.Signals, _Handler] = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            requeue = signal.getsignal(signal.SIGUSR2) if number == signal.SIGUSR1 else None  # submitit's handler
            previous_handlers[number] = signal.signal(number, requeue if callable(requeue) else _raise_interrupted)
    if job.by_submitit:
        if "OMP_NUM_THREADS" not in os.environ and "SLURM_CPUS_ON_NODE" in os.environ:
            cores = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ["SLURM_CPUS_ON_NODE"]
            os.environ["OMP_NUM_THREADS"] = cores
    elif job.launcher == "joblib":
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        if not any(thread.name == _PARENT_WATCHER for thread in threading.enumerate()):
            threading.Thread(target=_stop_with_parent, args=(job.parent,), name=_PARENT_WATCHER, daemon=True).start()
        take_device(Path(job.folder).parent, job.data.get("device"))
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _stop_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _output_to_log(folder: Path) -> Iterator[None]:
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    _flush()
    with os.fdopen(open_to_append(folder / folders.LOG), "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    try:
        yield
    finally:
        _flush()
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
