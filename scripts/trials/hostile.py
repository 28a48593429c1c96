"""Folders of strangers: pipes, links and bombs where files are read, pickles, class paths, names that climb out of
their folder, terminal codes.

Nothing in them runs, nothing is written outside the run's own folder, no command hangs, and what cannot be used is
refused by name.
"""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

from trials import hostile_configs, hostile_data, hostile_nodes, hostile_weights
from trials.commands import files_in, nothing_left, refused, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.scenes import Expected, Scene
from trials.stage import copy

_GUARDED = "precious"
"""A folder beside the trial's working folder that nobody may touch."""


def scenes() -> list[Scene]:
    """All scenes, in an order that mixes them."""
    every = list(itertools.chain(*(module.SCENES for module in (
        hostile_configs, hostile_data, hostile_nodes, hostile_weights
    ))))  # fmt: skip
    random.Random(0).shuffle(every)
    return every


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    every = scenes()
    return play(every[seed % len(every)], stage, place, chance_of("hostile", seed))


def play(scene: Scene, stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Plant a scene and type its command, in a folder beside which one lies that nobody may touch."""
    (place / _GUARDED).mkdir()
    (place / _GUARDED / "file").write_text("kept")
    work = place / "work"
    work.mkdir()
    copy(stage, work, "text.txt", "rows", "cache", "done", "published", "runs")
    scene.plant(work, chance)
    with planted(scene.about):
        before = files_in(work)
        answer = typed(work, *scene.words, watched=True)
        ran = [path.name for path in place.rglob("RAN*")]
        guarded = sorted(path.name for path in (place / _GUARDED).iterdir())
        if ran or guarded != ["file"] or (place / _GUARDED / "file").read_text() != "kept":
            raise Failed(Outcome.EXECUTED, f"{ran or guarded}")
        if sorted(path.name for path in place.iterdir()) != [_GUARDED, "work"]:
            raise Failed(Outcome.EXECUTED, f"written: {sorted(path.name for path in place.iterdir())}")
        if refused(answer, *scene.names):
            if scene.expected is Expected.LEGAL:
                raise Failed(Outcome.DEAD_END, f"legal, and refused: {answer.errors[:300]}")
            if scene.words[0] != "resume":  # a run that was there stays
                nothing_left(work, before, answer)
        elif scene.expected is Expected.REFUSED:
            raise Failed(Outcome.SILENT, f"accepted: {answer.said.strip()[-200:]}")
        elif re.search(r"\bnan\b", answer.out):
            raise Failed(Outcome.SILENT, f"no number comes out: {answer.out[-200:]}")
    return Verdict(Outcome.REFUSED if answer.status else Outcome.DONE, f"{scene.about}: {answer.errors[:150]}")


KIND = Kind("hostile", "folders and files of strangers", trials=400, draw=2, trial=_trial)
