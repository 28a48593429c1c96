"""Step time and peak memory of the tuning methods beside full finetuning.

    python scripts/benchmark_tuning.py                                     about ten minutes on two slow cores
    python scripts/benchmark_tuning.py --model bert_small --methods lora bitfit --rounds 3

A step is forward, backward, clipping and the optimizer's step (fused AdamW) of a classification. Every method is a
process of its own that reads the same made-up batches; they take turns of a few steps, round after round, so that a
drift of the machine meets all of them, and a ratio is taken within its round. Prints medians over the rounds with their
smallest and largest. Memory is the largest resident set of the process above what it held after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FULL = "full"
METHODS = ("head", "bitfit", "last_n", "ia3", "lora", "adapter", "prefix", "prompt")
SPEED_AIM, MEMORY_AIM = 1.4, 0.5
SEED = 0


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status names no VmHWM")


# One method in its process


def config_of(options: argparse.Namespace) -> Any:
    """The run: a classifier on a model with random weights."""
    from lmtool.cli import main as cli

    words = [
        f"model={options.model}", f"tuning={options.worker}", "task=custom", "task.kind=classification",
        "task.path=none", "task.text=[text]", "task.label=label", "task.labels=['0','1']", "checkpoint=none",
        f"max_length={options.length}",
    ]  # fmt: skip
    return cli.configuration("finetune", cli.parse(words), running=True)


def batches_of(options: argparse.Namespace, learner: Any) -> list[Any]:
    """Batches of texts whose lengths are spread evenly from a quarter of the longest to it."""
    import torch

    from lmtool.models.encoder_decoder import EncoderDecoder, shifted
    from lmtool.types import Batch, Packed, Target

    generator, batches = torch.Generator().manual_seed(SEED), []
    for _ in range(4):
        lengths = torch.randint(options.length // 4, options.length + 1, (options.examples,), generator=generator)
        tokens = torch.randint(1000, 2000, (int(lengths.sum()),), generator=generator)
        columns = {"segment": torch.zeros_like(tokens)}
        inputs = Packed(tokens, tuple(lengths.tolist()), columns)
        outputs = shifted(inputs, 0) if isinstance(learner.backbone, EncoderDecoder) else None
        labels = torch.arange(options.examples) % 2
        numbers = torch.arange(options.examples)
        batches.append(Batch(inputs, {learner.term: Target(labels)}, numbers, numbers * 0, outputs))
    return batches


def work(options: argparse.Namespace) -> None:
    """Take steps as asked for, a line of JSON each way."""
    import torch

    from lmtool.config.tables import build
    from lmtool.training.configs import AdamWConfig
    from lmtool.training.engine import Plain
    from lmtool.training.optimizers import named_parameters
    from lmtool.training.precision import keep_freed_memory, select_precision
    from lmtool.training.step import apply_gradients, gradients
    from lmtool.types import Step
    from lmtool.weights.assemble import assemble

    torch.set_num_threads(options.threads)
    keep_freed_memory()
    config, precision = config_of(options), select_precision(options.precision, torch.device("cpu"))
    imported = peak_bytes()
    learner = assemble(config, None)[0].train()
    batches, groups = batches_of(options, learner), learner.parameter_groups()
    named, optimizer = named_parameters(groups), build(AdamWConfig(), groups)
    counts = (sum(tensor.numel() for tensor in tensors) for tensors in (named.values(), learner.parameters()))
    print(json.dumps({"trainable": next(counts), "total": next(counts)}), flush=True)
    step = 0
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(json.loads(line)):
            step += 1
            data = Step([batches[step % len(batches)]], {}, 0.0)
            gradients(Plain(learner), data, step, SEED, precision.device, precision)
            apply_gradients(optimizer, None, list(named.values()), 1.0)
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes() - imported}), flush=True)


# The turns


class Worker:
    """A method in its process."""

    def __init__(self, method: str, words: Sequence[str]):
        command = [sys.executable, __file__, *words, "--worker", method]
        self.method = method
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.parameters = self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line.strip():
            raise SystemExit(f"error: tuning={self.method} ended; its lines are above")
        return json.loads(line)

    def take(self, steps: int) -> dict[str, Any]:
        print(steps, file=self.process.stdin, flush=True)
        return {"method": self.method, "steps": steps, **self.answer()}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=20)


def measure(workers: Mapping[str, Worker], rounds: int, turn_seconds: float) -> list[dict[str, Any]]:
    """The rows of all turns. Every second round goes backwards."""
    slowest = 0.0
    for worker in workers.values():
        worker.take(2)  # kernels are chosen and memory is grown in the first steps
        slowest = max(slowest, worker.take(1)["seconds"])
    steps, rows = max(2, round(turn_seconds / slowest)), []
    for number in range(rounds):
        order = list(workers.values())
        for worker in order if number % 2 == 0 else order[::-1]:
            rows.append({"round": number, **worker.take(steps)})
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By method: milliseconds of a step, how many times faster than full finetuning in the same round (median,
    smallest, largest), and the peak's bytes."""
    per_step = {(row["method"], row["round"]): row["seconds"] / row["steps"] for row in rows}
    found = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {number: seconds for (name, number), seconds in per_step.items() if name == method}
        faster = [per_step[FULL, number] / seconds for number, seconds in own.items()]
        found[method] = {
            "milliseconds": 1000 * statistics.median(own.values()),
            "faster": (statistics.median(faster), min(faster), max(faster)),
            "peak_bytes": max(row["peak_bytes"] for row in rows if row["method"] == method),
        }
    return found


def compose(found: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, Mapping[str, int]]) -> str:
    """The table of a summary."""
    lines = [f"{'tuning=':10}{'learn':>13}{'ms/step':>9}{'faster':>9}  {'(min-max)':13}{'peak MB':>8}{'memory':>8}"]
    for method, row in found.items():
        median, smallest, largest = row["faster"]
        share = row["peak_bytes"] / found[FULL]["peak_bytes"]
        lines.append(
            f"{method:10}{parameters[method]['trainable']:13,}{row['milliseconds']:9.0f}{median:8.2f}x"
            f"  {f'({smallest:.2f}-{largest:.2f})':13}{row['peak_bytes'] / 1e6:8.0f}{share:7.2f}x"
        )
    return "\n".join([*lines, f"aim: {SPEED_AIM:g}x faster, {MEMORY_AIM:g}x the memory"])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert", help="a YAML of the group model: bert (base), bert_small, ...")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="values of tuning= beside full")
    parser.add_argument("--examples", type=int, default=16, help="of a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens of the longest text")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the matrix products")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=5.0, help="of the slowest method's turn")
    parser.add_argument("--output", type=Path, help="write the figures here too, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    options = parse(words)
    if options.worker:
        work(options)
        return
    load, workers = os.getloadavg()[0], {}
    try:
        for method in dict.fromkeys([FULL, *options.methods]):
            workers[method] = Worker(method, words)
        rows = measure(workers, options.rounds, options.turn_seconds)
    finally:
        for worker in workers.values():
            worker.close()
    found, parameters = summary(rows), {method: worker.parameters for method, worker in workers.items()}
    print(
        f"model={options.model}, {options.examples} texts of at most {options.length} tokens, {options.precision}, "
        f"{options.threads} threads, load before {load:.2f}"
    )
    print(compose(found, parameters))
    if options.output is not None:
        metadata = {"load_before": load, **{name: str(value) for name, value in vars(options).items()}}
        options.output.write_text(json.dumps({"facts": metadata, "methods": found, "parameters": parameters}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
