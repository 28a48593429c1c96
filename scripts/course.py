"""Run the commands of docs/course.md, and write the course as one page.

    python scripts/course.py [--only ID[,ID]] [--folder runs/course]

Runs every command in order, in the folder, offline. FOLDER/logs keeps their output and FOLDER/topics the finished ones,
from which a stopped script resumes. A command that changed in the document runs again, with all later ones of its
topic. FOLDER/index.html shows all results so far. course_text.py describes the format of the document.

A short command spends most of its time on importing torch and packages that use it. A line that is a single command of
lmtool therefore runs in a fork of this process, which has imported them once; bash runs any other line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT, listed, with_this_tree
from course_page import Spent, stdout_of, write_course
from course_text import Course, Topic, read_course, written

from lmtool.reporting.text import duration

COURSE = ROOT / "docs" / "course.md"
# A line of the document is a line of bash, in which `lmtool` is that of this interpreter.
_SHELL = f'lmtool() {{ {shlex.quote(sys.executable)} -m lmtool "$@"; }}\n'
# Characters with a meaning in bash unless they are quoted.
_OF_BASH = re.compile(r"[|&;<>$`*?~{}()\\]")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
TOGETHER = 2


def main() -> None:
    course = read_course(COURSE.read_text(encoding="utf-8"))
    ids = [topic.id for topic in course.topics]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=listed("--only", ids), default=ids, metavar="ID[,ID]", help="some topics")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "course", help="where everything is written")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    error = None
    for topic in (topic for topic in course.topics if topic.id in options.only):
        error = lacking(course, topic, options.folder) or run(topic, options.folder)
        if error:
            break
    spent = {topic.id: spent_on(topic, options.folder) for topic in course.topics}
    page = write_course(course, options.folder, spent)
    left = [name for name, each in spent.items() if not each.finished]
    print(f"{page}{': without ' + ', '.join(left) if left else ''}")
    if error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def lacking(course: Course, topic: Topic, folder: Path) -> str | None:
    """An error if a topic reads a file that does not exist."""
    for name in sorted(topic.needed):
        if not (folder / name).exists():
            makers = [each.id for each in course.topics if any(name in written(line) for line in each.commands)]
            there = f"--only {makers[0]},{topic.id}" if makers else "no topic writes it"
            return f"topic {topic.id} lacks {name}: {there}"
    return None


def run(topic: Topic, folder: Path) -> str | None:
    """Runs the remaining commands of a topic. Returns an error, or None."""
    records = finished(topic, folder)
    left = list(topic.steps(len(records)))
    print(f"{topic.number}. {topic.title}{'' if left else ': finished before'}", flush=True)
    for lines in left:
        outs = {line: stdout_of(folder, topic, number) for number, line in enumerate(lines, len(records))}
        print("\n".join(f"  {line}" for line in lines), end="  ", flush=True)
        stdout_of(folder, topic, 0).parent.mkdir(exist_ok=True)
        ran = run_commands(outs, folder)
        print(duration(sum(each.seconds for each in ran)) + (" together" if len(ran) > 1 else ""), flush=True)
        for each, out in zip(ran, outs.values(), strict=True):
            if each.status:
                log = out.with_suffix(".err")
                said = " ".join(re.findall(r"^(?:error|hint): .*", log.read_text(errors="replace"), re.MULTILINE))
                return f"topic {topic.id} ended with status {each.status} at {each.command}: {said or 'see'} {log}"
            records.append(asdict(each))
            path = record_path(topic, folder)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(records, indent=1) + "\n")
    if left:
        seconds, cpu = (sum(record[key] for record in records) for key in ("seconds", "cpu_seconds"))
        print(f"  {duration(seconds)}, {duration(cpu)} of CPU", flush=True)
    return None


def record_path(topic: Topic, folder: Path) -> Path:
    return folder / "topics" / f"{topic.id}.json"


def finished(topic: Topic, folder: Path) -> list[dict[str, Any]]:
    """The records of the topic's first commands, up to the first that is new or has changed in the document."""
    path = record_path(topic, folder)
    records = json.loads(path.read_text()) if path.exists() else []
    same = 0
    while same < min(len(records), len(topic.commands)) and records[same]["command"] == topic.commands[same]:
        same += 1
    return records[:same]


def spent_on(topic: Topic, folder: Path) -> Spent:
    records = finished(topic, folder)
    return Spent([record["seconds"] for record in records], len(records) == len(topic.commands))


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """seconds: elapsed time, for parallel commands since the previous one ended. cpu_seconds: of all its processes.
    status: its exit status."""

    command: str
    seconds: float
    cpu_seconds: float
    status: int


def run_commands(commands: Mapping[str, Path], folder: Path) -> list[Ran]:
    """Runs commands in a folder; several run TOGETHER at a time, with one thread each. commands: the output file of
    each; standard error goes to the same path with .err. Returns the results in order."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    forks = [command.startswith("lmtool ") and not _OF_BASH.search(_QUOTED.sub("", command)) for command in commands]
    if any(forks):
        import_all()
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
            command, now, cpu = running.pop(process), time.monotonic(), usage.ru_utime + usage.ru_stime
            ran[command] = Ran(command, round(now - before, 2), round(cpu, 2), os.waitstatus_to_exitcode(status))
            before = now
    except KeyboardInterrupt:
        for process in running:
            os.waitpid(process, 0)  # the interrupt reached it too: it saves a checkpoint
        raise
    return [ran[command] for command in commands]


def import_all() -> None:
    from lmtool.system.environment import ENVIRONMENT

    os.environ |= ENVIRONMENT | os.environ
    import lmtool.reporting.looks  # noqa: F401


def _become(command: str, folder: Path, stdout: Path, in_fork: bool, threads: int | None) -> None:
    """Runs the command in the new process and exits. threads: None for all."""
    status = 1
    try:
        for path, stream in ((Path(os.devnull), 0), (stdout, 1), (stdout.with_suffix(".err"), 2)):
            os.dup2(os.open(path, (os.O_WRONLY if stream else os.O_RDONLY) | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        os.chdir(folder)
        os.environ |= with_this_tree(dict(os.environ))
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        if not in_fork:
            os.execvp("bash", ["bash", "-o", "pipefail", "-c", _SHELL + command])
        import torch

        from lmtool.cli.main import main

        if threads is not None:
            torch.set_num_threads(threads)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", encoding="utf-8", errors="replace") for stream in (1, 2))
        sys.argv = shlex.split(command)
        status = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
