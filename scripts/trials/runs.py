"""Runs that are killed or stopped by a signal, and runs whose data, rows or caches change before they resume.

The same command reaches the result of an undisturbed run, bit for bit. It is refused if the rest of the run would read
other data, and it never trains on damaged data.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.commands import jobs
from tests.training.kill_harness import Count, fork, outcome, run_killed, wait
from trials.checkpoints import WAYS
from trials.harness import Answer, ended, in_fork, refused, require_refusal, require_success, typed
from trials.outcomes import Failed, Outcome, Verdict, chance_of, kind, planted
from trials.stage import ROWS, RUNS, copy, once, require_same_result, words_of

# --- killed -----------------------------------------------------------------------------------------------------------

# The commonest jobs occur most often.
JOBS = ("pretraining", "finetuning", "pretraining", "finetuning", "gpt", "multitask", "t5", "electra", "bart")


def _alone(folder: Path, name: str) -> None:
    """Runs the job undisturbed, starting with empty caches, and writes its seconds."""
    begun = time.monotonic()
    if wait(fork(getattr(jobs, name), folder / "alone"), 120) != 0:
        raise RuntimeError(f"the undisturbed job {name} failed")
    (folder / "seconds").write_text(json.dumps(time.monotonic() - begun))


@kind("kills", trials=40, draw=1)
def kills(stage: Path, place: Path, seed: int) -> Verdict:
    """Kills a command at one to three random moments, and runs it again each time."""
    chance = chance_of("kills", seed)
    name = JOBS[seed % len(JOBS)]
    job, before = getattr(jobs, name), stage / "kills" / name
    once(before, lambda folder: _alone(folder, name))
    seconds = json.loads((before / "seconds").read_text())
    cold = chance.random() < 0.4
    shutil.copytree(before / "shared", place / "shared")
    if cold:  # so that kills also fall into the tokenizer's training and into tokenization
        shutil.rmtree(place / "shared" / "cache", ignore_errors=True)
    moments = [seconds * chance.uniform(0, 0.5 if cold else 0.9) for _ in range(chance.randint(1, 3))]
    fault = (
        f"{name} killed after {' and '.join(f'{moment:.2f}' for moment in moments)} s{', caches empty' if cold else ''}"
    )
    count, run, errors = Count(), place / "run", place / "log"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    with planted(fault):
        try:
            run_killed(job, run, iter(moments), count, 120)
        except RuntimeError as error:
            raise Failed(Outcome.DEAD_END, f"{error}: {errors.read_text()[-300:]}") from error
        if count.unreadable:
            raise Failed(Outcome.SILENT, f"{count.unreadable} checkpoints do not verify")
        require_same_result(run, before / "alone")
        missing = [path.name for path in (before / "alone").iterdir() if not (run / path.name).exists()]
        left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith((".tmp-", ".del-"))]
        if missing or left:
            raise Failed(Outcome.LEFTOVER, f"missing {missing}, left {left}")
    return Verdict(Outcome.RECOVERED, f"{fault}, {count.kills} of {len(moments)} before its end")


# --- stopped ----------------------------------------------------------------------------------------------------------

STATUS = {
    signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75,
}  # fmt: skip
_STUDENT = [
    "finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=4", "max_epochs=null", "distill=soft",
    "distill.teacher=done/tuned", "distill.store=true", "run_dir=run",
]  # fmt: skip
_STOPPED = {"pre": words_of("pre", "run"), "tuned": words_of("tuned", "run"), "student": _STUDENT}
_SECONDS = 2.5  # duration of such a command


def _signalled(place: Path, words: list[str], number: signal.Signals, moment: float) -> Answer:
    """Runs the command, and sends it a signal after `moment` seconds."""
    from lmtool.cli import main as cli

    def work() -> int:
        for each in STATUS:  # a signal that the parent ignores would stay ignored
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
    """Signals a command at a random moment, then runs it again."""
    chance = chance_of("stops", seed)
    name = list(_STOPPED)[seed % len(_STOPPED)]
    copy(stage, place, "text.txt", "rows", "done", *(["cache"] if chance.random() < 0.3 else []))
    words, number, run = _STOPPED[name], chance.choice(list(STATUS)), place / "run"
    moment = _SECONDS * chance.random() ** 2  # most often before training
    with planted(f"{name}: {number.name} after {moment:.2f} s"):
        answer = _signalled(place, words, number, moment)
        ended = _how_it_ended(answer, number, run)
        left = [path.name for path in place.rglob("*") if path.name == "LOCK" or path.name.startswith(".tmp-")]
        if left:
            raise Failed(Outcome.LEFTOVER, f"left {left}")
        require_success(typed(place, *words))
        if name != "student":
            require_same_result(run, stage / "done" / name)
    return Verdict(Outcome.RECOVERED, f"{name}: {number.name} after {moment:.2f} s {ended}")


def _how_it_ended(answer: Answer, number: signal.Signals, run: Path) -> str:
    """The command's reaction to its signal. Raises Failed for a wrong one."""
    lines = answer.err.splitlines()
    if answer.status == 0:
        if lines and not lines[0].startswith(f"warning: {number.name} came after the last step, too late to stop"):
            raise Failed(Outcome.UNCLEAR, f"status 0: {lines[:3]}")
        return "came too late" if lines else "came after its end"
    if answer.status != STATUS[number]:
        raise Failed(Outcome.SILENT, f"status {answer.status} instead of {STATUS[number]}: {lines[-3:]}")
    if not lines or not lines[0].startswith(f"error: stopped by {number.name}"):
        raise Failed(Outcome.UNCLEAR, f"says {lines[:3]}")
    resumable = (run / "config.yaml").exists()
    if len(lines) != 1 + resumable or (resumable and not lines[1].startswith("hint: lmtool resume ")):
        raise Failed(Outcome.UNCLEAR, f"says {lines[:4]}")
    return lines[0].removeprefix(f"error: stopped by {number.name}").strip(": ") or "before its run"


# --- changed ----------------------------------------------------------------------------------------------------------

Change = Callable[[Path, random.Random], object]


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


def _word(path: Path, chance: random.Random) -> None:
    """One word becomes another of the same length."""
    text = path.read_text()
    match = chance.choice(list(re.finditer(" cat| dog", text)))
    path.write_text(text[: match.start()] + (" dog" if match[0] == " cat" else " cat") + text[match.end() :])


def _swap(path: Path, chance: random.Random) -> None:
    """Swaps the labels of two rows of different classes, or two lines of a text."""
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
    """Changes the data, the rows or the caches of a run before it resumes."""
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
            require_success(answer)
            require_same_result(place / "runs" / run, stage / "done" / run)
            return Verdict(Outcome.RECOVERED, shape)
        names = [path.name] if name == "gone" else ["text", "data", "task", path.name]
        require_refusal(answer, *names, accepted=f"resumed: {answer.said[-200:]}")
    return ended(answer, shape)


LOST_ROWS: dict[str, Change] = {
    "deleted": lambda path, chance: path.unlink(),
    "emptied": lambda path, chance: path.write_bytes(b""),
    "shortened": lambda path, chance: path.write_text("\n".join(_lines(path)[chance.randint(1, 5) :])),
}


def _rows(stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Deletes rows of a run before it resumes: it reports that, and reaches the same weights."""
    run, way = chance.choice(RUNS), chance.choice(list(LOST_ROWS))
    LOST_ROWS[way](place / "runs" / run / "metrics.jsonl", chance)
    with planted(f"{run}: metrics.jsonl {way}"):
        answer = typed(place, "resume", f"runs/{run}")
        require_success(answer)
        if "metrics.jsonl lacks " not in answer.out:
            raise Failed(Outcome.SILENT, "does not report the missing rows")
        ours, theirs = outcome(place / "runs" / run), outcome(stage / "done" / run)
        if any(ours[name] != theirs[name] for name in theirs if name.endswith(".safetensors")):
            raise Failed(Outcome.SILENT, "the weights differ from an undisturbed run")
    return Verdict(Outcome.RECOVERED, f"{run}: metrics.jsonl {way}")


def _broken_cache(stage: Path, place: Path, chance: random.Random) -> Verdict:
    """Damages a file of the cache, then resumes a run or starts one."""
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
        require_same_result(place / "runs" / "pre", stage / "done" / "pre")
    return Verdict(Outcome.RECOVERED, shape)
