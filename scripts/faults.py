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
import hashlib
import importlib
import json
import os
import shutil
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
    "kills", "checkpoints", "disks", "changes", "overrides", "typos", "tables", "texts", "hostile", "secrets",
)  # fmt: skip
SECONDS = 300  # of a trial, by the clock

Trial = tuple[str, int]
Row = dict[str, Any]


def prepare() -> None:
    """Set the process up to be forked: no threads in it, and the package and the tests importable."""
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]


def kinds() -> dict[str, Any]:
    """The kinds of faults by name, each a module of scripts/trials."""
    found = [importlib.import_module(f"trials.{name}").KIND for name in KINDS]
    return {kind.name: kind for kind in found}


def source() -> str:
    """A hash of what is tried and of what tries it."""
    digest = hashlib.sha256()
    for folder in ("lmtool", "conf", "scripts/trials", "tests/commands", "tests/training"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- running --------------------------------------------------------------------------------------------------------


def build_stage(stage: Path) -> None:
    """Make what the trials start from, in a fork, and import here all that its commands have imported."""
    from trials.stage import build, once

    listing = stage.with_name("modules.json")

    def child() -> None:
        once(stage, build)
        listing.write_text(json.dumps(sorted(sys.modules)))

    process = _fork(child)
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        sys.exit("error: the stage cannot be built: lmtool does not get through two small runs")
    for name in json.loads(listing.read_text()):
        if name not in sys.modules and not name.startswith(("__", "tests.")):
            try:
                importlib.import_module(name)
            except Exception:  # a module that another one has made, and that cannot be imported by its name
                continue


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
    """Rows of the trials as they end, some at a time, each in a process and a folder of its own."""
    waiting, running = deque(trials), dict[int, tuple[Trial, Path]]()
    while waiting or running:
        while waiting and len(running) < workers:
            name, seed = trial = waiting.popleft()
            place = Path(tempfile.mkdtemp(prefix=f"faults-{name}-{seed}-"))
            running[_start(known[name], seed, stage, place)] = trial, place
        process, _ = os.wait()
        (name, seed), place = running.pop(process)
        answer = place.with_name(f"{place.name}.json")
        if answer.exists():
            yield json.loads(answer.read_text())
            answer.unlink()
        else:
            yield {"kind": name, "seed": seed, "outcome": "BROKEN", "detail": "the trial died", "seconds": 0.0}
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _start(kind: Any, seed: int, stage: Path, place: Path) -> int:
    def work() -> None:
        import signal

        os.setsid()
        signal.alarm(SECONDS)
        log = os.open(place.with_name(f"{place.name}.log"), os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        row = run_trial(kind, seed, stage, place)
        place.with_name(f"{place.name}.json").write_text(json.dumps(row))
        if row["outcome"] != "BROKEN":
            place.with_name(f"{place.name}.log").unlink()

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"kinds, of {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, help="one trial of --only; its folder stays")
    parser.add_argument("--trials", type=int, help="at most so many of each kind")
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--output", type=Path, default=Path("faults"), help="folder of the rows, and of the stage")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    prepare()
    known = kinds()
    names = arguments.only.split(",") if arguments.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(known)}")
    planned = {name: known[name].draw if arguments.quick else known[name].trials for name in names}
    if arguments.trials is not None:
        planned = {name: min(count, arguments.trials) for name, count in planned.items()}
    from rows import Rows

    output = arguments.output.resolve()
    settings = output / "settings.json"
    if settings.exists() and json.loads(settings.read_text()).get("source") not in (None, source()):
        print(f"lmtool has changed since {output} was written: it begins again")
        shutil.rmtree(output)
    rows = Rows(output, ("kind", "seed"), {"source": source()})
    build_stage(output / "stage")
    if arguments.seed is not None:
        trials, rows.all = [(name, arguments.seed) for name in names], []
    else:
        trials = [(name, seed) for name in names for seed in range(planned[name]) if not rows.has(name, seed)]
    begun, single = time.monotonic(), arguments.seed is not None
    for row in run_all(trials, known, output / "stage", single, arguments.workers):
        if single:
            rows.all.append(row)
        else:
            rows.add(row)
        if single:
            print(f"{row['outcome']}: {row['detail']}")
        elif row["outcome"].isupper():
            print(f"{row['kind']} {row['seed']}: {row['outcome']}", flush=True)
    wanted = [row for row in rows.all if row["kind"] in names]
    summarized = [known[name] for name in names if known[name].summary]
    sums = [kind.summary([row for row in wanted if row["kind"] == kind.name]) for kind in summarized]
    if not single:
        print(f"\n{table(wanted, planned)}\n")
        print("\n".join(line for line, _ in sums), f"{time.monotonic() - begun:.0f} seconds", sep="\n")
        print(failures(wanted))
    failed = any(row["outcome"].isupper() for row in wanted) or not all(good for _, good in sums)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
