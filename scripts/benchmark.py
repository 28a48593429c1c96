"""lmtool and transformers side by side: speed and memory of masked and causal pretraining and of finetuning beside the
Trainer, as documented and tuned; of prediction beside the pipeline.

    python scripts/benchmark.py                    at most 25 minutes on two cores (`make bench`)
    python scripts/benchmark.py --quick            about eight minutes: two rounds, wide spreads
    python scripts/benchmark.py --only sst2,mnli   some of the tables
    python scripts/benchmark.py --resume FILE      finish what FILE began, with its settings
    python scripts/benchmark.py --markdown FILE    the table of docs/speed.md from a finished FILE; nothing is measured

Same model size, tokenised examples, precision, dropout, optimizer and batch on both sides. Every variant is a process
of its own (scripts/peers.py) that stays loaded; they take turns of a few steps, round after round, so that a drift of
the machine meets all of them, and a ratio is taken within its round. Products of matrices take turns too: what a
variant's real work is of the machine's own speed. Where a table claims the same work, one step of both sides from the
same weights is compared first. Prints medians over the rounds with their smallest and largest, says of each aim
whether it is reached, and writes a JSON line for each finished measurement to `--output`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_figures import DIFFERENT, DIFFERENT_STEP, Row, checks, of_work
from bench_tables import compose, machine_line, markdown, settings_line
from bench_turns import Failed, ask, measure
from bench_works import WORKS, Work

FOLDER = Path("runs/bench")
MINUTES, QUICK_MINUTES = 23, 7


def processor() -> str:
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    return {
        "kind": "machine",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": processor(),
        "cores": cores(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: version(name) for name in ("torch", "transformers", "lmtool")},
    }


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What holds of every table; a work's own settings replace some of it."""
    return {
        "seed": 0,
        "threads": cores(),
        "device": "cpu",
        "precision": options.precision,
        "family": "bert",
        "max_length": 128,
        "texts": [],
        "task": None,
        "corpus_bytes": 3_000_000,
        "rows": 0,
        "batch": 16,
        "lr": 1e-4,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "rounds": 2 if options.quick else 10,
        "turn_seconds": 2.0 if options.quick else 5.0,
        "most_steps": 18,
        "model": {
            "vocab_size": 30522,
            "num_layers": 4,
            "hidden_size": 256,
            "num_heads": 4,
            "feedforward_size": 1024,
            "max_positions": 512,
            "dropout": 0.1,
            "attention_dropout": options.attention_dropout,
        },
    }


def works_of(names: str | None) -> list[Work]:
    """The tables by their names, between commas."""
    known = {work.name: work for work in WORKS}
    wanted = list(known) if names is None else names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise Failed(f"--only {unknown[0]}: there is no such table", f"of {', '.join(known)}")
    return [known[name] for name in wanted]


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; a last line that was cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise Failed(f"{path}: {problem.strerror}", "name the file that a run printed at its end") from problem
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError as problem:
            if number + 1 < len(lines):
                raise Failed(f"{path}:{number + 1}: no JSON", "name a file that a run wrote") from problem
    if [row.get("kind") for row in rows[:2]] != ["machine", "settings"]:
        raise Failed(f"{path} is no results file", "name the file that a run printed at its end")
    return rows


def require_same_machine(machine: Row, before: Row, path: Path) -> None:
    """One table is of one machine and of one code."""
    for name in ("processor", "cores", "torch", "transformers", "lmtool"):
        if machine[name] != before[name]:
            raise Failed(
                f"{path} was measured with {name} {before[name]}, and here it is {machine[name]}", "begin anew"
            )


def run_work(work: Work, settings: dict[str, Any], rows: list[Row], seconds: float, record: Any) -> None:
    """Prepare, check and measure one table, as far as its rows do not say it already."""
    settings = {**settings, **work.settings}
    begin = max((row["rounds"] for row in of_work(work, rows) if row["kind"] == "round"), default=0)
    if begin >= settings["rounds"] or any(row["kind"] == "finished" for row in of_work(work, rows)):
        return
    deadline = time.monotonic() + seconds
    folder = FOLDER / "examples" / work.name
    print(f"  {work.name}: the examples", file=sys.stderr, flush=True)
    metadata = ask("prepare", folder, settings)
    record({"kind": "examples", "work": work.name, **metadata})
    claims = [comparison for comparison in work.comparisons if comparison.same]
    if claims and not any(row["kind"] == "check" for row in of_work(work, rows)):
        variants = [(work.variant(claim.own), work.variant(claim.rival)) for claim in claims]
        pairs = [[dict(variant.options) for variant in pair] for pair in variants]
        answer = ask("check", folder, {**settings, "pairs": pairs})
        for claim, step in zip(claims, answer["steps"], strict=True):
            record({"kind": "check", "work": work.name, "own": claim.own, "rival": claim.rival, **step})
        record({"kind": "packing", "lines": answer["packing"]})
    measure(work, folder, settings, deadline, record, begin)
    record({"kind": "finished", "work": work.name})


def opened(options: argparse.Namespace) -> tuple[Path, list[Row]]:
    """The results file with its whole lines, and their rows: those of the run that is resumed, or the first two."""
    machine, path = describe_machine(), options.resume or options.output
    if options.resume is not None:
        if vars(options) != vars(parse(["--resume", str(options.resume)])):
            raise Failed("--resume measures with the settings of its file", "leave the other options out")
        rows = read_rows(path)
        require_same_machine(machine, rows[0], path)
    else:
        path = path or FOLDER / time.strftime("%Y%m%d-%H%M%S.jsonl")
        if path.exists():
            raise Failed(f"--output {path} is there already", f"--resume {path}, or another name")
        if options.precision == "auto":
            options.precision = own_precision()
        rows = [machine, {"kind": "settings", **settings_of(options), "only": options.only}]
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path, rows


def own_precision() -> str:
    """What lmtool computes in on this machine, where nothing is asked for."""
    from lmtool.training.precision import select_device, select_precision

    return select_precision("auto", select_device("cpu")).name


def measure_all(options: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        raise Failed("the peer is not installed: transformers and accelerate", "make bench")
    works_of(options.only)
    started = time.monotonic()
    output, rows = opened(options)
    settings = {name: value for name, value in rows[1].items() if name != "kind"}
    works = works_of(settings.pop("only"))
    seconds = 60 * (QUICK_MINUTES if settings["rounds"] <= 2 else MINUTES)
    with output.open("a", encoding="utf-8") as lines:

        def record(row: Row) -> None:
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)

        for index, work in enumerate(works):
            left = seconds - (time.monotonic() - started)
            run_work(work, settings, rows, left / (len(works) - index), record)
    report(works, rows)
    print(f"\n{time.monotonic() - started:.0f} s; every turn is in {output}")
    if broken := [line for work in works for line in checks(work, rows) if DIFFERENT_STEP in line or DIFFERENT in line]:
        raise Failed(f"not the same work: {broken[0]}", "the ratios of that comparison mean nothing", status=3)


def report(works: Sequence[Work], rows: Sequence[Row]) -> None:
    """Everything that was measured, on the terminal."""
    print(machine_line(rows), settings_line(rows[1]), sep="\n")
    packing = next((row["lines"] for row in rows if row["kind"] == "packing"), [])
    for line in packing:
        print(f"transformers: {line}")
    for work in works:
        examples = next((row["text"] for row in of_work(work, rows) if row["kind"] == "examples"), None)
        print(f"\n{compose(work, rows)}", *([f"  text: {examples}"] if examples else []), sep="\n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds instead of ten")
    parser.add_argument("--only", metavar="A,B", help=f"some of the tables: {', '.join(work.name for work in WORKS)}")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: lmtool's own")
    parser.add_argument("--attention-dropout", type=float, default=0.1, help="on both sides (0.1, as published)")
    parser.add_argument("--output", type=Path, help="for the JSON lines (runs/bench/TIME.jsonl)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="finish this results file, with its settings")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of docs/speed.md")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    try:
        if options.markdown is not None:
            rows = read_rows(options.markdown)
            print(markdown(works_of(rows[1]["only"]), rows))
        else:
            measure_all(options)
    except Failed as failure:
        print(f"error: {failure}\nhint: {failure.hint}", file=sys.stderr)
        sys.exit(failure.status)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
