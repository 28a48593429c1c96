"""Processes of worker.py that take turns, round after round: a drift of the machine meets all of them, and ratios are
taken within a round."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from timing.works import PRODUCTS, Variant, Work

WORKERS = Path(__file__).with_name("worker.py")
MULTIPLY = Variant(PRODUCTS, "matrix products of 1,024 cubed", steps=100)
COUNTED_STEPS = 3

Record = Callable[[dict[str, Any]], None]


class Failed(Exception):
    """One line for the user, and what to type. variant: the one that ended."""

    def __init__(self, message: str, hint: str, status: int = 2, variant: Variant | None = None):
        super().__init__(message)
        self.hint, self.status, self.variant = hint, status, variant


class Worker:
    """One variant in its process."""

    def __init__(self, variant: Variant, folder: Path, settings: Mapping[str, Any]):
        self.variant = variant
        self.log = folder / f"{variant.name}.log"
        told = json.dumps({**settings, "variant": dict(variant.options)})
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKERS), variant.name, str(folder), told],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line.strip():
            self.close()
            last = (self.log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise Failed(f"{self.variant.name} ended: {last}", f"read {self.log}", 1, self.variant)
        return json.loads(line)

    def run(self, steps: int, count: bool = False) -> dict[str, Any]:
        """Let it take steps; the row of the turn. count: also how often they wait for the device."""
        with suppress(BrokenPipeError):  # the answer says why
            print(json.dumps({"steps": steps, "count": count}), file=self.process.stdin, flush=True)
        return {"variant": self.variant.name, "imports_bytes": self.ready["imports_bytes"], **self.answer()}

    def close(self) -> None:
        """Its loop ends when there are no more commands."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ask(job: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a process that does one thing and ends."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(WORKERS), job, str(folder), json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"{folder}: {job} failed", "read the lines above", status=1)
    return json.loads(done.stdout)


def order_of(work: Work, round_number: int) -> tuple[Variant, ...]:
    """Who goes when: lmtool in the middle of its rivals, every second of their own rounds backwards."""
    half = (len(work.rivals) + 1) // 2
    order = (*work.rivals[:half], *work.own, *work.rivals[half:])
    present = tuple(variant for variant in order if round_number % variant.every == 0)
    return present if (round_number + 1) // 2 % 2 == 0 else present[::-1]


def measure(
    work: Work, folder: Path, settings: dict[str, Any], deadline: float, record: Record, begin: int = 0,
    required: bool = True,
) -> None:  # fmt: skip
    """Rounds of turns from `begin` on until the deadline (or `settings["rounds"]`), at least one; `record` takes each
    row. A rival that ends is a row that says why, and the others go on without it; so is lmtool where it is not
    required. On CUDA further steps, which are not timed, count how often the host waits."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}

        def without(failure: Failed) -> None:
            assert failure.variant is not None
            if failure.variant not in work.rivals and required:
                raise failure
            name = failure.variant.name
            record({"kind": "failed", "work": work.name, "variant": name, "why": str(failure)})
            workers.pop(name, None)

        for variant in (MULTIPLY, *work.variants):
            print(f"  {work.name}: {variant.name} starts", file=sys.stderr, flush=True)
            try:
                workers[variant.name] = Worker(variant, folder, settings)
                stack.callback(workers[variant.name].close)
                workers[variant.name].run(2)  # kernels are chosen and memory is grown in the first steps
            except Failed as failure:
                without(failure)
        while len(workers) > 1:
            try:
                begin = take_turns(work, workers, settings, deadline, record, begin)
                for worker in workers.values() if settings["device"] == "cuda" else ():
                    record({"kind": "counted", "work": work.name, **worker.run(COUNTED_STEPS, count=True)})
                return
            except Failed as failure:
                without(failure)


def take_turns(
    work: Work, workers: Mapping[str, Worker], settings: Mapping[str, Any], deadline: float, record: Record, begin: int
) -> int:
    """The rounds of `measure`, by the workers that are there; the number of the next."""
    probes = []
    for worker in workers.values():
        probe = worker.run(1)
        record({"kind": "worker", "work": work.name, **worker.ready})
        if worker.variant.name != PRODUCTS:
            probes.append(probe["seconds"])
    steps = min(max(math.ceil(settings["turn_seconds"] / max(probes)), 3), settings["most_steps"])
    round_number, longest = begin, 0.0
    while round_number < settings["rounds"] and (round_number == begin or time.monotonic() + longest < deadline):
        begun = time.monotonic()
        for variant in (MULTIPLY, *order_of(work, round_number)):
            if variant.name in workers:
                row = workers[variant.name].run(variant.steps or steps)
                record({"kind": "turn", "work": work.name, "round": round_number, **row})
        longest = max(longest, time.monotonic() - begun)
        round_number += 1
        record({"kind": "round", "work": work.name, "rounds": round_number})
        print(f"  {work.name}: round {round_number}, {longest:.0f} s", file=sys.stderr, flush=True)
    return round_number
