"""Command lines typed in a fork: what they print, how they end, what they leave behind.

The fork has everything imported: a fresh process would cost seconds. It is held to ten seconds of processor time.
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

from tests.training.kill_harness import fork, wait
from trials.outcomes import Failed, Outcome
from trials.watching import watch

SECONDS = 10  # of processor time; one that waits for something is given three times as many by the clock
_MEMORY = 6 << 30  # bytes of address space beyond those of the fork's start
# All control characters but tab and line feed, and the C1 set, which terminals obey too.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DEED = "watched: "


@dataclass(frozen=True)
class Answer:
    """status: as a shell has it, negative after a signal, None where the command hung."""

    words: tuple[str, ...]
    status: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def errors(self) -> str:
        """The lines `error:` alone."""
        return "\n".join(line for line in self.err.splitlines() if line.startswith("error: "))


def in_fork(
    place: Path, work: Callable[[], int], environment: Mapping[str, str] | None = None, stdin: bytes = b""
) -> Answer:
    """Do some work in a fork whose working folder is `place`; it returns its exit status."""
    streams = {name: place / f".{name}" for name in ("in", "out", "err")}
    streams["in"].write_bytes(stdin)

    def child(folder: Path) -> None:
        _redirect(streams)
        os.chdir(folder)
        home = folder / ".home"
        os.environ.update({"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch"), **(environment or {})})
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
        if pages:
            limit = pages * resource.getpagesize() + _MEMORY
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
    return Answer((), None if status == -signal.SIGXCPU else status, out, err)


def _redirect(streams: Mapping[str, Path]) -> None:
    """Standard input, output and error from and to files, below Python too: libraries in Rust and C++ print."""
    flags = {"in": os.O_RDONLY, "out": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "err": os.O_WRONLY | os.O_CREAT}
    for number, (name, path) in enumerate(streams.items()):
        os.dup2(os.open(path, flags[name], 0o600), number)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", errors=errors, write_through=True)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )


def typed(
    place: Path, *words: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", watched: bool = False
) -> Answer:
    """`lmtool WORDS` in the folder `place`. watched: nothing in its input may run or be written elsewhere. Raises
    Failed where it ends in a way that no input excuses: see `sound`."""
    from lmtool.cli import main as cli

    def work() -> int:
        sys.argv = ["lmtool", *words]
        deeds = watch(place) if watched else list
        try:
            return cli.main(list(words))
        finally:
            if deeds():
                print(f"{_DEED}{'; '.join(deeds())}", file=sys.stderr)

    answer = in_fork(place, work, environment, stdin)
    if _DEED in answer.err:
        raise Failed(Outcome.EXECUTED, f"{shown(words)}: {answer.err.rpartition(_DEED)[2].strip()[:300]}")
    return sound(Answer(words, answer.status, answer.out, answer.err))


def sound(answer: Answer) -> Answer:
    """The answer, where it is one that a user may get: the work done, or a refusal with its two lines. Raises Failed
    for a hang, a traceback, an abort, a status of its own and control characters."""
    line = shown(answer.words)
    if answer.status is None:
        raise Failed(Outcome.HANG, line)
    if answer.status < 0:
        raise Failed(Outcome.TRACEBACK, f"{line}: ended by {signal.Signals(-answer.status).name}")
    if answer.status == 1 or "Traceback (most recent call last)" in answer.said or _panicked(answer):
        raise Failed(Outcome.TRACEBACK, f"{line}: {_last_words(answer)}")
    if control := _CONTROL.search(answer.said):
        raise Failed(Outcome.ESCAPE, f"{line}: prints {control[0]!r}")
    if answer.status and not re.search(r"^error: .", answer.err, re.MULTILINE):
        raise Failed(Outcome.UNCLEAR, f"{line}: status {answer.status} without a line `error:`")
    if answer.status == 2 and not re.search(r"^hint: .", answer.err, re.MULTILINE):
        raise Failed(Outcome.UNCLEAR, f"{line}: no hint: {answer.err.strip()}")
    return answer


def _panicked(answer: Answer) -> bool:
    """Whether a library in Rust panicked and nothing was made of it: its own line comes before any of ours."""
    return " panicked at " in answer.said and not (answer.status == 2 and answer.errors)


def _last_words(answer: Answer) -> str:
    """The line of a traceback that names the exception."""
    lines = [line for line in answer.err.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return (lines or answer.err.splitlines()[-2:] or ["nothing"])[-1][:300]


def shown(words: Sequence[str]) -> str:
    """A command line as the table shows it; long words cut."""
    short = (repr(word if len(word) <= 80 else f"{word[:77]}...")[1:-1] for word in words)
    return f"lmtool {' '.join(short)}"


def refused(answer: Answer, *names: str) -> bool:
    """Whether the command ended with an error that names one of these. Raises Failed where it ended with one that
    names none of them."""
    if answer.status == 0:
        return False
    if names and not any(name in answer.errors for name in names):
        wanted = " or ".join(names)
        raise Failed(Outcome.UNCLEAR, f"{shown(answer.words)}: does not name {wanted}: {answer.errors[:300]}")
    return True


def files_in(place: Path) -> set[str]:
    """What lies in a folder, caches left out."""
    return {
        path
        for path in (str(path.relative_to(place)) for path in place.rglob("*"))
        if path.split("/")[0] not in ("cache", ".home")
    }


def nothing_left(place: Path, before: set[str], answer: Answer) -> None:
    """Raises Failed where a refused command left files behind."""
    left = sorted(files_in(place) - before)
    if answer.status and left:
        raise Failed(Outcome.LEFTOVER, f"{shown(answer.words)}: leaves {', '.join(left[:3])}")
