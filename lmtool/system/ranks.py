"""The ranks that torchrun or `devices=` started: the rank of this process, and how each rank exited. Standard library
only, because configuration errors are reported before torch is imported.

torch's launcher gives each rank an error file (`TORCHELASTIC_ERROR_FILE`) in a separate folder, next to the folders of
the machine's other ranks. Through these files, ranks read each other's errors: an error that occurs in all ranks is
printed once, and an error that is only a consequence of another rank's exit is not printed.
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

from lmtool.errors import TERMINATED, UserError

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER = "LMTOOL_LAUNCHER"
"""Environment variable with the process id of the launcher, set by `devices=`."""
PID = "pid"
"""The file, next to the error file, in which a rank writes its process id when it starts."""
START_AGAIN = "start it with `torchrun --nproc-per-node=N -m lmtool ...`"

JOINT_SECONDS = 20.0
"""How long a rank with an error waits for rank 0 to exit, since rank 0 must close the run folder."""
CAUSE_SECONDS = 3.0
"""How long a rank with an unexpected error waits for an earlier error of another rank, which may be the cause."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process among `size` ranks. local_rank, local_size: the same among the ranks on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Reads the rank from torchrun's environment variables; without them, this is a single process. Raises UserError if
    some of the variables are missing or not numbers."""
    if not any(environment.get(name) for name in (RANK, SIZE, LOCAL_RANK)):
        return RankInfo()
    missing = [name for name in (RANK, SIZE, LOCAL_RANK, ADDRESS, PORT) if not environment.get(name)]
    if missing:
        present = next(name for name in (RANK, SIZE, LOCAL_RANK) if environment.get(name))
        raise UserError(
            f"the environment has {present}={environment[present]}, but not {', '.join(missing)}: this process is one "
            "of several, but it is unknown how they connect",
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
    """Prepares a process that is one of several ranks: only rank 0 writes to the standard output."""
    if process.size == 1:
        return
    # Hides warnings of torch's reducer, but not errors.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if process.rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until the process exits
    folder = RankExits.local(process).folder
    if folder is not None:
        with suppress(OSError):
            (folder / str(process.local_rank) / PID).write_text(str(os.getpid()), encoding="utf-8")
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        _end_with_parent(int(launcher))


def _end_with_parent(launcher: int) -> None:
    """Makes Linux send SIGTERM to this process when the launcher is killed, since nothing else would end the ranks.
    Sends it at once if the launcher ended while this process started: Linux does not tell of that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankExit:
    """How a rank exited.

    lines: the printed lines of the rank's error. expected: whether the error is an LmtoolError; any other error may be
    a consequence of an earlier exit of another rank. reported: whether a rank has printed the error. at: seconds since
    the epoch.
    """

    rank: int
    exit_status: int
    lines: tuple[str, ...]
    expected: bool = True
    reported: bool = True
    at: float = 0.0


class RankExits:
    """The exits of the ranks on this machine. Without error files, a rank does not learn about other ranks."""

    def __init__(self, folder: Path | None, process: RankInfo):
        self.folder, self.process = folder, process

    @classmethod
    def local(cls, process: RankInfo) -> RankExits:
        file = os.environ.get(ERROR_FILE)
        return cls(Path(file).parent.parent if file else None, process)

    def read(self) -> dict[int, RankExit]:
        """Reads the recorded exits, by local rank."""
        exits: dict[int, RankExit] = {}
        for file in self.folder.glob("*/error.json") if self.folder is not None else ():
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(file.read_text(encoding="utf-8"))["end"]
                exits[int(file.parent.name)] = RankExit(**{**record, "lines": tuple(record["lines"])})
        return exits

    def write(self, end: RankExit) -> None:
        """Records the exit of this rank, also in the format of torch's launcher, which prints the first message."""
        if self.folder is None:
            return
        file = self.folder / str(self.process.local_rank) / "error.json"
        message = {"message": end.lines[0] if end.lines else "", "extraInfo": {"timestamp": str(int(end.at))}}
        with suppress(OSError):
            draft = file.with_suffix(".tmp")
            draft.write_text(json.dumps({"message": message, "end": asdict(end)}), encoding="utf-8")
            draft.rename(file)

    def running_ranks(self) -> list[int]:
        """Returns the ranks on this machine that have not recorded an exit."""
        first, exits = self.process.rank - self.process.local_rank, self.read()
        return [first + number for number in range(self.process.local_size) if number not in exits]

    def any_killed(self) -> bool:
        """Whether a rank of this machine was killed before it recorded its exit."""
        ended = set()
        for file in self.folder.glob(f"*/{PID}") if self.folder is not None else ():
            with suppress(OSError, ValueError):
                if not _is_running(int(file.read_text())):
                    ended.add(int(file.parent.name))
        return bool(ended - self.read().keys())  # read last: a rank records its exit before it ends

    def _claim_lines(self, lines: tuple[str, ...]) -> bool:
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

    def record_error(self, exit_status: int, lines: tuple[str, ...]) -> str | None:
        """Records a user error. Returns the prefix of the error's lines, such as "rank 1: "; None if another rank
        prints the same error, or if the launcher has ended: it printed why, and removed the folder."""
        if self.process.size == 1:
            return ""
        if self.folder is not None and not self.folder.exists():
            return None
        failed = any(end.reported and end.exit_status != TERMINATED for end in self.read().values())
        # Because another rank failed or was killed, which that rank or the launcher reports.
        ended_by_launcher = exit_status == TERMINATED and (failed or self.any_killed())
        self.write(RankExit(self.process.rank, exit_status, lines, reported=not ended_by_launcher, at=time.time()))
        if ended_by_launcher:
            return None
        if self.process.rank == 0:
            self._claim_lines(lines)
            return ""
        on_machine_of_rank_0 = self.process.rank == self.process.local_rank
        if on_machine_of_rank_0 and self.folder is not None:
            _wait_until(lambda: 0 in self.read(), JOINT_SECONDS)
            first = self.read().get(0)
            if first is not None and first.lines and first.lines[0].startswith(lines[0]):
                return None  # rank 0 prints the same error, perhaps with more details
        return f"rank {self.process.rank}: " if self._claim_lines(lines) else None

    def record_exception(self, exit_status: int, lines: tuple[str, ...]) -> str | None:
        """Records an unexpected exception. Returns the prefix of the error's line; None if another rank failed before
        (the cause, or the same error) or was killed, which the launcher reports."""
        if self.process.size == 1:
            return ""
        local = RankExit(self.process.rank, exit_status, lines, False, False, time.time())
        self.write(local)
        _wait_until(lambda: self.any_killed() or any(end.expected for end in self.read().values()), CAUSE_SECONDS)
        exits = self.read().values()
        if self.any_killed() or any(end.expected or (end.at, end.rank) < (local.at, local.rank) for end in exits):
            return None
        self.write(replace(local, reported=True))
        return f"rank {self.process.rank}: "


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return not Path("/proc/self").exists()  # unknown without /proc


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
