"""Runs that are killed or stopped by a signal, and runs whose data, metrics or caches change before they resume.

When the same command runs again, it must reach the result of an undisturbed run, bit for bit. It must be refused if the
rest of the run would read other data, and it must never train on damaged data.
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
from tests.faults.checkpoints import DAMAGES
from tests.faults.harness import (
    Answer,
    is_refusal,
    refused_or_done,
    require_refusal,
    require_success,
    run_in_fork,
    run_lmtool,
)
from tests.faults.outcomes import Outcome, TrialFailed, Verdict, fault_prefix, kind, trial_rng
from tests.faults.stage import ROWS, RUNS, build_once, copy, require_same_result, run_arguments
from tests.training.kill_harness import Count, fork, outcome, run_killed, wait

# --- killed -----------------------------------------------------------------------------------------------------------

# The most common jobs occur most often.
JOBS = ("pretraining", "finetuning", "pretraining", "finetuning", "gpt", "multitask", "t5", "electra", "bart")


def _run_undisturbed(folder: Path, name: str) -> None:
    """Runs a job without a disturbance, from empty caches, into folder/alone. Writes its duration to folder/seconds."""
    started = time.monotonic()
    if wait(fork(getattr(jobs, name), folder / "alone"), 120) != 0:
        raise RuntimeError(f"the undisturbed job {name} failed")
    (folder / "seconds").write_text(json.dumps(time.monotonic() - started))


@kind("kills", trials=40, quick_trials=1)
def kills(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Kills a command at one to three random moments, and runs it again after each kill."""
    rng = trial_rng("kills", seed)
    name = JOBS[seed % len(JOBS)]
    job, before = getattr(jobs, name), stage / "kills" / name
    build_once(before, lambda folder: _run_undisturbed(folder, name))
    seconds = json.loads((before / "seconds").read_text())
    cold = rng.random() < 0.4
    shutil.copytree(before / "shared", workdir / "shared")
    if cold:  # so that some kills hit the training of the tokenizer or the tokenization
        shutil.rmtree(workdir / "shared" / "cache", ignore_errors=True)
    moments = [seconds * rng.uniform(0, 0.5 if cold else 0.9) for _ in range(rng.randint(1, 3))]
    fault = (
        f"{name} killed after {' and '.join(f'{moment:.2f}' for moment in moments)} s{', caches empty' if cold else ''}"
    )
    count, run, errors = Count(), workdir / "run", workdir / "log"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    with fault_prefix(fault):
        try:
            run_killed(job, run, iter(moments), count, 120)
        except RuntimeError as error:
            raise TrialFailed(Outcome.DEAD_END, f"{error}: {errors.read_text()[-300:]}") from error
        if count.unreadable:
            raise TrialFailed(Outcome.SILENT, f"{count.unreadable} checkpoints do not verify")
        require_same_result(run, before / "alone")
        missing = [path.name for path in (before / "alone").iterdir() if not (run / path.name).exists()]
        left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith((".tmp-", ".del-"))]
        if missing or left:
            raise TrialFailed(Outcome.LEFTOVER, f"missing {missing}, left {left}")
    return Verdict(Outcome.RECOVERED, f"{fault}, {count.kills} of {len(moments)} before its end")


# --- stopped ----------------------------------------------------------------------------------------------------------

STATUS = {
    signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75,
}  # fmt: skip
_STUDENT = [
    "finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=4", "max_epochs=null", "distill=soft",
    "distill.teacher=done/tuned", "distill.store=true", "run_dir=run",
]  # fmt: skip
_STOPPED_COMMANDS = {"pre": run_arguments("pre", "run"), "tuned": run_arguments("tuned", "run"), "student": _STUDENT}
_SECONDS = 2.5  # typical duration of these commands


def _run_and_signal(workdir: Path, arguments: list[str], number: signal.Signals, moment: float) -> Answer:
    """Runs a command in a fork that sends itself a signal after `moment` seconds."""
    from lmtool.cli import main as cli

    def work() -> int:
        for handled in STATUS:  # a fork inherits ignored signals
            signal.signal(handled, signal.SIG_DFL)
        timer = threading.Timer(moment, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        try:
            return cli.main(arguments)
        finally:
            timer.cancel()

    return run_in_fork(workdir, arguments, work)


@kind("stops", trials=40, quick_trials=3)
def stops(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Sends a command a signal at a random moment, then runs the command again."""
    rng = trial_rng("stops", seed)
    name = list(_STOPPED_COMMANDS)[seed % len(_STOPPED_COMMANDS)]
    copy(stage, workdir, "text.txt", "rows", "done", *(["cache"] if rng.random() < 0.3 else []))
    arguments, number, run = _STOPPED_COMMANDS[name], rng.choice(list(STATUS)), workdir / "run"
    # Squared, so that most signals arrive before training. Until lmtool has installed its handlers, a signal ends the
    # process as it ends any other.
    moment = max(0.05, _SECONDS * rng.random() ** 2)
    with fault_prefix(f"{name}: {number.name} after {moment:.2f} s"):
        answer = _run_and_signal(workdir, arguments, number, moment)
        reaction = _reaction_to(answer, number, run)
        left = [path.name for path in workdir.rglob("*") if path.name == "LOCK" or path.name.startswith(".tmp-")]
        if left:
            raise TrialFailed(Outcome.LEFTOVER, f"left {left}")
        require_success(run_lmtool(workdir, *arguments))
        if name != "student":
            require_same_result(run, stage / "done" / name)
    return Verdict(Outcome.RECOVERED, f"{name}: {number.name} after {moment:.2f} s {reaction}")


def _reaction_to(answer: Answer, number: signal.Signals, run: Path) -> str:
    """Returns a description of how the command reacted to its signal. Raises TrialFailed if the exit status or the
    messages are wrong."""
    lines = answer.err.splitlines()
    if answer.status == 0:
        if lines and not lines[0].startswith(f"warning: {number.name} came after the last step, too late to stop"):
            raise TrialFailed(Outcome.UNCLEAR, f"status 0: {lines[:3]}")
        return "came too late" if lines else "came after its end"
    if answer.status != STATUS[number]:
        raise TrialFailed(Outcome.SILENT, f"status {answer.status} instead of {STATUS[number]}: {lines[-3:]}")
    if not lines or not lines[0].startswith(f"error: stopped by {number.name}"):
        raise TrialFailed(Outcome.UNCLEAR, f"says {lines[:3]}")
    resumable = (run / "config.yaml").exists()
    if len(lines) != 1 + resumable or (resumable and not lines[1].startswith("hint: lmtool resume ")):
        raise TrialFailed(Outcome.UNCLEAR, f"says {lines[:4]}")
    return lines[0].removeprefix(f"error: stopped by {number.name}").strip(": ") or "before its run"


# --- changed ----------------------------------------------------------------------------------------------------------

Change = Callable[[Path, random.Random], object]


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


def _replace_word(path: Path, rng: random.Random) -> None:
    """Replaces a word by another word of the same length."""
    text = path.read_text()
    match = rng.choice(list(re.finditer(" cat| dog", text)))
    path.write_text(text[: match.start()] + (" dog" if match[0] == " cat" else " cat") + text[match.end() :])


def _swap_rows(path: Path, rng: random.Random) -> None:
    """Swaps the labels of two rows of different classes, or two lines of a text."""
    lines = _lines(path)
    ends = sorted({line[-2:] for line in lines[1:] if line})
    if path.suffix == ".tsv":
        first, second = (rng.choice([n for n, line in enumerate(lines) if n and line.endswith(end)]) for end in ends)
        lines[first], lines[second] = lines[first][:-2] + lines[second][-2:], lines[second][:-2] + lines[first][-2:]
    else:
        first, second = rng.sample([number for number, line in enumerate(lines) if line], 2)
        lines[first], lines[second] = lines[second], lines[first]
    path.write_text("\n".join(lines))


def _drop_row(path: Path, rng: random.Random) -> None:
    lines = _lines(path)
    del lines[rng.choice([number for number, line in enumerate(lines) if number and line])]
    path.write_text("\n".join(lines))


def _append_row(path: Path, rng: random.Random) -> None:
    with path.open("a") as file:
        file.write("\nThe happy cat saw the ship.\n" if path.suffix == ".txt" else "The happy cat saw the ship.\t1\n")


CHANGES: dict[str, Change] = {
    "a word replaced": _replace_word, "two rows swapped": _swap_rows, "a row removed": _drop_row,
    "a row added": _append_row, "deleted": lambda path, rng: path.unlink(),
}  # fmt: skip
"""Changes after which a run must not resume."""
LEGAL: dict[str, Change] = {
    "touched": lambda path, rng: os.utime(path, (0, 0)),
    "rewritten": lambda path, rng: (content := path.read_bytes(), path.unlink(), path.write_bytes(content)),
}


@kind("changes", trials=100)
def changes(stage: Path, workdir: Path, seed: int) -> Verdict:
    """Changes the data, the metrics or the caches of a run before it resumes."""
    rng = trial_rng("changes", seed)
    copy(stage, workdir, "text.txt", "rows", "cache", "done/pre", "runs")
    return (
        _resume_with_changed_data,
        _use_damaged_cache,
        _resume_with_changed_data,
        _use_damaged_cache,
        _resume_with_lost_rows,
    )[seed % 5](stage, workdir, rng)


def _resume_with_changed_data(stage: Path, workdir: Path, rng: random.Random) -> Verdict:
    """Changes a file of text or rows before the run resumes. Only a change in LEGAL may be accepted."""
    run = rng.choice(RUNS)
    path = workdir / ("text.txt" if run == "pre" else rng.choice(("rows/train.tsv", "rows/dev.tsv")))
    legal = rng.random() < 0.25
    name = rng.choice(list(LEGAL if legal else CHANGES))
    (LEGAL if legal else CHANGES)[name](path, rng)
    shape = f"{run}: {path.relative_to(workdir)} {name}"
    repeats_command = rng.random() < 0.5
    arguments = run_arguments(run, f"runs/{run}") if repeats_command else ["resume", f"runs/{run}"]
    with fault_prefix(shape):
        answer = run_lmtool(workdir, *arguments)
        if legal:
            require_success(answer)
            require_same_result(workdir / "runs" / run, stage / "done" / run)
            return Verdict(Outcome.RECOVERED, shape)
        split = {"train.tsv": "no train split", "dev.tsv": "no development split"}.get(path.name, path.name)
        names = [path.name, split] if name == "deleted" else ["text", "data", "task", path.name]
        require_refusal(answer, *names, accepted=f"resumed: {answer.output[-200:]}")
    return refused_or_done(answer, shape)


# Damages of metrics.jsonl.
LOST_ROWS: dict[str, Change] = {
    "deleted": lambda path, rng: path.unlink(),
    "emptied": lambda path, rng: path.write_bytes(b""),
    "shortened": lambda path, rng: path.write_text("\n".join(_lines(path)[rng.randint(1, 5) :])),
}


def _resume_with_lost_rows(stage: Path, workdir: Path, rng: random.Random) -> Verdict:
    """Deletes rows of metrics.jsonl before the run resumes. The command must report it and reach the same weights."""
    run, damage = rng.choice(RUNS), rng.choice(list(LOST_ROWS))
    LOST_ROWS[damage](workdir / "runs" / run / "metrics.jsonl", rng)
    with fault_prefix(f"{run}: metrics.jsonl {damage}"):
        answer = run_lmtool(workdir, "resume", f"runs/{run}")
        require_success(answer)
        if "metrics.jsonl lacks " not in answer.out:
            raise TrialFailed(Outcome.SILENT, "does not report the missing rows")
        result, reference = outcome(workdir / "runs" / run), outcome(stage / "done" / run)
        if any(result[name] != reference[name] for name in reference if name.endswith(".safetensors")):
            raise TrialFailed(Outcome.SILENT, "the weights differ from an undisturbed run")
    return Verdict(Outcome.RECOVERED, f"{run}: metrics.jsonl {damage}")


def _use_damaged_cache(stage: Path, workdir: Path, rng: random.Random) -> Verdict:
    """Damages a file of the cache, then resumes a run or starts a new one."""
    files = sorted(path for path in (workdir / "cache").rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    damage = rng.choice(list(DAMAGES))
    DAMAGES[damage](path, rng)
    new = rng.random() < 0.6
    if new:
        shutil.rmtree(workdir / "runs" / "pre")
    arguments = run_arguments("pre", "runs/pre") if new or rng.random() < 0.5 else ["resume", "runs/pre"]
    shape = f"cache/{path.relative_to(workdir / 'cache')} {damage}, {'new run' if new else 'resumed'}"
    with fault_prefix(shape):
        answer = run_lmtool(workdir, *arguments)
        if is_refusal(answer, path.name, path.parent.name, "cache_dir"):
            return refused_or_done(answer, shape)
        require_same_result(workdir / "runs" / "pre", stage / "done" / "pre")
    return Verdict(Outcome.RECOVERED, shape)
