"""`lmtool demo`: pretrains and finetunes a tiny BERT on docstrings of the installed Python packages.

Pretrains a BERT with rotary positions, finetunes it and a randomly initialized copy to predict which package a
docstring comes from, and compares their accuracy with the majority class. Runs offline, on a CPU, in at most five
minutes. The output of the finetuning goes to a file; `lmtool report` then prints its table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lmtool.errors import CheckFailed
from lmtool.reporting.console import Output, print_table
from lmtool.resolver.commands import DemoConfig
from lmtool.system.files import user_path
from lmtool.system.terminal import say

# The default of three epochs, as in BERT's paper. With ten epochs, random weights score nearly as well.
FINETUNE = ["task=pydocs", "seed=1,2,3,4,5,6", "evaluate_every=1000"]


def lmtool(*words: str, log: Path | None = None) -> None:
    """Prints and runs an lmtool command. Raises CheckFailed if it fails. log: the file for its output, if not the
    screen."""
    say(f"\n$ lmtool {' '.join(words)}{f'  > {log}' if log else ''}")
    sys.stdout.flush()
    with log.open("w") if log else nullcontext() as file:
        done = subprocess.run([sys.executable, "-P", "-m", "lmtool", *words], stdout=file, stderr=file)
    if done.returncode:
        place = "is above" if log is None else f"is in {log}"
        raise CheckFailed(f"lmtool {words[0]} ended with status {done.returncode}", f"read its output, which {place}")


def results(folder: Path, checkpoint: str) -> list[dict[str, Any]]:
    """Returns the result.json of each job of a sweep that started from a checkpoint, sorted by seed."""
    jobs = {path.parent: json.loads(path.read_text()) for path in folder.glob("*/submitted.json")}
    folders = [path for path, job in jobs.items() if job["config"]["checkpoint"] == checkpoint]
    found = (json.loads((path / "result.json").read_text()) for path in folders)
    return sorted(found, key=lambda result: result["seed"])


def free_name(runs: Path, stem: str) -> Path:
    """Returns the first of STEM-1, STEM-2, ... for which neither a run nor a finetuning sweep exists."""
    number = 1
    while any((runs / f"{stem}-{number}{end}").exists() for end in ("", "-finetuned")):
        number += 1
    return runs / f"{stem}-{number}"


def run(config: DemoConfig) -> None:
    """Runs the commands of the demo, and prints what they show."""
    started = time.monotonic()
    pretrained = free_name(user_path(config.folder), "demo")
    sweep = Path(f"{pretrained}-finetuned")
    budget = [f"max_minutes={config.minutes:g}", "log_every=500"]
    lmtool("pretrain", "experiment=bert_tiny", "model/positions=rotary", *budget, f"run_dir={pretrained}")
    arguments = ["finetune", "-m", *FINETUNE, f"checkpoint={pretrained},none", f"hydra.sweep.dir={sweep}"]
    lmtool(*arguments, log=pretrained / "finetuning.txt")
    lmtool("report", str(sweep))

    finetuned = {"pretrained": results(sweep, str(pretrained)), "from scratch": results(sweep, "none")}
    scores = {name: [result["value"] for result in jobs] for name, jobs in finetuned.items()}
    majority = finetuned["pretrained"][0]["baseline"]
    rows = [
        [name, f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}", len(values)]
        for name, values in scores.items()
    ]
    output = Output()
    output.line()
    header = ["start", "accuracy", "seeds"]
    print_table(output, header, [*rows, ["majority class", f"{majority:.3f}", ""]], heading="Which package is it from?")
    output.line(verdict(scores["pretrained"], scores["from scratch"]))
    output.line(f"reports: {pretrained / 'report.html'}, {sweep / 'sweep.html'}")
    output.line(f"{time.monotonic() - started:.0f} s in all")


def verdict(pretrained: list[float], from_scratch: list[float]) -> str:
    """Says whether pretraining helped, with the standard error over pairs of seeds."""
    gains = [score - baseline for score, baseline in zip(pretrained, from_scratch, strict=True)]
    mean, error = statistics.mean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    conclusion = (
        "pretraining helps" if mean > 3 * error else "pretraining hurts" if mean < -3 * error else "no clear difference"
    )
    return f"{conclusion}: {mean:+.3f} ± {error:.3f} accuracy over {len(gains)} pairs of seeds"
