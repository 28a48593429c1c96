"""The main job in one go, on text every machine has: what `make demo` runs.

Pretrains a tiny BERT on docstrings, finetunes it to tell which package a docstring comes from, finetunes the same
model from random weights for comparison, and prints the scores beside the majority class. Runs offline, on a CPU, in a
few minutes.

    python scripts/demo.py [--runs runs] [--minutes 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table

SEEDS = "seed=1,2,3"
# Few labelled rows want more passes than the default, which is BERT's.
FINETUNE = ["task=pydocs", "max_epochs=10", SEEDS]


def lmtool(*words: str) -> None:
    """Run a command as a user would, and show it first."""
    print(f"\n$ lmtool {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "lmtool", *words])
    if done.returncode:
        sys.exit(done.returncode)


def results(folder: Path) -> list[dict[str, Any]]:
    """result.json of every job of a sweep."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]


def free_name(runs: Path, stem: str) -> Path:
    """A run folder that is not there yet."""
    number = 1
    while any((runs / f"{stem}-{number}{end}").exists() for end in ("", "-pretrained", "-scratch")):
        number += 1
    return runs / f"{stem}-{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run folders go")
    parser.add_argument("--minutes", type=float, default=4.0, help="minutes of pretraining, at most")
    options = parser.parse_args()
    started = time.monotonic()

    start = free_name(options.runs, "demo")
    lmtool("pretrain", "experiment=bert_tiny", f"max_minutes={options.minutes:g}", f"run_dir={start}")
    sweeps = {"pretrained": Path(f"{start}-pretrained"), "from scratch": Path(f"{start}-scratch")}
    lmtool("finetune", "-m", *FINETUNE, f"checkpoint={start}", f"hydra.sweep.dir={sweeps['pretrained']}")
    lmtool(
        "finetune", "-m", *FINETUNE, "checkpoint=none", "model=bert_tiny", "tokenizer=folder",
        f"tokenizer.path={start}", f"hydra.sweep.dir={sweeps['from scratch']}",
    )  # fmt: skip

    scores = {name: [result["value"] for result in results(folder)] for name, folder in sweeps.items()}
    majority = results(sweeps["pretrained"])[0]["baseline"]
    rows = [
        [name, f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}", len(values)]
        for name, values in scores.items()
    ]
    output = Output()
    output.line()
    header = ["start", "accuracy", "seeds"]
    print_table(output, header, [*rows, ["majority class", f"{majority:.3f}", ""]], heading="Which package is it from?")
    output.line(verdict(scores["pretrained"], scores["from scratch"]))
    output.line(f"reports: {start / 'report.html'}, {sweeps['pretrained'] / '0' / 'report.html'}")
    output.line(f"{time.monotonic() - started:.0f} s in all")


def verdict(pretrained: list[float], scratch: list[float]) -> str:
    """Whether pretraining showed, in a sentence; the seeds' differences are the error."""
    gains = [after - other for after, other in zip(pretrained, scratch, strict=True)]
    mean, error = statistics.mean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    clear = (
        "pretraining helps" if mean > 2 * error else "pretraining hurts" if mean < -2 * error else "no clear difference"
    )
    return f"{clear}: {mean:+.3f} ± {error:.3f} accuracy over {len(gains)} pairs of seeds"


if __name__ == "__main__":
    main()
