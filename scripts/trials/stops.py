"""A signal at a random moment of a command, while it reads, tokenizes, asks a teacher, trains or writes its results.

The status says which one, one line says so, nothing is left locked, and the same command ends as if nothing had been.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from trials.commands import Answer, in_fork, typed
from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.stage import ROWS, copy, result_of, words_of

STATUS = {
    signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75,
}  # fmt: skip
_STUDENT = [
    "finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=4", "max_epochs=null", "distill=soft",
    "distill.teacher=done/tuned", "distill.store=true", "run_dir=run",
]  # fmt: skip
COMMANDS = {"pre": words_of("pre", "run"), "tuned": words_of("tuned", "run"), "student": _STUDENT}
SECONDS = 2.5  # that such a command takes


def _stopped(place: Path, words: list[str], number: signal.Signals, moment: float) -> Answer:
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

    answer = in_fork(place, work)
    return Answer(tuple(words), answer.status, answer.out, answer.err)


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("stops", seed)
    name = list(COMMANDS)[seed % len(COMMANDS)]
    copy(stage, place, "text.txt", "rows", "done", *(["cache"] if chance.random() < 0.3 else []))
    words, number, run = COMMANDS[name], chance.choice(list(STATUS)), place / "run"
    moment = SECONDS * chance.random() ** 2  # before it trains, most often
    with planted(f"{name}: {number.name} after {moment:.2f} s"):
        answer = _stopped(place, words, number, moment)
        ended = _ended(answer, number, run)
        left = [path.name for path in place.rglob("*") if path.name == "LOCK" or path.name.startswith(".tmp-")]
        if left:
            raise Failed(Outcome.LEFTOVER, f"left {left}")
        again = typed(place, *words)
        if again.status:
            raise Failed(Outcome.DEAD_END, again.errors[:300])
        if name != "student" and result_of(run) != result_of(stage / "done" / name):
            raise Failed(Outcome.SILENT, "rows or weights differ from an undisturbed run")
    return Verdict(Outcome.RECOVERED, f"{name}: {number.name} after {moment:.2f} s {ended}")


def _ended(answer: Answer, number: signal.Signals, run: Path) -> str:
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
    if len(lines) != 1 + run.exists() or (run.exists() and not lines[1].startswith("hint: lmtool resume ")):
        raise Failed(Outcome.UNCLEAR, f"says {lines[:4]}")
    return lines[0].removeprefix(f"error: stopped by {number.name}").strip(": ") or "before its run"


KIND = Kind("stops", "signals at random moments, then the same command again", trials=40, draw=3, trial=_trial)
