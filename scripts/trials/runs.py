"""Runs that are killed, stopped by a signal, or whose data, rows or caches changed before they resume.

The same command comes to the same end as if nothing had been, bit for bit; where the rest of the run would be of other
data it is refused by name, and what is broken is never trained on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.commands import jobs
from tests.training.kill_harness import Count, fork, outcome, run_killed, wait
from trials.checkpoints import WAYS
from trials.harness import Answer, Failed, Outcome, Verdict, chance_of, ended, in_fork, kind, planted, refused, typed
from trials.stage import ROWS, RUNS, copy, once, result_of, words_of

# --- killed -----------------------------------------------------------------------------------------------------------

# What real commands people run, the commonest most often.
JOBS = ("pretraining", "finetuning", "pretraining", "finetuning", "gpt", "multitask", "t5", "electra", "bart")


def _alone(folder: Path, name: str) -> None:
    """The job's undisturbed run, with the caches it leaves, and how long it took without them."""
    begun = time.monotonic()
    if wait(fork(getattr(jobs, name), folder / "alone"), 120) != 0:
        raise RuntimeError(f"the uninterrupted job {name} failed")
    (folder / "seconds").write_text(json.dumps(time.monotonic() - begun))


@kind("kills", trials=40, draw=1)
def kills(stage: Path, place: Path, seed: int) -> Verdict:
    """Kill -9 a command at random moments, once, twice or three times, and type it again."""
    chance = chance_of("kills", seed)
    name = JOBS[seed % len(JOBS)]
    job, before = getattr(jobs, name), stage / "kills" / name
    once(before, lambda folder: _alone(folder, name))
    seconds = json.loads((before / "seconds").read_text())
    cold = chance.random() < 0.4
    shutil.copytree(before / "shared", place / "shared")
    if cold:  # it is killed while it trains its tokenizer, and while it tokenizes
        shutil.rmtree(place / "shared" / "cache", ignore_errors=True)
    moments = [seconds * chance.uniform(0, 0.5 if cold else 0.9) for _ in range(chance.randint(1, 3))]
    fault = (
        f"{name} killed after {' and '.join(f'{moment:.2f}' for moment in moments)} s{', caches empty' if cold else ''}"
    )
    count, run, errors = Count(), place / "run", place / "log"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    try:
        run_killed(job, run, iter(moments), count, 120)
    except RuntimeError as error:
        raise Failed(Outcome.DEAD_END, f"{fault}: {error}: {errors.read_text()[-300:]}") from error
    if count.unreadable:
        raise Failed(Outcome.SILENT, f"{fault}: {count.unreadable} checkpoints do not verify")
    if outcome(run) != outcome(before / "alone"):
        raise Failed(Outcome.SILENT, f"{fault}: rows or weights differ from an uninterrupted run")
    missing = [path.name for path in (before / "alone").iterdir() if not (run / path.name).exists()]
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith((".tmp-", ".del-"))]
    if missing or left:
        raise Failed(Outcome.LEFTOVER, f"{fault}: missing {missing}, left {left}")
    return Verdict(Outcome.RECOVERED, f"{fault}, {count.kills} of {len(moments)} while it lived")


# --- stopped ----------------------------------------------------------------------------------------------------------

STATUS = {
    signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75,
}  # fmt: skip
_STUDENT = [
    "finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=4", "max_epochs=null", "distill=soft",
    "distill.teacher=done/tuned", "distill.store=true", "run_dir=run",
]  # fmt: skip
_STOPPED = {"pre": words_of("pre", "run"), "tuned": words_of("tuned", "run"), "student": _STUDENT}
_SECONDS = 2.5  # that such a command takes


def _signalled(place: Path, words: list[str], number: signal.Signals, moment: float) -> Answer:
    """The command, which gets a signal after so many seconds, if it lives that long."""
    from lmtool.cli import main as cli

    def work() -> int:
        for each in STATUS:  # those that make was told to ignore would stay ignored
            signal.signal(each, signal.SIG_DFL)
        timer = threading.Timer(moment, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        try:
            return cli.main(words)
        finally:
            timer.cancel()

    return in_fork(place, words, work)


@kind("stops", trials=40, draw=3)
def stops(stage: Path, place: Path, seed: int) -> Verdict:
    """A signal at a random moment; then the same command again."""
    chance = chance_of("stops", seed)
    name = list(_STOPPED)[seed % len(_STOPPED)]
    copy(stage, place, "text.txt", "rows", "done", *(["cache"] if chance.random() < 0.3 else []))
    words, number, run = _STOPPED[name], chance.choice(list(STATUS)), place / "run"
    moment = _SECONDS * chance.random() ** 2  # before it trains, most often
    with planted(f"{name}: {number.name} after {moment:.2f} s"):
        answer = _signalled(place, words, number, moment)
        ended = _how_it_ended(answer, number, run)
        left = [path.name for path in place.rglob("*") if path.name == "LOCK" or path.name.startswith(".tmp-")]
        if left:
            raise Failed(Outcome.LEFTOVER, f"left {left}")
        again = typed(place, *words)
        if again.status:
            raise Failed(Outcome.DEAD_END, again.errors[:300])
        if name != "student" and result_of(run) != result_of(stage / "done" / name):
            raise Failed(Outcome.SILENT, "rows or weights differ from an undisturbed run")
    return Verdict(Outcome.RECOVERED, f"{name}: {number.name} after {moment:.2f} s {ended}")


def _how_it_ended(answer: Answer, number: signal.Signals, run: Path) -> str:
    """How a command took its signal. Raises Failed where it did not end as it should."""
    lines = answer.err.splitlines()
    if answer.status == 0:
        if lines and not lines[0].startswith(f"warning: {number.name} came after the last step, too late to stop"):
            raise Failed(Outcome.UNCLEAR, f"status 0: {lines[:3]}")
        return "came too late" if lines else "came after its end"
    if answer.status != STATUS[number]:
        raise Failed(Outcome.SILENT, f"status {answer.status} instead of {STATUS[number]}: {lines[-3:]}")
    if not lines or not lines[0].startswith(f"error: stopped by {number.name}"):
        raise Failed(Outcome.UNCLEAR, f"says {lines[:3]}")
    there = (run / "config.yaml").exists()  # from then on it can be resumed
    if len(lines) != 1 + there or (there and not lines[1].startswith("hint: lmtool resume ")):
        raise Failed(Outcome.UNCLEAR, f"says {lines[:4]}")
    return lines[0].removeprefix(f"error: stopped by {number.name}").strip(": ") or "before its run"


# --- changed ----------------------------------------------------------------------------------------------------------

Change = Callable[[Path, random.Random], object]


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


CHANGES: dict[str, Change] = {
    "a word": _word, "two rows swapped": _swap, "a row less": _drop, "a row more": _append,
    "gone": lambda path, chance: path.unlink(),
}  # fmt: skip
LEGAL: dict[str, Change] = {
    "touched": lambda path, chance: os.utime(path, (0, 0)),
    "written again": lambda path, chance: (content := path.read_bytes(), path.unlink(), path.write_bytes(content)),
}


@kind("changes", trials=100)
def changes(stage: Path, place: Path, seed: int) -> Verdict:
    """Data that changed before a run resumes, rows that went, and caches that broke."""
    chance = chance_of("changes", seed)
    copy(stage, place, "text.txt", "rows", "cache", "done/pre", "runs")
    return (_data, _broken_cache, _data, _broken_cache, _rows)[seed % 5](stage, place, chance)


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
    return ended(answer, shape)


def _same(stage: Path, place: Path, run: str, shape: str) -> Verdict:
    """The run is done, and it must be the undisturbed one."""
    if result_of(place / "runs" / run) != result_of(stage / "done" / run):
        raise Failed(Outcome.SILENT, "the run ends otherwise than an undisturbed one")
    return Verdict(Outcome.RECOVERED, shape)


LOST_ROWS: dict[str, Change] = {
    "deleted": lambda path, chance: path.unlink(),
    "emptied": lambda path, chance: path.write_bytes(b""),
    "shortened": lambda path, chance: path.write_text("\n".join(_lines(path)[chance.randint(1, 5) :])),
}


def _rows(stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Rows of a run are gone when it resumes: it says so, and learns what it would have learned."""
    run, way = chance.choice(RUNS), chance.choice(list(LOST_ROWS))
    LOST_ROWS[way](place / "runs" / run / "metrics.jsonl", chance)
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


def _broken_cache(stage: Path, place: Path, chance: random.Random) -> Verdict:
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
            return ended(answer, shape)
        return _same(stage, place, "pre", shape)
