"""What a run learns from, data and teachers: kept in each of its checkpoints, and compared when the run resumes from
one.

data.json   {"data=text": {"text": sha256, "bytes": ..., ...}, "task=sst2": {"train rows": ..., "train texts": sha256,
            "train labels": sha256, "dev rows": ..., ...}}
base.json   of a tuned run: which weights it left out, see weights/bases.py
teachers.json   of a distilled run: {"runs/NAME": sha256 of the tensors that the student learns from}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmtool.commands.lineage import LINEAGE, Lineage
from lmtool.commands.opening import OpenRun
from lmtool.config.checkpoint import DATA, read_json, read_manifest
from lmtool.data.sources import Source
from lmtool.distillation.distilled import Distilled
from lmtool.drafts import write_bytes
from lmtool.errors import UserError
from lmtool.runs.files import to_json
from lmtool.tasks.loading import TaskData
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.bases import BASE, Base, digest

TEACHERS = "teachers.json"
Contents = dict[str, dict[str, Any]]
"""By origin ("data=text", "task=sst2"): hashes and counts of what it holds, by what they are of."""


def contents_of(tasks: Mapping[str, TaskData], text: tuple[str, Source] | None = None) -> Contents:
    """tasks: labelled data by the task's name. text: the name of a text's configuration, and the text."""
    contents = {f"task={name}": task.contents() for name, task in tasks.items()}
    if text is not None:
        name, source = text
        counts = {key: value for key, value in source.facts().items() if type(value) is int}
        contents[f"data={name}"] = {"text": source.fingerprint, **counts}
    return contents


def require_same_data(opened: OpenRun, contents: Contents) -> None:
    """UserError, naming what differs, where the run resumes and its data are not those it was started with."""
    checkpoint = opened.checkpoint
    if checkpoint is None or DATA not in read_manifest(checkpoint).files:
        return
    saved = read_json(checkpoint, DATA)
    changes = []
    for origin, now in contents.items():
        before = saved.get(origin)
        before = before if isinstance(before, dict) else {}
        differing = [key for key in now if before.get(key) != now[key]]
        if any(isinstance(now[key], str) for key in differing):  # hashes decide, counts only say more
            changes.append(f"{origin}: {', '.join(_change(key, before.get(key), now[key]) for key in differing)}")
    if changes:
        run = opened.folder.path
        raise UserError(
            f"the data of {run} changed after {checkpoint.name}: {'; '.join(changes)}",
            "bring them back as they were; or start another run from these weights: the same command with name=NEW "
            f"checkpoint={run}",
        )


def _change(key: str, before: Any, now: Any) -> str:
    return f"{key} {before:,} -> {now:,}" if type(before) is type(now) is int else f"other {key}"


def teachers_of(distilled: Distilled | None) -> dict[str, str]:
    """By what a user calls a teacher, the sha256 of its tensors."""
    teachers = () if distilled is None else distilled.teachers
    return {teacher.origin: digest(teacher.learner.state_dict()) for teacher in teachers}


def require_same_teachers(opened: OpenRun, teachers: Mapping[str, str]) -> None:
    """UserError, with both hashes, where the run resumes and a teacher is another than it was started with."""
    checkpoint = opened.checkpoint
    if checkpoint is None or TEACHERS not in read_manifest(checkpoint).files:
        return
    saved = read_json(checkpoint, TEACHERS)
    for origin, now in teachers.items():
        before = saved.get(origin)
        if before != now:
            run = opened.folder.path
            raise UserError(
                f"the teacher {origin} changed after {checkpoint.name} of {run}: sha256 {str(before)[:16]} then, "
                f"{now[:16]} now",
                "bring it back as it was; or start another run from these weights: the same command with name=NEW "
                f"checkpoint={run}",
            )


def require_unchanged(teachers: Mapping[str, str], distilled: Distilled) -> None:
    """RuntimeError where training has changed a teacher."""
    if teachers != teachers_of(distilled):
        raise RuntimeError(f"training has changed a teacher: {', '.join(teachers)}")


def extras(
    tokenizer: Tokenizer,
    contents: Contents,
    base: Base | None = None,
    lineage: Lineage = (),
    teachers: Mapping[str, str] | None = None,
) -> Callable[[Path], None]:
    """What writes the files of a checkpoint that the loop does not know."""

    def write(folder: Path) -> None:
        tokenizer.save(folder)
        write_bytes(folder / DATA, to_json(contents).encode())
        if base is not None:
            write_bytes(folder / BASE, to_json(base.to_plain()).encode())
        if teachers:
            write_bytes(folder / TEACHERS, to_json(dict(teachers)).encode())
        if lineage:
            write_bytes(folder / LINEAGE, to_json({"checkpoints": list(lineage)}).encode())

    return write
