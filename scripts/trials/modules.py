"""Files in the working folder that are called as modules of Python are: none is run, by lmtool or by any process that
it starts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from trials.outcomes import Failed, Kind, Outcome, Verdict, chance_of, planted
from trials.scenes import replaced
from trials.stage import TEXT, copy

# What Python itself imports for -m before it comes to lmtool: only -P keeps it from the working folder.
_BEFORE = {
    "abc", "codecs", "collections", "contextlib", "copyreg", "enum", "functools", "importlib", "io", "keyword", "os",
    "operator", "re", "reprlib", "runpy", "site", "stat", "types", "typing", "warnings",
}  # fmt: skip
_RUN = ["pretrain", *TEXT, "max_steps=1", "offline=true"]
COMMANDS: dict[str, list[str]] = {
    "several processes": [*_RUN, "devices=2", "name=a"],
    "doctor": ["doctor", "offline=true", "cache_dir=cache", "device=cpu"],
    "joblib": [*_RUN, "name=a", "-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": [*_RUN, "name=a", "-m", "seed=1", "hydra/launcher=submitit_local"],
    "a tracker": [*_RUN, "name=a", "logger=tensorboard"],
    "processes that tokenize": [*replaced(_RUN, "data.path=long.txt"), "name=a"],
    "compiled": [*_RUN, "name=a", "compile=true"],
}
_WORTH = 8_000_000
"""Characters for which processes are started."""
_STARTS = {"the command": [str(Path(sys.executable).with_name("lmtool"))], "-m": [sys.executable, "-m", "lmtool"]}


def _trial(stage: Path, place: Path, seed: int) -> Verdict:
    chance = chance_of("modules", seed)
    name, start = list(COMMANDS)[seed % len(COMMANDS)], chance.choice(list(_STARTS))
    copy(stage, place, "text.txt", "cache")
    if name == "processes that tokenize":
        text = (place / "text.txt").read_text()
        (place / "long.txt").write_text(text * (_WORTH // len(text) + 1))
    _plant(place, chance)
    with planted(f"{name}, started by {start}"):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"HOME": str(place / ".home"), "RAYON_NUM_THREADS": "2"}
        environment.pop("TOKENIZERS_PARALLELISM", None)
        command = [*_STARTS[start], *COMMANDS[name]]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        if (place / "RAN").exists():
            raise Failed(Outcome.EXECUTED, (place / "RAN").read_text()[:200])
        if done.returncode:
            raise Failed(Outcome.DEAD_END, f"status {done.returncode}: {done.stderr[-300:]}")
    return Verdict(Outcome.DONE, f"{name}, started by {start}")


def _plant(place: Path, chance: random.Random) -> None:
    """Modules that say that they were run, and then are none; `token` and `json` among them."""
    names = sorted(sys.stdlib_module_names - set(sys.builtin_module_names) - _BEFORE)
    planted = {"json", "token", *chance.sample([name for name in names if not name.startswith("_")], 40)}
    for name in planted:
        (place / f"{name}.py").write_text(
            f"print({name!r}, file=open({str(place / 'RAN')!r}, 'a'))\nraise ImportError\n"
        )


KIND = Kind("modules", "files of strangers by the names of Python's modules", trials=7, draw=1, trial=_trial)
