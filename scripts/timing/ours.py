"""Runs lmtool's training loop on prepared examples, as `lmtool pretrain` and `lmtool finetune` do, and prediction with
`lmtool predict` and the pipeline of transformers, until the gate closes."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lmtool.config.registry import build
from lmtool.costs.plan import works_of
from lmtool.data.loader import PackedLoader
from lmtool.learners.base import Inference
from lmtool.models.configs import BertConfig, GptConfig
from lmtool.nn.stack import attention_path
from lmtool.objectives.configs import ClmConfig, MlmConfig
from lmtool.runs.run_folder import RunFolder
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.configs import AdamWConfig, LinearConfig
from lmtool.training.loop import train
from lmtool.training.precision import select_device, select_precision
from lmtool.training.progress import TrainingSettings
from timing.examples import LABELS, task_data, text_examples
from timing.gate import Gate, peak_bytes
from timing.trainer import trainer_model

NEVER = 1_000_000
TEXTS_PER_STEP = 128  # predicted in a step, like a file for `lmtool predict`


class GateClosed(Exception):
    """The gate has closed."""


class GatedLoader:
    """lmtool's loader behind the gate: the loop reads a step when it has finished the previous one."""

    def __init__(self, loader: Any, gate: Gate, witness: Any):
        self.loader, self.gate, self.witness = loader, gate, witness

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        steps = self.loader.steps(cursor, rank, ranks)
        while self.gate.open():
            step = next(steps)
            tokens = sum(batch.tokens for batch in step.batches)
            self.gate.count(tokens=tokens, examples=sum(len(batch.examples) for batch in step.batches), slots=tokens)
            if self.witness is not None:
                self.witness.batches = step.batches
            yield step
        raise GateClosed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def learner_of(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """The learner and its loader."""
    gpt, options = settings["family"] == "gpt", settings["variant"]
    backbone = build((GptConfig if gpt else BertConfig)(**settings["model"]), settings["seed"])
    if settings["task"] is None:
        learner = (ClmConfig() if gpt else MlmConfig()).learner(backbone, tokenizer, settings["seed"])
        examples = text_examples(folder, settings, tokenizer, options["rows"])
    else:
        data = task_data(folder, settings)
        learner = data.config.learner(backbone, tokenizer, settings["seed"])
        examples = learner.examples(data.splits()["train"], settings["task"]["max_length"])
    tokens = options.get("batch_tokens")
    size = {"batch_examples": settings["batch"]} if tokens is None else {"batch_tokens": tokens}
    return learner, PackedLoader(examples, settings["seed"], **size)


def flops(learner: Any, loader: Any) -> float:
    """FLOPs of training on one real token: the head only at predicted positions, causal attention at half, at the mean
    length of the examples."""
    metadata, places = loader.metadata(), getattr(learner.config, "places", {})
    works = works_of(learner, places, metadata.get("predicted_fraction", 0.0), metadata["mean_length"])
    return sum(work.flops for work in works)


def run_lmtool(folder: Path, settings: dict[str, Any], gate: Gate, witness: Any = None) -> None:
    """Trains without evaluating or saving, like the Trainer here. witness: receives the learner before the first step,
    its batches, and the first row."""
    imports_bytes = peak_bytes("cpu")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    learner, loader = learner_of(folder, settings, tokenizer)
    if witness is not None:
        witness.take_weights(learner, tokenizer)
    precision = select_precision(settings["precision"], select_device(settings["device"]))
    training_settings = TrainingSettings(
        settings["seed"], "loss", False,
        AdamWConfig(weight_decay=settings["weight_decay"], clip_norm=settings["clip_norm"], lr=settings["lr"]),
        LinearConfig(warmup_fraction=0.0), settings["device"], settings["precision"],
        max_steps=NEVER, evaluate_every=NEVER, checkpoint_every=NEVER,
        compiles=bool(settings["variant"].get("compile")),
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    metadata = {"imports_bytes": imports_bytes, "parameters": parameters, "flops_per_token": flops(learner, loader)}
    gate.say({"ready": "lmtool", **metadata, "attention": attention_path(learner, precision.device, precision.dtype)})
    with tempfile.TemporaryDirectory() as runs, RunFolder(Path(runs) / "bench", {}, "{}") as run:
        gated_loader = GatedLoader(loader, gate, witness)
        with suppress(GateClosed):
            train(learner, gated_loader, lambda step: {"loss": 0.0}, run, training_settings)
        if witness is not None:
            witness.row = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])


# --- prediction -------------------------------------------------------------------------------------------------------


def text_batches(folder: Path) -> Iterator[list[str]]:
    """The documents of the corpus in lists of `TEXTS_PER_STEP`, repeated without end."""
    lines = [line for line in (folder / "documents.txt").read_text(encoding="utf-8").splitlines() if line]
    cycle = itertools.cycle(lines)
    while True:
        yield list(itertools.islice(cycle, TEXTS_PER_STEP))


def run_prediction(folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Predicts with a randomly initialized model of the same size on both sides. Both times include tokenization."""
    imports_bytes = peak_bytes("cpu")
    tokenizer, longest = Tokenizer.load(folder / "tokenizer"), settings["max_length"]
    batch = settings["variant"].get("at_once")
    predict, parameters = (lmtool_predictor if batch is None else pipeline)(folder, settings, tokenizer)
    batch = batch or 1  # lmtool computes no padding
    gate.say({"ready": "prediction", "imports_bytes": imports_bytes, "parameters": parameters})
    for texts in text_batches(folder):
        if not gate.open():
            return
        assert predict(texts) == len(texts)
        lengths = [min(len(ids) + 2, longest) for ids in tokenizer.encode_batch(texts)]
        batches = (lengths[start : start + batch] for start in range(0, len(lengths), batch))
        slots = sum(max(group) * len(group) for group in batches)
        gate.count(tokens=sum(lengths), examples=len(texts), slots=slots)


def pipeline(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, int]:
    """The pipeline over a model in the precision that is asked for, and its parameters."""
    import transformers

    model = trainer_model(settings, "classification").eval()
    model = model.to(torch.bfloat16) if settings["precision"] == "bf16" else model
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))
    theirs.model_max_length = settings["max_length"]
    pipe = transformers.pipeline(
        "text-classification", model=model, tokenizer=theirs, batch_size=settings["variant"]["at_once"]
    )
    return lambda texts: len(pipe(texts, truncation=True)), model.num_parameters()


def lmtool_predictor(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, int]:
    """What `lmtool predict` does with the texts of a file."""
    backbone = build(BertConfig(**settings["model"]), settings["seed"])
    learner = ClassificationConfig(name="bench", labels=LABELS).learner(backbone, tokenizer, settings["seed"]).eval()
    precision = select_precision(settings["precision"], select_device("cpu"))

    def predict(texts: list[str]) -> int:
        rows = learner.responder().read_rows({"text": texts}, [("text", number) for number in range(len(texts))])
        return len(list(learner.responder().answers(rows, Inference(settings["max_length"], 8192, precision)).records))

    return predict, sum(parameter.numel() for parameter in learner.parameters())
