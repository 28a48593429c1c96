"""lmtool and transformers side by side: speed and memory of masked-LM pretraining and of finetuning beside the Trainer,
of prediction beside the pipeline.

    python scripts/benchmark.py             about a quarter of an hour on two slow cores (`make bench`)
    python scripts/benchmark.py --quick     about two minutes: at most two rounds, wide spreads

Same model size, tokenised examples, precision, dropout, optimizer and batch in examples on both sides. Every variant
is a process of its own (scripts/peers.py) that stays loaded; they take turns of a few steps, round after round, so
that a drift of the machine meets all of them, and a ratio is taken within its round. Prints medians over the rounds
with their smallest and largest, and writes a JSON line for each finished measurement to `--output`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).with_name("peers.py")
MEMORY_AIM = 0.7


@dataclass(frozen=True)
class Variant:
    """One row of a table. `steps`: steps of its turn, where it needs a number of its own. `aim`: how many times
    faster lmtool should be."""

    name: str
    label: str
    aim: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Work:
    """One table. `unit`: what is counted a second, a key of a turn's row. lmtool's variant is the last."""

    name: str
    title: str
    unit: str
    variants: tuple[Variant, ...]

    @property
    def own(self) -> Variant:
        return self.variants[-1]

    @property
    def rivals(self) -> tuple[Variant, ...]:
        return self.variants[:-1]


# The sampler sorts 50 batches at a time by length: fewer would time its long batches or its short ones alone.
GROUPED_STEPS = 50

WORKS = (
    Work(
        "masked_lm",
        "Masked LM, documents of natural length cut at 128 tokens, batches of 16 examples",
        "tokens",
        (
            Variant("trainer_lines", "Trainer, a text a line, padded to the longest of the batch", aim=6.0),
            Variant("trainer_packed", "Trainer, texts joined into rows of 128 (group_texts)", aim=3.0),
            Variant("lmtool_language_model", "lmtool pretrain"),
        ),
    ),
    Work(
        "classification",
        "Classification at SST-2's lengths, at most 66 tokens, batches of 32 examples",
        "examples",
        (
            Variant("trainer_maximum_128", "Trainer, padded to 128 (run_glue's default)", aim=4.0),
            Variant("trainer_maximum", "Trainer, padded to 66, the longest of the set", aim=4.0),
            Variant("trainer_padded", "Trainer, padded to the longest of the batch"),
            Variant("trainer_grouped", "Trainer, the same, group_by_length", aim=1.25, steps=GROUPED_STEPS),
            Variant("lmtool_classification", "lmtool finetune"),
        ),
    ),
    Work(
        "prediction",
        "Prediction of classes, texts of natural length cut at 128 tokens, 128 at a time",
        "examples",
        (
            Variant("pipeline_single", "pipeline, a text at a time (its default)", aim=2.0),
            Variant("pipeline_batched", "pipeline, batch_size=32", aim=2.0),
            Variant("lmtool_prediction", "lmtool predict"),
        ),
    ),
)


class Failed(Exception):
    """One line for the user, and what to type."""

    def __init__(self, message: str, hint: str, status: int = 2):
        super().__init__(message)
        self.hint, self.status = hint, status


# Figures from rows


def turns(rows: Sequence[dict[str, Any]], variant: str) -> list[dict[str, Any]]:
    """The finished turns of a variant."""
    return [row for row in rows if row["kind"] == "turn" and row["variant"] == variant]


def rates(rows: Sequence[dict[str, Any]], variant: str, unit: str) -> dict[int, float]:
    """`unit` a second of a variant, by round."""
    return {row["round"]: row[unit] / row["seconds"] for row in turns(rows, variant)}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    values = list(values)
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}


def memory(rows: Sequence[dict[str, Any]], variant: str) -> tuple[int, int]:
    """Peak resident bytes of a variant's process: in all, and above what it held after its imports."""
    own = turns(rows, variant)
    peak = max(row["peak_bytes"] for row in own)
    return peak, peak - own[0]["imports_bytes"]


def ratios(work: Work, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rival: lmtool's speed over its speed, taken within each round that both finished, and lmtool's
    memory over its memory."""
    table = []
    ours = rates(rows, work.own.name, work.unit)
    for rival in work.rivals:
        theirs = rates(rows, rival.name, work.unit)
        pairs = [ours[number] / theirs[number] for number in ours if number in theirs]
        if not pairs:
            continue
        held, held_by_rival = memory(rows, work.own.name), memory(rows, rival.name)
        row = {"kind": "ratio", "work": work.name, "against": rival.name, "quantity": f"{work.unit}_per_second"}
        row |= {**spread(pairs), "rounds": len(pairs), "aim": rival.aim}
        row |= {"memory": held[0] / held_by_rival[0], "memory_above_imports": held[1] / held_by_rival[1]}
        table.append(row)
    return table


def same_examples(work: Work, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether lmtool and the first rival, which keeps the stored order, read as many tokens in each of their turns."""
    ours, theirs = (
        {row["round"]: row["tokens"] for row in turns(rows, column.name)} for column in (work.own, work.rivals[0])
    )
    return all(ours[number] == theirs[number] for number in ours if number in theirs)


def compose(work: Work, rows: Sequence[dict[str, Any]]) -> str:
    """The table of a work, from the rows of its turns."""
    width = max(len(variant.label) for variant in work.variants)
    lines = [work.title, f"  {'':{width}}  {work.unit + '/s':>8}  {'(min-max)':>15}  padding  peak MB  above imports"]
    for variant in work.variants:
        own = turns(rows, variant.name)
        if not own:
            lines.append(f"  {variant.label:{width}}  not measured")
            continue
        speed = spread(rates(rows, variant.name, work.unit).values())
        padding = 1 - sum(row["tokens"] for row in own) / sum(row["slots"] for row in own)
        whole, above = (held / 1e6 for held in memory(rows, variant.name))
        span = f"({speed['smallest']:.0f}-{speed['largest']:.0f})"
        numbers = f"{speed['median']:8.0f}  {span:>15}  {padding:7.0%}  {whole:7.0f}  {above:13.0f}"
        lines.append(f"  {variant.label:{width}}  {numbers}")
    rounds = ratios(work, rows)
    if not rounds:
        return "\n".join(lines)
    lines.append(f"  {'lmtool over ...':{width}}  {'speed':>8}  {'(min-max)':>15}      aim   memory  above imports")
    labels = {variant.name: variant.label for variant in work.rivals}
    for row in rounds:
        aim = "" if row["aim"] is None else f"{row['aim']:g}x"
        span = f"({row['smallest']:.2f}-{row['largest']:.2f})"
        lines.append(
            f"  {labels[row['against']]:{width}}  {row['median']:7.2f}x  {span:>15}  {aim:>7}"
            f"  {row['memory']:6.2f}x  {row['memory_above_imports']:12.2f}x"
        )
    same = "yes" if same_examples(work, rows) else "no"
    lines.append(f"  {rounds[0]['rounds']} rounds; memory: aim at most {MEMORY_AIM}x")
    lines.append(f"  each turn of lmtool and of the first rival had the same examples: {same}")
    return "\n".join(lines)


# The machine and the settings


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


def machine_line(machine: dict[str, Any]) -> str:
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, as many threads",
        ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "lmtool")),
    ]
    if machine.get("gflops"):
        products = ", ".join(f"{name} {value:.0f}" for name, value in machine["gflops"].items())
        parts.append(f"matrix products {products} GFLOP/s")
    busy = " (others were at work: do not trust the figures)" if machine["load_before"] > 0.5 else ""
    parts.append(f"load before {machine['load_before']:g}{busy}")
    return "Machine: " + "; ".join(parts)


def settings_line(settings: dict[str, Any], facts: dict[str, Any]) -> str:
    model = settings["model"]
    return (
        f"Both: BERT H{model['hidden_size']} L{model['num_layers']} heads {model['num_heads']}"
        f" FF{model['feedforward_size']} V{model['vocab_size']}, dropout {model['dropout']:g}, attention dropout"
        f" {model['attention_dropout']:g}, {settings['precision']}, fused AdamW, clip {settings['clip_norm']:g}\n"
        f"Text: {facts['text']}"
    )


# Running


class Worker:
    """One variant in its process."""

    def __init__(self, variant: Variant, folder: Path, settings: dict[str, Any]):
        self.variant = variant
        self.log = folder / f"{variant.name}.log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKERS), variant.name, str(folder), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ready = self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line.strip():
            self.close()
            last = (self.log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise Failed(f"{self.variant.name} ended: {last}", f"read {self.log}", status=1)
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


def order_of(work: Work, round_number: int) -> tuple[Variant, ...]:
    """Who goes when: lmtool in the middle of its rivals, every second round backwards."""
    half = (len(work.rivals) + 1) // 2
    order = (*work.rivals[:half], work.own, *work.rivals[half:])
    return order if round_number % 2 == 0 else order[::-1]


def measure(work: Work, folder: Path, settings: dict[str, Any], deadline: float, record: Callable) -> None:
    """Rounds of turns until the deadline (or `settings["rounds"]`), at least one; `record` takes each row."""
    with ExitStack() as stack:
        workers = {}
        for variant in work.variants:
            print(f"  {work.name}: {variant.name} starts", file=sys.stderr, flush=True)
            workers[variant.name] = Worker(variant, folder, settings)
            stack.callback(workers[variant.name].close)
        take_turns(work, workers, settings, deadline, record)


def take_turns(
    work: Work, workers: Mapping[str, Worker], settings: dict[str, Any], deadline: float, record: Callable
) -> None:
    """The rounds of `measure`, by the workers that are there."""
    probes = []
    for worker in workers.values():
        worker.run(2)  # kernels are chosen and memory is grown in the first steps
        probe = worker.run(1)
        record({"kind": "worker", "work": work.name, **worker.ready})
        probes.append(probe["seconds"])
    steps = min(max(math.ceil(settings["turn_seconds"] / max(probes)), 3), 40)
    round_number, longest = 0, 0.0
    while round_number < settings["rounds"] and (not round_number or time.monotonic() + longest < deadline):
        begun = time.monotonic()
        for variant in order_of(work, round_number):
            if variant.name in workers:
                row = workers[variant.name].run(variant.steps or steps)
                record({"kind": "turn", "work": work.name, "round": round_number, **row})
        longest = max(longest, time.monotonic() - begun)
        round_number += 1
        print(f"  {work.name}: round {round_number}, {longest:.0f} s", file=sys.stderr, flush=True)


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make the examples both sides read (kept between runs); what they are, and the machine's matrix rates."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(WORKERS), "prepare", str(folder), json.dumps(settings)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise Failed("the examples could not be made", "read the lines above", status=1)
    return json.loads(done.stdout)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes instead of eighteen")
    parser.add_argument("--only", choices=[work.name for work in WORKS], help="one of the tables")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of the matrix products")
    parser.add_argument("--attention-dropout", type=float, default=0.1, help="on both sides (0.1, as published)")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here (runs/bench/TIME.jsonl)")
    return parser.parse_args(words)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": 0,
        "threads": cores(),
        "device": "cpu",
        "precision": options.precision,
        "family": "bert",
        "max_length": 128,
        "documents": "separate",
        "corpus_bytes": 3_000_000,
        "rows": 14_400,  # nine times what the Trainer's sampler sorts at once
        "batch": 16,
        "task_batch": 32,
        "lr": 1e-4,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "rounds": 2 if options.quick else 10,
        "turn_seconds": 5.0 if options.quick else 15.0,
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


def run(options: argparse.Namespace) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        raise Failed("the peer is not installed: transformers and accelerate", "make bench")
    started = time.monotonic()
    settings, machine = settings_of(options), describe_machine()
    deadline = started + 60 * (2 if options.quick else 18)
    output = options.output or Path("runs/bench") / time.strftime("%Y%m%d-%H%M%S.jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    facts = prepare(folder := Path("runs/bench/examples"), settings)
    machine["gflops"] = facts["gflops"]
    rows: list[dict[str, Any]] = []
    works = [work for work in WORKS if options.only in (None, work.name)]
    with output.open("a") as lines:

        def record(row: dict[str, Any]) -> None:
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)

        record(machine)
        record({"kind": "settings", **settings, "facts": facts})
        for index, work in enumerate(works):
            share = (deadline - time.monotonic()) / (len(works) - index)
            measure(work, folder, settings, time.monotonic() + share, record)
            for row in ratios(work, rows):
                record(row)
    print(machine_line(machine), settings_line(settings, facts), sep="\n")
    for work in works:
        print(f"\n{compose(work, rows)}")
    print(f"\n{time.monotonic() - started:.0f} s; every turn is in {output}")


def main() -> None:
    try:
        run(parse())
    except Failed as failure:
        print(f"error: {failure}\nhint: {failure.hint}", file=sys.stderr)
        sys.exit(failure.status)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
