"""`devices=N`: N processes of the same command on this machine, started and watched by torch's launcher.

They have the environment variables of torchrun, so the command runs as under torchrun. Each process prints its own
errors; this module reports a process that was killed. It forwards signals to all processes, which save a checkpoint and
end as a single process does.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lmtool import errors
from lmtool.config.registry import command_line
from lmtool.errors import UserError
from lmtool.system import ranks
from lmtool.system.environment import available_cores, child_environment
from lmtool.system.ranks import LAUNCHER, PID, RankExits, RankInfo, rank_info, started_together
from lmtool.system.signals import Interrupted
from lmtool.system.terminal import counted, say_error

THREADS = "OMP_NUM_THREADS"
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MAX_PROCESSES_PER_CORE = 4
_LOOPBACK = "127.0.0.1"


def processes_to_start(verb: str, devices: int | None, device: str, is_run: bool = True) -> int:
    """Returns the number of processes to start for a command; 1 means that this process runs the command. is_run:
    whether the command may run in several. Raises UserError if the machine cannot run that many, or if torchrun started
    another number."""
    process = rank_info(os.environ)
    if started_together(os.environ):
        if not is_run and process.size > 1:
            raise UserError(
                f"lmtool {verb} runs in one process, but torchrun started {process.size}",
                f"run it without torchrun: lmtool {verb}",
            )
        if devices is not None and devices != process.size:
            processes = "1 process" if process.size == 1 else f"{process.size} processes"
            raise UserError(
                f"devices={devices}, but torchrun started {processes}",
                f"omit devices=, or pass --nproc-per-node={devices}",
            )
        return 1
    if devices is None or devices == 1:
        return 1
    _require_devices(devices, device)
    _require_loopback(devices)
    return devices


def _require_devices(devices: int, device: str) -> None:
    import torch

    kind, _, number = device.partition(":")
    if number:
        raise UserError(
            f"devices={devices} needs more than one device, but device={device} names one",
            f"set device={kind}, or devices=1",
        )
    if kind != "cpu" and torch.cuda.is_available():
        most = torch.cuda.device_count()
        if devices > most:
            message = f"devices={devices}, but this machine has {counted(most, 'CUDA device')}"
            raise UserError(message, f"set devices={most}, or use torchrun on several machines")
        return
    most = _MAX_PROCESSES_PER_CORE * available_cores()
    if devices > most:
        raise UserError(
            f"devices={devices}, but this machine has no CUDA device, and its "
            f"{counted(available_cores(), 'core')} can run at most {most} processes",
            f"set devices={available_cores()}, one process per core",
        )


def _require_loopback(devices: int) -> None:
    """If the processes cannot connect, torch's launcher would try for minutes, and print its own messages."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"devices={devices}: the processes connect through the address {_LOOPBACK} of this machine, which does not "
            f"work: {error.strerror or error}",
            "start the loopback interface (ip link set lo up), or train in one process: devices=1",
        ) from error


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Runs `lmtool ARGUMENTS` in several processes. Returns 0, or the exit status of the process whose
    failure ended the run."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's messages are replaced by those below
    with tempfile.TemporaryDirectory(prefix="lmtool-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{_LOOPBACK}:0",  # a free port
            max_restarts=0,
            local_addr=_LOOPBACK,
            signals_to_handle="SIGURG",  # other signals are forwarded, without the launcher's time limit
        )
        with _environment(processes), _forward_signals(Path(folder), processes) as received:
            try:
                elastic_launch(config, sys.executable)("-P", "-m", "lmtool", *arguments)
            except ChildFailedError as error:
                failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
                return _exit_status(Path(folder), processes, failed, received)
            except SignalException as error:  # before all processes had started
                raise Interrupted(error.sigval) from error
    return errors.DONE


@contextmanager
def _environment(processes: int) -> Iterator[None]:
    launch_environment = {LAUNCHER: str(os.getpid())}
    if THREADS not in os.environ:
        launch_environment[THREADS] = str(max(available_cores() // processes, 1))
    with child_environment(launch_environment):
        yield


@contextmanager
def _forward_signals(folder: Path, processes: int) -> Iterator[list[int]]:
    """Forwards signals to all processes, or ends the launch if some have not started yet. Yields the received
    signals."""
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        started = [int(file.read_text() or 0) for file in folder.glob(f"*/attempt_*/*/{PID}")]
        if len(started) < processes or not all(started):
            raise SignalException("before all processes had started", signal.Signals(number))
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    previous_handlers = {number: signal.getsignal(number) for number in _FORWARDED_SIGNALS}
    for number, handler in previous_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit_status(folder: Path, processes: int, failed: Mapping[int, int], received: Sequence[int]) -> int:
    """Returns the exit status of a failed run, and reports a killed process. failed: exit codes by rank of the
    processes that ended first, negative for signals."""
    attempt = next(folder.glob("*/attempt_*"), folder)
    exits = RankExits(attempt, RankInfo(0, processes, 0, processes)).read()
    # An error that a process recognized goes before an exception, which may be a consequence of it.
    reported = sorted(
        (end for end in exits.values() if end.reported), key=lambda end: (not end.expected, end.at, end.rank)
    )
    if reported:
        return reported[0].exit_status
    killed = {rank: -code for rank, code in failed.items() if code < 0}
    if killed and received:
        raise Interrupted(received[0])
    if killed:  # the launcher ends the other processes by SIGTERM, then by SIGKILL
        rank = min(killed, key=lambda rank: (rank in exits, killed[rank] == signal.SIGTERM, rank))
        say_error(*_kill_message(rank, killed[rank], _run_of(attempt)))
        return errors.FAULT
    return next((code for code in failed.values() if code > 0), errors.FAULT)


def _kill_message(rank: int, number: int, run: str | None) -> tuple[str, str]:
    restart = "the same command starts again"
    resume = f"{command_line('resume', run)} continues from its last checkpoint" if run else restart
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return f"rank {rank} was ended by {name}, so the other ranks were ended too", resume
    return (
        f"rank {rank} was killed (SIGKILL), so the other ranks were ended too",
        f"{resume}; if the system was out of memory (dmesg), set a smaller micro_batch_tokens= or fewer devices=",
    )


RUN_FILE = "run"


def note_run(path: Path) -> None:
    """Writes the run's folder to a file for the launcher, which names it if a process is killed."""
    file = os.environ.get(ranks.ERROR_FILE)
    if file:
        (Path(file).parent.parent / RUN_FILE).write_text(str(path), encoding="utf-8")


def _run_of(attempt: Path) -> str | None:
    file = attempt / RUN_FILE
    return file.read_text(encoding="utf-8") if file.exists() else None
