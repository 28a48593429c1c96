"""Kill a training repeatedly at random times, and let it resume.

The jobs are forked from this process after its imports, which is 100 times cheaper than a fresh interpreter. A job is a
function `job(folder)` that trains in the run folder `folder` until the run is done, and resumes from the checkpoints in
it. Forking needs a process without threads: start the harness as a separate program with one thread.

    OMP_NUM_THREADS=1 python tests/training/kill_harness.py PACKAGE.MODULE:JOB --kills 100 --root FOLDER

prints one JSON line per job: kills, kills during a save, kills after a checkpoint, runs, unreadable checkpoints, runs
that differ from the uninterrupted run, and the files that differ. Several jobs of a module are separated by commas
(MODULE:ONE,OTHER), and jobs may run real commands; ONE@4@5 is killed at these steps instead of random times. A function
`prepare()` in the module is called before the first fork.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmtool.training.progress import Progress

Job = Callable[[Path], None]
Outcome = dict[str, object]
CLOCKS = ("tokens_per_second", "seconds", "evaluation_seconds")


@dataclass
class Count:
    """Counts of kills and runs.

    Attributes:
        resumed: Kills that left a checkpoint to resume from.
        differing: Runs whose outcome differs from the uninterrupted run.
        files: Files that differ.
    """

    kills: int = 0
    runs: int = 0
    kills_in_a_save: int = 0
    resumed: int = 0
    unreadable: int = 0
    differing: int = 0
    files: list[str] = field(default_factory=list)

    def compare(self, outcome: Outcome, expected: Outcome) -> None:
        """Count a finished run."""
        names = sorted(name for name in outcome.keys() | expected.keys() if outcome.get(name) != expected.get(name))
        self.runs += 1
        self.differing += bool(names)
        self.files = sorted({*self.files, *names})


def fork(job: Job, folder: Path) -> int:
    """Fork a child that runs the job and exits with 0, or with 1 after a traceback. Returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        job(folder)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait(child: int, seconds: float) -> int | None:
    """The child's exit status, negative after a signal; None if it still runs after this time."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def outcome(folder: Path) -> Outcome:
    """Results of a run by file: rows, and weights, optimizer, carried state and counters of the last checkpoint.

    Without measured times. Tensors are bytes by name, because the header of a safetensors file has no fixed order.
    """
    from safetensors.numpy import load_file

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = folder / "checkpoints" / (folder / "checkpoints" / "last").read_text().strip()
    tensors = {path.name: load_file(path) for path in sorted(last.glob("*.safetensors"))}
    return {
        "metrics.jsonl": [_without_clocks(row) for row in rows],
        "state.json": _without_clocks(json.loads((last / "state.json").read_text())),
        **{file: {name: held.tobytes() for name, held in sorted(of_file.items())} for file, of_file in tensors.items()},
    }


def _without_clocks(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if key not in CLOCKS}


def kill_many(job: Job, root: Path, kills: int, seed: int = 0, seconds: float = 600.0) -> Count:
    """Kill runs of the job until `kills` have hit a running process, at least one of them after a checkpoint.

    Each run is compared with an uninterrupted run.

    The times are sampled uniformly up to the duration of an uninterrupted run, a third of them from its first quarter,
    so that a run is hit several times.

    Raises:
        RuntimeError: The job fails by itself.
    """
    # The first optimizer step imports it, for a second; here once instead of in each child.
    import torch._dynamo  # noqa: F401

    count, chance = Count(), random.Random(seed)
    begun = time.monotonic()
    if wait(fork(job, root / "alone"), seconds) != 0:
        raise RuntimeError("the uninterrupted run failed")
    alone = time.monotonic() - begun
    expected = outcome(root / "alone")

    def few() -> bool:
        return count.kills < kills or not count.resumed

    def moments() -> Iterator[float]:
        while few():
            yield chance.uniform(0, alone * (0.25 if chance.random() < 0.33 else 1.0))

    while few():
        folder = root / f"killed-{count.runs:03d}"
        run_killed(job, folder, moments(), count, seconds)
        count.compare(outcome(folder), expected)
    return count


def run_killed(job: Job, folder: Path, moments: Iterator[float], count: Count, seconds: float = 600.0) -> None:
    """Run the job in `folder` until it is done, killing it at each of these times, in seconds after a start.

    Raises:
        RuntimeError: The job fails by itself.
    """
    from lmtool.runs.finding import is_intact, saved_steps

    while True:
        child = fork(job, folder)
        moment = next(moments, None)
        status = wait(child, seconds if moment is None else moment)
        if status == 0:
            return
        if status is not None:
            raise RuntimeError(f"the job failed with {status} in {folder}")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if moment is None:
            raise RuntimeError(f"the job did not end within {seconds} seconds in {folder}")
        count.kills += 1
        count.kills_in_a_save += any((folder / "checkpoints").glob(".tmp-*"))
        saved = saved_steps(folder / "checkpoints")
        count.resumed += bool(saved)
        count.unreadable += sum(not is_intact(step) for step in saved)


def kill_at(job: Job, root: Path, steps: Sequence[int], seconds: float = 600.0) -> Count:
    """Kill a run after each of these steps and before its checkpoint, let it resume from the previous checkpoint, and
    compare it with an uninterrupted run. The job must save a checkpoint at each of these steps."""
    import torch._dynamo  # noqa: F401 see kill_many

    count = Count()
    if wait(fork(job, root / "alone"), seconds) != 0:
        raise RuntimeError("the uninterrupted run failed")
    expected = outcome(root / "alone")
    for step in steps:
        folder = root / f"killed-at-{step}"
        if wait(fork(dying_at(job, step), folder), seconds) != -signal.SIGKILL:
            raise RuntimeError(f"the run was not killed at step {step}")
        if wait(fork(job, folder), seconds) != 0:
            raise RuntimeError(f"the job failed in {folder}")
        count.kills, count.resumed = count.kills + 1, count.resumed + 1
        count.compare(outcome(folder), expected)
    return count


def dying_at(job: Job, step: int) -> Job:
    """The job in a process that kills itself instead of saving this step's checkpoint."""

    def dying(folder: Path) -> None:
        from lmtool.training.keeper import Keeper

        save = Keeper.save

        def save_or_die(keeper: Keeper, progress: Progress, must: bool = False) -> bool:
            if progress.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return save(keeper, progress, must)

        Keeper.save = save_or_die  # type: ignore[method-assign]
        job(folder)

    return dying


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", help="package.module:function,function@step,...")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    module, _, names = arguments.job.partition(":")
    jobs = importlib.import_module(module)
    getattr(jobs, "prepare", lambda: None)()
    for words in names.split(","):
        name, *steps = words.split("@")
        job: Job = getattr(jobs, name)
        root: Path = arguments.root / name
        root.mkdir()
        if steps:
            count = kill_at(job, root, [int(step) for step in steps])
        else:
            count = kill_many(job, root, arguments.kills, arguments.seed)
        print(json.dumps(asdict(count)), flush=True)  # a forked child would inherit the buffer


if __name__ == "__main__":
    main()
