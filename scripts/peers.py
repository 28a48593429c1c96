"""The processes that `scripts/benchmark.py` and `scripts/gpu.py` time: each trains one side on prepared examples, some
steps at a time.

    python scripts/peers.py prepare FOLDER SETTINGS     make the examples both sides read
    python scripts/peers.py VARIANT FOLDER SETTINGS     train; SETTINGS is JSON

A worker loads everything, writes one JSON line `{"ready": ...}` and waits. For each line `{"steps": n}` on its input
it lets its training loop run n more steps and answers with their seconds, tokens and its peak memory, so start-up
is in no figure and the sides can take turns; `{"steps": n, "count": true}` also counts how often the host waited for
the device. Both sides run their real loop: the transformers Trainer held at `on_step_end`, lmtool's loop held by its
loader.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

PADDED_LENGTH = 128  # run_glue's max_seq_length
TASK_LENGTH = 66
CLASSES = ("0", "1")

# Lengths in tokens, special ones included: lognormal, clipped. The documents, cut at `max_length`, then have a median
# of 46, and a mean of 62 where that is 128; the rows, like the longer of SST-2's sentences, a mean of 25.
DOCUMENT_LENGTHS = {"median": 46.0, "sigma": 1.5, "smallest": 8}
ROW_LENGTHS = {"median": 22.0, "sigma": 0.5, "smallest": 4, "largest": TASK_LENGTH}


def peak_bytes(device: str) -> int:
    """Largest resident set of this process so far (`ru_maxrss` starts at the parent's size on Linux); on CUDA, what was
    allocated at most."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Waits:
    """Counts how often the host waits for CUDA, by the warnings of torch's synchronisation debugging."""

    def __init__(self) -> None:
        self.count = 0
        self.others = warnings.showwarning

    def start(self) -> None:
        import torch

        warnings.filterwarnings("always", message=".*synchronizing CUDA operation.*")
        warnings.showwarning = self.show
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> int:
        import torch

        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self.others
        return self.count

    def show(self, message: Warning | str, *rest: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.count += 1
        else:
            self.others(message, *rest)


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0


class Gate:
    """Holds a training loop between steps until it is told how many to run, and times them."""

    def __init__(self, commands: TextIO, answers: TextIO, device: str):
        self.commands, self.answers, self.device = commands, answers, device
        self.left, self.started, self.graphs = 0, 0.0, 0
        self.turn: dict[str, Any] | None = None
        self.waits: Waits | None = None

    def say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self.answers, flush=True)

    def open(self) -> bool:
        """Called before each step. False: no more steps are wanted."""
        if self.left == 0:
            if self.turn is not None:
                self.say(self.close_turn(self.turn))
            line = self.commands.readline()
            if not line.strip():
                return False
            command = json.loads(line)
            self.left = command["steps"]
            self.turn = {"steps": self.left, "tokens": 0, "examples": 0, "slots": 0}
            self.graphs = compiled_graphs()
            self.started = self.now()
            if command.get("count") and self.device == "cuda":
                self.waits = Waits()
                self.waits.start()
        self.left -= 1
        return True

    def close_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """The finished turn with what was measured."""
        waits = {} if self.waits is None else {"waits": self.waits.stop()}
        self.waits = None
        seconds = self.now() - self.started
        graphs = compiled_graphs() - self.graphs
        return {**turn, **waits, "seconds": seconds, "graphs": graphs, "peak_bytes": peak_bytes(self.device)}

    def now(self) -> float:
        """The time when everything asked for so far is done."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def count(self, tokens: int, examples: int, slots: int) -> None:
        """Add a step's real tokens, examples, and token places computed (padding included)."""
        assert self.turn is not None
        self.turn["tokens"] += tokens
        self.turn["examples"] += examples
        self.turn["slots"] += slots


# The transformers side

LANGUAGE_MODEL = ("trainer_lines", "trainer_packed")
TRAINER_NAMES = {
    "bert": {
        **{name: name for name in ("vocab_size", "hidden_size")},
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "feedforward_size",
        "max_position_embeddings": "max_positions",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    "gpt": {
        "vocab_size": "vocab_size",
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_heads",
        "n_inner": "feedforward_size",
        "n_positions": "max_positions",
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
    },
}


class TrainerRows:
    """The examples as the Trainer's collators take them, from flat arrays: the leanest data set it can be given."""

    def __init__(self, variant: str, folder: Path, settings: dict[str, Any]):
        import numpy

        data = numpy.load(folder / "examples.npz")
        prefix = "language_model" if variant in LANGUAGE_MODEL else "classification"
        self.tokens, self.borders = data[f"{prefix}_tokens"], data[f"{prefix}_borders"]
        if variant == "trainer_packed":
            # run_mlm's group_texts: all in one stream, cut into rows of the maximum length, the rest dropped.
            self.borders = numpy.arange(0, len(self.tokens) + 1, settings["max_length"])
        self.special = numpy.isin(self.tokens, data["special_ids"]).astype(int)
        self.labels = None if variant in LANGUAGE_MODEL else data["classification_labels"]

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
    import transformers

    transformers.set_seed(settings["seed"])
    size, family = settings["model"], settings["family"]
    fields = {theirs: size[ours] for theirs, ours in TRAINER_NAMES[family].items()}
    if family == "gpt":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields))
    config = transformers.BertConfig(**fields, num_labels=len(CLASSES))
    return (transformers.BertForSequenceClassification if classification else transformers.BertForMaskedLM)(config)


class Collator:
    """What run_mlm, run_clm and run_glue use, with `padding` as the variant says. Each batch carries its `counts`:
    real tokens, examples, and places with padding; plain numbers, for they come from other processes on CUDA."""

    def __init__(self, variant: str, tokenizer: Any, family: str):
        self.collate = trainer_collator(variant, tokenizer, family)

    def __call__(self, rows: list[dict]) -> Any:
        batch = self.collate(rows)
        examples, width = batch["input_ids"].shape
        batch["counts"] = [int(batch["attention_mask"].sum()), examples, examples * width]
        return batch


def trainer_collator(variant: str, tokenizer: Any, family: str) -> Any:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, default_data_collator

    if variant in LANGUAGE_MODEL and family == "gpt":
        return lambda rows: default_data_collator([{**row, "labels": row["input_ids"]} for row in rows])
    if variant in LANGUAGE_MODEL:
        # run_mlm --line_by_line pads to the longest of the batch by default; packed rows need none.
        return DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15)
    lengths = {"trainer_maximum": TASK_LENGTH, "trainer_maximum_128": PADDED_LENGTH}
    if variant in lengths:
        # run_glue's default, pad_to_max_length=True.
        return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=lengths[variant])
    return DataCollatorWithPadding(tokenizer, padding="longest")


def run_trainer(variant: str, folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Train with the transformers Trainer as its example scripts set it up, until the gate closes."""
    from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    imports_bytes = peak_bytes("cpu")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))

    class Held(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.open()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not gate.open():
                control.should_training_stop = True

    class Counted(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            gate.count(*inputs.pop("counts"))
            return super().training_step(model, inputs, *rest, **named)

    classification, cuda = variant not in LANGUAGE_MODEL, settings["device"] == "cuda"
    order = "group_by_length" if variant == "trainer_grouped" else "sequential"
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=not cuda,
        bf16=settings["precision"] == "bf16",
        optim="adamw_torch_fused",
        # On CUDA the collator, in Python, is slower than the step.
        dataloader_num_workers=4 if cuda else 0,
        per_device_train_batch_size=settings["task_batch" if classification else "batch"],
        max_steps=1_000_000,
        learning_rate=settings["lr"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip_norm"],
        # The stored order is the one lmtool's seed gives; grouping by length makes its own.
        train_sampling_strategy=order,
        # Otherwise the collator would lose `special_tokens_mask` and work it out in Python, token by token.
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    model = trainer_model(settings, classification)
    rows, collate = TrainerRows(variant, folder, settings), Collator(variant, tokenizer, settings["family"])
    trainer = Counted(model, arguments, collate, rows, processing_class=tokenizer, callbacks=[Held()])
    gate.say({"ready": variant, "imports_bytes": imports_bytes, "parameters": model.num_parameters()})
    trainer.train()


# lmtool's side


class Closed(Exception):
    """No more steps are wanted."""


class HeldLoader:
    """lmtool's own loader, read through the gate: the loop asks for a step when it has done the one before."""

    def __init__(self, loader: Any, gate: Gate):
        self.loader, self.gate = loader, gate

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        steps = self.loader.steps(cursor, rank, ranks)
        while self.gate.open():
            step = next(steps)
            tokens = sum(batch.tokens for batch in step.batches)
            self.gate.count(tokens, sum(len(batch.examples) for batch in step.batches), tokens)
            yield step
        raise Closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def cache_of(folder: Path) -> Path:
    """Corpus, tokenizers and token stores, by content: the examples of several sizes share them."""
    return folder.parent / "cache"


def task_data(folder: Path, settings: dict[str, Any]) -> Any:
    """The rows as `task=custom` reads them."""
    from lmtool.tasks.configs import ClassificationConfig
    from lmtool.tasks.loading import load_task

    config = ClassificationConfig(name="bench", path=str(folder / "rows"), labels=CLASSES)
    return load_task(config, settings["seed"], cache_of(folder), offline=True)


def text_examples(folder: Path, settings: dict[str, Any], tokenizer: Any) -> Any:
    """The documents as `data=text` reads them, made into examples as `objective=mlm` or `clm` does."""
    from lmtool.config.tables import build
    from lmtool.data.configs import TextConfig
    from lmtool.data.store import open_store
    from lmtool.objectives.configs import MlmConfig
    from lmtool.objectives.examples.causal import CausalWindows
    from lmtool.objectives.examples.masked import MaskedWindows

    source = build(TextConfig(path=str(folder / "documents.txt"), document="line"), cache_of(folder))
    store = open_store(source, "train", tokenizer, cache_of(folder))
    length, documents = settings["max_length"], settings["documents"]
    if settings["family"] == "gpt":
        return CausalWindows(tokenizer, store, length, documents, "train")
    return MaskedWindows(MlmConfig(), tokenizer, "bert", store, length, documents, "train", settings["seed"])


def lmtool_learner(variant: str, folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """The learner and its loader, built as `lmtool pretrain` and `lmtool finetune` do."""
    from lmtool.config.tables import build
    from lmtool.data.loader import PackedLoader
    from lmtool.models.configs import BertConfig, GptConfig
    from lmtool.objectives.configs import ClmConfig, MlmConfig

    gpt = settings["family"] == "gpt"
    backbone = build((GptConfig if gpt else BertConfig)(**settings["model"]), settings["seed"])
    if variant == "lmtool_language_model":
        learner = (ClmConfig() if gpt else MlmConfig()).learner(backbone, tokenizer, settings["seed"])
        examples, batch = text_examples(folder, settings, tokenizer), settings["batch"]
    else:
        data = task_data(folder, settings)
        learner = data.config.learner(backbone, tokenizer, settings["seed"])
        examples, batch = learner.examples(data.splits()["train"], TASK_LENGTH), settings["task_batch"]
    return learner, PackedLoader(examples, settings["seed"], batch_examples=batch)


def run_lmtool(variant: str, folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Train with lmtool's loop until the gate closes. Nothing is evaluated or saved, as on the other side."""
    from lmtool.nn.attention import attention_path
    from lmtool.runs.run_folder import RunFolder
    from lmtool.tokenizers.tokenizer import Tokenizer
    from lmtool.training.configs import AdamWConfig, LinearConfig
    from lmtool.training.loop import train
    from lmtool.training.precision import choose_device, choose_precision
    from lmtool.training.progress import TrainingSettings

    imports_bytes = peak_bytes("cpu")
    learner, loader = lmtool_learner(variant, folder, settings, Tokenizer.load(folder / "tokenizer"))
    precision = choose_precision(settings["precision"], choose_device(settings["device"]))
    never = 1_000_000
    budget = {"max_steps": never, "evaluate_every": never, "checkpoint_every": never}
    wanted = TrainingSettings(settings["seed"], "loss", False, settings["device"], settings["precision"], **budget)
    optimizer = AdamWConfig(**{name: settings[name] for name in ("weight_decay", "clip_norm")}, lr=settings["lr"])
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    facts = {"imports_bytes": imports_bytes, "parameters": parameters, "flops_per_token": flops(learner, loader)}
    gate.say({"ready": variant, **facts, "attention": attention_path(learner, precision.device, precision.dtype)})
    with tempfile.TemporaryDirectory() as runs, RunFolder(Path(runs) / "bench", {}, "{}") as run:
        held, schedule = HeldLoader(loader, gate), LinearConfig(warmup_fraction=0.0)
        with suppress(Closed):
            train(learner, held, lambda step: {"loss": 0.0}, run, wanted, optimizer, schedule)


def flops(learner: Any, loader: Any) -> float:
    """FLOPs of training on one real token: the head where it is computed, causal attention at half, by the mean length
    of the examples."""
    from lmtool.costs.work import works_of

    facts = loader.facts()
    places = getattr(learner.config, "places", {})
    works = works_of(learner, places, facts.get("predicted_fraction", 0.0), facts["mean_length"])
    return sum(work.flops for work in works)


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
    from lmtool.data.sources import documents
    from lmtool.data.vocabulary import trained_tokenizer
    from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig

    source = build(PydocsConfig(max_bytes=settings["corpus_bytes"]), cache_of(folder))
    kind, size = ByteBpeConfig() if settings["family"] == "gpt" else WordPieceConfig(), settings["model"]["vocab_size"]
    tokenizer = trained_tokenizer(kind, source, size, cache_of(folder))
    tokenizer.save(folder / "tokenizer")
    flat = [word for text in documents(source.parts("train")) for word in text.split()]
    kinds = sorted(set(flat))
    tokens = {word: len(ids) for word, ids in zip(kinds, tokenizer.encode_batch(kinds), strict=True)}
    words = [(word, tokens[word]) for word in flat if tokens[word]]
    shape = {**DOCUMENT_LENGTHS, "largest": settings["max_length"]}
    drawn = draw_lengths(shape, len(words), settings["seed"]) - 2  # [CLS] and [SEP]
    (folder / "documents.txt").write_text("\n".join(cut(words, drawn.tolist())), encoding="utf-8")
    texts = list(cut(words, (draw_lengths(ROW_LENGTHS, settings["rows"], settings["seed"]) - 2).tolist()))
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

    from lmtool.streams import Permutation
    from lmtool.tasks.kinds.texts import SequenceExamples

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, text = write_texts(folder, settings)
    both = {"language_model": text_examples(folder, settings, tokenizer)}
    if settings["family"] == "bert":
        data = task_data(folder, settings).train
        both["classification"] = SequenceExamples(data, tokenizer, "bert", TASK_LENGTH, "bench", "train")
    arrays: dict[str, Any] = {"special_ids": numpy.array(sorted(tokenizer.special_ids))}
    for name, examples in both.items():
        plan = examples.plan(0)
        order = Permutation(len(plan), settings["seed"], "order", 0)(numpy.arange(len(plan)))
        if name == "classification":
            batch = examples.batch(plan.rows[order], order, 0)
            tokens, arrays["classification_labels"] = batch.inputs.tokens.numpy(), batch.targets["bench"].labels.numpy()
        elif settings["family"] == "gpt":
            tokens = examples.batch(plan.rows[order], order, 0).inputs.tokens.numpy()
        else:
            tokens = examples.assemble(plan.rows[order]).tokens
        arrays[f"{name}_tokens"] = tokens
        arrays[f"{name}_borders"] = numpy.concatenate([[0], numpy.cumsum(plan.lengths[order])])
        lengths = plan.lengths
        text += (
            f"; {name}: {len(plan):,} of mean {lengths.mean():.0f}, median {numpy.median(lengths):.0f},"
            f" longest {lengths.max()} tokens"
        )
    numpy.savez(folder / "examples.npz", **arrays)
    return {"text": f"{text}; their lengths are drawn", "gflops": product_rates(settings)}


def product_rates(settings: dict[str, Any]) -> dict[str, float]:
    """GFLOP/s of matrix products by precision: on a CPU those of the model's width, on CUDA of large square ones."""
    import torch

    from lmtool.costs.rate import STEP_SHARE, measure_rate

    if settings["device"] == "cpu":
        size = settings["model"]["hidden_size"], settings["model"]["feedforward_size"]
        return {name: measure_rate(*size, name) / STEP_SHARE / 1e9 for name in ("fp32", "bf16")}
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        matrix @ matrix
    torch.cuda.synchronize()
    return {"bf16": 10 * 2 * 8192**3 / (time.perf_counter() - started) / 1e9}


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
    gate = Gate(sys.stdin, answers, settings["device"])
    if variant == "prepare":
        gate.say(prepare(folder, settings))
    elif variant.startswith(("pipeline", "lmtool_prediction")):
        from predicting import run_prediction

        run_prediction(variant, folder, settings, gate)
    elif variant.startswith("trainer"):
        run_trainer(variant, folder, settings, gate)
    else:
        run_lmtool(variant, folder, settings, gate)


if __name__ == "__main__":
    main()
