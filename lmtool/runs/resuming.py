"""The checkpoint a run resumes from: the newest that verifies. Damaged ones are set aside and reported.

Chosen once, before anything is read from it, so that tokenizer, counters, weights and optimizer are those of one
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lmtool.config.checkpoint import of_step, read_state, saved_steps, verify
from lmtool.errors import CheckFailed, cannot_write
from lmtool.manifest import Damaged
from lmtool.runs.checkpoints import BAD


def resume_point(checkpoints: Path, report: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint of a run, or None where it has none.

    Newer ones, and the best one, are set aside under another name where they are damaged. CheckFailed where there are
    checkpoints and none is intact: nothing is moved then.
    """
    damages: dict[Path, Damaged] = {}
    for folder in saved_steps(checkpoints):
        try:
            verify(folder)
        except Damaged as damage:
            damages[folder] = damage
            continue
        for damaged, problem in damages.items():
            aside = _set_aside(damaged)
            report(f"{problem}; set aside as {aside.name}, the run resumes from {folder.name}")
        _check_best(folder, report)
        return folder
    if damages:
        raise CheckFailed(
            f"none of the {len(damages)} checkpoints in {checkpoints} is intact; {next(iter(damages.values()))}",
            f"copy them again from where they came, or begin anew: rm -r {checkpoints}",
        )
    return None


def _check_best(newest: Path, report: Callable[[str], None]) -> None:
    """The best weights are read when the run ends: where they are damaged, the run must not wait for that."""
    best = of_step(newest.parent, read_state(newest).get("best_step"))
    if best is None or best == newest:
        return
    try:
        verify(best)
    except Damaged as damage:
        report(f"{damage}; it was the best checkpoint, set aside as {_set_aside(best).name}")


def _set_aside(folder: Path) -> Path:
    number, aside = 1, folder.with_name(f"{BAD}{folder.name}")
    while aside.exists():
        number, aside = number + 1, folder.with_name(f"{BAD}{folder.name}-{number + 1}")
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return aside
