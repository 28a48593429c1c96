"""What a GPU is needed to check: the `gpu`-marked tests, then speed and memory beside the transformers Trainer.

    make gpu PYTHON=python3                         at most ten minutes on one GPU; one line where there is none
    python scripts/gpu.py --device cpu --tiny       the same steps with tiny sizes, to try the script itself

Installs nothing: it runs with the Python it is started by (torch 2.11 or newer), on this tree, and what is not there
(pytest, transformers, accelerate) is a line in its place. Both sides have the same model, examples, batch, precision,
dropout and optimizer, and take turns in processes of their own (scripts/timing). The Trainer runs as documented, and
tuned: compiled, and of single texts on batches of like length; lmtool as it is, and compiled. What is compiled takes a
minute or so to start, in no figure: `--only bert_128,gpt_1024` gives half of the runs twice the rounds. Prints a
markdown table row by row, so that a run which is cut short keeps what it has, and appends it to `--output`.

MFU: FLOPs of training on the real tokens (the head where it is computed, causal attention at half, lmtool's count for
both sides) over the measured rate of large bf16 matrix products. Recompiles: graphs that torch.compile makes after the
first steps. Waits: how often a step makes the host wait for the device, counted in steps that are not timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, cores, listed, with_this_tree
from timing.report import Spread, rates, turns, within_rounds
from timing.report import markdown_row as row
from timing.turns import Failed, Worker, ask, take_turns
from timing.works import GROUPED_STEPS, Comparison, Variant, Work, labelled, settings_of

TEST_SECONDS = 200
COUNTED_STEPS = 3
BERT = {
    "vocab_size": 30522, "num_layers": 12, "hidden_size": 768, "num_heads": 12, "feedforward_size": 3072,
    "max_positions": 512, "dropout": 0.1,
}  # fmt: skip
GPT = {**BERT, "vocab_size": 50257, "max_positions": 1024, "dropout": 0.0}
TINY = {"vocab_size": 600, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "feedforward_size": 48}
COLUMNS = (
    "run", "side", "tokens/s", "(min-max)", "over Trainer", "over tuned", "MFU", "peak GB", "recompiles",
    "waits a step", "ms a step",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A table's rows. batch: examples a step. tiny: length and batch in a dry run. attention_dropout: with it lmtool's
    attention takes another kernel. lengths: of the texts of a labelled task; without, a language model learns."""

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
        task = None if self.lengths is None else labelled("classification", **self.lengths, largest=length)
        size: dict[str, Any] = {"model": model, "rows": 9_600, "rounds": 5, "turn_seconds": 3.0}
        if options.tiny:
            size = {"model": model | TINY, "rows": 400, "rounds": 1, "turn_seconds": 0.1, "corpus_bytes": 300_000}
        return settings_of(
            threads=cores(), device=options.device, precision="bf16", family=self.family, max_length=length,
            texts=["joined"] if task is None else [], task=task, batch=batch, most_steps=40, **size,
        )  # fmt: skip


def sides(name: str, title: str, rows: str, documented: dict[str, Any], tuned: dict[str, Any]) -> Work:
    """The Trainer as documented, and tuned; lmtool as it is, and compiled."""
    steps = GROUPED_STEPS if tuned.get("grouped") else None
    variants = (
        Variant("trainer", "Trainer", {"rows": rows, **documented}),
        Variant("trainer_tuned", "Trainer, tuned", {"rows": rows, "compile": True, **tuned}, steps),
        Variant("lmtool", "lmtool", {"rows": rows}),
        Variant("lmtool_compiled", "lmtool, compile=true", {"rows": rows, "compile": True}),
    )
    comparisons = tuple(Comparison(own.name, rival.name) for own in variants[2:] for rival in variants[:2])
    return Work(name, title, "tokens", variants, comparisons)


# 32,768 tokens a step, and finetuning's usual 32 examples. Rows of joined text need no padding, so that the tuned
# Trainer is the compiled one; of single texts it also takes batches of like length, in multiples of 16 tokens, which
# keeps the shapes it compiles for few.
CASES = (
    Case(sides("bert_128", "BERT base, masked LM at 128", "joined", {}, {}), "bert", 128, 256, (32, 4)),
    Case(sides("bert_512", "BERT base, masked LM at 512", "joined", {}, {}), "bert", 512, 64, (64, 4)),
    Case(sides("gpt_1024", "GPT small at 1024", "joined", {}, {}), "gpt", 1024, 32, (64, 4)),
    Case(
        sides(
            "classification", "BERT base, classification at MNLI's lengths", "task",
            {"padding": 128}, {"grouped": True, "multiple": 16},
        ),
        "bert", 128, 32, (128, 4), attention_dropout=0.1,
        lengths={"median": 35.5, "sigma": 0.5, "smallest": 6},
    ),
)  # fmt: skip


def over(speeds: dict[int, float], theirs: dict[int, float]) -> str:
    """How many times as fast, by the median of the rounds that both finished."""
    pairs = within_rounds(speeds, theirs)
    return f"{Spread.of(pairs).median:.2f}x" if pairs else "–"


def side(case: Case, variant: Variant, rows: Sequence[dict[str, Any]], flops: float | None, rate: float) -> str:
    """The row of a side that has finished turns. flops: of a real token; None where lmtool, which counts them, failed.
    rate: of matrix products, FLOP/s."""
    own, speeds = turns(rows, variant.name), rates(rows, variant.name, "tokens")
    rivals = case.work.rivals if variant.own else ()
    counted = [row for row in rows if row["kind"] == "counted" and row["variant"] == variant.name and "waits" in row]
    speed = Spread.of(speeds.values())
    return row(
        case.work.title,
        variant.label,
        f"{speed.median:,.0f}",
        f"{speed.smallest:,.0f}-{speed.largest:,.0f}",
        *(over(speeds, rates(rows, rival.name, "tokens")) for rival in rivals),
        *["–"] * (len(case.work.rivals) - len(rivals)),
        f"{speed.median * flops / rate:.1%}" if flops else "–",
        f"{max(turn['peak_bytes'] for turn in own) / 1e9:.1f}",
        f"{sum(turn['graphs'] for turn in own)}",
        f"{counted[-1]['waits'] / counted[-1]['steps']:.1f}" if counted else "–",
        f"{1000 * sum(turn['seconds'] for turn in own) / sum(turn['steps'] for turn in own):.1f}",
    )


def note(case: Case, variant: Variant, text: str) -> str:
    """The row of a side that was not measured."""
    return row(case.work.title, variant.label, text, *[""] * (len(COLUMNS) - 3))


def missing() -> str | None:
    """What the peer lacks here."""
    names = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(names)} not installed" if names else None


def start(
    case: Case, folder: Path, settings: dict[str, Any], stack: ExitStack
) -> tuple[dict[str, Worker], dict[str, str]]:
    """The workers of a case that are ready, and why others are not, by name; `stack` closes them."""
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    lacks = missing()
    for variant in case.work.variants:
        if lacks and variant in case.work.rivals:
            failed[variant.name] = lacks
            continue
        print(f"  {case.work.name}: {variant.label} starts", file=sys.stderr, flush=True)
        try:
            worker = Worker(variant, folder, settings)
            stack.callback(worker.close)
            worker.run(1)
            workers[variant.name] = worker
        except Failed as failure:
            failed[variant.name] = str(failure)
    return workers, failed


def run_case(
    case: Case, folder: Path, options: argparse.Namespace, deadline: float, write: Callable[[str], None]
) -> None:
    """Measure both sides of a case until the deadline and write their rows; a side that fails is a line in its own."""
    settings, rows = case.settings(options), []
    gflops = ask("prepare", folder, settings)["gflops"]["bf16"]
    with ExitStack() as stack:
        workers, failed = start(case, folder, settings, stack)
        own = next((workers[variant.name] for variant in case.work.own if variant.name in workers), None)
        while workers:
            try:
                take_turns(case.work, workers, settings, deadline, rows.append)
                for worker in workers.values():
                    rows.append({"kind": "counted", **worker.run(COUNTED_STEPS, count=True)})
                break
            except Failed as failure:  # the other side runs without this one
                name = str(failure).split()[0]
                failed[name] = str(failure)
                del workers[name]
    flops = None if own is None else own.ready["flops_per_token"]
    for variant in reversed(case.work.variants):
        if variant.name in failed or not turns(rows, variant.name):
            write(note(case, variant, failed.get(variant.name, "not finished")))
        else:
            write(side(case, variant, rows, flops, 1e9 * gflops))


def run_tests(options: argparse.Namespace) -> str:
    """The `gpu`-marked tests, in words."""
    if importlib.util.find_spec("pytest") is None:
        return "not run, pytest is not installed"
    # Others import what need not be here.
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


def cuda() -> tuple[bool, str]:
    """Whether torch sees a CUDA device, and what there is, in words."""
    try:
        import torch
    except ImportError:
        return False, "torch is not installed"
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    return True, f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything together")
    known = [case.work.name for case in CASES]
    help_only = f"some of {', '.join(known)}, without the tests"
    parser.add_argument("--only", metavar="A,B", type=listed("--only", known), help=help_only)
    parser.add_argument("--output", type=Path, help="the table is appended here (runs/gpu/TIME.md)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    started, options = time.monotonic(), parse(words)
    there, machine = cuda()
    if options.device == "cuda" and not there:
        print(f"make gpu: {machine}; nothing to run")
        return 0
    os.environ |= with_this_tree(dict(os.environ))  # in every process that is started here
    output = options.output or ROOT / "runs" / "gpu" / time.strftime("%Y%m%d-%H%M%S.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Ten seconds for what is under way when the time is up.
    deadline = started + 60 * options.minutes - 10
    with output.open("a", encoding="utf-8") as file:

        def write(line: str) -> None:
            for place in (file, sys.stdout):
                print(line, file=place, flush=True)

        write(f"{time.strftime('%Y-%m-%d %H:%M')}: {machine}\n")
        tests = "" if options.only or options.device == "cpu" else run_tests(options)
        if tests:
            write(f"gpu-marked tests: {tests}\n")
        write(row(*COLUMNS))
        write(row(*["---"] * 2, *["---:"] * (len(COLUMNS) - 2)))
        cases = [case for case in CASES if not options.only or case.work.name in options.only]
        for left, case in zip(range(len(cases), 0, -1), cases, strict=True):
            now = time.monotonic()
            if now > deadline:
                write(note(case, case.work.own[0], "no time left"))
                continue
            run_case(case, output.parent / "examples" / case.work.name, options, now + (deadline - now) / left, write)
    print(f"{time.monotonic() - started:.0f} s; the table is in {output}", file=sys.stderr)
    return 1 if " failed" in tests or " error" in tests else 0


if __name__ == "__main__":
    sys.exit(main())
