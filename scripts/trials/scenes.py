"""A scene: a folder with files from a stranger, and a command that reads them.

No code in the folder may run, no command may hang or write outside its folder, and an error names the unusable file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Concatenate, ParamSpec

from trials.harness import ended, refused, require_refusal, require_success, typed
from trials.outcomes import Failed, Outcome, Verdict, planted
from trials.stage import copy

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m"
"""Codes that terminals obey: set the title, clear the screen, set a color (also in its one-byte form)."""
GUARDED = "precious"
"""A folder next to the working folder that no command may change."""
Plant = Callable[[Path], object]
P = ParamSpec("P")


def plant_of(write: Callable[Concatenate[Path, P], object]) -> Callable[P, Plant]:
    """Turns a function of a folder and further arguments into one of the further arguments that returns a plant."""
    return lambda *arguments, **options: lambda place: write(place, *arguments, **options)


class Expected(Enum):
    """The allowed outcomes of the command."""

    REFUSED = "refused"
    LEGAL = "legal"
    EITHER = "either"  # both are allowed


EITHER, LEGAL, REFUSED = Expected.EITHER, Expected.LEGAL, Expected.REFUSED


@dataclass(frozen=True)
class Scene:
    """plant: writes the files. names: an error must contain one of them."""

    about: str
    words: tuple[str, ...] | list[str]
    plant: Plant
    names: tuple[str, ...] = ()
    expected: Expected = REFUSED


def play(scene: Scene, stage: Path, place: Path) -> Verdict:
    """Plants a scene and runs its command, next to a folder that it must not change."""
    (place / GUARDED).mkdir()
    (place / GUARDED / "file").write_text("kept")
    work = place / "work"
    work.mkdir()
    copy(stage, work, "text.txt", "rows", "cache", "done", "published", "runs")
    scene.plant(work)
    with planted(scene.about):
        # A resume adds files to a run that existed before, even if it is refused.
        answer = typed(work, *scene.words, watched=True, clean=scene.words[0] != "resume")
        ran = [path.name for path in place.rglob("RAN*")]
        guarded = sorted(path.name for path in (place / GUARDED).iterdir())
        if ran or guarded != ["file"] or (place / GUARDED / "file").read_text() != "kept":
            raise Failed(Outcome.EXECUTED, f"{ran or guarded}")
        if sorted(path.name for path in place.iterdir()) != [GUARDED, "work"]:
            raise Failed(Outcome.EXECUTED, f"written: {sorted(path.name for path in place.iterdir())}")
        refused(answer, *scene.names)
        if scene.expected is LEGAL:
            require_success(answer, "legal, but refused: ")
        if scene.expected is REFUSED:
            require_refusal(answer, accepted=f"accepted: {answer.said.strip()[-200:]}")
        if not answer.status and re.search(r"\bnan\b", answer.out):
            raise Failed(Outcome.SILENT, f"prints NaN: {answer.out[-200:]}")
    return ended(answer, scene.about)
