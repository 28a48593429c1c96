"""What data a run learns from: kept in each of its checkpoints, and compared when the run resumes from one.

data.json   {"data=text": {"text": sha256, "bytes": ..., ...}, "task=sst2": {"train rows": ..., "train texts": sha256,
            "train labels": sha256, "dev rows": ..., ...}}
base.json   of a tuned run: which weights it left out, see weights/bases.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmtool.commands.lineage import LINEAGE, Lineage
from lmtool.commands.opening import OpenRun
from lmtool.config.checkpoint import DATA, read_json, read_manifest
from lmtool.data.sources import Source
from lmtool.errors import UserError
from lmtool.manifest import write_bytes
from lmtool.runs.files import to_json
from lmtool.tasks.loading import TaskData
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.bases import BASE, Base

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


def extras(
    tokenizer: Tokenizer, contents: Contents, base: Base | None = None, lineage: Lineage = ()
) -> Callable[[Path], None]:
    """What writes the files of a checkpoint that the loop does not know."""

    def write(folder: Path) -> None:
        tokenizer.save(folder)
        write_bytes(folder / DATA, to_json(contents).encode())
        if base is not None:
            write_bytes(folder / BASE, to_json(base.to_plain()).encode())
        if lineage:
            write_bytes(folder / LINEAGE, to_json({"checkpoints": list(lineage)}).encode())

    return write
