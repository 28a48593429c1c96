"""Run on a GPU the `gpu`-marked tests, then compare speed and memory with the transformers Trainer.

    make gpu PYTHON=python3                         at most ten minutes on one GPU; without a GPU, prints one line
    python scripts/gpu.py --device cpu --tiny       the same steps with tiny sizes, to test the script itself

Installs nothing: it uses the current Python (torch 2.11 or newer) and this repository, and prints a line for each
missing package (pytest, transformers, accelerate). lmtool and the Trainer have the same model, examples, batch,
precision, dropout and optimizer, and take turns in separate processes (scripts/timing). The Trainer runs as documented,
and tuned: compiled, and for single texts with batches of similar length. lmtool runs with its defaults, and compiled.
Compilation takes about a minute, which is not measured; `--only bert_128,gpt_1024` therefore gives half of the runs
twice the rounds. Each table is printed and appended to `--output` when it is complete, so that an interrupted run keeps
its tables.

Columns of the tables. Products: the MFU, that is, the FLOP/s of training on the real tokens (the head only at predicted
positions, causal attention at half, counted by lmtool for both sides) divided by the FLOP/s of large bf16 matrix
products in the same round. Recompiles: graphs that torch.compile builds after the first steps. Waits: how often a step
makes the host wait for the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, cores, name_list, with_this_tree
from timing.report import Row, compose
from timing.turns import TimingError, ask, measure
from timing.works import GROUPED_STEPS, Comparison, Variant, Work, labeled, settings_of

TEST_SECONDS = 200  # time limit of the tests
BERT = {
    "vocab_size": 30522, "num_layers": 12, "hidden_size": 768, "num_heads": 12, "feedforward_size": 3072,
    "max_positions": 512, "dropout": 0.1,
}  # fmt: skip
GPT = {**BERT, "vocab_size": 50257, "max_positions": 1024, "dropout": 0.0}
TINY = {"vocab_size": 600, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48}


@dataclass(frozen=True)
class Case:
    """A table of the output.

    Attributes:
        work: the title and the programs that are compared
        family: "bert" or "gpt"
        max_length: tokens per example
        batch: examples per step
        tiny: max_length and batch with --tiny
        attention_dropout: with a rate above 0, lmtool uses another attention kernel
        lengths: the distribution of the lengths of a labeled task's texts; None for a language model
    """

    work: Work
    family: str
    max_length: int
    batch: int
    tiny: tuple[int, int]
    attention_dropout: float = 0.0
    lengths: dict[str, float] | None = None

    def settings(self, options: argparse.Namespace) -> dict[str, Any]:
        model = {**(GPT if self.family == "gpt" else BERT), "attention_dropout": self.attention_dropout}
        length, batch = self.tiny if options.tiny else (self.max_length, self.batch)
        task = None if self.lengths is None else labeled("classification", **self.lengths, largest=length)
        size: dict[str, Any] = {"model": model, "rows": 9_600, "rounds": 5, "turn_seconds": 3.0}
        if options.tiny:
            size = {"model": model | TINY, "rows": 400, "rounds": 1, "turn_seconds": 0.1, "corpus_bytes": 300_000}
        return settings_of(
            threads=cores(), device=options.device, precision="bf16", family=self.family, max_length=length,
            texts=["joined"] if task is None else [], task=task, batch=batch, most_steps=40, **size,
        )  # fmt: skip


def compare_sides(name: str, title: str, rows: str, documented: dict[str, Any], tuned: dict[str, Any]) -> Work:
    """Returns a comparison of the Trainer (as documented, and tuned) with lmtool (by default, and compiled).

    Args:
        name: the name for --only
        title: the title of the table
        rows: what both read, "joined" text or the rows of a "task"
        documented: further settings of the Trainer as documented
        tuned: further settings of the tuned Trainer
    """
    steps = GROUPED_STEPS if tuned.get("grouped") else None
    variants = (
        Variant("trainer", "Trainer", {"rows": rows, **documented}),
        Variant("trainer_tuned", "Trainer, tuned", {"rows": rows, "compile": True, **tuned}, steps),
        Variant("lmtool", "lmtool", {"rows": rows}),
        Variant("lmtool_compiled", "lmtool, compile=true", {"rows": rows, "compile": True}),
    )
    comparisons = tuple(Comparison(own.name, rival.name) for own in variants[2:] for rival in variants[:2])
    return Work(name, title, "tokens", variants, comparisons)


# Steps of 32,768 tokens, or finetuning's usual 32 examples. Joined text needs no padding, so that tuning the Trainer
# means only compiling it. For single texts the tuned Trainer also groups texts of similar length into batches, padded
# to multiples of 16 tokens, so that it compiles for few shapes.
CASES = (
    Case(compare_sides("bert_128", "BERT base, masked LM at 128", "joined", {}, {}), "bert", 128, 256, (32, 4)),
    Case(compare_sides("bert_512", "BERT base, masked LM at 512", "joined", {}, {}), "bert", 512, 64, (64, 4)),
    Case(compare_sides("gpt_1024", "GPT small at 1024", "joined", {}, {}), "gpt", 1024, 32, (64, 4)),
    Case(
        compare_sides(
            "classification", "BERT base, classification at MNLI's lengths", "task",
            {"padding": 128}, {"grouped": True, "multiple": 16},
        ),
        "bert", 128, 32, (128, 4), attention_dropout=0.1,
        lengths={"median": 35.5, "sigma": 0.5, "smallest": 6},
    ),
)  # fmt: skip


def missing_packages() -> str | None:
    """Returns a message about the packages of the Trainer that are not installed; None if all are."""
    names = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(names)} not installed" if names else None


def run_case(case: Case, folder: Path, options: argparse.Namespace, deadline: float) -> str:
    """Measures a case until the deadline and returns its table. If one side fails, its line gives the reason."""
    settings, rows = case.settings(options), list[Row]()
    work = case.work
    if missing := missing_packages():
        rows = [{"kind": "failed", "work": work.name, "variant": rival.name, "why": missing} for rival in work.rivals]
        work = Work(work.name, work.title, work.unit, work.own, ())
    try:
        rows.append({"kind": "examples", "work": work.name, **ask("prepare", folder, settings)})
        measure(work, folder, settings, deadline, rows.append, required=False)
    except TimingError as failure:
        return f"{work.title}: {failure}"
    return compose(case.work, rows)


def run_tests(options: argparse.Namespace) -> str:
    """Runs the `gpu`-marked tests and returns a summary."""
    if importlib.util.find_spec("pytest") is None:
        return "not run, pytest is not installed"
    # Other tests import packages that may be missing.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    try:
        done = subprocess.run(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        print(expired.stdout or "", file=sys.stderr)
        return f"not finished in {TEST_SECONDS} seconds"
    print(done.stdout, file=sys.stderr, flush=True)
    return (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip("= ")


def describe_cuda() -> tuple[bool, str]:
    """Returns whether torch finds a CUDA device, and a description of the device or of the reason."""
    try:
        import torch
    except ImportError:
        return False, "torch is not installed"
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    return True, f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [case.work.name for case in CASES]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit for the whole script")
    only = f"some of {', '.join(known)}, without the tests"
    parser.add_argument("--only", metavar="A,B", type=name_list("--only", known), help=only)
    parser.add_argument("--output", type=Path, help="the tables are appended here (runs/gpu/TIME.txt)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    started, options = time.monotonic(), parse(words)
    available, machine = describe_cuda()
    if options.device == "cuda" and not available:
        print(f"make gpu: {machine}; nothing to run")
        return 0
    os.environ |= with_this_tree(dict(os.environ))  # for all processes that this script starts
    output = options.output or ROOT / "runs" / "gpu" / time.strftime("%Y%m%d-%H%M%S.txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Ten seconds remain for the turn that is running at the deadline.
    deadline = started + 60 * options.minutes - 10
    with output.open("a", encoding="utf-8") as file:

        def write(text: str) -> None:
            for stream in (file, sys.stdout):
                print(f"{text}\n", file=stream, flush=True)

        write(f"{time.strftime('%Y-%m-%d %H:%M')}: {machine}")
        tests = "" if options.only or options.device == "cpu" else run_tests(options)
        if tests:
            write(f"gpu-marked tests: {tests}")
        cases = [case for case in CASES if not options.only or case.work.name in options.only]
        for remaining, case in zip(range(len(cases), 0, -1), cases, strict=True):
            if (now := time.monotonic()) > deadline:
                write(f"{case.work.title}: no time left")
                continue
            write(
                run_case(case, output.parent / "examples" / case.work.name, options, now + (deadline - now) / remaining)
            )
    print(f"{time.monotonic() - started:.0f} s; the tables are in {output}", file=sys.stderr)
    return 1 if any(word in tests for word in (" failed", " error", "not finished")) else 0


if __name__ == "__main__":
    sys.exit(main())
