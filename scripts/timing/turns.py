"""Processes of worker.py take turns in rounds: a drift of the machine affects all of them, and ratios are taken within
a round."""

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


class TimingError(Exception):
    """An error for the user, with a hint. variant: the one whose process ended."""

    def __init__(self, message: str, hint: str, status: int = 2, variant: Variant | None = None):
        super().__init__(message)
        self.hint, self.status, self.variant = hint, status, variant


class Worker:
    """The process of a variant. host: the worker whose process it shares."""

    def __init__(self, variant: Variant, folder: Path, settings: Mapping[str, Any], host: Worker | None = None):
        self.variant = variant
        if host is not None:
            self.log, self.process, self.ready = host.log, host.process, host.ready
            return
        self.log = folder / f"{variant.name}.log"
        settings_of_worker = json.dumps({**settings, "variant": dict(variant.options)})
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKERS), variant.name, str(folder), settings_of_worker],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line.strip():
            self.close()
            last = (self.log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
            raise TimingError(f"{self.variant.name} ended: {last}", f"read {self.log}", 1, self.variant)
        return json.loads(line)

    def run(self, steps: int, count: bool = False) -> dict[str, Any]:
        """Runs steps and returns the row of the turn. count: also count the waits for the device."""
        command = {"steps": steps, "count": count, "options": dict(self.variant.options)}
        with suppress(BrokenPipeError, ValueError):  # the process has ended, or its input is closed: see the answer
            print(json.dumps(command), file=self.process.stdin, flush=True)
        return {"variant": self.variant.name, "imports_bytes": self.ready["imports_bytes"], **self.answer()}

    def close(self) -> None:
        """Ends the commands, and with them the worker's loop."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ask(job: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a worker that runs a single job."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(WORKERS), job, str(folder), json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise TimingError(f"{folder}: {job} failed", "read the lines above", status=1)
    return json.loads(done.stdout)


def order_of(work: Work, round_number: int) -> tuple[Variant, ...]:
    """The order of turns in a round: lmtool between its rivals, reversed in every second round."""
    half = (len(work.rivals) + 1) // 2
    order = (*work.rivals[:half], *work.own, *work.rivals[half:])
    present = tuple(variant for variant in order if round_number % variant.every == 0)
    return present if (round_number + 1) // 2 % 2 == 0 else present[::-1]


def measure(
    work: Work, folder: Path, settings: dict[str, Any], deadline: float, record: Record, first_round: int = 0,
    required: bool = True,
) -> None:  # fmt: skip
    """Runs rounds of turns from number `first_round` until the deadline or `settings["rounds"]`, at least one. `record`
    receives each row. If a rival ends, a row records the reason and the other variants continue; likewise for lmtool
    unless it is required. On CUDA further, untimed steps count how often the host waits."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}

        def drop_variant(failure: TimingError) -> None:
            assert failure.variant is not None
            if failure.variant not in work.rivals and required:
                raise failure
            name = failure.variant.name
            record({"kind": "failed", "work": work.name, "variant": name, "why": str(failure)})
            workers.pop(name, None)

        for variant in (MULTIPLY, *work.variants):
            print(f"  {work.name}: {variant.name} starts", file=sys.stderr, flush=True)
            present = workers.values() if variant.shared else ()
            host = next((one for one in present if one.variant.shared and one.variant.own == variant.own), None)
            try:
                workers[variant.name] = Worker(variant, folder, settings, host)
                stack.callback(workers[variant.name].close)
                workers[variant.name].run(2)  # the first steps choose kernels and allocate memory
            except TimingError as failure:
                drop_variant(failure)
        while len(workers) > 1:
            try:
                first_round = take_turns(work, workers, settings, deadline, record, first_round)
                for worker in workers.values() if settings["device"] == "cuda" else ():
                    record({"kind": "counted", "work": work.name, **worker.run(COUNTED_STEPS, count=True)})
                return
            except TimingError as failure:
                drop_variant(failure)


def take_turns(
    work: Work,
    workers: Mapping[str, Worker],
    settings: Mapping[str, Any],
    deadline: float,
    record: Record,
    first_round: int,
) -> int:
    """Runs the rounds of `measure` with the remaining workers; returns the number of the next round."""
    probes = []
    for worker in workers.values():
        probe = worker.run(1)
        record({"kind": "worker", "work": work.name, **worker.ready})
        if worker.variant.name != PRODUCTS:
            probes.append(probe["seconds"])
    steps = min(max(math.ceil(settings["turn_seconds"] / max(probes)), 3), settings["most_steps"])
    round_number, longest = first_round, 0.0
    while round_number < settings["rounds"] and (round_number == first_round or time.monotonic() + longest < deadline):
        round_started = time.monotonic()
        for variant in (MULTIPLY, *order_of(work, round_number)):
            if variant.name in workers:
                row = workers[variant.name].run(variant.steps or steps)
                record({"kind": "turn", "work": work.name, "round": round_number, **row})
        longest = max(longest, time.monotonic() - round_started)
        round_number += 1
        record({"kind": "round", "work": work.name, "rounds": round_number})
        print(f"  {work.name}: round {round_number}, {longest:.0f} s", file=sys.stderr, flush=True)
    return round_number
