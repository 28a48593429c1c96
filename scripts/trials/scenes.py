"""A scene: what lies in a folder of a stranger, and what is typed there.

Nothing in the folder runs, nothing is written outside the run's own folder, no command hangs, and what cannot be used
is refused by name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trials.harness import Failed, Outcome, Verdict, ended, planted, refused, typed
from trials.stage import copy

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m"
"""Codes that a terminal obeys: a title, a cleared screen, a colour, the one-byte form."""
GUARDED = "precious"
"""A folder beside the trial's working folder that nobody may touch."""
Plant = Callable[[Path, random.Random], object]


class Expected(Enum):
    """How the command should take it."""

    REFUSED = "refused"
    LEGAL = "legal"
    EITHER = "either"  # as long as nothing else happens


EITHER, LEGAL, REFUSED = Expected.EITHER, Expected.LEGAL, Expected.REFUSED


@dataclass(frozen=True)
class Scene:
    """plant: makes it in the trial's folder. names: what an error must name, one of them."""

    about: str
    words: tuple[str, ...] | list[str]
    plant: Plant
    names: tuple[str, ...] = ()
    expected: Expected = REFUSED


def play(scene: Scene, stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Plant a scene and type its command, in a folder beside which one lies that nobody may touch."""
    (place / GUARDED).mkdir()
    (place / GUARDED / "file").write_text("kept")
    work = place / "work"
    work.mkdir()
    copy(stage, work, "text.txt", "rows", "cache", "done", "published", "runs")
    scene.plant(work, chance)
    with planted(scene.about):
        # Of a command that resumes, a run that was there stays.
        answer = typed(work, *scene.words, watched=True, clean=scene.words[0] != "resume")
        ran = [path.name for path in place.rglob("RAN*")]
        guarded = sorted(path.name for path in (place / GUARDED).iterdir())
        if ran or guarded != ["file"] or (place / GUARDED / "file").read_text() != "kept":
            raise Failed(Outcome.EXECUTED, f"{ran or guarded}")
        if sorted(path.name for path in place.iterdir()) != [GUARDED, "work"]:
            raise Failed(Outcome.EXECUTED, f"written: {sorted(path.name for path in place.iterdir())}")
        if refused(answer, *scene.names):
            if scene.expected is LEGAL:
                raise Failed(Outcome.DEAD_END, f"legal, and refused: {answer.errors[:300]}")
        elif scene.expected is REFUSED:
            raise Failed(Outcome.SILENT, f"accepted: {answer.said.strip()[-200:]}")
        elif re.search(r"\bnan\b", answer.out):
            raise Failed(Outcome.SILENT, f"no number comes out: {answer.out[-200:]}")
    return ended(answer, scene.about)
