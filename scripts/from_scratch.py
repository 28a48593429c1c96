"""Does pretraining pay? One task finetuned from a pretrained run and from random weights, on equal budgets.

    python scripts/from_scratch.py --checkpoint runs/NAME --path FOLDER [--task sst2] [--examples 2000] [--seeds 1,2,3]
        [--rates 1e-3,2e-3] [--output runs/from-scratch] [OVERRIDE ...]

Small models with random weights want another learning rate than pretrained ones: with several rates each start takes
the one that does best with seed 0, which is not counted. Appends one row a finished run to OUTPUT/rows.jsonl and goes
on where it stopped; prints means with standard errors over seeds, and the majority class.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rows import Rows, listed, mean_and_error, stop

from lmtool.cli import main as cli
from lmtool.config.checkpoint import checkpoint_folder
from lmtool.reporting.console import Output, print_table

STARTS = ("pretrained", "scratch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--rates", type=listed(float), default=[], help="learning rates that a start chooses from")
    parser.add_argument("--output", type=Path, default=Path("runs/from-scratch"))
    parser.add_argument("overrides", nargs="*", help="further keys of lmtool finetune")
    options = parser.parse_args()
    if 0 in options.seeds and len(options.rates) > 1:
        stop("--seeds 0: seed 0 chooses the rate and is not counted", "give other seeds")

    asked = {name: value for name, value in vars(options).items() if name not in ("output", "seeds")}
    rows = Rows(options.output, ("start", "rate", "seed"), asked)
    rates = dict.fromkeys(STARTS, options.rates[0] if options.rates else None)
    if len(options.rates) > 1:
        for start in STARTS:
            tried = {rate: finetuned(rows, options, start, rate, 0) for rate in options.rates}
            rates[start] = max(tried, key=lambda rate: tried[rate])
    for seed in options.seeds:
        for start in STARTS:
            finetuned(rows, options, start, rates[start], seed)
    show(rows, options, rates)


def finetuned(rows: Rows, options: argparse.Namespace, start: str, rate: float | None, seed: int) -> float:
    """The score of one run, which is made where its row is missing. rate: None for the task's own."""
    if not rows.has(start, rate, seed):
        folder = options.output / "-".join(str(word) for word in (start, rate, seed) if word is not None)
        task = [f"task={options.task}", f"task.path={options.path}", f"task.train_examples={options.examples}"]
        chosen = [] if rate is None else [f"optimizer.lr={rate:g}"]
        words = [*task, *words_of(start, options.checkpoint), *chosen, f"seed={seed}", f"run_dir={folder}"]
        if cli.main(["finetune", *words, *options.overrides]):
            sys.exit(1)
        result = json.loads((folder / "result.json").read_text())
        kept = ("metric", "value", "baseline", "steps", "seconds", "validation_examples")
        rows.add({"start": start, "rate": rate, "seed": seed, **{name: result[name] for name in kept}})
    return rows.values("value", start=start, rate=rate, seed=seed)[0]


def words_of(start: str, checkpoint: str) -> list[str]:
    """The words of a start: the pretrained weights, or the same model and tokenizer with random ones."""
    if start == "pretrained":
        return [f"checkpoint={checkpoint}"]
    model = json.loads((checkpoint_folder(checkpoint) / "config.json").read_text())["model"]
    sizes = [f"model.{name}={value}" for name, value in model.items() if isinstance(value, (int, float))]
    named = [f"model={model['name']}", f"model/positions={model['positions']['name']}", *sizes]
    return ["checkpoint=none", *named, "tokenizer=folder", f"tokenizer.path={checkpoint}"]


def show(rows: Rows, options: argparse.Namespace, rates: dict[str, float | None]) -> None:
    """The table: mean and standard error over seeds, the paired gain, the majority class."""
    runs = {start: [finetuned(rows, options, start, rates[start], seed) for seed in options.seeds] for start in STARTS}
    gains = [after - other for after, other in zip(*runs.values(), strict=True)]
    table = []
    for name, scores in {**runs, "gain": gains}.items():
        mean, error = mean_and_error(scores)
        rate = "" if rates.get(name) is None else f"{rates[name]:g}"
        table.append([name, rate, f"{mean:.4f}", f"{error:.4f}", len(scores)])
    first = rows.all[0]
    table.append(["majority or mean", "", f"{first['baseline']:.4f}", "", ""])
    heading = f"{options.task}, {options.examples} training rows, {first['validation_examples']} scored"
    print_table(Output(), ["start", "rate", first["metric"], "standard error", "seeds"], table, heading=heading)


if __name__ == "__main__":
    main()
