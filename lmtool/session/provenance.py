"""The provenance of a run: the checkpoints, data and teachers that it comes from. It is saved in each checkpoint and
compared when the run resumes. This module also starts branches.

Files in a checkpoint:

data.json       {"data=text": {"text": sha256, "bytes": ..., ...}, "task=sst2": {"train rows": ..., "train texts":
                sha256, "train labels": sha256, "dev rows": ..., ...}}
base.json       for a tuned run: the weights that its checkpoints leave out, see weights/base.py
teachers.json   for a distilled run: {"runs/NAME": sha256 of the teacher's tensors}
lineage.json    {"checkpoints": [...]}: the checkpoints that the run descends from, oldest first
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from lmtool.config.base import JsonObject
from lmtool.config.registry import Choice, build
from lmtool.data.sources import Source
from lmtool.distillation.distilled import Distilled
from lmtool.errors import UserError, cannot_write
from lmtool.resolver.decoding import require_same_learning
from lmtool.runs.branches import Trunk
from lmtool.runs.checkpoints import copy_checkpoint
from lmtool.runs.files import read_rows, to_json
from lmtool.runs.finding import (
    CONFIG,
    DATA,
    MODEL,
    STATE,
    find,
    read_config,
    read_json,
    read_manifest,
    read_state,
    require_optimizer,
    saved_steps,
)
from lmtool.runs.identity import budgets
from lmtool.session.open_run import OpenRun, starts_from
from lmtool.system.files import Damaged, sha256
from lmtool.system.secrets import masked
from lmtool.tasks.loading import TaskData
from lmtool.training.configs import ScheduleConfig
from lmtool.training.progress import Progress
from lmtool.weights.base import digest
from lmtool.weights.folders import WEIGHTS, hf_folder

LINEAGE = "lineage.json"
Lineage = Sequence[JsonObject]
"""One entry per checkpoint, oldest first: `checkpoint` and what is known of its step, command, revision and sha256."""


def lineage_of(run: OpenRun) -> Lineage:
    """Returns the checkpoints that a run descends from; empty for random weights.

    A resumed run reads them from its own checkpoint, because its starting checkpoint may no longer exist.
    """
    if run.checkpoint is not None:
        return _ancestors(run.checkpoint)
    origin = starts_from(run.config)
    if origin is None:
        return []
    published = hf_folder(origin, run.config.offline)
    if published is not None:
        file = published.path / WEIGHTS[0]
        hashes = {"sha256": sha256(file)} if file.is_file() else {}
        # As an address, since 40 hexadecimal digits alone are masked like a key.
        address = f"{origin.partition('@')[0]}@{published.revision}"
        revision = {} if published.revision is None else {"revision": address}
        return [{"checkpoint": origin, **revision, **hashes}]
    folder = find(origin)
    return [*_ancestors(folder), {"checkpoint": origin, **_entry_values(folder)}]


def _entry_values(folder: Path) -> JsonObject:
    manifest = read_manifest(folder)
    values = {"step": manifest.metadata.get("step"), "command": _command(folder), **manifest.files[MODEL]}
    return {key: values[key] for key in ("step", "command", "sha256") if values.get(key) is not None}


def lineage_line(lineage: Lineage) -> str:
    """Formats a lineage as one line for the first screen."""
    return " → ".join(str(entry["checkpoint"]) for entry in lineage)


def _ancestors(folder: Path) -> Lineage:
    if LINEAGE not in read_manifest(folder).files:
        return []
    entries = read_json(folder, LINEAGE).get("checkpoints")
    return [entry for entry in entries or [] if isinstance(entry, dict) and "checkpoint" in entry]


def _command(folder: Path) -> str:
    with suppress(OSError, ValueError, TypeError, LookupError):
        run = folder.parents[1]  # a checkpoint is in RUN/checkpoints
        argv = json.loads((run / "environment.json").read_text(encoding="utf-8"))["arguments"]
        if len(argv) > 1:
            return masked(shlex.join(["lmtool", *map(str, argv[1:])]))
    with suppress(UserError):
        return f"lmtool {read_config(folder).get('command', '')}".strip()
    return "lmtool"


TEACHERS = "teachers.json"
Contents = dict[str, JsonObject]
"""For each source of data ("data=text", "task=sst2"), hashes and counts by name ("train rows", "train texts", ...)."""


def contents_of(tasks: Mapping[str, TaskData], text: tuple[str, Source] | None = None) -> Contents:
    """Returns the hashes and counts of a run's data. tasks: the labeled data by the task's name. text: the name of the
    `data` section and the opened text; None for a run without text."""
    contents = {f"task={name}": task.contents() for name, task in tasks.items()}
    if text is not None:
        name, source = text
        counts = {key: value for key, value in source.metadata().items() if type(value) is int}
        contents[f"data={name}"] = {"text": source.fingerprint, **counts}
    return contents


def require_same_data(run: OpenRun, contents: Contents, notes: Sequence[str] = ()) -> None:
    """Raises UserError if a resumed run's data have changed since its checkpoint was saved. notes: how the data are
    read now, for the message."""
    checkpoint = run.checkpoint
    if checkpoint is None or DATA not in read_manifest(checkpoint).files:
        return
    saved = read_json(checkpoint, DATA)
    changes = []
    for source, current in contents.items():
        before = saved.get(source)
        before = before if isinstance(before, dict) else {}
        changed_keys = [key for key in current if before.get(key) != current[key]]
        if any(isinstance(current[key], str) for key in changed_keys):  # hashes decide; counts are only for the message
            source_changes = [_change(key, before.get(key), current[key]) for key in changed_keys]
            changes.append(f"{source}: {', '.join(source_changes)}")
    if changes:
        folder = run.folder.path
        raise UserError(
            f"the data of {folder} changed after {checkpoint.name}: {'; '.join([*changes, *notes])}",
            f"restore the data; or start another run from these weights: the same command with name=NEW "
            f"checkpoint={folder}",
        )


def _change(key: str, before: object, now: object) -> str:
    return f"{key} {before:,} -> {now:,}" if type(before) is type(now) is int else f"other {key}"


def teacher_digests(distilled: Distilled) -> dict[str, str]:
    """Returns the sha256 of each teacher's tensors, by the teacher's checkpoint as the user typed it."""
    return {teacher.origin: digest(teacher.learner.state_dict()) for teacher in distilled.teachers}


def require_same_teachers(run: OpenRun, teachers: Mapping[str, str]) -> None:
    """Raises UserError, with both hashes, if a teacher of a resumed run has changed since its checkpoint was saved."""
    checkpoint = run.checkpoint
    if checkpoint is None or TEACHERS not in read_manifest(checkpoint).files:
        return
    saved = read_json(checkpoint, TEACHERS)
    for origin, now in teachers.items():
        before = saved.get(origin)
        if before != now:
            folder = run.folder.path
            raise UserError(
                f"the teacher {origin} changed after {checkpoint.name} of {folder}: sha256 {str(before)[:16]} then, "
                f"{now[:16]} now",
                f"restore the teacher; or start another run from these weights: the same command with name=NEW "
                f"checkpoint={folder}",
            )


# A branch (branch=RUN@STEP) is a run that continues from an intermediate checkpoint of another run, its trunk.
#
# It starts with a copy of the trunk's checkpoint and of the trunk's rows of metrics.jsonl up to that step. The copy has
# the branch's configuration, no best checkpoint, and one more entry in its lineage. From then on the branch is like any
# run that resumes, and does not need its trunk. The trunk's folder is only read, as the trunk may still be training.


def begin_branch(run: OpenRun) -> None:
    """Writes the first checkpoint of a branch; does nothing for other runs, and for a branch that resumes.

    Raises UserError if the trunk's checkpoint is damaged, or is removed while it is being copied.
    """
    if run.folder.writes:
        _copy_trunk(run)
    run.group.wait()


def _copy_trunk(run: OpenRun) -> None:
    folder, branch = run.folder, run.config.branch
    if branch is None or saved_steps(folder.checkpoints):
        return
    trunk = Trunk.of(branch)
    require_same_learning(trunk, folder.config)
    require_optimizer(trunk.point)
    saved_state = read_state(trunk.point)
    state = _first_state(saved_state, trunk, folder.config)
    warning = _learning_rate_warning(trunk, run)
    if warning is not None:
        run.output.warn(warning)
    folder.begin_at(trunk.step, (row for row in read_rows(trunk.run / "metrics.jsonl") if row["step"] <= trunk.step))
    costs = {key: saved_state[key] for key in ("tokens", "seconds") if key in saved_state}
    lineage = [*_ancestors(trunk.point), {"checkpoint": str(trunk), **_entry_values(trunk.point), **costs}]
    new_files = {CONFIG: folder.config, STATE: state, LINEAGE: {"checkpoints": lineage}}
    try:
        copy_checkpoint(
            trunk.point, folder.checkpoints, {name: to_json(content).encode() for name, content in new_files.items()}
        )
    except OSError as error:
        raise cannot_write(folder.checkpoints, error) from error
    except Damaged as damage:
        if trunk.point.is_dir():
            raise trunk.refusal(damage) from damage
        raise UserError(
            f"{trunk.point} was removed while it was copied: its run is still training and has removed the checkpoint",
            f"set branch={trunk.run}@last; or train the trunk with keep=all or keep_every=, to retain more checkpoints",
        ) from damage


def _learning_rate_warning(trunk: Trunk, run: OpenRun) -> str | None:
    """None with a budget other than max_steps too: the number of steps is then not known yet."""
    config, trunk_config = run.config, trunk.config()
    if set(budgets(run.folder.config)) != {"max_steps"}:
        return None
    horizon = read_state(trunk.point).get("total_steps") or math.inf
    trunk_rate, branch_rate = (
        build(schedule)(trunk.step + 1, steps) * config.scaled_optimizer.lr
        for schedule, steps in (
            (cast(ScheduleConfig, Choice("schedule").validate(trunk_config["schedule"])), horizon),
            (config.schedule, float(config.max_steps or math.inf)),
        )
    )
    if abs(branch_rate - trunk_rate) <= 0.05 * max(trunk_rate, branch_rate):
        return None
    return (
        f"the learning rate jumps: at step {trunk.step + 1} it is {trunk_rate:.3g} in {trunk.run}, but "
        f"{branch_rate:.3g} with schedule={config.schedule.name} max_steps={config.max_steps}"
    )


def _first_state(saved: JsonObject, trunk: Trunk, config: JsonObject) -> JsonObject:
    """The trunk's counters, without its best checkpoint and, if the budgets differ, its total number of steps."""
    try:
        progress = Progress.from_plain(saved)
    except ValueError as error:
        raise UserError(f"{trunk.point / STATE}: {error}", "use another step of the trunk") from error
    progress.forget_best()
    progress.stale_evaluations = 0
    progress.ended = None
    if budgets(trunk.config()) != budgets(config):
        progress.forget_horizon()
    return progress.to_plain()
