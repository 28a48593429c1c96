"""A trial plants a fault, runs commands in forked processes and judges how they end.

A fork inherits the imports, which would cost a fresh process seconds. Limits hold its processor time and its memory,
and an audit hook records the programs it starts, the connections it opens and the files it writes elsewhere.
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
from tests.training.kill_harness import fork, wait
from trials.outcomes import Failed, Outcome, Verdict

SECONDS = 10  # of processor time; the clock allows three times as many, since a command may wait
_MEMORY = 6 << 30  # bytes of address space in addition to those at the start of the fork
# All control characters except tab and line feed. Terminals obey the C1 set (0x80 to 0x9f) as well.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DEED = "watched: "


def ended(answer: Answer, detail: str) -> Verdict:
    """The verdict on a command that either refused or succeeded."""
    return Verdict(Outcome.REFUSED if answer.status else Outcome.DONE, f"{detail}: {answer.errors[:150]}")


# --- command lines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """status: the exit status, negative after a signal, None if the command hung."""

    words: tuple[str, ...]
    status: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def errors(self) -> str:
        """The lines that begin with `error:`."""
        return "\n".join(line for line in self.err.splitlines() if line.startswith("error: "))


def in_fork(
    place: Path, words: Sequence[str], work: Callable[[], int], environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Answer:  # fmt: skip
    """Calls `work`, which returns an exit status, in a fork whose working folder is `place`. words: its command line,
    for messages."""
    streams = {name: place / f".{name}" for name in ("in", "out", "err")}
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

    process = fork(child, place)
    status = wait(process, 3 * SECONDS)
    if status is None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    out, err = (streams[name].read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    for path in streams.values():
        path.unlink()
    return Answer(tuple(words), None if status == -signal.SIGXCPU else status, out, err)


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


def typed(
    place: Path, *words: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", watched: bool = False,
    clean: bool = False,
) -> Answer:  # fmt: skip
    """Runs `lmtool WORDS` in the folder `place`. watched: the input must not run code or write elsewhere. clean: a
    refused command must leave no file except caches. Raises Failed for an end that no input excuses (see `sound`)."""
    from lmtool.cli import main as cli

    def files() -> set[str]:
        paths = (path.relative_to(place) for path in place.rglob("*"))
        return {str(path) for path in paths if path.parts[0] not in ("cache", ".home")}

    def work() -> int:
        sys.argv = ["lmtool", *words]
        deeds = watch(place) if watched else list
        try:
            return cli.main(list(words))
        finally:
            if deeds():
                print(f"{_DEED}{'; '.join(deeds())}", file=sys.stderr)

    before = files() if clean else set()
    answer = in_fork(place, words, work, environment, stdin)
    if _DEED in answer.err:
        raise Failed(Outcome.EXECUTED, f"{shown(words)}: {answer.err.rpartition(_DEED)[2].strip()[:300]}")
    sound(answer)
    # A run that diverged has trained: its folder stays, with the batch.
    if clean and answer.status not in (0, DIVERGED) and (left := sorted(files() - before)):
        raise Failed(Outcome.LEFTOVER, f"{shown(words)}: leaves {', '.join(left[:3])}")
    return answer


def sound(answer: Answer) -> Answer:
    """Returns an answer that a user may get: a success, or a refusal with an error and a hint. Raises Failed for a
    hang, a traceback, an abort, an error without a hint and control characters."""
    line = shown(answer.words)
    if answer.status is None:
        raise Failed(Outcome.HANG, line)
    if answer.status < 0:
        raise Failed(Outcome.TRACEBACK, f"{line}: ended by {signal.Signals(-answer.status).name}")
    # lmtool reports a panic of a Rust library as an error; without one, the panic went unhandled.
    panicked = " panicked at " in answer.said and not (answer.status == 2 and answer.errors)
    if answer.status == 1 or "Traceback (most recent call last)" in answer.said or panicked:
        raised = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*", answer.err, re.MULTILINE)
        raise Failed(Outcome.TRACEBACK, f"{line}: {(raised or answer.err.splitlines() or ['nothing'])[-1][:300]}")
    if control := _CONTROL.search(answer.said):
        raise Failed(Outcome.ESCAPE, f"{line}: prints {control[0]!r}")
    if answer.status and not re.search(r"^error: .", answer.err, re.MULTILINE):
        raise Failed(Outcome.UNCLEAR, f"{line}: status {answer.status} without a line `error:`")
    if answer.status == 2 and not re.search(r"^hint: .", answer.err, re.MULTILINE):
        raise Failed(Outcome.UNCLEAR, f"{line}: no hint: {answer.err.strip()}")
    return answer


def shown(words: Sequence[str]) -> str:
    """A command line for messages, its long arguments truncated."""
    short = (repr(word if len(word) <= 80 else f"{word[:77]}...")[1:-1] for word in words)
    return f"lmtool {' '.join(short)}"


def refused(answer: Answer, *names: str) -> bool:
    """Whether the command failed. Raises Failed if its error contains none of `names`."""
    if answer.status and names and not any(name in answer.errors for name in names):
        missing = f"does not name {' or '.join(names)}"
        raise Failed(Outcome.UNCLEAR, f"{shown(answer.words)}: {missing}: {answer.errors[:300]}")
    return answer.status != 0


def require_refusal(answer: Answer, *names: str, accepted: str = "read without a word") -> None:
    """Raises Failed, with the detail `accepted`, if the command succeeded."""
    if not refused(answer, *names):
        raise Failed(Outcome.SILENT, accepted)


def require_success(answer: Answer, when: str = "") -> None:
    """Raises Failed if the command was refused. when: prefixes its error."""
    if answer.status:
        raise Failed(Outcome.DEAD_END, f"{when}{answer.errors[:300]}")


# --- what a command does in addition to its work ----------------------------------------------------------------------

_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree")
_KNOWN = ("fc-list", "uname")  # programs that matplotlib and platform start


def watch(place: Path) -> Callable[[], list[str]]:
    """Watches this process and returns a function that lists the programs it started, the connections it opened and the
    files it wrote outside its folder. Call it in a fork: the hook cannot be removed."""
    events: list[str] = []
    home = os.path.realpath(place)

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
