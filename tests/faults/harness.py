"""Runs the commands of a trial in forked processes, and checks how they end.

A fork inherits this process's imports, which would take a new process seconds. The processor time and the memory of a
fork are limited. On request, an audit hook records the programs that it starts, the connections that it opens and the
files that it writes outside its folder.
"""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtool.errors import DIVERGED
from tests.faults.outcomes import Outcome, TrialFailed, Verdict
from tests.training.kill_harness import fork, wait

SECONDS = 10  # limit of a command's processor time; the elapsed time may be three times as long
_MEMORY = 6 << 30  # bytes of address space that a command may add to those of the fork
# All control characters except tab and line feed. Terminals obey the C1 set (0x80 to 0x9f) as well.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_EVENTS_PREFIX = "watched: "


def refused_or_done(answer: Answer, detail: str) -> Verdict:
    """Returns REFUSED or DONE, depending on the exit status of the command."""
    return Verdict(Outcome.REFUSED if answer.status else Outcome.DONE, f"{detail}: {answer.errors[:150]}")


# --- command lines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it printed.

    Attributes:
        arguments: the command line without `lmtool`
        status: the exit status; negative after a signal, None if the command hung
        out: standard output
        err: standard error
    """

    arguments: tuple[str, ...]
    status: int | None
    out: str
    err: str

    @property
    def output(self) -> str:
        return self.out + self.err

    @property
    def errors(self) -> str:
        """The printed lines that begin with `error:`."""
        return "\n".join(line for line in self.err.splitlines() if line.startswith("error: "))


def run_in_fork(
    workdir: Path, arguments: Sequence[str], work: Callable[[], int], environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Answer:  # fmt: skip
    """Calls a function in a fork, with limits on its processor time and memory.

    Args:
        workdir: the working folder of the fork
        arguments: the command line of the answer, for messages
        work: the function; it returns the exit status
        environment: additional environment variables
        stdin: the content of standard input
    """
    streams = {name: workdir / f".{name}" for name in ("in", "out", "err")}
    streams["in"].write_bytes(stdin)

    def child(folder: Path) -> None:
        _redirect(streams)
        os.chdir(folder)
        home = folder / ".home"
        os.environ.update({"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch"), **(environment or {})})
        if (memory := Path("/proc/self/statm")).exists():
            limit = int(memory.read_text().split()[0]) * resource.getpagesize() + _MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    process = fork(child, workdir)
    status = wait(process, 3 * SECONDS)
    if status is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    out, err = (streams[name].read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    for path in streams.values():
        path.unlink()
    return Answer(tuple(arguments), None if status == -signal.SIGXCPU else status, out, err)


def _redirect(streams: Mapping[str, Path]) -> None:
    """Redirects the standard streams to files at the level of descriptors: libraries in Rust and C++ print too."""
    flags = {"in": os.O_RDONLY, "out": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "err": os.O_WRONLY | os.O_CREAT}
    for number, (name, path) in enumerate(streams.items()):
        os.dup2(os.open(path, flags[name], 0o600), number)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", errors=errors, write_through=True)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )


def run_lmtool(
    workdir: Path, *arguments: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"",
    watched: bool = False, clean: bool = False,
) -> Answer:  # fmt: skip
    """Runs `lmtool ARGUMENTS` in a fork.

    Args:
        workdir: the working folder
        arguments: the command line
        environment: additional environment variables
        stdin: the content of standard input
        watched: require that the command starts no program, opens no connection and writes nothing outside `workdir`
        clean: require that a refused command leaves no new file except in caches

    Raises:
        TrialFailed: if a requirement is violated, or if the command ends in a way that is always wrong (see
            `require_sound`)
    """
    from lmtool.cli import main as cli

    def files() -> set[str]:
        paths = (path.relative_to(workdir) for path in workdir.rglob("*"))
        return {str(path) for path in paths if path.parts[0] not in ("cache", ".home")}

    def work() -> int:
        sys.argv = ["lmtool", *arguments]
        events = watch(workdir) if watched else list
        try:
            return cli.main(list(arguments))
        finally:
            if events():
                print(f"{_EVENTS_PREFIX}{'; '.join(events())}", file=sys.stderr)

    before = files() if clean else set()
    answer = run_in_fork(workdir, arguments, work, environment, stdin)
    if _EVENTS_PREFIX in answer.err:
        raise TrialFailed(
            Outcome.EXECUTED, f"{command_line(arguments)}: {answer.err.rpartition(_EVENTS_PREFIX)[2].strip()[:300]}"
        )
    require_sound(answer)
    # A run that diverged has trained: it keeps its folder, which holds the batch at which it diverged.
    if clean and answer.status not in (0, DIVERGED) and (left := sorted(files() - before)):
        raise TrialFailed(Outcome.LEFTOVER, f"{command_line(arguments)}: leaves {', '.join(left[:3])}")
    return answer


def require_sound(answer: Answer) -> Answer:
    """Returns the answer if the command succeeded, or was refused with an error and a hint. Raises TrialFailed for a
    hang, a traceback, an abort, an error without a hint, and control characters in the output."""
    line = command_line(answer.arguments)
    if answer.status is None:
        raise TrialFailed(Outcome.HANG, line)
    if answer.status < 0:
        raise TrialFailed(Outcome.TRACEBACK, f"{line}: ended by {signal.Signals(-answer.status).name}")
    # lmtool reports a panic in a Rust library as an error. If there is no error, the panic went unhandled.
    panicked = " panicked at " in answer.output and not (answer.status == 2 and answer.errors)
    if answer.status == 1 or "Traceback (most recent call last)" in answer.output or panicked:
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*", answer.err, re.MULTILINE)
        raise TrialFailed(Outcome.TRACEBACK, f"{line}: {(raised or answer.err.splitlines() or ['nothing'])[-1][:300]}")
    if control := _CONTROL.search(answer.output):
        raise TrialFailed(Outcome.ESCAPE, f"{line}: prints {control[0]!r}")
    if answer.status and not re.search(r"^error: .", answer.err, re.MULTILINE):
        raise TrialFailed(Outcome.UNCLEAR, f"{line}: status {answer.status} without a line `error:`")
    if answer.status == 2 and not re.search(r"^hint: .", answer.err, re.MULTILINE):
        raise TrialFailed(Outcome.UNCLEAR, f"{line}: no hint: {answer.err.strip()}")
    return answer


def command_line(arguments: Sequence[str]) -> str:
    """Formats a command line for messages, and truncates long arguments."""
    short = (repr(word if len(word) <= 80 else f"{word[:77]}...")[1:-1] for word in arguments)
    return f"lmtool {' '.join(short)}"


def is_refusal(answer: Answer, *names: str) -> bool:
    """Returns whether the command failed. Raises TrialFailed if its error contains none of `names`."""
    if answer.status and names and not any(name in answer.errors for name in names):
        missing = f"does not name {' or '.join(names)}"
        raise TrialFailed(Outcome.UNCLEAR, f"{command_line(answer.arguments)}: {missing}: {answer.errors[:300]}")
    return answer.status != 0


def require_refusal(answer: Answer, *names: str, accepted: str = "read without a message") -> None:
    """Raises TrialFailed if the command succeeded, or if its error contains none of `names`. accepted: the detail of
    the failure of a command that succeeded."""
    if not is_refusal(answer, *names):
        raise TrialFailed(Outcome.SILENT, accepted)


def require_success(answer: Answer, when: str = "") -> None:
    """Raises TrialFailed if the command failed. when: a prefix of the detail."""
    if answer.status:
        raise TrialFailed(Outcome.DEAD_END, f"{when}{answer.errors[:300]}")


# --- audit of a command -----------------------------------------------------------------------------------------------

_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree")
_KNOWN = ("fc-list", "uname")  # programs that matplotlib and platform start


def watch(workdir: Path) -> Callable[[], list[str]]:
    """Installs an audit hook in this process, and returns a function that lists the programs that the process has
    started, the connections that it has opened, and the files that it has written outside `workdir`. Must be called in
    a fork, since an audit hook cannot be removed."""
    events: list[str] = []
    home = os.path.realpath(workdir)

    def inside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a file descriptor
        resolved = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        return f"{resolved}/".startswith((f"{home}/", "/dev/", "/proc/")) or "__pycache__" in resolved

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _STARTS and arguments[0] not in _KNOWN:
            events.append(f"{event} {arguments[:2]!r}"[:200])
        elif event == "open" and isinstance(arguments[2], int):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and not inside(arguments[0]):
                events.append(f"writes {arguments[0]!r}")
        elif event in _CHANGES and not inside(arguments[0]):
            events.append(f"{event} {arguments[0]!r}")

    sys.addaudithook(hook)
    return lambda: list(events)
