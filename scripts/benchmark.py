"""Compare the speed and memory of lmtool with transformers: masked and causal pretraining and finetuning with the
Trainer, as documented and tuned; prediction with the pipeline; and what a trained model is used for: texts with
`generate`, vectors with sentence-transformers, and scores of candidates after examples in a prompt.

    python scripts/benchmark.py                    at most 35 minutes on two cores (`make bench`)
    python scripts/benchmark.py --quick            about ten minutes: two rounds, wide spreads
    python scripts/benchmark.py --only sst2,mnli   some of the tables
    python scripts/benchmark.py --sizes base       BERT-base and GPT-2 small instead: a few steps, about eight minutes
    python scripts/benchmark.py --corpus 40 160    memory of pretrain, predict and embed, by megabytes
    python scripts/benchmark.py --resume FILE      finish the measurements of FILE, with its settings
    python scripts/benchmark.py --markdown FILE    the table of docs/speed.md from a finished FILE; nothing is measured

Both sides have the same model size, tokenized examples, precision, dropout, optimizer and batch. Each variant has its
own process (scripts/timing/worker.py), which stays loaded. They take turns of a few steps in rounds, so that a drift of
the machine affects all of them, and ratios are taken within a round. Matrix products take turns too, to measure the
machine. If a table claims the same work, one step of both sides from the same weights, or the tokens, vectors or scores
of both, are compared first. Prints medians over the rounds with their minimum and maximum, reports whether each aim is
reached, and writes a JSON line for each finished measurement to `--output`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import cores, foreign_seconds, name_list, processor, stop
from timing.corpus import measure_corpora
from timing.report import DIFFERENCES, Row, checks, compose, machine_line, markdown, rows_of_work
from timing.report import settings_line as line_of_settings
from timing.turns import TimingError, ask, measure
from timing.works import BASE_MODEL, BASE_WORKS, WORKS, Work, settings_of

FOLDER = Path("runs/bench")
MINUTES, QUICK_MINUTES = 32, 9
NAMES = tuple(work.name for work in WORKS)


def describe_machine() -> Row:
    return {
        "kind": "machine", "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "processor": processor(), "cores": cores(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: version(name) for name in ("torch", "transformers", "lmtool")},
    }  # fmt: skip


def settings_row(options: argparse.Namespace) -> Row:
    """The settings of all tables; a work's settings override them."""
    if options.precision == "auto":  # lmtool's default precision on this machine
        from lmtool.training.precision import select_device, select_precision

        options.precision = select_precision("auto", select_device("cpu")).name
    base = options.sizes == "base"
    quick = {"rounds": 2, "turn_seconds": 2.0} if options.quick or base else {}
    settings = settings_of(threads=cores(), precision=options.precision, **quick)
    settings["model"] |= {"attention_dropout": options.attention_dropout, **(BASE_MODEL if base else {})}
    return {"kind": "settings", **settings, "only": [work.name for work in BASE_WORKS] if base else options.only}


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file, without an incomplete last line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise TimingError(f"{path}: {problem.strerror}", "name the file that a run printed at its end") from problem
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError as problem:
            if number + 1 < len(lines):
                raise TimingError(f"{path}:{number + 1}: not JSON", "name a file that a run wrote") from problem
    if [row.get("kind") for row in rows[:2]] != ["machine", "settings"]:
        raise TimingError(f"{path} is not a results file", "name the file that a run printed at its end")
    return rows


def open_results(options: argparse.Namespace) -> tuple[Path, list[Row]]:
    """The results file and its rows: those of the run to resume, or the machine and the settings."""
    machine, path = describe_machine(), options.resume or options.output
    if options.resume is not None:
        if vars(options) != vars(parse(["--resume", str(options.resume)])):
            raise TimingError("--resume measures with the settings of its file", "omit the other options")
        rows = read_rows(path)
        for name in ("processor", "cores", "torch", "transformers", "lmtool"):  # one table is of one machine and code
            if machine[name] != (before := rows[0][name]):
                message = f"{path} was measured with {name} {before}, and here it is {machine[name]}"
                raise TimingError(message, "omit --resume")
    else:
        path = path or FOLDER / time.strftime("%Y%m%d-%H%M%S.jsonl")
        if path.exists():
            raise TimingError(f"--output {path} exists already", f"use --resume {path}, or another name")
        rows = [machine, settings_row(options)]
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path, rows


def works_of(rows: Sequence[Row]) -> list[Work]:
    """The tables of a results file."""
    return [work for work in (*WORKS, *BASE_WORKS) if work.name in (rows[1]["only"] or NAMES)]


def run_work(work: Work, rows: list[Row], seconds: float, record: Callable[[Row], None]) -> None:
    """Prepares, checks and measures one table, except for what its rows contain already."""
    settings = {name: value for name, value in rows[1].items() if name not in ("kind", "only")} | work.settings
    settings["model"] = {**rows[1]["model"], **settings["model"]}
    first_round = max((row["rounds"] for row in rows_of_work(work, rows) if row["kind"] == "round"), default=0)
    if first_round >= settings["rounds"] or any(row["kind"] == "finished" for row in rows_of_work(work, rows)):
        return
    started, foreign = time.monotonic(), foreign_seconds()
    folder = FOLDER / "examples" / work.name
    print(f"  {work.name}: the examples", file=sys.stderr, flush=True)
    record({"kind": "examples", "work": work.name, **ask("prepare", folder, settings)})
    claims = [comparison for comparison in work.comparisons if comparison.same]
    if claims and not any(row["kind"] == "check" for row in rows_of_work(work, rows)):
        pairs = [[dict(work.variant(name).options) for name in (claim.own, claim.rival)] for claim in claims]
        answer = ask("check", folder, {**settings, "pairs": pairs})
        for claim, step in zip(claims, answer["steps"], strict=True):
            record({"kind": "check", "work": work.name, "own": claim.own, "rival": claim.rival, **step})
    measure(work, folder, settings, started + seconds, record, first_round)
    row: Row = {"kind": "finished", "work": work.name}
    if foreign is not None and (after := foreign_seconds()) is not None:
        row["foreign"] = (after - foreign) / (cores() * (time.monotonic() - started))
    record(row)


def measure_all(options: argparse.Namespace) -> None:
    peers = ("transformers", "accelerate", "sentence_transformers")
    if missing := [name for name in peers if importlib.util.find_spec(name) is None]:
        raise TimingError(f"not installed: {', '.join(missing)}", "run make bench")
    started = time.monotonic()
    if options.sizes == "base" and options.only:
        raise TimingError("--only names tables that --sizes base does not measure", "omit --only or --sizes")
    output, rows = open_results(options)
    works = works_of(rows)
    seconds = 60 * (QUICK_MINUTES if rows[1]["rounds"] <= 2 else MINUTES)
    with output.open("a", encoding="utf-8") as lines:

        def record(row: Row) -> None:
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)

        for index, work in enumerate(works):
            run_work(work, rows, (seconds - (time.monotonic() - started)) / (len(works) - index), record)
    report(works, rows)
    print(f"\n{time.monotonic() - started:.0f} s; every turn is in {output}")
    if broken := [line for work in works for line in checks(work, rows) if any(word in line for word in DIFFERENCES)]:
        raise TimingError(f"not the same work: {broken[0]}", "the ratios of that comparison mean nothing", status=3)


def report(works: Sequence[Work], rows: Sequence[Row]) -> None:
    """Prints all measurements."""
    print(machine_line(rows), line_of_settings(rows[1]), sep="\n")
    for work in works:
        examples = next((row["text"] for row in rows_of_work(work, rows) if row["kind"] == "examples"), None)
        print(f"\n{compose(work, rows)}", *([f"  text: {examples}"] if examples else []), sep="\n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("--quick", action="store_true", help="two rounds instead of ten")
    add("--only", metavar="A,B", type=name_list("--only", NAMES), help=f"some of the tables: {', '.join(NAMES)}")
    add("--sizes", choices=["small", "base"], default="small", help="base: BERT-base and GPT-2 small, pretraining only")
    add("--corpus", metavar="MB", nargs="+", type=int, help="only the memory of some commands, by megabytes of text")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: lmtool's own")
    add("--attention-dropout", type=float, default=0.1, help="on both sides (0.1, as published)")
    add("--output", type=Path, help="for the JSON lines (runs/bench/TIME.jsonl)")
    add("--resume", type=Path, metavar="FILE", help="finish this results file, with its settings")
    add("--markdown", type=Path, metavar="FILE", help="print the table of docs/speed.md")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    try:
        if options.markdown is not None:
            rows = read_rows(options.markdown)
            print(markdown(works_of(rows), rows))
        elif options.corpus is not None:
            for line in measure_corpora(options.corpus):
                print(line, flush=True)
        else:
            measure_all(options)
    except TimingError as failure:
        stop(str(failure), failure.hint, failure.status)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
