"""The ranks that torchrun or `devices=` started: the rank of this process, and how each rank ended. Standard library
only, because configuration errors are reported before torch is imported.

torch's launcher gives each rank an error file (`TORCHELASTIC_ERROR_FILE`) in a folder of its own, next to those of the
other ranks of the machine. Through these files, ranks see each other's errors: an error that all of them meet is
printed once, and one that only follows from the end of another rank is not printed.
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
"""Environment variable with the process number of the launcher, set by `devices=`."""
PID = "pid"
"""The file, next to the error file, in which a rank writes its process number when it starts."""
START_AGAIN = "start it with `torchrun --nproc-per-node=N -m lmtool ...`"

JOINT_SECONDS = 20.0
"""Seconds that a rank with an error waits for rank 0 to end, whose run folder would otherwise stay open."""
CAUSE_SECONDS = 3.0
"""Seconds that a rank with an unexpected error waits for an earlier error of another rank, which may be the cause."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process. size: number of ranks. local_rank, local_size: the same on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info(environment: Mapping[str, str]) -> RankInfo:
    """The rank in torchrun's environment variables; a single process if none is set. Raises UserError if some are
    missing or not numbers."""
    if not any(environment.get(name) for name in (RANK, SIZE, LOCAL_RANK)):
        return RankInfo()
    missing = [name for name in (RANK, SIZE, LOCAL_RANK, ADDRESS, PORT) if not environment.get(name)]
    if missing:
        present = next(name for name in (RANK, SIZE, LOCAL_RANK) if environment.get(name))
        raise UserError(
            f"the environment has {present}={environment[present]}, but not {', '.join(missing)}: it names one of "
            "several processes, but not how they connect",
            f"{START_AGAIN}, or unset {present} to train in one process",
        )
    values = {name: environment[name] for name in (RANK, SIZE, LOCAL_RANK, PORT)}
    values[LOCAL_SIZE] = environment.get(LOCAL_SIZE) or values[SIZE]
    for name, value in values.items():
        if not (value.isascii() and value.isdigit()):
            raise UserError(f"the environment has {name}={value!r}, which is not a number", START_AGAIN)
    rank, size, local_rank, local_size = (int(values[name]) for name in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE))
    if not rank < size:
        raise UserError(f"the environment has {RANK}={rank} of {SIZE}={size}: ranks count from 0", START_AGAIN)
    return RankInfo(rank, size, local_rank, local_size)


def started_together(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process, even as the only one."""
    return bool(environment.get(RANK))


def join(process: RankInfo) -> None:
    """Prepare one of several ranks: only rank 0 writes to the standard output."""
    if process.size == 1:
        return
    # Warnings of torch's reducer are not printed, its errors are.
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
    """Receive SIGTERM when the launcher is killed, because nothing else would end the other ranks. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class End:
    """How a rank ended. lines: its error as printed. expected: an LmtoolError; the cause of any other error may be that
    another rank ended before. reported: whether this rank, or another one with the same error, printed it. at: seconds
    since the epoch."""

    rank: int
    exit_status: int
    lines: tuple[str, ...]
    expected: bool = True
    reported: bool = True
    at: float = 0.0


class Ends:
    """The exits of the ranks on this machine. Without error files, a rank knows only its own exit."""

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
        """Record the exit of this rank, also in torch's format: torch's launcher prints the first message."""
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
        """Record a user error. Returns the prefix of its line, the rank; None if another rank printed the same
        error."""
        if self.process.size == 1:
            return ""
        self.write(End(self.process.rank, exit_status, lines, at=time.time()))
        if self.process.rank == 0:
            self.claims(lines)
            return ""
        on_machine_of_rank_0 = self.process.rank == self.process.local_rank
        if on_machine_of_rank_0 and self.folder is not None:
            _until(lambda: 0 in self.all(), JOINT_SECONDS)
            first = self.all().get(0)
            if first is not None and first.lines and first.lines[0].startswith(lines[0]):
                return None  # rank 0 prints the same error, perhaps with more details
        return f"rank {self.process.rank}: " if self.claims(lines) else None

    def last_traceback(self, exit_status: int, lines: tuple[str, ...]) -> str | None:
        """Record an unexpected exception. Returns the prefix of its line; None if another rank failed before (the
        cause, or the same error) or was killed, which the launcher reports."""
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
    """Wait until a condition holds, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
