"""Runs of strangers, unpacked: links to files of the user, by the names that a run, a report or a sweep writes.

The files stay as they are. A folder or file that a user types may be a link of his own: that is none of these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from trials.hostile import play
from trials.outcomes import Kind, Verdict, chance_of
from trials.scenes import EVALUATE, Expected, Scene
from trials.stage import TEXT

_SWEEP = ("pretrain", *TEXT, "max_steps=1", "name=s", "-m", "seed=1,2")
# What is typed, in which folder it writes, and by which names: files, then folders.
_WRITTEN: list[tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]] = [
    (
        ("resume", "runs/tuned"),
        "runs/tuned",
        ("LOCK", "log.txt", "metrics.jsonl", "environment.json", "facts.json", "result.json", "predictions.jsonl",
         "report.html", "checkpoints/last", "checkpoints/best", "plots/loss.png", "plots/curves.png"),
        ("checkpoints", "plots", "wandb", "tensorboard"),
    ),
    (("report", "done/tuned"), "done/tuned", ("report.html", "plots/loss.png"), ("plots",)),
    ((*EVALUATE, "report=out"), "out", ("evaluation.json", "predictions.jsonl", "plots/dev_confusion.png"), ("plots",)),
    (_SWEEP, "runs/s", ("submission.json", "plan.json", "sweep.html", "sweep.csv"), ("0_seed-1",)),
]  # fmt: skip


def _plant(path: str, hard: bool, to_folder: bool) -> Callable[[Path, random.Random], None]:
    def plant(place: Path, chance: random.Random) -> None:
        own, link = place.parent / "precious" / ("" if to_folder else "file"), place / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_dir():
            link.rename(f"{link}.moved")
        link.unlink(missing_ok=True)
        if hard:
            os.link(own, link)
        else:
            link.symlink_to(own)

    return plant


def _scenes() -> Iterator[Scene]:
    for words, folder, files, folders in _WRITTEN:
        every = [(name, hard, False) for name in files for hard in (False, True)]
        for name, hard, to_folder in [*every, *((name, False, True) for name in folders)]:
            path = f"{folder}/{name}"
            about = f"a {'hard ' if hard else ''}link at {path}, {words[0]}"
            yield Scene(about, words, _plant(path, hard, to_folder), (name,), Expected.EITHER)


SCENES = list(_scenes())


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    return play(SCENES[seed % len(SCENES)], stage, place, chance_of("links", seed))


KIND = Kind("links", "links in folders of strangers", trials=len(SCENES), draw=2, trial=_trial)
