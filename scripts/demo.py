"""The main job in one go, on text every machine has: what `make demo` runs.

Pretrains a tiny BERT on docstrings, finetunes it to tell which package a docstring comes from, finetunes the same
model from random weights for comparison, and prints the three scores. Runs offline, on a CPU, in a few minutes.

    python scripts/demo.py [--runs runs] [--minutes 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

SEEDS = (1, 2, 3)


def lmtool(*words: str) -> None:
    """Run a command as a user would, and show it first."""
    print(f"\n$ lmtool {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "lmtool", *words])
    if done.returncode:
        sys.exit(done.returncode)


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run folders go")
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes of pretraining")
    options = parser.parse_args()
    started = time.monotonic()

    pretrained = options.runs / "demo-pretrain"
    lmtool(
        "pretrain", "model=bert_tiny", "data=pydocs", "data.max_bytes=6000000", "objective=mlm",
        "optimizer.lr=2e-3", f"max_minutes={options.minutes}", "max_steps=null", f"run_dir={pretrained}",
    )  # fmt: skip
    scores: dict[str, list[float]] = {"pretrained": [], "from scratch": []}
    for seed in SEEDS:
        for start, words in (
            ("pretrained", [f"checkpoint={pretrained}"]),
            ("from scratch", ["checkpoint=none", "model=bert_tiny", f"tokenizer={pretrained}"]),
        ):
            folder = options.runs / f"demo-{start.replace(' ', '-')}-{seed}"
            lmtool("finetune", "task=pydocs", *words, f"seed={seed}", f"run_dir={folder}")
            scores[start].append(result(folder)["value"])
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
