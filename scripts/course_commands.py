"""Commands of the course, run as a user would type them, offline, with what they print in files.

Most of a short command's time is the import of torch and of what stands on it. A line that is nothing but a command of
lmtool therefore runs in a fork of this process, which has imported all of it once; any other line is bash's.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A line of the document is a line of bash, in which `lmtool` is that of this interpreter.
_SHELL = f'lmtool() {{ {shlex.quote(sys.executable)} -m lmtool "$@"; }}\n'
# What bash reads more in than words, where it is not quoted.
_OF_BASH = re.compile(r"[|&;<>$`*?~{}()\\]")
TOGETHER = 2
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")


@dataclass(frozen=True)
class Ran:
    """seconds: of the wall; of one that ran beside others, those by which it outlasted the one that ended before it.
    cpu_seconds: of all its processes. status: its exit status."""

    command: str
    seconds: float
    cpu_seconds: float
    status: int


def run_commands(commands: Mapping[str, Path], folder: Path) -> list[Ran]:
    """Run lines in a folder, of several TOGETHER at a time, on a thread each. commands: where each prints; standard
    error is written beside it, as .err. What they return is in their order."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    forks = [command.startswith("lmtool ") and not _OF_BASH.search(_QUOTED.sub("", command)) for command in commands]
    if any(forks):
        _import_all()
    sys.stdout.flush()
    sys.stderr.flush()
    before = time.monotonic()
    waiting = list(zip(commands.items(), forks, strict=True))
    running: dict[int, str] = {}
    ran = {}
    try:
        while waiting or running:
            while waiting and len(running) < TOGETHER:
                (command, stdout), in_fork = waiting.pop(0)
                process = os.fork()
                if process == 0:
                    _become(command, folder, stdout.resolve(), in_fork, 1 if len(commands) > 1 else None)
                running[process] = command
            process, status, usage = os.wait4(-1, 0)
            command = running.pop(process)
            now, cpu_seconds = time.monotonic(), usage.ru_utime + usage.ru_stime
            status = os.waitstatus_to_exitcode(status)
            ran[command] = Ran(command, round(now - before, 2), round(cpu_seconds, 2), status)
            before = now
    except KeyboardInterrupt:
        for process in running:
            os.waitpid(process, 0)  # it was interrupted too, and saves a checkpoint
        raise
    return [ran[command] for command in commands]


def _import_all() -> None:
    from lmtool.system.environment import ENVIRONMENT

    os.environ |= ENVIRONMENT | os.environ
    import lmtool.cli.main
    import lmtool.commands.inspect
    import lmtool.commands.inspect_attention
    import lmtool.commands.pretrain
    import lmtool.reporting.drawing  # noqa: F401


def _become(command: str, folder: Path, stdout: Path, in_fork: bool, threads: int | None) -> None:
    """In the new process: run the command and end. threads: as many as there are where None."""
    status = 1
    try:
        for path, stream in ((Path(os.devnull), 0), (stdout, 1), (stdout.with_suffix(".err"), 2)):
            os.dup2(os.open(path, (os.O_WRONLY if stream else os.O_RDONLY) | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        if not in_fork:
            os.execvp("bash", ["bash", "-o", "pipefail", "-c", _SHELL + command])
        import torch

        from lmtool.cli import main as cli

        if threads is not None:
            torch.set_num_threads(threads)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", encoding="utf-8", errors="replace") for stream in (1, 2))
        sys.argv = shlex.split(command)
        status = cli.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
