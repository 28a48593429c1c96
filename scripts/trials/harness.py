"""A trial: a fault that is planted, command lines typed in a fork, and how it ended.

A fork has everything imported, which would cost a fresh process seconds. It is held to ten seconds of processor time
and to its share of memory, and what it starts, connects to or writes elsewhere is seen.
"""

from __future__ import annotations

import io
import os
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lmtool.errors import DIVERGED
from tests.training.kill_harness import fork, wait

SECONDS = 10  # of processor time; one that waits for something is given three times as many by the clock
_MEMORY = 6 << 30  # bytes of address space beyond those of the fork's start
# All control characters but tab and line feed, and the C1 set, which terminals obey too.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DEED = "watched: "


class Outcome(StrEnum):
    """How a trial ended. Those in capitals are failures."""

    RECOVERED = "recovered"  # the fault is gone from the result: it is that of an undisturbed run
    FELL_BACK = "fell back"  # another checkpoint was used, and the command said so
    REFUSED = "refused"  # a line `error:` that names the fault, and a line `hint:`
    DONE = "done"  # no fault after all: legal input, read as it should be
    IMPOSSIBLE = "not possible here"  # this machine lacks what the trial needs
    SILENT = "SILENT"  # a wrong result, or an unread fault, without a word
    TRACEBACK = "TRACEBACK"  # a traceback, an abort, or a status that means a bug
    HANG = "HANG"
    SECRET = "SECRET"
    LEFTOVER = "LEFTOVER"  # a refused command left files behind
    DEAD_END = "DEAD END"  # no way on: a refusal where a fall back was possible, or a hint that does not work
    UNCLEAR = "UNCLEAR"  # a refusal without a hint, or one that does not name the fault
    ESCAPE = "ESCAPE"  # control characters of the input reached the screen
    EXECUTED = "EXECUTED"  # something in the input ran, or wrote outside its place
    BROKEN = "BROKEN"  # the trial itself failed


@dataclass(frozen=True)
class Verdict:
    """detail: what was planted, and what was seen; one line."""

    outcome: Outcome
    detail: str


class Failed(Exception):
    """Ends a trial with a failure."""

    def __init__(self, outcome: Outcome, detail: str):
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail)


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Names the fault in what is raised inside."""
    try:
        yield
    except Failed as failure:
        raise Failed(failure.verdict.outcome, f"{fault}: {failure.verdict.detail}") from failure


Trial = Callable[[Path, Path, int], Verdict]
Row = dict[str, Any]
Summary = Callable[[list[Row]], tuple[str, bool]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. trials: how many there are in all, seeds 0, 1, ... draw: how many a small draw has. trial: takes
    the stage (see stage.py), an empty folder that is the trial's own, and its seed; what it plants is a function of the
    seed. Raises Failed, or returns a verdict. summary: a line about all finished rows, and whether it is a good one."""

    trials: int
    draw: int
    trial: Trial
    summary: Summary | None = None

    def run(self, stage: Path, place: Path, seed: int) -> Verdict:
        try:
            return self.trial(stage, place, seed)
        except Failed as failure:
            return failure.verdict


KINDS: dict[str, Kind] = {}


def kind(name: str, trials: int, draw: int = 2, summary: Summary | None = None) -> Callable[[Trial], Trial]:
    """Enters a trial into KINDS."""

    def enter(trial: Trial) -> Trial:
        KINDS[name] = Kind(trials, draw, trial, summary)
        return trial

    return enter


def chance_of(name: str, seed: int) -> random.Random:
    """The random choices of a trial."""
    return random.Random(f"{name} {seed}")


def ended(answer: Answer, detail: str) -> Verdict:
    """Of a command that was refused, or done."""
    return Verdict(Outcome.REFUSED if answer.status else Outcome.DONE, f"{detail}: {answer.errors[:150]}")


# --- command lines ----------------------------------------------------------------------------------------------------


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
    place: Path, words: Sequence[str], work: Callable[[], int], environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Answer:  # fmt: skip
    """Do some work in a fork whose working folder is `place`; it returns its exit status. words: what it is called."""
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
    place: Path, *words: str, environment: Mapping[str, str] | None = None, stdin: bytes = b"", watched: bool = False,
    clean: bool = False,
) -> Answer:  # fmt: skip
    """`lmtool WORDS` in the folder `place`. watched: nothing in its input may run or be written elsewhere. clean: where
    it is refused, no file stays behind but caches. Raises Failed where it ends in a way that no input excuses: see
    `sound`."""
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
    # What diverges has trained: its run stays, with the batch.
    if clean and answer.status not in (0, DIVERGED) and (left := sorted(files() - before)):
        raise Failed(Outcome.LEFTOVER, f"{shown(words)}: leaves {', '.join(left[:3])}")
    return answer


def sound(answer: Answer) -> Answer:
    """The answer, where it is one that a user may get: the work done, or a refusal with its two lines. Raises Failed
    for a hang, a traceback, an abort, a status of its own and control characters."""
    line = shown(answer.words)
    if answer.status is None:
        raise Failed(Outcome.HANG, line)
    if answer.status < 0:
        raise Failed(Outcome.TRACEBACK, f"{line}: ended by {signal.Signals(-answer.status).name}")
    # Where nothing was made of a library's panic in Rust, its own line comes before any of ours.
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
    """A command line as the table shows it; long words cut."""
    short = (repr(word if len(word) <= 80 else f"{word[:77]}...")[1:-1] for word in words)
    return f"lmtool {' '.join(short)}"


def refused(answer: Answer, *names: str) -> bool:
    """Whether the command ended with an error that names one of these. Raises Failed where it names none of them."""
    if answer.status and names and not any(name in answer.errors for name in names):
        wanted = f"does not name {' or '.join(names)}"
        raise Failed(Outcome.UNCLEAR, f"{shown(answer.words)}: {wanted}: {answer.errors[:300]}")
    return answer.status != 0


# --- what a command does beside its work ------------------------------------------------------------------------------

_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree")
_KNOWN = ("fc-list", "uname")  # programs that matplotlib and platform start by themselves


def watch(place: Path) -> Callable[[], list[str]]:
    """Watch this process from here on; the function returned lists what it did: programs started, connections opened,
    files written outside its folder. For a fork: a hook stays for good."""
    events: list[str] = []
    home = os.path.realpath(place)

    def inside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # an open file's number
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
