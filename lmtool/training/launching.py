"""`devices=N`: N processes of the same command on this machine, started and watched by torch's own launcher.

Each of them finds in its environment what torchrun would say, and the command runs as under torchrun. What a process
has to say it prints itself; what it could not say, because it was killed, is said here. Signals are handed on to all
of them: they save a checkpoint and end, as one process does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lmtool import errors
from lmtool.config.plugins import command_line
from lmtool.errors import UserError
from lmtool.system import ranks
from lmtool.system.environment import inherited
from lmtool.system.ranks import LAUNCHER, PID, Ends, RankInfo, rank_info, started_together
from lmtool.system.signals import Interrupted
from lmtool.system.terminal import counted, say_error

THREADS = "OMP_NUM_THREADS"
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MOST_A_CORE = 4


def processes_to_start(config: Any, verb: str) -> int:
    """How many processes a command asks for that are not there yet; 1: this one runs it. UserError where there cannot
    be so many, or where torchrun has started others than it asks for."""
    devices, process = getattr(config, "devices", None), rank_info(os.environ)
    if started_together(os.environ):
        if not hasattr(config, "devices") and process.size > 1:
            raise UserError(f"lmtool {verb} runs in one process, torchrun started {process.size}", f"lmtool {verb} ...")
        if devices is not None and devices != process.size:
            processes = "1 process" if process.size == 1 else f"{process.size} processes"
            raise UserError(
                f"devices={devices}, but torchrun started {processes}",
                f"omit devices=, or pass --nproc-per-node={devices}",
            )
        return 1
    if devices is None or devices == 1:
        return 1
    _require_devices(devices, config.device)
    return int(devices)


def _require_devices(devices: int, device: str) -> None:
    """UserError where this machine has not so many."""
    import torch

    kind, _, number = device.partition(":")
    if number:
        raise UserError(f"devices={devices} beside device={device}, which is one", f"device={kind}, or devices=1")
    if kind != "cpu" and torch.cuda.is_available():
        most = torch.cuda.device_count()
        if devices > most:
            message = f"devices={devices}: this machine has {most} CUDA device{'s' if most > 1 else ''}"
            raise UserError(message, f"devices={most}, or torchrun on several machines")
        return
    most = _MOST_A_CORE * cores()
    if devices > most:
        raise UserError(
            f"devices={devices}: this machine has no CUDA device and {counted(cores(), 'core')} for processes of a CPU",
            f"devices={cores()}; {most} are the most",
        )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(processes: int, words: Sequence[str]) -> int:
    """Run `lmtool WORDS` in so many processes. Returns the exit status: that of the process whose end was the reason
    for the others'."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # what the launcher has to say is said below
    with tempfile.TemporaryDirectory(prefix="lmtool-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            max_restarts=0,
            local_addr="127.0.0.1",
            signals_to_handle="SIGURG",  # the others are handed on, not turned into an end after a time limit
        )
        with _environment(processes), _handing_on(Path(folder), processes) as received:
            try:
                elastic_launch(config, sys.executable)("-P", "-m", "lmtool", *words)
            except ChildFailedError as error:
                failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
                return _exit_status(Path(folder), processes, failed, received)
            except SignalException as error:  # before all processes were there
                raise Interrupted(error.sigval) from error
    return errors.DONE


@contextmanager
def _environment(processes: int) -> Iterator[None]:
    """What the processes inherit: who started them, and the share of the threads that each may have."""
    launch_environment = {LAUNCHER: str(os.getpid())}
    if THREADS not in os.environ:
        launch_environment[THREADS] = str(max(cores() // processes, 1))
    with inherited(launch_environment):
        yield


@contextmanager
def _handing_on(folder: Path, processes: int) -> Iterator[list[int]]:
    """Signals go to all processes; what ends them is theirs to say. Before all of them have started, they are ended.
    Gives those that came."""
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        started = [int(file.read_text() or 0) for file in folder.glob(f"*/attempt_*/*/{PID}")]
        if len(started) < processes or not all(started):
            raise SignalException("before all processes had begun", signal.Signals(number))
        for process in started:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    before = {number: signal.getsignal(number) for number in _HANDED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit_status(folder: Path, processes: int, failed: Mapping[int, int], received: Sequence[int]) -> int:
    """The exit status of a run that failed; says of a process that was killed what it could not say. failed: by rank
    the exit code of those that ended first, as `subprocess` has it. received: signals that were handed on."""
    attempt = next(folder.glob("*/attempt_*"), folder)
    ends = Ends(attempt, RankInfo(0, processes, 0, processes)).all()
    reported = sorted(
        (end for end in ends.values() if end.reported), key=lambda end: (not end.expected, end.at, end.rank)
    )
    if reported:
        return reported[0].exit_status
    killed = {rank: -code for rank, code in failed.items() if code < 0}
    if killed and received:  # before they could say a word
        raise Interrupted(received[0])
    if killed:  # the launcher itself ends the others by SIGTERM, or SIGKILL where that does not help
        rank = min(killed, key=lambda rank: (rank in ends, killed[rank] == signal.SIGTERM, rank))
        say_error(*_killed(rank, killed[rank], _run_of(attempt)))
        return errors.FAULT
    return next((code for code in failed.values() if code > 0), errors.FAULT)


def _killed(rank: int, number: int, run: str | None) -> tuple[str, str]:
    """What is said of a process that a signal ended."""
    restart = "the same command starts again"
    resume = f"{command_line('resume', run)} continues from its last checkpoint" if run else restart
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return f"rank {rank} was ended by {name}, and the others with it", resume
    return (
        f"rank {rank} was killed (SIGKILL), and the others were ended with it",
        f"{resume}; where the system was out of memory (dmesg), set a smaller micro_batch_tokens= or fewer devices=",
    )


RUN = "run"


def note_run(path: Path) -> None:
    """Let the launcher know which run it is: said where a process could not."""
    file = os.environ.get(ranks.ERROR_FILE)
    if file:
        (Path(file).parent.parent / RUN).write_text(str(path), encoding="utf-8")


def _run_of(attempt: Path) -> str | None:
    file = attempt / RUN
    return file.read_text(encoding="utf-8") if file.exists() else None
