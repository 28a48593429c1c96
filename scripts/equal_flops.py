"""Encoders side by side after the same number of training FLOPs: what each has learned from the same text.

    python scripts/equal_flops.py [--families bert,roberta,electra,deberta_v3,xlnet,modernbert] [--flops 7e12]
        [--seeds 1,2,3] [--pretrainings 3] [--jobs 2] [--threads 1] [--epochs 10] [--output runs/equal-flops]
    python scripts/equal_flops.py --markdown runs/equal-flops/rows.jsonl

Each family in one shape (SHAPE; what it cannot have alike is in FAMILIES) learns its published objective from
docstrings, which every machine has, with its published optimizer and the rate of its experiment=FAMILY_tiny, until the
FLOPs are spent that `lmtool plan` counts: forward and backward, of a generator too. One WordPiece vocabulary is trained
first and serves all, so that a token is the same for each. The weights are then finetuned to tell which package a
docstring comes from (task=pydocs); beside them, random weights of the same shape are. The accuracy is that of the last
weights, which chooses nothing. With fewer --pretrainings than --seeds, several finetunings begin at the same weights,
as is usual where pretraining is dear; the spread is then that of finetuning alone.

Losses compare where models predict the same words behind the same masks: those that learned masked words are scored so
(objective=mlm, 15%, one seed). The others have what they learn beside its best constant.

Runs --jobs processes at a time. Appends a row a finished run to OUTPUT/rows.jsonl, and resumes where it stopped;
--markdown prints the table of such a file, and runs nothing. 45 minutes at most on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import Rows, listed, mean_and_error, stop

import lmtool
from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table

SHAPE = {"num_layers": 2, "hidden_size": 128, "num_heads": 2, "feedforward_size": 512, "vocab_size": 8192}
# Sizes that a family has in another way.
FAMILIES: dict[str, dict[str, int]] = {
    "bert": {},
    "roberta": {},
    "electra": {},
    "deberta_v3": {},
    "xlnet": {},
    # Its feed-forward part has three matrices: as many values in all. Of two layers the second is local.
    "modernbert": {"feedforward_size": 344, "global_every": 2},
}
MASKED = "masked_lm"
KEYS = ("family", "run", "seed")
RUNS = PRETRAIN, FINETUNE, RANDOM = "pretrain", "finetune", "random"
LENGTH, BATCH, EXAMPLES = 64, 1024, 32  # tokens of a text, tokens of a step, examples of a step of finetuning
RATE = 1e-3  # of finetuning
NEVER = 1_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=listed(str), default=list(FAMILIES))
    parser.add_argument("--flops", type=float, default=7e12, help="of each pretraining")
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--pretrainings", type=int, help="of each family, at most; as many as seeds where not given")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--epochs", type=int, default=10, help="of finetuning")
    parser.add_argument("--output", type=Path, default=Path("runs/equal-flops"))
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of a rows file; run nothing")
    options = parser.parse_args()
    if options.markdown is not None:
        if not options.markdown.is_file():
            stop(f"--markdown {options.markdown}: no such file", "name the rows.jsonl of a finished table")
        print(markdown([json.loads(line) for line in options.markdown.read_text().splitlines()]))
        return
    if unknown := [family for family in options.families if family not in FAMILIES]:
        stop(f"--families {unknown[0]}: one of {', '.join(FAMILIES)}", "leave it out for all")
    if missing := [family for family in options.families if not experiment(family).is_file()]:
        print(f"left out, without an experiment of its own: {', '.join(missing)}")
    families = [family for family in options.families if family not in missing]
    options.pretrainings = options.pretrainings or len(options.seeds)
    rows = Rows(options.output, KEYS, {name: getattr(options, name) for name in ("flops", "epochs", "pretrainings")})
    tokenizer = options.output / "tokenizer"
    if not (tokenizer / "tokenizer.json").exists():
        words = [f"tokenizer.vocab_size={SHAPE['vocab_size']}", "offline=true", f"output={tokenizer}"]
        execute(["tokenizer", *words], options.threads, options.output / "tokenizer.log")
    comparison = Comparison(rows, options)
    with ThreadPoolExecutor(options.jobs) as pool:
        # Seed by seed, so that a table that is cut short has all families.
        for step, seeds in ((comparison.pretrain, comparison.starts), (comparison.finetune, options.seeds)):
            pending = [pool.submit(step, family, seed) for seed in seeds for family in families]
            try:
                for job in pending:
                    job.result()
            except SystemExit:
                pool.shutdown(cancel_futures=True)
                raise
    show(rows.all, families)


def experiment(family: str) -> Path:
    """The YAML of its tiny experiment."""
    return Path(lmtool.__file__).parent.parent / "conf" / "experiment" / f"{family}_tiny.yaml"


def shape_of(family: str, tokenizer: Path) -> list[str]:
    """The words of a family's model in the shape, and of the vocabulary."""
    sizes = [f"model.{name}={value}" for name, value in {**SHAPE, **FAMILIES[family]}.items()]
    return [*sizes, "tokenizer=folder", f"tokenizer.path={tokenizer}"]


class Comparison:
    """The runs of a table. rows: where the finished ones are added, by one thread at a time."""

    def __init__(self, rows: Rows, options: argparse.Namespace):
        self._rows, self._options, self._lock = rows, options, threading.Lock()
        self.starts: list[int] = options.seeds[: options.pretrainings]
        """Seeds of the pretrainings."""

    def pretrain(self, family: str, seed: int) -> None:
        """Pretrain, where that is missing."""
        options, start = self._options, self._start(family, seed)
        words = [f"experiment={family}_tiny", *self._shape(family), *PRETRAINING, f"max_flops={options.flops:g}"]
        self._run((family, PRETRAIN, seed), words, start)

    def finetune(self, family: str, seed: int) -> None:
        """Finetune the pretrained and random weights: what is missing of it."""
        options, tuned = self._options, [f"max_epochs={self._options.epochs}", *FINETUNING]
        start = self._start(family, self.starts[options.seeds.index(seed) % len(self.starts)])
        folder = options.output / f"{family}-{seed}"
        self._run((family, FINETUNE, seed), [*tuned, f"checkpoint={start}"], Path(f"{folder}-finetuned"))
        random = ["checkpoint=none", f"model={family}_tiny", *self._shape(family)]
        self._run((family, RANDOM, seed), [*tuned, *random], Path(f"{folder}-random"))

    def _start(self, family: str, seed: int) -> Path:
        return Path(self._options.output, f"{family}-{seed}")

    def _shape(self, family: str) -> list[str]:
        return shape_of(family, self._options.output / "tokenizer")

    def _run(self, key: tuple[str, str, int], words: list[str], folder: Path) -> None:
        """A run in its own process, and its row."""
        if self._rows.has(*key):
            return
        _, run, seed = key
        command = PRETRAIN if run == PRETRAIN else "finetune"
        given = [command, *words, f"seed={seed}", f"run_dir={folder}", "offline=true", f"evaluate_every={NEVER}"]
        execute(given, self._options.threads, folder.with_suffix(".log"))
        result = json.loads((folder / "result.json").read_text())
        row = {name: result[name] for name in ("parameters", "steps", "tokens", "seconds", "ended")}
        if run == PRETRAIN:
            row |= {"learned": learned(result["metrics"])}
            if masked := masked_words(folder, self._options.threads):
                row |= {"masked": masked}
        else:
            row |= {"metric": result["metric"], "value": result["value"], "majority": result["baseline"]}
            shutil.rmtree(folder / "checkpoints")  # nothing reads the weights again
        with self._lock:
            self._rows.add({**dict(zip(KEYS, key, strict=True)), **row})
        print(f"{' '.join(map(str, key))}: {summary(row)}", flush=True)


PRETRAINING = [
    f"max_length={LENGTH}", f"batch_tokens={BATCH}", "max_steps=null", "max_minutes=null", "schedule=linear",
    "schedule.warmup_fraction=0.1", "log_every=50", f"checkpoint_every={NEVER}",
]  # fmt: skip
FINETUNING = [
    "task=pydocs", "tuning=full", "optimizer=adamw", f"optimizer.lr={RATE:g}", "schedule=linear",
    "schedule.warmup_fraction=0.1", f"max_length={LENGTH}", f"batch_examples={EXAMPLES}",
]  # fmt: skip


def execute(words: list[str], threads: int, log: Path) -> None:
    """`lmtool` in its own process, which ends this one where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("a") as file:
        command = [sys.executable, "-m", "lmtool", *words]
        status = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if status:
        stop(f"lmtool {' '.join(words)} ended with status {status}", f"see {log}, and give the same command again")


def learned(metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By term of the objective, its loss on held-out text and that of the best constant."""
    terms = [name.removesuffix("_baseline") for name in metrics if name.endswith("_baseline")]
    return {term: {"loss": metrics[f"{term}_loss"], "constant": metrics[f"{term}_baseline"]} for term in terms}


def masked_words(folder: Path, threads: int) -> dict[str, float] | None:
    """The loss of masked words and that of the best constant, at masks that do not depend on the family or its seed;
    None where the model has no head for them."""
    import torch

    from lmtool.data.sources import open_source
    from lmtool.learners.held_out import HeldOutSplits
    from lmtool.objectives.configs import MlmConfig
    from lmtool.session.phases import text_of
    from lmtool.session.trained import read_trained
    from lmtool.training.precision import select_device, select_precision

    torch.set_num_threads(threads)
    trained = read_trained(str(folder), True, select_precision("fp32", select_device("cpu")))
    if not any(name.startswith(f"heads.{MASKED}.") for name in trained.weights.tensors):
        return None
    before: Any = trained.config.model_copy(update={"seed": 0})
    source = open_source(before.data, before.cache_dir, offline=True)
    train, held_out = (
        text_of(before.data, source, split, trained.tokenizer, before.cache_dir, None, {})
        for split in ("train", "validation")
    )
    learner = replace(trained, config=before).learner(MlmConfig())
    predictors = learner.predictors(train, learner.examples(train, LENGTH))
    metrics = HeldOutSplits(learner, {"validation": held_out}, LENGTH, 8192, 0, predictors).score(trained.precision)
    (term,) = learned(metrics.metrics()).values()
    return term


def summary(row: dict[str, Any]) -> str:
    """Of a finished run, what it gave."""
    if "value" in row:
        return f"{row['metric']} {row['value']:.3f}"
    losses = ", ".join(f"{name} {term['loss']:.3f} ({term['constant']:.3f})" for name, term in row["learned"].items())
    return f"{losses} after {row['tokens'] / 1e6:.2f} M tokens in {row['seconds']:.0f} s"


HEADER = ["family", "parameters", "tokens (M)", "masked words", "objective (best constant)", "accuracy", "from random"]


def cells(rows: Sequence[dict[str, Any]], family: str) -> list[str] | None:
    """A family's line of the table, means over seeds and their standard errors; None before its first finetuning."""
    own = {run: [row for row in rows if (row["family"], row["run"]) == (family, run)] for run in RUNS}
    before = own[PRETRAIN]
    if not all(own.values()):
        return None
    masked = [row["masked"]["loss"] for row in before if "masked" in row]
    terms = [
        f"{name} {spread([row['learned'][name]['loss'] for row in before])} "
        f"({mean_and_error([row['learned'][name]['constant'] for row in before])[0]:.3f})"
        for name in before[0]["learned"]
    ]
    return [
        family,
        f"{before[0]['parameters']:,}",
        f"{mean_and_error([row['tokens'] for row in before])[0] / 1e6:.2f}",
        spread(masked) if masked else "",
        ", ".join(terms),
        *(spread([row["value"] for row in own[run]]) for run in (FINETUNE, RANDOM)),
    ]


def spread(values: Sequence[float]) -> str:
    """The mean, and its standard error where there are several values."""
    mean, error = mean_and_error(values)
    return f"{mean:.3f} ± {error:.3f}" if len(values) > 1 else f"{mean:.3f}"


def lines(rows: Sequence[dict[str, Any]]) -> tuple[list[list[str]], str]:
    """The lines of the table, and what stands beside all of them."""
    table = [line for family in FAMILIES if (line := cells(rows, family)) is not None]
    notes = [f"majority {row['majority']:.3f}" for row in rows if "majority" in row][:1]
    notes += [f"best constant of masked words {row['masked']['constant']:.3f}" for row in rows if "masked" in row][:1]
    for run, name in ((PRETRAIN, "seeds of pretraining"), (FINETUNE, "of finetuning")):
        notes.append(f"{name} {', '.join(map(str, sorted({row['seed'] for row in rows if row['run'] == run})))}")
    return table, "; ".join(notes)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, and the line below it."""
    table, note = lines(rows)
    texts = [HEADER, ["---"] * len(HEADER), *table]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in texts), "", note])


def show(rows: Sequence[dict[str, Any]], families: Sequence[str]) -> None:
    """The table on the screen."""
    table, note = lines([row for row in rows if row["family"] in families])
    print_table(Output(), HEADER, table, heading=note)


if __name__ == "__main__":
    main()
