"""Data that changed between a stop and the resuming, rows that went, and caches that broke.

A changed text or label is refused by name: the rest of the run would be of other data. What is the same in substance
(a new date, a touched file) is none of it. A broken cache is rebuilt, or refused; it is never trained on.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.training.kill_harness import outcome
from trials.checkpoints import WAYS
from trials.commands import refused, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.stage import RUNS, copy, result_of, words_of

Change = Callable[[Path, random.Random], None]


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


def _word(path: Path, chance: random.Random) -> None:
    """One word becomes another of the same length."""
    text = path.read_text()
    places = [at for at in range(len(text) - 4) if text[at : at + 4] in (" cat", " dog")]
    at = chance.choice(places)
    other = " dog" if text[at : at + 4] == " cat" else " cat"
    path.write_text(text[:at] + other + text[at + 4 :])


def _swap(path: Path, chance: random.Random) -> None:
    """The labels of a row of each class change places; of a text, two lines."""
    lines = _lines(path)
    ends = sorted({line[-2:] for line in lines[1:] if line})
    if path.suffix == ".tsv":
        first, second = (chance.choice([n for n, line in enumerate(lines) if n and line.endswith(end)]) for end in ends)
        lines[first], lines[second] = lines[first][:-2] + lines[second][-2:], lines[second][:-2] + lines[first][-2:]
    else:
        first, second = chance.sample([number for number, line in enumerate(lines) if line], 2)
        lines[first], lines[second] = lines[second], lines[first]
    path.write_text("\n".join(lines))


def _drop(path: Path, chance: random.Random) -> None:
    lines = _lines(path)
    del lines[chance.choice([number for number, line in enumerate(lines) if number and line])]
    path.write_text("\n".join(lines))


def _append(path: Path, chance: random.Random) -> None:
    with path.open("a") as file:
        file.write("\nThe happy cat saw the ship.\n" if path.suffix == ".txt" else "The happy cat saw the ship.\t1\n")


def _touch(path: Path, chance: random.Random) -> None:
    os.utime(path, (0, 0))


def _rewrite(path: Path, chance: random.Random) -> None:
    """The same content in another file."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


CHANGES: dict[str, Change] = {
    "a word": _word, "two rows swapped": _swap, "a row less": _drop, "a row more": _append,
    "gone": lambda path, chance: path.unlink(),
}  # fmt: skip
LEGAL: dict[str, Change] = {"touched": _touch, "written again": _rewrite}


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("changes", seed)
    copy(stage, place, "text.txt", "rows", "cache", "done/pre", "runs")
    return (_data, _cache, _data, _cache, _rows)[seed % 5](stage, place, chance)


def _data(stage: Path, place: Path, chance: random.Random) -> Verdict:
    run = chance.choice(RUNS)
    path = place / ("text.txt" if run == "pre" else chance.choice(("rows/train.tsv", "rows/dev.tsv")))
    legal = chance.random() < 0.25
    name = chance.choice(list(LEGAL if legal else CHANGES))
    (LEGAL if legal else CHANGES)[name](path, chance)
    shape = f"{run}: {path.relative_to(place)} {name}"
    again = chance.random() < 0.5
    words = words_of(run, f"runs/{run}") if again else ["resume", f"runs/{run}"]
    with planted(shape):
        answer = typed(place, *words)
        if legal:
            if answer.status:
                raise Failed(Outcome.DEAD_END, answer.errors[:300])
            return _same(stage, place, run, shape)
        file = path.name if name == "gone" else ""
        if not refused(answer, file or "text", "data", "task", path.name):
            raise Failed(Outcome.SILENT, f"resumed: {answer.said[-200:]}")
    return Verdict(Outcome.REFUSED, f"{shape}: {answer.errors[:120]}")


def _same(stage: Path, place: Path, run: str, shape: str) -> Verdict:
    """The run is done, and it must be the undisturbed one."""
    if result_of(place / "runs" / run) != result_of(stage / "done" / run):
        raise Failed(Outcome.SILENT, "the run ends otherwise than an undisturbed one")
    return Verdict(Outcome.RECOVERED, shape)


ROWS: dict[str, Change] = {
    "deleted": lambda path, chance: path.unlink(),
    "emptied": lambda path, chance: path.write_bytes(b"") and None,
    "shortened": lambda path, chance: path.write_text("\n".join(_lines(path)[chance.randint(1, 5) :])) and None,
}


def _rows(stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Rows of a run are gone when it resumes: it says so, and learns what it would have learned."""
    run, way = chance.choice(RUNS), chance.choice(list(ROWS))
    ROWS[way](place / "runs" / run / "metrics.jsonl", chance)
    with planted(f"{run}: metrics.jsonl {way}"):
        answer = typed(place, "resume", f"runs/{run}")
        if answer.status:
            raise Failed(Outcome.DEAD_END, answer.errors[:300])
        if "metrics.jsonl lacks " not in answer.out:
            raise Failed(Outcome.SILENT, "not a word about rows that are gone")
        ours, theirs = outcome(place / "runs" / run), outcome(stage / "done" / run)
        if any(ours[name] != theirs[name] for name in theirs if name.endswith(".safetensors")):
            raise Failed(Outcome.SILENT, "the weights differ from an undisturbed run")
    return Verdict(Outcome.RECOVERED, f"{run}: metrics.jsonl {way}")


def _cache(stage: Path, place: Path, chance: random.Random) -> Verdict:
    """A file of the cache breaks; then a run resumes, or a new one starts."""
    files = sorted(path for path in (place / "cache").rglob("*") if path.is_file() and path.stat().st_size)
    path = chance.choice(files)
    way = chance.choice(list(WAYS))
    WAYS[way](path, chance)
    new = chance.random() < 0.6
    if new:
        shutil.rmtree(place / "runs" / "pre")
    words = words_of("pre", "runs/pre") if new or chance.random() < 0.5 else ["resume", "runs/pre"]
    shape = f"cache/{path.relative_to(place / 'cache')} {way}, {'new run' if new else 'resumed'}"
    with planted(shape):
        answer = typed(place, *words)
        if refused(answer, path.name, path.parent.name, "cache_dir"):
            return Verdict(Outcome.REFUSED, f"{shape}: {answer.errors[:120]}")
        return _same(stage, place, "pre", shape)


KIND = Kind("changes", "data changed before a run resumes, and broken caches", trials=100, draw=2, trial=_trial)
