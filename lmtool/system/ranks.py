"""Processes that were started together, by torchrun or by `devices=`: the place of this one among them, and how each of
them ends. Standard library only: torch is not imported yet where a configuration is wrong.

torch's launcher gives each process a file for its last words (`TORCHELASTIC_ERROR_FILE`), in a folder of its own beside
those of the others on its machine. By these files the processes of a machine find out what the others ended with, so
that an error which all of them meet is printed once, and one that only follows from the end of another not at all.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lmtool.errors import UserError

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER = "LMTOOL_LAUNCHER"
"""In the environment of a process that `devices=` started: the process that did."""
PID = "pid"
"""The file in which a process says, beside its last words, that it has started."""
START_AGAIN = "start it with `torchrun --nproc-per-node=N -m lmtool ...`"

JOINT_SECONDS = 20.0
"""How long a process with an error waits for rank 0, which may close a folder: its own end would end rank 0 too."""
CAUSE_SECONDS = 3.0
"""How long one that failed unexpectedly waits for the reason: another that ended. The launcher kills it sooner."""


@dataclass(frozen=True)
class RankInfo:
    """The place of this process among those that were started together. local_rank: on its machine; local_size: how
    many there are on it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info(environment: Mapping[str, str]) -> RankInfo:
    """What the environment says, as torchrun sets it; alone where it says nothing. UserError where it says half of it,
    or no numbers."""
    if not any(environment.get(name) for name in (RANK, SIZE, LOCAL_RANK)):
        return RankInfo()
    missing = [name for name in (RANK, SIZE, LOCAL_RANK, ADDRESS, PORT) if not environment.get(name)]
    if missing:
        present = next(name for name in (RANK, SIZE, LOCAL_RANK) if environment.get(name))
        raise UserError(
            f"the environment has {present}={environment[present]}, but not {', '.join(missing)}: it names one of "
            "several processes, and not how they meet",
            f"{START_AGAIN}, or unset {present} to train in one process",
        )
    values = {name: environment[name] for name in (RANK, SIZE, LOCAL_RANK, PORT)}
    values[LOCAL_SIZE] = environment.get(LOCAL_SIZE) or values[SIZE]
    for name, value in values.items():
        if not (value.isascii() and value.isdigit()):
            raise UserError(f"the environment has {name}={value!r}, which is no number", START_AGAIN)
    rank, size, local_rank, local_size = (int(values[name]) for name in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE))
    if not rank < size:
        raise UserError(f"the environment has {RANK}={rank} of {SIZE}={size}: ranks count from 0", START_AGAIN)
    return RankInfo(rank, size, local_rank, local_size)


def started_together(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or what sets the same, has started this process, be it alone."""
    return bool(environment.get(RANK))


def join(process: RankInfo) -> None:
    """What a process does first that is one of several: rank 0 alone writes to the standard output."""
    if process.size == 1:
        return
    # Torch's reducer reports what it did not need to look for; errors are still printed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if process.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process lasts
    folder = Ends.local(process).folder
    if folder is not None:
        with suppress(OSError):
            (folder / str(process.local_rank) / PID).write_text(str(os.getpid()), encoding="utf-8")
    if os.environ.get(LAUNCHER) == str(os.getppid()):
        _end_with_parent()


def _end_with_parent() -> None:
    """Be stopped, as by SIGTERM, where the process that started this one is killed: nobody would end the others of a
    run that is incomplete. Linux alone can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class End:
    """How a process ended. lines: its error, as it is printed. expected: an error of lmtool's own; else its cause may
    be that another process ended before it. reported: whether it, or another process with the same, has printed it. at:
    seconds since the epoch."""

    rank: int
    exit_status: int
    lines: tuple[str, ...]
    expected: bool = True
    reported: bool = True
    at: float = 0.0


class Ends:
    """The exits of the ranks on this machine. Without files of the launcher, each rank knows only its own."""

    def __init__(self, folder: Path | None, process: RankInfo):
        self.folder, self.process = folder, process

    @classmethod
    def local(cls, process: RankInfo) -> Ends:
        file = os.environ.get(ERROR_FILE)
        return cls(Path(file).parent.parent if file else None, process)

    def all(self) -> dict[int, End]:
        """The recorded exits, by local rank."""
        ends: dict[int, End] = {}
        for file in self.folder.glob("*/error.json") if self.folder is not None else ():
            with suppress(OSError, ValueError, KeyError, TypeError):
                end = json.loads(file.read_text(encoding="utf-8"))["end"]
                ends[int(file.parent.name)] = End(**{**end, "lines": tuple(end["lines"])})
        return ends

    def write(self, end: End) -> None:
        """Records the exit of this process, also in torch's format: torch's launcher prints the first message."""
        if self.folder is None:
            return
        file = self.folder / str(self.process.local_rank) / "error.json"
        message = {"message": end.lines[0] if end.lines else "", "extraInfo": {"timestamp": str(int(end.at))}}
        with suppress(OSError):
            draft = file.with_suffix(".tmp")
            draft.write_text(json.dumps({"message": message, "end": asdict(end)}), encoding="utf-8")
            draft.rename(file)

    def silent(self) -> list[int]:
        """The ranks on this machine that have not ended."""
        first, exits = self.process.rank - self.process.local_rank, self.all()
        return [first + number for number in range(self.process.local_size) if number not in exits]

    def killed(self) -> bool:
        """Whether another rank of this machine was killed without recording its exit."""
        exits = self.all()
        for file in self.folder.glob(f"*/{PID}") if self.folder is not None else ():
            with suppress(OSError, ValueError):
                if int(file.parent.name) not in exits and not _runs(int(file.read_text())):
                    return True
        return False

    def claims(self, lines: tuple[str, ...]) -> bool:
        """Whether this rank is the first of this machine to print these lines."""
        if self.folder is None:
            return True
        name = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        try:
            (self.folder / f"said-{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def last_words(self, exit_status: int, lines: tuple[str, ...]) -> str | None:
        """Records a user error. Returns the prefix of its line, the rank; None if another rank printed the same
        error."""
        if self.process.size == 1:
            return ""
        self.write(End(self.process.rank, exit_status, lines, at=time.time()))
        if self.process.rank == 0:
            self.claims(lines)
            return ""
        with_first = self.process.rank == self.process.local_rank and self.folder is not None
        if with_first:
            _until(lambda: 0 in self.all(), JOINT_SECONDS)
            first = self.all().get(0)
            if first is not None and first.lines and first.lines[0].startswith(lines[0]):
                return None  # rank 0 prints the same error, perhaps with more details
        return f"rank {self.process.rank}: " if self.claims(lines) else None

    def last_traceback(self, exit_status: int, lines: tuple[str, ...]) -> str | None:
        """Records an unexpected exception. Returns the prefix of its line; None if another rank failed before, which is
        the cause or printed the same, or was killed, which the launcher reports."""
        if self.process.size == 1:
            return ""
        local = End(self.process.rank, exit_status, lines, False, False, time.time())
        self.write(local)
        _until(lambda: self.killed() or any(end.expected for end in self.all().values()), CAUSE_SECONDS)
        ends = self.all().values()
        if self.killed() or any(end.expected or (end.at, end.rank) < (local.at, local.rank) for end in ends):
            return None
        self.write(replace(local, reported=True))
        return f"rank {self.process.rank}: "


def _runs(process: int) -> bool:
    """Whether a process is running."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return not Path("/proc/self").exists()  # unknown without /proc


def _until(done: Callable[[], bool], seconds: float) -> None:
    """Waits until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
