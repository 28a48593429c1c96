"""`lmtool course`: runs the commands of the course, and writes it as one page.

Runs all commands in order, in `folder`, offline. FOLDER/logs contains their output. FOLDER/topics lists the finished
commands, after which a stopped course resumes. If a command has changed in the document, it and the later commands of
its topic run again. FOLDER/index.html shows all results so far.

A short command spends most of its time importing torch and packages that use it. A line that is a single lmtool command
therefore runs in a fork of this process, which has imported them once; bash runs all other lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from lmtool.config.registry import imported
from lmtool.course.document import Course, Topic, document, read_course, written_paths
from lmtool.course.page import TimeSpent, stdout_of, write_course
from lmtool.errors import CheckFailed, UserError
from lmtool.reporting.text import duration
from lmtool.resolver.commands import CourseConfig
from lmtool.runs.files import write_errors
from lmtool.system.files import user_path
from lmtool.system.terminal import say

# Defines `lmtool` for bash lines of the document: the lmtool of this interpreter.
_SHELL = f'lmtool() {{ {shlex.join([sys.executable, "-P", "-m", "lmtool"])} "$@"; }}\n'
# Characters with a meaning in bash unless they are quoted.
_BASH_CHARACTERS = re.compile(r"[|&;<>$`*?~{}()\\]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
MAX_PARALLEL = 2  # commands that run at a time in a block marked `together`


def run(config: CourseConfig) -> None:
    """Runs the unfinished commands of the selected topics and writes the page. Raises UserError for an unknown topic or
    one that needs another, and CheckFailed if a command fails."""
    course = read_course(document().read_text(encoding="utf-8"))
    ids = [topic.id for topic in course.topics]
    for name in config.topics:
        if name not in ids:
            raise UserError(f"topics: {name} is not one of {', '.join(ids)}", "use the id of a topic, or omit topics=")
    folder = user_path(config.folder)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for topic in course.topics:
            if topic.id in (config.topics or ids):
                require_inputs(course, topic, folder)
                run_topic(topic, folder)
    finally:
        spent = {topic.id: time_spent_on(topic, folder) for topic in course.topics}
        page = write_course(course, folder, spent)
        unfinished = [name for name, time_spent in spent.items() if not time_spent.finished]
        say(f"{page}{': without ' + ', '.join(unfinished) if unfinished else ''}")


def require_inputs(course: Course, topic: Topic, folder: Path) -> None:
    """Raises UserError if the topic reads a file or folder that does not exist."""
    for name in sorted(topic.needed):
        if not (folder / name).exists():
            writers = [
                other.id for other in course.topics if any(name in written_paths(line) for line in other.commands)
            ]
            hint = f"set topics=[{writers[0]},{topic.id}]" if writers else "omit the topic: no topic writes it"
            raise UserError(f"topic {topic.id} lacks {name}", hint)


def run_topic(topic: Topic, folder: Path) -> None:
    """Runs the unfinished commands of a topic. Raises CheckFailed if a command fails."""
    records = finished_records(topic, folder)
    steps = list(topic.steps(len(records)))
    say(f"{topic.number}. {topic.title}{'' if steps else ': finished before'}")
    for lines in steps:
        stdout_files = {line: stdout_of(folder, topic, number) for number, line in enumerate(lines, len(records))}
        say("\n".join(f"  {line}" for line in lines))
        stdout_of(folder, topic, 0).parent.mkdir(exist_ok=True)
        for result, stdout in zip(run_commands(stdout_files, folder), stdout_files.values(), strict=True):
            if result.status:
                log = stdout.with_suffix(".err")
                errors = " ".join(re.findall(r"^(?:error|hint): .*", log.read_text(errors="replace"), re.MULTILINE))
                fault = f"topic {topic.id} ended with status {result.status} at {result.command}"
                raise CheckFailed(f"{fault}: {errors}" if errors else fault, f"read its output, which is in {log}")
            records.append(asdict(result))
            path = record_path(topic, folder)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(records, indent=1) + "\n")
    if steps:
        seconds, cpu = (sum(record[key] for record in records) for key in ("seconds", "cpu_seconds"))
        say(f"  {duration(seconds)}, {duration(cpu)} of CPU")


def record_path(topic: Topic, folder: Path) -> Path:
    return folder / "topics" / f"{topic.id}.json"


def finished_records(topic: Topic, folder: Path) -> list[dict[str, Any]]:
    """Returns the records of the topic's finished commands, up to the first command that is new or has changed in the
    document."""
    path = record_path(topic, folder)
    records = json.loads(path.read_text()) if path.exists() else []
    unchanged = zip(records, topic.commands, strict=False)
    return [record for record, _ in takewhile(lambda pair: pair[0]["command"] == pair[1], unchanged)]


def time_spent_on(topic: Topic, folder: Path) -> TimeSpent:
    """Returns how long the finished commands of a topic took."""
    records = finished_records(topic, folder)
    return TimeSpent([record["seconds"] for record in records], len(records) == len(topic.commands))


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandResult:
    """A finished command, as in the document. seconds: elapsed time; if commands run in parallel, the time since the
    previous one ended, so that the seconds of a block add up. cpu_seconds: processor time of all processes of the
    command."""

    command: str
    seconds: float
    cpu_seconds: float
    status: int


def run_commands(commands: Mapping[str, Path], folder: Path) -> list[CommandResult]:
    """Runs commands in a folder, and returns their results in order. Of several commands, MAX_PARALLEL run at a time,
    with one thread each. commands: the file for the standard output of each command; standard error goes to the same
    path with .err. folder: the working folder."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    forks = [
        command.startswith("lmtool ") and not _BASH_CHARACTERS.search(_QUOTED.sub("", command)) for command in commands
    ]
    if any(forks):
        import_all()
    sys.stdout.flush()
    sys.stderr.flush()
    before = time.monotonic()
    waiting = list(zip(commands.items(), forks, strict=True))
    running: dict[int, str] = {}
    results = {}
    try:
        while waiting or running:
            while waiting and len(running) < MAX_PARALLEL:
                (command, stdout), in_fork = waiting.pop(0)
                process = os.fork()
                if process == 0:
                    _run_in_fork(command, folder, stdout.resolve(), in_fork, 1 if len(commands) > 1 else None)
                running[process] = command
            process, status, usage = os.wait4(-1, 0)
            command, now, cpu = running.pop(process), time.monotonic(), usage.ru_utime + usage.ru_stime
            results[command] = CommandResult(
                command, round(now - before, 2), round(cpu, 2), os.waitstatus_to_exitcode(status)
            )
            before = now
    except KeyboardInterrupt:
        for process in running:
            os.waitpid(process, 0)  # it has received the interrupt as well, and saves a checkpoint
        raise
    return [results[command] for command in commands]


def import_all() -> None:
    """Imports the modules that most commands need, which forks inherit, with lmtool's environment variables set."""
    from lmtool.system.environment import ENVIRONMENT

    os.environ |= ENVIRONMENT | os.environ
    import lmtool.reporting.looks  # noqa: F401


def _run_in_fork(command: str, folder: Path, stdout: Path, in_fork: bool, threads: int | None) -> None:
    """Runs a command in this process, which has just been forked, and exits. command: a line of the document. folder:
    the working folder. stdout: the file for standard output; standard error goes to the same path with .err. in_fork:
    call lmtool in this process, instead of bash. threads: the number of threads; None for the default."""
    status = 1
    try:
        for path, stream in ((Path(os.devnull), 0), (stdout, 1), (stdout.with_suffix(".err"), 2)):
            os.dup2(os.open(path, (os.O_WRONLY if stream else os.O_RDONLY) | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        os.chdir(folder)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        if not in_fork:
            os.execvp("bash", ["bash", "-o", "pipefail", "-c", _SHELL + command])
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", encoding="utf-8", errors="replace") for stream in (1, 2))
        sys.argv = shlex.split(command)
        status = imported("lmtool.cli.main:main")()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
