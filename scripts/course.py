"""The course in commands: runs docs/course.md, and writes one page of it.

    python scripts/course.py [--only ID[,ID]] [--folder runs/course]

Runs every command of docs/course.md in its order, in the folder, offline; keeps what each printed below FOLDER/logs,
and what is finished in FOLDER/topics, so that it resumes where it was stopped. A command that was changed in the
document is run again, with all that follow it in its topic. FOLDER/index.html has all that was run so far.
course_text.py has the format of the document.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course_commands import ROOT, run_commands
from course_page import Spent, stdout_of, write_course
from course_text import Course, Topic, read_course, written
from rows import listed, stop

from lmtool.config.nearest import nearest
from lmtool.reporting.text import duration

COURSE = ROOT / "docs" / "course.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=listed(str), default=[], metavar="ID[,ID]", help="topics that are run")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "course", help="where everything is written")
    options = parser.parse_args()
    course = read_course(COURSE.read_text(encoding="utf-8"))
    topics = chosen(course, options.only)
    options.folder.mkdir(parents=True, exist_ok=True)
    error = None
    for topic in topics:
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


def chosen(course: Course, only: list[str]) -> list[Topic]:
    """The topics of these ids, in the order of the course; all where none is named."""
    ids = [topic.id for topic in course.topics]
    for name in only:
        if name not in ids:
            meant = nearest(name, ids)
            stop(f"--only {name}: no such topic", f"did you mean {meant}?" if meant else f"there are {', '.join(ids)}")
    return [topic for topic in course.topics if not only or topic.id in only]


def lacking(course: Course, topic: Topic, folder: Path) -> str | None:
    """What a topic reads and no topic has written yet, in a sentence."""
    for name in sorted(topic.needed):
        if not (folder / name).exists():
            makers = [each.id for each in course.topics if any(name in written(line) for line in each.commands)]
            there = f"--only {makers[0]},{topic.id}" if makers else "no topic writes it"
            return f"topic {topic.id} lacks {name}: {there}"
    return None


def run(topic: Topic, folder: Path) -> str | None:
    """Run what is left of a topic; what went wrong, in a sentence."""
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
    """The records of the topic's first commands, as far as they ran as they stand in the document now."""
    path = record_path(topic, folder)
    records = json.loads(path.read_text()) if path.exists() else []
    same = 0
    while same < min(len(records), len(topic.commands)) and records[same]["command"] == topic.commands[same]:
        same += 1
    return records[:same]


def spent_on(topic: Topic, folder: Path) -> Spent:
    records = finished(topic, folder)
    return Spent([record["seconds"] for record in records], len(records) == len(topic.commands))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
