"""Kill -9 a command at random moments, once, twice or three times, while it tokenizes too, and type it again: the run
ends as one that was never killed, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from tests.commands import jobs
from tests.training.kill_harness import Count, fork, outcome, run_killed, wait
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of
from trials.stage import once

# What real commands people run, the commonest most often.
JOBS = ("pretraining", "finetuning", "pretraining", "finetuning", "gpt", "multitask", "t5", "electra", "bart")


def _alone(folder: Path, name: str) -> None:
    """The job's undisturbed run, with the caches it leaves, and how long it took without them."""
    begun = time.monotonic()
    if wait(fork(getattr(jobs, name), folder / "alone"), 120) != 0:
        raise RuntimeError(f"the uninterrupted job {name} failed")
    (folder / "seconds").write_text(json.dumps(time.monotonic() - begun))


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
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
    shown = " and ".join(f"{moment:.2f}" for moment in moments)
    fault = f"{name} killed after {shown} s{', caches empty' if cold else ''}"
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


KIND = Kind("kills", "kill -9 at random moments, then the same command again", trials=40, draw=1, trial=_trial)
