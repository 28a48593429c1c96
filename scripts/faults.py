"""Plant faults, one at a time, and check that lmtool recovers, reports a fallback, or refuses with a clear error.

    python scripts/faults.py                        all trials, at most 20 minutes on two cores (`make faults`)
    python scripts/faults.py --only kills --seed 7  one trial
    python scripts/faults.py --quick                a few trials of each kind

Each trial runs in an empty folder, in a process that is forked from this one after the imports. The kind and the seed
of a trial alone determine the fault. Each finished trial adds a row to OUTPUT/rows.jsonl. A script that was stopped
resumes from these rows, unless the code of lmtool or of the trials has changed since. At the end it prints a table; the
exit status is 3 if a trial failed.
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

from common import ROOT, name_list

KINDS = (
    "kills", "stops", "checkpoints", "disks", "changes", "overrides", "typos", "tables", "texts", "hostile", "links",
    "modules", "secrets", "environments",
)  # fmt: skip
TRIAL_SECONDS = 300  # time limit
# Up to this number of trials, each imports what it needs; more trials share the imports of this process.
MAX_FRESH_IMPORTS = 4

Trial = tuple[str, int]
Row = dict[str, Any]


def load_kinds() -> dict[str, Any]:
    """Returns the kinds of faults in tests/faults by name. Also prepares this process for forks: switches threads
    off, and makes lmtool and its tests importable."""
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]
    for name in ("checkpoints", "disks", "hostile", "inputs", "runs", "surroundings", "words"):
        importlib.import_module(f"tests.faults.{name}")  # registers kinds in tests.faults.outcomes.KINDS
    from tests.faults.outcomes import KINDS as known

    return {name: known[name] for name in KINDS}


def source_hash() -> str:
    """Returns a hash of the source code of lmtool and of the trials."""
    digest = hashlib.sha256()
    for folder in ("lmtool", "conf", "tests/faults", "tests/commands", "tests/training"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- running ----------------------------------------------------------------------------------------------------------


def build_stage(stage: Path, trials: int) -> None:
    """Builds the stage unless it exists. For more than MAX_FRESH_IMPORTS trials, also imports the modules that the
    commands need, which the forks inherit."""
    from tests.faults.stage import build, build_once, import_listed

    try:
        build_once(stage, build)
    except RuntimeError as error:
        sys.exit(f"error: cannot build the stage, since one of its runs fails: {error}")
    if trials > MAX_FRESH_IMPORTS:
        import_listed(stage)


def run_all(trials: Sequence[Trial], known: dict[str, Any], stage: Path, keep: bool, workers: int) -> Iterator[Row]:
    """Runs the trials, each in its own process and folder, and yields the row of each when it ends.

    Args:
        trials: kind and seed of each
        known: the kinds by name
        stage: the folder from which trials copy
        keep: keep the folders of the trials
        workers: the number of trials that run at a time
    """
    waiting, running = deque(trials), dict[int, tuple[Trial, Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.popleft()
                workdir = Path(tempfile.mkdtemp(prefix=f"faults-{trial[0]}-{trial[1]}-"))
                running[_start(known[trial[0]], trial, stage, workdir)] = trial, workdir
            process, _ = os.wait()
            trial, workdir = running.pop(process)
            yield _read_row(trial, workdir)
            if keep:
                print(f"its folder: {workdir}")
            else:
                shutil.rmtree(workdir, ignore_errors=True)
    finally:  # an interrupt of this script does not reach the trials' process groups
        for process, (_, workdir) in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            shutil.rmtree(workdir, ignore_errors=True)


def _start(kind: Any, trial: Trial, stage: Path, workdir: Path) -> int:
    """Forks a process that runs a trial and writes its row next to its folder. Returns the process id."""
    if process := os.fork():
        return process
    status, started = 1, time.monotonic()
    try:
        os.setsid()
        signal.alarm(TRIAL_SECONDS)
        log = os.open(workdir.with_name(f"{workdir.name}.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        try:
            verdict = kind.run(stage, workdir, trial[1])
            outcome, detail = verdict.outcome.value, verdict.detail
        except Exception as error:
            traceback.print_exc()
            outcome, detail = "BROKEN", f"{type(error).__name__}: {error}"
        row = _new_row(trial, outcome, detail) | {"seconds": round(time.monotonic() - started, 2)}
        workdir.with_name(f"{workdir.name}.json").write_text(json.dumps(row))
        status = 0
    finally:
        os._exit(status)


def _new_row(trial: Trial, outcome: str, detail: str) -> Row:
    return {"kind": trial[0], "seed": trial[1], "outcome": outcome, "detail": " ".join(detail.split()), "seconds": 0.0}


def _read_row(trial: Trial, workdir: Path) -> Row:
    """Reads the row of a finished trial and deletes its file. Keeps the log if the trial itself failed."""
    answer, log = (workdir.with_name(f"{workdir.name}.{kind}") for kind in ("json", "log"))
    row: Row = json.loads(answer.read_text()) if answer.exists() else _new_row(trial, "BROKEN", "the trial died")
    answer.unlink(missing_ok=True)
    if row["outcome"] == "BROKEN":
        row["detail"] += f"; see {log}"
    else:
        log.unlink(missing_ok=True)
    return row


# --- reporting --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], planned: dict[str, int]) -> str:
    """Formats a table with the number of trials by kind and outcome. planned: the number of trials of each kind."""
    outcomes = list(dict.fromkeys(sorted((row["outcome"] for row in rows), key=lambda name: (name.isupper(), name))))
    counts = Counter((row["kind"], row["outcome"]) for row in rows)
    width = max(map(len, [*planned, "kind"]))
    lines = ["  ".join([f"{'kind':{width}}", f"{'trials':>6}", *(f"{name:>9}" for name in outcomes)])]
    for kind, trials in planned.items():
        done = sum(row["kind"] == kind for row in rows)
        cells = [f"{counts[kind, name] or '':>{max(9, len(name))}}" for name in outcomes]
        not_run = f"  ({trials - done} not run)" if done < trials else ""
        lines.append("  ".join([f"{kind:{width}}", f"{done:>6}", *cells]) + not_run)
    return "\n".join(lines)


def failures(rows: Sequence[Row]) -> str:
    """Lists each failed trial with the command that repeats it."""
    return "\n".join(
        f"{row['outcome']}  {row['detail']}\n    scripts/faults.py --only {row['kind']} --seed {row['seed']}"
        for row in rows
        if row["outcome"].isupper()
    )


def report(rows: Sequence[Row], faults: dict[str, Any], planned: dict[str, int]) -> int:
    """Prints the table, the summaries and the failures. Returns the exit status."""
    rows = [row for row in rows if row["kind"] in planned]
    print(f"\n{table(rows, planned)}\n")
    summaries = [
        kind.summary([row for row in rows if row["kind"] == name]) for name, kind in faults.items() if kind.summary
    ]
    print(*(line for line, _ in summaries), failures(rows), sep="\n")
    return 3 if any(row["outcome"].isupper() for row in rows) or not all(passed for _, passed in summaries) else 0


def open_rows(output: Path) -> tuple[Path, list[Row]]:
    """Returns the file of finished trials and its rows. Deletes the folder first if the source code has changed since
    the rows were written."""
    settings, now = output / "settings.json", json.dumps({"source": source_hash()})
    if settings.exists() and settings.read_text() != now:
        print(f"the code has changed since {output} was written: all trials run again")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    settings.write_text(now)
    path = output / "rows.jsonl"
    path.touch()
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=name_list("--only", KINDS), default=list(KINDS), help=f"some of the kinds {','.join(KINDS)}"
    )
    parser.add_argument("--seed", type=int, help="run this one trial of the kind in --only, and keep its folder")
    parser.add_argument("--trials", type=int, help="maximum number of trials of each kind")
    parser.add_argument("--quick", action="store_true", help="run only a few trials of each kind")
    parser.add_argument("--output", type=Path, default=Path("faults"), help="folder for the rows and for the stage")
    parser.add_argument("--workers", type=int, default=2, help="number of trials that run at a time")
    arguments = parser.parse_args()
    if arguments.seed is not None and len(arguments.only) > 1:
        parser.error("--seed needs exactly one kind: use --only KIND --seed N")
    return arguments


def main() -> int:
    arguments = parse()
    faults = {name: kind for name, kind in load_kinds().items() if name in arguments.only}
    planned = {name: kind.quick_trials if arguments.quick else kind.trials for name, kind in faults.items()}
    if arguments.trials is not None:
        planned = {name: min(count, arguments.trials) for name, count in planned.items()}
    output = arguments.output.resolve()
    (path, rows), stage = open_rows(output), output / "stage"
    if arguments.seed is not None:
        build_stage(stage, 1)
        (row,) = run_all([(arguments.only[0], arguments.seed)], faults, stage, keep=True, workers=1)
        print(f"{row['outcome']}: {row['detail']}")
        return 3 if row["outcome"].isupper() else 0
    finished = {(row["kind"], row["seed"]) for row in rows}
    remaining = [(name, seed) for name in faults for seed in range(planned[name]) if (name, seed) not in finished]
    # The kinds take turns, so that a script that is stopped has run some trials of each.
    trials = sorted(remaining, key=lambda trial: trial[1] / planned[trial[0]])
    build_stage(stage, len(trials))
    started = last_report = time.monotonic()
    with path.open("a") as file:
        for count, row in enumerate(run_all(trials, faults, stage, keep=False, workers=arguments.workers), 1):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            if row["outcome"].isupper():
                print(f"{row['kind']} {row['seed']}: {row['outcome']}", flush=True)
            if time.monotonic() - last_report > 60:
                last_report = time.monotonic()
                print(
                    f"{count} of {len(trials)} trials after {last_report - started:.0f} s", file=sys.stderr, flush=True
                )
    return report(rows, faults, planned)


if __name__ == "__main__":
    sys.exit(main())
