"""The processes that `scripts/benchmark.py` times: each trains one side on prepared examples, some steps at a time.

    python scripts/peers.py prepare FOLDER SETTINGS     make the examples both sides read
    python scripts/peers.py VARIANT FOLDER SETTINGS     train; SETTINGS is JSON

A worker loads everything, writes one JSON line `{"ready": ...}` and waits. For each line `{"steps": n}` on its input
it lets its training loop go on for n steps and answers with their seconds, tokens and its peak memory, so start-up
is in no figure and the sides can take turns. Both sides run their real loop: the transformers Trainer held at
`on_step_end`, lmtool's loop held by its loader.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

MAX_LENGTH = 128
TASK_LENGTH = 66
CLASSES = ("0", "1")

# Lengths in tokens, special ones included: lognormal, clipped. The documents then have a median of 46 and a mean of
# 62, a quarter of them is cut at 128; the rows, like the longer of SST-2's sentences, a mean of 25.
DOCUMENT_LENGTHS = {"median": 46.0, "sigma": 1.5, "smallest": 8, "largest": MAX_LENGTH}
ROW_LENGTHS = {"median": 22.0, "sigma": 0.5, "smallest": 4, "largest": TASK_LENGTH}
ROWS = 14_400  # nine times what the Trainer's sampler sorts at once
CORPUS_BYTES = 3_000_000


def peak_bytes() -> int:
    """Largest resident set of this process so far. (`ru_maxrss` starts at the parent's size on Linux.)"""
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Gate:
    """Holds a training loop between steps until it is told how many to run, and times them."""

    def __init__(self, commands: TextIO, answers: TextIO):
        self.commands, self.answers = commands, answers
        self.left, self.started = 0, 0.0
        self.turn: dict[str, Any] | None = None

    def say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.answers, flush=True)

    def open(self) -> bool:
        """Called before each step. False: no more steps are wanted."""
        if self.left == 0:
            if self.turn is not None:
                seconds = time.perf_counter() - self.started
                self.say({**self.turn, "seconds": seconds, "peak_bytes": peak_bytes()})
            line = self.commands.readline()
            if not line.strip():
                return False
            self.left = json.loads(line)["steps"]
            self.turn = {"steps": self.left, "tokens": 0, "examples": 0, "slots": 0}
            self.started = time.perf_counter()
        self.left -= 1
        return True

    def count(self, tokens: int, examples: int, slots: int) -> None:
        """Add a step's real tokens, examples, and token places computed (padding included)."""
        assert self.turn is not None
        self.turn["tokens"] += tokens
        self.turn["examples"] += examples
        self.turn["slots"] += slots


# The transformers side

MASKED_LM = ("trainer_lines", "trainer_packed")
TRAINER_NAMES = {
    **{name: name for name in ("vocab_size", "hidden_size")},
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "feedforward_size",
    "max_position_embeddings": "max_positions",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


class TrainerRows:
    """The examples as the Trainer's collators take them, from flat arrays: the leanest data set it can be given."""

    def __init__(self, variant: str, folder: Path):
        import numpy

        data = numpy.load(folder / "examples.npz")
        prefix = "masked_lm" if variant in MASKED_LM else "classification"
        self.tokens, self.borders = data[f"{prefix}_tokens"], data[f"{prefix}_borders"]
        if variant == "trainer_packed":
            # run_mlm's group_texts: all in one stream, cut into rows of the maximum length, the rest dropped.
            self.borders = numpy.arange(0, len(self.tokens) + 1, MAX_LENGTH)
        self.special = numpy.isin(self.tokens, data["special_ids"]).astype(int)
        self.labels = None if variant in MASKED_LM else data["classification_labels"]

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = slice(self.borders[number], self.borders[number + 1])
        row: dict[str, Any] = {"input_ids": self.tokens[place].tolist()}
        row["attention_mask"] = [1] * len(row["input_ids"])
        if self.labels is None:
            row["special_tokens_mask"] = self.special[place].tolist()
        else:
            row["labels"] = int(self.labels[number])
        return row


def trainer_model(settings: dict[str, Any], classification: bool) -> Any:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, set_seed

    set_seed(settings["seed"])
    size = settings["model"]
    config = BertConfig(**{theirs: size[ours] for theirs, ours in TRAINER_NAMES.items()}, num_labels=len(CLASSES))
    return BertForSequenceClassification(config) if classification else BertForMaskedLM(config)


def trainer_collator(variant: str, tokenizer: Any) -> Any:
    """What run_mlm and run_glue use, with `padding` as the variant says."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    if variant in MASKED_LM:
        # run_mlm --line_by_line pads to the longest of the batch by default; packed rows need none.
        return DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15)
    lengths = {"trainer_maximum": TASK_LENGTH, "trainer_maximum_128": MAX_LENGTH}
    if variant in lengths:
        # run_glue's default, pad_to_max_length=True.
        return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=lengths[variant])
    return DataCollatorWithPadding(tokenizer, padding="longest")


def run_trainer(variant: str, folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Train with the transformers Trainer as its example scripts set it up, until the gate closes."""
    from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    imports_bytes = peak_bytes()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))
    collate = trainer_collator(variant, tokenizer)
    waiting: deque[tuple[int, int, int]] = deque()  # the Trainer loads one batch ahead of its step

    def counting(features: list[dict]) -> Any:
        batch = collate(features)
        ids = batch["input_ids"]
        waiting.append((int(batch["attention_mask"].sum()), ids.shape[0], ids.numel()))
        return batch

    class Held(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.open()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.count(*waiting.popleft())
            if not gate.open():
                control.should_training_stop = True

    classification = variant not in MASKED_LM
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        bf16=settings["precision"] == "bf16",
        per_device_train_batch_size=settings["task_batch" if classification else "batch"],
        max_steps=1_000_000,
        learning_rate=settings["lr"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip_norm"],
        # The stored order is the one lmtool's seed gives; grouping by length makes its own.
        train_sampling_strategy="group_by_length" if variant == "trainer_grouped" else "sequential",
        # Otherwise the collator would lose `special_tokens_mask` and work it out in Python, token by token.
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    model = trainer_model(settings, classification)
    rows = TrainerRows(variant, folder)
    trainer = Trainer(model, arguments, counting, rows, processing_class=tokenizer, callbacks=[Held()])
    gate.say({"ready": variant, "imports_bytes": imports_bytes, "parameters": model.num_parameters()})
    trainer.train()


# lmtool's side


class Closed(Exception):
    """No more steps are wanted."""


class HeldLoader:
    """lmtool's own loader, read through the gate: the loop asks for a step when it has done the one before."""

    def __init__(self, loader: Any, gate: Gate):
        self.loader, self.gate = loader, gate

    def steps(self, cursor: dict[str, int] | None) -> Iterator[Any]:
        steps = self.loader.steps(cursor)
        while self.gate.open():
            step = next(steps)
            tokens = sum(batch.tokens for batch in step.batches)
            self.gate.count(tokens, sum(len(batch.examples) for batch in step.batches), tokens)
            yield step
        raise Closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def task_data(folder: Path, settings: dict[str, Any]) -> Any:
    """The rows as `task=custom` reads them."""
    from lmtool.tasks.configs import ClassificationConfig
    from lmtool.tasks.loading import load_task

    config = ClassificationConfig(name="bench", path=str(folder / "rows"), labels=CLASSES)
    return load_task(config, settings["seed"], folder / "cache", offline=True)


def masked_examples(folder: Path, settings: dict[str, Any], tokenizer: Any) -> Any:
    """The documents as `data=text` reads them, made into examples as `objective=mlm` does."""
    from lmtool.config.tables import build
    from lmtool.data.configs import TextConfig
    from lmtool.data.store import open_store
    from lmtool.objectives.configs import MlmConfig
    from lmtool.objectives.examples import MaskedWindows

    source = build(TextConfig(path=str(folder / "documents.txt"), document="line"), folder / "cache")
    store = open_store(source, "train", tokenizer, folder / "cache")
    return MaskedWindows(MlmConfig(), tokenizer, "bert", store, MAX_LENGTH, "separate", "train", settings["seed"])


def lmtool_learner(variant: str, folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """The learner and its loader, built as `lmtool pretrain` and `lmtool finetune` do."""
    from lmtool.config.tables import build
    from lmtool.data.loader import PackedLoader
    from lmtool.models.configs import BertConfig
    from lmtool.objectives.configs import MlmConfig

    backbone = build(BertConfig(**settings["model"]), settings["seed"])
    if variant == "lmtool_masked_lm":
        learner = build(MlmConfig(), backbone, tokenizer, settings["seed"])
        examples, batch = masked_examples(folder, settings, tokenizer), settings["batch"]
    else:
        data = task_data(folder, settings)
        learner = build(data.config, backbone, tokenizer, settings["seed"])
        examples, batch = learner.examples(data.train, TASK_LENGTH, "train"), settings["task_batch"]
    return learner, PackedLoader(examples, settings["seed"], batch_examples=batch)


def run_lmtool(variant: str, folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Train with lmtool's loop until the gate closes. Nothing is evaluated or saved, as on the other side."""
    from lmtool.tokenizers.tokenizer import Tokenizer
    from lmtool.training.configs import AdamWConfig, LinearConfig
    from lmtool.training.loop import train
    from lmtool.training.progress import TrainingSettings
    from lmtool.training.run_folder import RunFolder

    imports_bytes = peak_bytes()
    learner, loader = lmtool_learner(variant, folder, settings, Tokenizer.load(folder / "tokenizer"))
    never = 1_000_000
    budget = {"max_steps": never, "evaluate_every": never, "checkpoint_every": never}
    wanted = TrainingSettings(settings["seed"], "loss", False, "cpu", settings["precision"], **budget)
    optimizer = AdamWConfig(**{name: settings[name] for name in ("weight_decay", "clip_norm")}, lr=settings["lr"])
    parameters = sum(one.numel() for one in learner.parameters())
    gate.say({"ready": variant, "imports_bytes": imports_bytes, "parameters": parameters})
    with tempfile.TemporaryDirectory() as runs, RunFolder(Path(runs) / "bench", {}, "{}") as run:
        held, schedule = HeldLoader(loader, gate), LinearConfig(warmup_fraction=0.0)
        with suppress(Closed):
            train(learner, held, lambda step: {"loss": 0.0}, run, wanted, optimizer, schedule)


# The examples of both


def draw_lengths(shape: dict[str, float], count: int, seed: int) -> Any:
    """(count,) lengths in tokens, special ones included."""
    import numpy

    drawn = shape["median"] * numpy.exp(shape["sigma"] * numpy.random.default_rng(seed).standard_normal(count))
    return numpy.clip(numpy.rint(drawn), shape["smallest"], shape["largest"]).astype(int)


def cut(words: Sequence[tuple[str, int]], lengths: Sequence[int]) -> Iterator[str]:
    """Runs of consecutive words with at most `lengths` tokens each, until the words or the lengths are used up. A
    word longer than a run is left out. words: each with its number of tokens."""
    at = 0
    for length in lengths:
        run: list[str] = []
        while at < len(words) and (words[at][1] <= length or not run):
            if words[at][1] <= length:
                run.append(words[at][0])
                length -= words[at][1]
            at += 1
        if run:
            yield " ".join(run)


def write_texts(folder: Path, settings: dict[str, Any]) -> tuple[Any, str]:
    """Write the documents and the labelled rows, and save the tokenizer trained on the corpus."""
    import numpy

    from lmtool.config.tables import build
    from lmtool.data.configs import PydocsConfig
    from lmtool.data.vocabulary import trained_tokenizer
    from lmtool.tokenizers.configs import WordPieceConfig

    source = build(PydocsConfig(max_bytes=CORPUS_BYTES), folder / "cache")
    size = settings["model"]["vocab_size"]
    tokenizer = trained_tokenizer(WordPieceConfig(), source, size, folder / "cache")
    tokenizer.save(folder / "tokenizer")
    flat = [word for text in source.documents("train") for word in text.split()]
    kinds = sorted(set(flat))
    tokens = {word: len(ids) for word, ids in zip(kinds, tokenizer.encode_batch(kinds), strict=True)}
    words = [(word, tokens[word]) for word in flat if tokens[word]]
    drawn = draw_lengths(DOCUMENT_LENGTHS, len(words), settings["seed"]) - 2  # [CLS] and [SEP]
    (folder / "documents.txt").write_text("\n".join(cut(words, drawn.tolist())), encoding="utf-8")
    texts = list(cut(words, (draw_lengths(ROW_LENGTHS, ROWS, settings["seed"]) - 2).tolist()))
    labels = numpy.random.default_rng(settings["seed"]).integers(0, len(CLASSES), len(texts)).tolist()
    lines = [json.dumps({"text": text, "label": CLASSES[label]}) for text, label in zip(texts, labels, strict=True)]
    (folder / "rows").mkdir(exist_ok=True)
    (folder / "rows" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "rows" / "dev.jsonl").write_text("\n".join(lines[:8]), encoding="utf-8")
    facts = source.facts()
    return tokenizer, f"{facts['bytes'] / 1e6:.1f} MB of docstrings, WordPiece of {tokenizer.vocab_size:,} entries"


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make the examples lmtool's own way, and store them for the Trainer in the order in which lmtool reads them."""
    import numpy

    from lmtool.reporting.rate import STEP_SHARE, measure_rate
    from lmtool.streams import Permutation
    from lmtool.tasks.examples import SequenceExamples

    tokenizer, text = write_texts(folder, settings)
    masked = masked_examples(folder, settings, tokenizer)
    rows = SequenceExamples(task_data(folder, settings).train, tokenizer, "bert", TASK_LENGTH, "bench", "train")
    arrays: dict[str, Any] = {"special_ids": numpy.array(sorted(tokenizer.special_ids))}
    for name, examples in (("masked_lm", masked), ("classification", rows)):
        plan = examples.plan(0)
        order = Permutation(len(plan), settings["seed"], "order", 0)(numpy.arange(len(plan)))
        if name == "masked_lm":
            tokens = masked.assemble(plan.rows[order]).tokens
        else:
            batch = examples.batch(plan.rows[order], order, 0)
            tokens, arrays["classification_labels"] = batch.inputs.tokens.numpy(), batch.targets["bench"].labels.numpy()
        arrays[f"{name}_tokens"] = tokens
        arrays[f"{name}_borders"] = numpy.concatenate([[0], numpy.cumsum(plan.lengths[order])])
        lengths = plan.lengths
        text += (
            f"; {name}: {len(plan):,} of mean {lengths.mean():.0f}, median {numpy.median(lengths):.0f},"
            f" longest {lengths.max()} tokens"
        )
    numpy.savez(folder / "examples.npz", **arrays)
    size = settings["model"]["hidden_size"], settings["model"]["feedforward_size"]
    rates = {name: measure_rate(*size, name) / STEP_SHARE / 1e9 for name in ("fp32", "bf16")}
    return {"text": f"{text}; their lengths are drawn", "gflops": rates}


def main() -> None:
    variant, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    # Libraries may print: answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if variant.startswith("lmtool"):
        from lmtool.environment import ENVIRONMENT

        os.environ.update(ENVIRONMENT)  # what its command line sets before torch is loaded
    import torch

    torch.set_num_threads(settings["threads"])
    gate = Gate(sys.stdin, answers)
    if variant == "prepare":
        gate.say(prepare(folder, settings))
    elif variant.startswith("trainer"):
        run_trainer(variant, folder, settings, gate)
    else:
        run_lmtool(variant, folder, settings, gate)


if __name__ == "__main__":
    main()
