"""Plant faults, one at a time, and check that lmtool recovers, reports a fallback, or refuses with a clear error.

    python scripts/faults.py                        all of them, at most 20 minutes on two cores (`make faults`)
    python scripts/faults.py --only kills --seed 7  one trial
    python scripts/faults.py --quick                a few of each kind

Each trial runs in an empty folder, in a process forked from this one after its imports; its kind and seed alone decide
what it plants. Each finished trial adds a row to OUTPUT/rows.jsonl, from which a stopped script resumes; it begins
again if lmtool or a trial has changed. It prints a table, and exits with status 3 if a trial failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, listed

KINDS = (
    "kills", "stops", "checkpoints", "disks", "changes", "overrides", "typos", "tables", "texts", "hostile", "links",
    "modules", "secrets",
)  # fmt: skip
SECONDS = 300  # time limit of a trial, by the clock
FEW = 4  # up to so many trials, each imports what it needs; more share this process's imports

Trial = tuple[str, int]
Row = dict[str, Any]


def kinds() -> dict[str, Any]:
    """The kinds of faults of scripts/trials by name. Prepares the process for forks: no threads; the package
    and the tests are importable."""
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]
    for name in ("checkpoints", "disks", "hostile", "inputs", "runs", "surroundings", "words"):
        importlib.import_module(f"trials.{name}")  # each registers its kinds
    from trials.outcomes import KINDS as known

    return {name: known[name] for name in KINDS}


def source() -> str:
    """A hash of the source code of lmtool and of the trials."""
    digest = hashlib.sha256()
    for folder in ("lmtool", "conf", "scripts/trials", "tests/commands", "tests/training"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- running ----------------------------------------------------------------------------------------------------------


def build_stage(stage: Path, trials: int) -> None:
    """Builds the stage. For more than FEW trials, imports all modules of its commands, which the forks inherit."""
    from trials.stage import build, import_listed, once

    try:
        once(stage, build)
    except RuntimeError as error:
        sys.exit(f"error: cannot build the stage, since one of its runs fails: {error}")
    if trials > FEW:
        import_listed(stage)


def run_all(trials: Sequence[Trial], known: dict[str, Any], stage: Path, keep: bool, workers: int) -> Iterator[Row]:
    """The rows of the trials as they end. Up to `workers` run at a time, each in its own process and folder. keep: do
    not delete the folders."""
    waiting, running = deque(trials), dict[int, tuple[Trial, Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.popleft()
                place = Path(tempfile.mkdtemp(prefix=f"faults-{trial[0]}-{trial[1]}-"))
                running[_start(known[trial[0]], trial, stage, place)] = trial, place
            process, _ = os.wait()
            trial, place = running.pop(process)
            yield _row(trial, place)
            if keep:
                print(f"its folder: {place}")
            else:
                shutil.rmtree(place, ignore_errors=True)
    finally:  # an interrupt of this script does not reach the trials' process groups
        for process, (_, place) in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            shutil.rmtree(place, ignore_errors=True)


def _start(kind: Any, trial: Trial, stage: Path, place: Path) -> int:
    """Forks a process that runs a trial and writes its row next to its folder."""
    if process := os.fork():
        return process
    status, begun = 1, time.monotonic()
    try:
        os.setsid()
        signal.alarm(SECONDS)
        log = os.open(place.with_name(f"{place.name}.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        try:
            verdict = kind.run(stage, place, trial[1])
            outcome, detail = verdict.outcome.value, verdict.detail
        except Exception as error:
            traceback.print_exc()
            outcome, detail = "BROKEN", f"{type(error).__name__}: {error}"
        row = _new_row(trial, outcome, detail) | {"seconds": round(time.monotonic() - begun, 2)}
        place.with_name(f"{place.name}.json").write_text(json.dumps(row))
        status = 0
    finally:
        os._exit(status)


def _new_row(trial: Trial, outcome: str, detail: str) -> Row:
    return {"kind": trial[0], "seed": trial[1], "outcome": outcome, "detail": " ".join(detail.split()), "seconds": 0.0}


def _row(trial: Trial, place: Path) -> Row:
    """The row that a finished trial has written."""
    answer, log = (place.with_name(f"{place.name}.{kind}") for kind in ("json", "log"))
    row: Row = json.loads(answer.read_text()) if answer.exists() else _new_row(trial, "BROKEN", "the trial died")
    answer.unlink(missing_ok=True)
    if row["outcome"] == "BROKEN":
        row["detail"] += f"; see {log}"
    else:
        log.unlink(missing_ok=True)
    return row


# --- reporting --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], planned: dict[str, int]) -> str:
    """Trials of each kind by outcome."""
    seen = list(dict.fromkeys(sorted((row["outcome"] for row in rows), key=lambda name: (name.isupper(), name))))
    counts = Counter((row["kind"], row["outcome"]) for row in rows)
    width = max(map(len, [*planned, "kind"]))
    lines = ["  ".join([f"{'kind':{width}}", f"{'trials':>6}", *(f"{name:>9}" for name in seen)])]
    for kind, trials in planned.items():
        done = sum(row["kind"] == kind for row in rows)
        cells = [f"{counts[kind, name] or '':>{max(9, len(name))}}" for name in seen]
        left = f"  ({trials - done} not run)" if done < trials else ""
        lines.append("  ".join([f"{kind:{width}}", f"{done:>6}", *cells]) + left)
    return "\n".join(lines)


def failures(rows: Sequence[Row]) -> str:
    """Each failed trial, with the command that repeats it."""
    return "\n".join(
        f"{row['outcome']}  {row['detail']}\n    scripts/faults.py --only {row['kind']} --seed {row['seed']}"
        for row in rows
        if row["outcome"].isupper()
    )


def report(rows: Sequence[Row], known: dict[str, Any], planned: dict[str, int]) -> int:
    """Prints the table, the summaries and the failures. Returns the exit status."""
    wanted = [row for row in rows if row["kind"] in planned]
    print(f"\n{table(wanted, planned)}\n")
    sums = [
        kind.summary([row for row in wanted if row["kind"] == name]) for name, kind in known.items() if kind.summary
    ]
    print(*(line for line, _ in sums), failures(wanted), sep="\n")
    return 3 if any(row["outcome"].isupper() for row in wanted) or not all(good for _, good in sums) else 0


def opened(output: Path) -> tuple[Path, list[Row]]:
    """The file of finished trials and its rows; deletes rows of other source code."""
    settings, now = output / "settings.json", json.dumps({"source": source()})
    if settings.exists() and settings.read_text() != now:
        print(f"lmtool has changed since {output} was written: it begins again")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    settings.write_text(now)
    path = output / "rows.jsonl"
    path.touch()
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=listed("--only", KINDS), default=list(KINDS), help=f"kinds, of {','.join(KINDS)}"
    )
    parser.add_argument("--seed", type=int, help="one trial of --only; its folder stays")
    parser.add_argument("--trials", type=int, help="at most so many of each kind")
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--output", type=Path, default=Path("faults"), help="folder of the rows, and of the stage")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.seed is not None and len(arguments.only) > 1:
        parser.error("--seed goes with one kind, --only KIND")
    return arguments


def main() -> int:
    arguments = parse()
    known = {name: kind for name, kind in kinds().items() if name in arguments.only}
    planned = {name: kind.draw if arguments.quick else kind.trials for name, kind in known.items()}
    if arguments.trials is not None:
        planned = {name: min(count, arguments.trials) for name, count in planned.items()}
    output = arguments.output.resolve()
    (path, rows), stage = opened(output), output / "stage"
    if arguments.seed is not None:
        build_stage(stage, 1)
        (row,) = run_all([(arguments.only[0], arguments.seed)], known, stage, True, 1)
        print(f"{row['outcome']}: {row['detail']}")
        return 3 if row["outcome"].isupper() else 0
    finished = {(row["kind"], row["seed"]) for row in rows}
    every = [(name, seed) for name in known for seed in range(planned[name]) if (name, seed) not in finished]
    # All kinds advance together, so that a stopped script has run some trials of each.
    trials = sorted(every, key=lambda trial: trial[1] / planned[trial[0]])
    build_stage(stage, len(trials))
    begun = shown = time.monotonic()
    with path.open("a") as file:
        for count, row in enumerate(run_all(trials, known, stage, False, arguments.workers), 1):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            if row["outcome"].isupper():
                print(f"{row['kind']} {row['seed']}: {row['outcome']}", flush=True)
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(f"{count} of {len(trials)} trials after {shown - begun:.0f} s", file=sys.stderr, flush=True)
    return report(rows, known, planned)


if __name__ == "__main__":
    sys.exit(main())
