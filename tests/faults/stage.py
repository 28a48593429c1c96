"""The stage: a folder with small data and runs, from which all trials copy.

    text.txt  rows/  cache/       text, labeled rows and their caches
    runs/pre     runs/tuned       runs killed at step 12 of 12, before the last checkpoint was saved
    done/pre     done/tuned       the same runs, finished without a disturbance
    published                     done/tuned, exported
    modules                       names of the modules that the commands import

A run of twelve steps takes two seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.commands.conftest import TINY, write_rows, write_text
from tests.faults.outcomes import Outcome, TrialFailed
from tests.training.kill_harness import dying_at, fork, outcome, wait

STEPS = 12
_BUDGET = [f"max_steps={STEPS}", "max_epochs=null", "checkpoint_every=2", "evaluate_every=4", "log_every=1"]
HERE = ["device=cpu", "precision=fp32", "cache_dir=cache"]
TEXT = ["model=bert_tiny", *TINY, "data=text", "data.path=text.txt", "cache_dir=cache", "batch_tokens=1024"]
"""Arguments that pretrain on text.txt; twelve steps read it one and a half times."""
ROWS = ["task=sst2", "task.path=rows", *HERE, "batch_examples=16", "max_length=32"]
"""Arguments that finetune on rows/."""
RUNS = ("pre", "tuned")
# Small valid command lines.
PRETRAIN = ["pretrain", *TEXT, "max_steps=1", "run_dir=run"]
FINETUNE = ["finetune", *ROWS, "checkpoint=none", "model=bert_tiny", "max_steps=1", "run_dir=run"]
PREDICT = ["predict", "checkpoint=done/tuned", *HERE, "text=hello"]
EVALUATE = ["evaluate", "checkpoint=done/tuned", *HERE]
VOCABULARY = ["tokenizer", "data=text", "data.path=text.txt", "cache_dir=cache", "output=vocabulary",
              "tokenizer=wordpiece", "tokenizer.vocab_size=300"]  # fmt: skip
_WARM_UP = [
    PREDICT,
    ["predict", "checkpoint=done/pre", *HERE, "text=hello [MASK]"],
    EVALUATE,
    ["evaluate", "checkpoint=done/pre", *HERE],
    ["import", "checkpoint=published", "output=tried/imported"],
    [*VOCABULARY[:4], "output=tried/vocabulary"],
    ["inspect", "pretrain", *TEXT, "n=1", "tokens=2000"],
    ["plan", "pretrain", *TEXT],
    ["pretrain", *TEXT, "max_steps=1", "name=tried", "-m", "seed=1"],
]
"""Commands that the stage runs only to learn which modules they import; the trials' forks inherit those modules."""


def run_arguments(run: str, folder: str) -> list[str]:
    """Returns the command line of a run of the stage, "pre" (pretraining) or "tuned" (finetuning)."""
    if run == "pre":
        return ["pretrain", *TEXT, *_BUDGET, f"run_dir={folder}"]
    return ["finetune", *ROWS, *_BUDGET, "checkpoint=done/pre", f"run_dir={folder}"]


def with_overrides(arguments: list[str] | tuple[str, ...], *others: str) -> tuple[str, ...]:
    """Returns the command line with further overrides, which replace overrides of the same keys."""
    keys = {other.partition("=")[0] for other in others}
    return (*(word for word in arguments if word.partition("=")[0] not in keys), *others)


def last_overrides(arguments: list[str]) -> list[str]:
    """Returns the command line with only the last of several overrides of the same key."""
    return [arguments[0], *{word.partition("=")[0]: word for word in arguments[1:]}.values()]


def build(stage: Path) -> None:
    """Builds the stage in an empty folder, and imports into this process the modules that its commands import. Raises
    RuntimeError if a command fails."""
    write_text(stage / "text.txt")
    write_rows(stage / "rows")
    for run in RUNS:
        _run_in_stage(stage, run_arguments(run, f"done/{run}"))
        _run_in_stage(stage, run_arguments(run, f"runs/{run}"), die_at=STEPS)
    for arguments in (["export", "checkpoint=done/tuned", "output=published"], *_WARM_UP):
        _run_in_stage(stage, arguments)
    for folder in ("tried", "runs/tried"):
        shutil.rmtree(stage / folder)


def _run_in_stage(stage: Path, arguments: list[str], die_at: int | None = None) -> None:
    from lmtool.cli import main as cli

    def job(folder: Path) -> None:
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        status = cli.main(arguments)
        with open("modules", "a") as listing:
            listing.writelines(f"{name}\n" for name in sys.modules)
        os._exit(status)

    status = wait(fork(job if die_at is None else dying_at(job, die_at), stage), 120)
    import_listed(stage)
    if status != (0 if die_at is None else -signal.SIGKILL):
        raise RuntimeError(f"lmtool {' '.join(arguments)}: status {status}\n{(stage / 'log').read_text()[-3000:]}")


def import_listed(stage: Path) -> None:
    """Imports into this process the modules that are listed in the stage, so that forks need not import them."""
    for name in sorted(set((stage / "modules").read_text().split()) - sys.modules.keys()):
        if not name.startswith(("__", "tests.")):
            with contextlib.suppress(Exception):  # some modules are created by other modules and cannot be imported
                importlib.import_module(name)


def copy(stage: Path, workdir: Path, *names: str) -> None:
    """Copies the named files and folders of the stage into a trial's working folder."""
    for name in dict.fromkeys(names):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        if (stage / name).is_dir():
            shutil.copytree(stage / name, workdir / name, symlinks=True)
        else:
            shutil.copy2(stage / name, workdir / name)


def result_hash(run: Path) -> str:
    """Returns a hash of a finished run: its metrics without times, its counters and its last tensors."""
    return hashlib.sha256(repr(outcome(run)).encode()).hexdigest()


def require_same_result(run: Path, reference: Path) -> None:
    """Raises TrialFailed if the metrics or the weights of two runs differ."""
    if outcome(run) != outcome(reference):
        raise TrialFailed(Outcome.SILENT, "rows or weights differ from an undisturbed run")


def build_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Calls `make` on a new folder of the stage, unless another trial has built the folder already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "built").write_text("")
