"""Plant faults, one at a time, and see that lmtool recovers, falls back and says so, or refuses by name.

    python scripts/faults.py                        all of them, at most 20 minutes on two cores (`make faults`)
    python scripts/faults.py --only kills --seed 7  one trial
    python scripts/faults.py --quick                a few of each kind

Each trial is a process forked from this one, after its imports, in an empty folder of its own; what it plants is a
function of its kind and seed. A finished trial is a row of OUTPUT/rows.jsonl, so that the script resumes where it was
stopped; where lmtool or a trial has changed since, it begins again. It ends with a table, and with status 3 where a
trial failed.
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

ROOT = Path(__file__).resolve().parents[1]
KINDS = (
    "kills", "stops", "checkpoints", "disks", "changes", "overrides", "typos", "tables", "texts", "hostile", "links",
    "modules", "secrets",
)  # fmt: skip
SECONDS = 300  # of a trial, by the clock
FEW = 4  # trials that import for themselves, rather than wait for all imports

Trial = tuple[str, int]
Row = dict[str, Any]


def prepare() -> None:
    """Set the process up to be forked: no threads in it, and the package and the tests importable."""
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]


def kinds() -> dict[str, Any]:
    """The kinds of faults by name, each a module of scripts/trials."""
    return {name: importlib.import_module(f"trials.{name}").KIND for name in KINDS}


def source() -> str:
    """A hash of what is tried and of what tries it."""
    digest = hashlib.sha256()
    for folder in ("lmtool", "conf", "scripts/trials", "tests/commands", "tests/training"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- running --------------------------------------------------------------------------------------------------------


def build_stage(stage: Path, trials: int) -> None:
    """Make what the trials start from, and import here all that its commands have imported: for so many trials it is
    cheaper than in each."""
    from trials.stage import build, import_listed, once

    try:
        once(stage, build)
    except RuntimeError as error:
        sys.exit(f"error: the stage cannot be built: lmtool does not get through two small runs: {error}")
    if trials > FEW:
        import_listed(stage)


def _fork(work: Any) -> int:
    process = os.fork()
    if process:
        return process
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run_trial(kind: Any, seed: int, stage: Path, place: Path) -> Row:
    """One trial, in this process, in an empty folder."""
    begun = time.monotonic()
    try:
        verdict = kind.run(stage, place, seed)
        outcome, detail = verdict.outcome.value, verdict.detail
    except Exception as error:
        traceback.print_exc()
        outcome, detail = "BROKEN", f"{type(error).__name__}: {error}"
    row = {"kind": kind.name, "seed": seed, "outcome": outcome, "detail": " ".join(detail.split())}
    return row | {"seconds": round(time.monotonic() - begun, 2)}


def run_all(trials: Sequence[Trial], known: dict[str, Any], stage: Path, keep: bool, workers: int) -> Iterator[Row]:
    """Rows of the trials as they end, some at a time, each in a process and a folder of its own. keep: the folders."""
    waiting, running = deque(trials), dict[int, tuple[Trial, Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.popleft()
                place = Path(tempfile.mkdtemp(prefix=f"faults-{trial[0]}-{trial[1]}-"))
                running[_start(known[trial[0]], trial[1], stage, place)] = trial, place
            process, _ = os.wait()
            trial, place = running.pop(process)
            yield _row(trial, place)
            if keep:
                print(f"its folder: {place}")
            else:
                shutil.rmtree(place, ignore_errors=True)
    finally:  # stopped: the trials are sessions of their own
        for process, (_, place) in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            shutil.rmtree(place, ignore_errors=True)


def _row(trial: Trial, place: Path) -> Row:
    """What an ended trial has written."""
    answer, log = (place.with_name(f"{place.name}.{kind}") for kind in ("json", "log"))
    if answer.exists():
        row: Row = json.loads(answer.read_text())
        answer.unlink()
    else:
        row = {"kind": trial[0], "seed": trial[1], "outcome": "BROKEN", "detail": "the trial died", "seconds": 0.0}
    if row["outcome"] == "BROKEN":
        row["detail"] += f"; see {log}"
    else:
        log.unlink(missing_ok=True)
    return row


def _start(kind: Any, seed: int, stage: Path, place: Path) -> int:
    def work() -> None:
        os.setsid()
        signal.alarm(SECONDS)
        log = os.open(place.with_name(f"{place.name}.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        row = run_trial(kind, seed, stage, place)
        place.with_name(f"{place.name}.json").write_text(json.dumps(row))

    return _fork(work)


# --- reporting ------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], planned: dict[str, int]) -> str:
    """Trials of each kind by outcome."""
    seen = list(dict.fromkeys(sorted((row["outcome"] for row in rows), key=lambda name: (name.isupper(), name))))
    counts = Counter((row["kind"], row["outcome"]) for row in rows)
    width = max(map(len, [*planned, "kind"]))
    lines = ["  ".join([f"{'kind':{width}}", f"{'trials':>6}", *(f"{name:>9}" for name in seen)])]
    for kind, trials in planned.items():
        done = sum(row["kind"] == kind for row in rows)
        cells = [f"{counts[kind, name] or '':>{max(9, len(name))}}" for name in seen]
        lines.append("  ".join([f"{kind:{width}}", f"{done:>6}", *cells]))
        if done < trials:
            lines[-1] += f"  ({trials - done} not run)"
    return "\n".join(lines)


def failures(rows: Sequence[Row]) -> str:
    """Each failed trial: what was seen, and how to see it again."""
    failed = [row for row in rows if row["outcome"].isupper()]
    return "\n".join(
        f"{row['outcome']}  {row['detail']}\n    scripts/faults.py --only {row['kind']} --seed {row['seed']}"
        for row in failed
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"kinds, of {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, help="one trial of --only; its folder stays")
    parser.add_argument("--trials", type=int, help="at most so many of each kind")
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--output", type=Path, default=Path("faults"), help="folder of the rows, and of the stage")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",") if arguments.only else list(KINDS)
    if unknown := [name for name in arguments.only if name not in KINDS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(KINDS)}")
    if arguments.seed is not None and len(arguments.only) > 1:
        parser.error("--seed goes with one kind, --only KIND")
    return arguments


def opened(output: Path) -> Any:
    """The rows of finished trials; none where they are of another lmtool, or of other trials."""
    from rows import Rows

    settings, now = output / "settings.json", {"source": source()}
    if settings.exists() and json.loads(settings.read_text()).get("source", now["source"]) != now["source"]:
        print(f"lmtool has changed since {output} was written: it begins again")
        shutil.rmtree(output)
    return Rows(output, ("kind", "seed"), now)


def main() -> int:
    arguments = parse()
    prepare()
    known = {name: kind for name, kind in kinds().items() if name in arguments.only}
    planned = {name: kind.draw if arguments.quick else kind.trials for name, kind in known.items()}
    if arguments.trials is not None:
        planned = {name: min(count, arguments.trials) for name, count in planned.items()}
    output = arguments.output.resolve()
    rows, stage = opened(output), output / "stage"
    if arguments.seed is not None:
        build_stage(stage, 1)
        (row,) = run_all([(arguments.only[0], arguments.seed)], known, stage, True, 1)
        print(f"{row['outcome']}: {row['detail']}")
        return 3 if row["outcome"].isupper() else 0
    every = [(name, seed) for name in known for seed in range(planned[name])]
    # All kinds advance together, so that a script that was stopped has seen something of each.
    trials = sorted((trial for trial in every if not rows.has(*trial)), key=lambda trial: trial[1] / planned[trial[0]])
    build_stage(stage, len(trials))
    begun = shown = time.monotonic()
    for count, row in enumerate(run_all(trials, known, stage, False, arguments.workers), 1):
        rows.add(row)
        if row["outcome"].isupper():
            print(f"{row['kind']} {row['seed']}: {row['outcome']}", flush=True)
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"{count} of {len(trials)} trials after {shown - begun:.0f} seconds", file=sys.stderr, flush=True)
    return report(rows.all, known, planned)


def report(rows: Sequence[Row], known: dict[str, Any], planned: dict[str, int]) -> int:
    """Print the table, a line of each kind that has one, and the failures. Returns the exit status."""
    wanted = [row for row in rows if row["kind"] in planned]
    print(f"\n{table(wanted, planned)}\n")
    summarized = [kind for kind in known.values() if kind.summary is not None]
    sums = [kind.summary([row for row in wanted if row["kind"] == kind.name]) for kind in summarized]
    for line, _ in sums:
        print(line)
    print(failures(wanted))
    return 3 if any(row["outcome"].isupper() for row in wanted) or not all(good for _, good in sums) else 0


if __name__ == "__main__":
    sys.exit(main())
