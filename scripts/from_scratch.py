"""Does pretraining pay? One task finetuned from a pretrained run and from random weights, on equal budgets.

    python scripts/from_scratch.py --checkpoint runs/NAME --path FOLDER [--task sst2] [--examples 2000] [--seeds 1 2 3]
        [--output runs/from-scratch] [OVERRIDE ...]

Appends one row a finished run to OUTPUT/rows.jsonl and goes on where it stopped; prints means with standard errors
over seeds, and the majority class.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rows import Rows, mean_and_error

from lmtool import cli
from lmtool.config.saved import checkpoint_folder
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, default=Path("runs/from-scratch"))
    parser.add_argument("overrides", nargs="*", help="further keys of lmtool finetune")
    options = parser.parse_args()

    asked = {name: value for name, value in vars(options).items() if name not in ("output", "seeds")}
    rows = Rows(options.output, ("start", "seed"), asked)
    for seed in options.seeds:
        for start, words in starts(options.checkpoint).items():
            if rows.has(start, seed):
                continue
            folder = options.output / f"{start}-{seed}"
            task = [f"task={options.task}", f"task.path={options.path}", f"task.train_examples={options.examples}"]
            typed = ["finetune", *task, *words, f"seed={seed}", f"run_dir={folder}", *options.overrides]
            if cli.main(typed):
                sys.exit(1)
            result = json.loads((folder / "result.json").read_text())
            kept = ("metric", "value", "baseline", "steps", "seconds", "validation_examples")
            rows.add({"start": start, "seed": seed, **{name: result[name] for name in kept}})
    show(rows, options)


def starts(checkpoint: str) -> dict[str, list[str]]:
    """The words of each start: the pretrained weights, and the same model and tokenizer with random ones."""
    model = json.loads((checkpoint_folder(checkpoint) / "config.json").read_text())["model"]
    sizes = [f"model.{name}={value}" for name, value in model.items() if isinstance(value, (int, float))]
    return {
        "pretrained": [f"checkpoint={checkpoint}"],
        "scratch": [
            "checkpoint=none", f"model={model['name']}", *sizes, "tokenizer=folder", f"tokenizer.path={checkpoint}"
        ],
    }  # fmt: skip


def show(rows: Rows, options: argparse.Namespace) -> None:
    """The table: mean and standard error over seeds, the paired gain, the majority class."""
    values = {start: rows.values("value", start=start) for start in ("pretrained", "scratch")}
    gains = [one - other for one, other in zip(values["pretrained"], values["scratch"], strict=True)]
    table = []
    for name, found in {**values, "gain": gains}.items():
        mean, error = mean_and_error(found)
        table.append([name, f"{mean:.4f}", f"{error:.4f}", len(found)])
    first = rows.all[0]
    table.append(["majority or mean", f"{first['baseline']:.4f}", "", ""])
    heading = f"{options.task}, {options.examples} training rows, {first['validation_examples']} scored"
    print_table(Output(), ["start", first["metric"], "standard error", "seeds"], table, heading=heading)


if __name__ == "__main__":
    main()
