"""Scenes: a folder with untrusted files, and a command that reads them.

The command must not run code from the folder, hang, or write outside the folder, and an error must name the unusable
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Concatenate, ParamSpec

from tests.faults.harness import is_refusal, refused_or_done, require_refusal, require_success, run_lmtool
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix
from tests.faults.stage import copy

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m"
"""Terminal escape codes that set the title, clear the screen, and set a color (once in the one-byte form)."""
GUARDED = "precious"
"""A folder next to the working folder that no command may change."""
Plant = Callable[[Path], object]
P = ParamSpec("P")


def plant_factory(write: Callable[Concatenate[Path, P], object]) -> Callable[P, Plant]:
    """Turns a function that takes a folder and further arguments into a function that takes only the further arguments
    and returns a plant, which takes the folder."""
    return lambda *arguments, **options: lambda workdir: write(workdir, *arguments, **options)


class Expected(Enum):
    """The allowed outcomes of the command."""

    REFUSED = "refused"
    LEGAL = "legal"
    EITHER = "either"


EITHER, LEGAL, REFUSED = Expected.EITHER, Expected.LEGAL, Expected.REFUSED


@dataclass(frozen=True)
class Scene:
    """Untrusted files and a command that reads them.

    Attributes:
        description: for messages
        arguments: the command line
        plant: a function that writes the files into the working folder
        names: if the command is refused, its error must contain one of these
        expected: the allowed outcomes
    """

    description: str
    arguments: tuple[str, ...] | list[str]
    plant: Plant
    names: tuple[str, ...] = ()
    expected: Expected = REFUSED


def play(scene: Scene, stage: Path, workdir: Path) -> Verdict:
    """Plants the files of a scene and runs its command. A folder next to the working folder must not change."""
    (workdir / GUARDED).mkdir()
    (workdir / GUARDED / "file").write_text("kept")
    work = workdir / "work"
    work.mkdir()
    copy(stage, work, "text.txt", "rows", "cache", "done", "published", "runs")
    scene.plant(work)
    with fault_prefix(scene.description):
        # `lmtool resume` may write into the folder of the run even if it is refused.
        answer = run_lmtool(work, *scene.arguments, watched=True, clean=scene.arguments[0] != "resume")
        ran = [path.name for path in workdir.rglob("RAN*")]
        guarded = sorted(path.name for path in (workdir / GUARDED).iterdir())
        if ran or guarded != ["file"] or (workdir / GUARDED / "file").read_text() != "kept":
            raise TrialFailed(Outcome.EXECUTED, f"{ran or guarded}")
        if sorted(path.name for path in workdir.iterdir()) != [GUARDED, "work"]:
            raise TrialFailed(Outcome.EXECUTED, f"written: {sorted(path.name for path in workdir.iterdir())}")
        is_refusal(answer, *scene.names)
        if scene.expected is LEGAL:
            require_success(answer, "legal, but refused: ")
        if scene.expected is REFUSED:
            require_refusal(answer, accepted=f"accepted: {answer.output.strip()[-200:]}")
        if not answer.status and re.search(r"\bnan\b", answer.out):
            raise TrialFailed(Outcome.SILENT, f"prints NaN: {answer.out[-200:]}")
    return refused_or_done(answer, scene.description)
