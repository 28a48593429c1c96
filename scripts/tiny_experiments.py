"""Does every family learn in minutes of one slow core? Each experiment/*_tiny, pretrained beside the best constant.

    python scripts/tiny_experiments.py [--only bert_tiny,gpt_tiny] [--jobs 2] [--output runs/tiny] [OVERRIDE ...]

Runs one thread each, `--jobs` at a time, on the docstrings that every machine has. Appends a row a finished run to
OUTPUT/rows.jsonl and resumes where it stopped; prints the table of docs/recipes.md, and exits with 1 where a score (of
several terms their sum) is not three standard errors better than the best constant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rows import Rows, listed, stop

ROOT = Path(__file__).resolve().parents[1]
ERRORS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=listed(str), default=[], help="names of experiments")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/tiny"))
    parser.add_argument("overrides", nargs="*", help="further keys of lmtool pretrain")
    options = parser.parse_args()
    known = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*_tiny.yaml"))
    if unknown := sorted({*options.only} - {*known}):
        stop(f"--only {unknown[0]}: no such experiment", f"there are {', '.join(known)}")
    rows = Rows(options.output, ("experiment",), {"overrides": options.overrides})
    names = [name for name in options.only or known if not rows.has(name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda name: trained(name, options), names):
            rows.add(row)
            print(json.dumps(row), flush=True)
    wanted = options.only or known
    finished = {row["experiment"]: row for row in rows.all}
    print("\n".join(table([finished[name] for name in wanted])))
    sys.exit(any(clear(finished[name]["score"]) < ERRORS for name in wanted))


def trained(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one experiment."""
    folder = options.output / name
    words = [sys.executable, "-m", "lmtool", "pretrain", f"experiment={name}", f"run_dir={folder}", *options.overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (options.output / f"{name}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        stop(f"{name} ended with {process.returncode}", f"see {log.name}")
    result = json.loads((folder / "result.json").read_text())
    kept = ("steps", "tokens", "seconds", "ended", "parameters", "seed")
    return {
        "experiment": name,
        "model": result["model"],
        "score": {"loss": result["value"], "baseline": result["baseline"], "error": result["standard_error"]},
        "terms": dict(terms_of(result["metrics"])),
        **{key: result[key] for key in kept},
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def terms_of(metrics: dict[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    """What is predicted, with its loss, that of the best constant and the standard error of their difference."""
    for key in metrics:
        term = key.removesuffix("_baseline")
        if term != key:
            loss, error = metrics[f"{term}_loss"], metrics[f"{term}_gain_standard_error"]
            yield term, {"loss": loss, "baseline": metrics[key], "error": error}


def clear(term: dict[str, float]) -> float:
    """By how many standard errors a term is better than its best constant."""
    return (term["baseline"] - term["loss"]) / term["error"]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown."""
    yield "| experiment | term | loss | best constant | difference in standard errors | tokens | CPU minutes |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        taken = f"{row['tokens'] / 1e6:.1f} M | {row['cpu_seconds'] / 60:.1f}"
        for number, (name, term) in enumerate(row["terms"].items()):
            first, last = (f"`{row['experiment']}`", taken) if number == 0 else ("", " | ")
            losses = f"{term['loss']:.4g} | {term['baseline']:.4g} | {clear(term):.0f}"
            yield f"| {first} | {name} | {losses} | {last} |"


if __name__ == "__main__":
    main()
