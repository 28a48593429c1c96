"""lmtool's own loop on prepared examples, built as `lmtool pretrain` and `lmtool finetune` do. See peers.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from peer_examples import task_data, text_examples
from peers import Gate, peak_bytes


class Closed(Exception):
    """No more steps are wanted."""


class HeldLoader:
    """lmtool's own loader, read through the gate: the loop asks for a step when it has done the one before."""

    def __init__(self, loader: Any, gate: Gate, witness: Any):
        self.loader, self.gate, self.witness = loader, gate, witness

    def steps(self, cursor: dict[str, int] | None, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        steps = self.loader.steps(cursor, rank, ranks)
        while self.gate.open():
            step = next(steps)
            tokens = sum(batch.tokens for batch in step.batches)
            examples = sum(len(batch.examples) for batch in step.batches)
            self.gate.count(tokens=tokens, examples=examples, slots=tokens)
            if self.witness is not None:
                self.witness.batches = step.batches
            yield step
        raise Closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def learner_of(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """The learner and its loader."""
    from lmtool.config.tables import build
    from lmtool.data.loader import PackedLoader
    from lmtool.models.configs import BertConfig, GptConfig
    from lmtool.objectives.configs import ClmConfig, MlmConfig

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


def run_lmtool(folder: Path, settings: dict[str, Any], gate: Gate, witness: Any = None) -> None:
    """Train with lmtool's loop until the gate closes. Nothing is evaluated or saved, as on the other side. witness:
    sees the learner before the first step, its batches, and the first row."""
    from lmtool.nn.stack import attention_path
    from lmtool.runs.run_folder import RunFolder
    from lmtool.tokenizers.tokenizer import Tokenizer
    from lmtool.training.configs import AdamWConfig, LinearConfig
    from lmtool.training.loop import train
    from lmtool.training.precision import choose_device, choose_precision
    from lmtool.training.progress import TrainingSettings

    imports_bytes = peak_bytes("cpu")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    learner, loader = learner_of(folder, settings, tokenizer)
    if witness is not None:
        witness.take(learner, tokenizer)
    precision = choose_precision(settings["precision"], choose_device(settings["device"]))
    never = 1_000_000
    budget = {"max_steps": never, "evaluate_every": never, "checkpoint_every": never}
    budget["compiles"] = bool(settings["variant"].get("compile"))
    optimizer = AdamWConfig(**{name: settings[name] for name in ("weight_decay", "clip_norm")}, lr=settings["lr"])
    schedule = LinearConfig(warmup_fraction=0.0)
    wanted = TrainingSettings(
        settings["seed"], "loss", False, optimizer, schedule, settings["device"], settings["precision"], **budget
    )
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    facts = {"imports_bytes": imports_bytes, "parameters": parameters, "flops_per_token": flops(learner, loader)}
    gate.say({"ready": "lmtool", **facts, "attention": attention_path(learner, precision.device, precision.dtype)})
    with tempfile.TemporaryDirectory() as runs, RunFolder(Path(runs) / "bench", {}, "{}") as run:
        held = HeldLoader(loader, gate, witness)
        with suppress(Closed):
            train(learner, held, lambda step: {"loss": 0.0}, run, wanted)
        if witness is not None:
            witness.row = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])


def flops(learner: Any, loader: Any) -> float:
    """FLOPs of training on one real token: the head where it is computed, causal attention at half, by the mean length
    of the examples."""
    from lmtool.costs.plan import works_of

    facts = loader.facts()
    places = getattr(learner.config, "places", {})
    works = works_of(learner, places, facts.get("predicted_fraction", 0.0), facts["mean_length"])
    return sum(work.flops for work in works)
