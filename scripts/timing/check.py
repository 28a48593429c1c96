"""Checks, before a table is timed, that one step of both sides computes the same."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from lmtool.weights.exporting import export_of
from timing.gate import Gate
from timing.ours import run_lmtool
from timing.trainer import run_trainer

BATCH = 4


class Witness:
    """Gives the Trainer lmtool's weights, and lmtool's masks instead of those that its collator draws, and records the
    losses and gradient norms of both sides' first step."""

    def __init__(self, settings: dict[str, Any]):
        self.causal, self.scale = settings["family"] == "gpt", 1.0
        self.masked = settings["family"] == "bert" and settings["task"] is None
        self.tensors: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.row: dict[str, Any] = {}
        self.theirs: dict[str, float] = {}

    def take_weights(self, learner: Any, tokenizer: Any) -> None:
        """Stores lmtool's weights under transformers' names."""
        model, task = learner.backbone.config, getattr(learner, "kind", None)
        section = None if task is None else task.config.model_dump()
        tensors = {name: tensor.detach().clone() for name, tensor in learner.state_dict().items()}
        self.tensors = export_of(model, tensors, section, tokenizer).hf_tensors

    def give_weights(self, model: Any) -> None:
        """Loads the weights into the Trainer's model. Raises RuntimeError if the parameters differ."""
        missing, unexpected = model.load_state_dict(self.tensors, strict=False)
        tied = {name for name, _ in model.named_parameters()}
        lost = [name for name in missing if name in tied] + list(unexpected)
        if lost:
            raise RuntimeError(f"not the same model: {', '.join(lost)}")
        assert all(torch.equal(tensor, self.tensors[name]) for name, tensor in model.named_parameters())

    def batch_for(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns the Trainer's batch, with lmtool's masks for masked LM. Raises RuntimeError if the tokens differ from
        lmtool's."""
        (batch,) = self.batches
        real = inputs["attention_mask"].bool()
        if not self.masked:
            if not torch.equal(inputs["input_ids"][real], batch.inputs.tokens):
                raise RuntimeError("not the same batch")
            if self.causal:
                # The Trainer divides by the number of labels, although no position predicts the first of a row.
                labels = inputs["labels"] != -100
                self.scale = float(labels.sum() / labels[:, 1:].sum())
            return inputs
        target = next(iter(batch.targets.values()))
        labels, given = torch.full_like(batch.inputs.tokens, -100), batch.inputs.tokens
        labels[target.at] = target.labels
        whole = torch.where(labels < 0, given, labels)
        theirs = torch.where(inputs["labels"] < 0, inputs["input_ids"], inputs["labels"])
        if not torch.equal(theirs[real], whole):
            raise RuntimeError("not the same batch")
        tokens, wanted = inputs["input_ids"].clone(), torch.full_like(inputs["labels"], -100)
        tokens[real], wanted[real] = given, labels
        return {**inputs, "input_ids": tokens, "labels": wanted}

    def record_step(self, model: Any, loss: Any) -> None:
        """Records the loss and the norm of the gradients of the Trainer's first step."""
        if not self.theirs:
            # lmtool uses torch's norm too, which rounds in the fourth digit for a table of millions of values.
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            loss, norm = float(loss) * self.scale, float(get_total_norm(grads)) * self.scale
            self.theirs = {"rival_loss": loss, "rival_norm": norm}


def one_step(folder: Path, settings: dict[str, Any], own: dict[str, Any], rival: dict[str, Any]) -> dict[str, float]:
    """Returns the loss and the gradient norm of one step of both sides' training loops, from the same weights, in fp32,
    without dropout."""
    model = {**settings["model"], "dropout": 0.0, "attention_dropout": 0.0}
    # The Trainer's softmax over a span's scores includes padding, which a single window lacks.
    batch = 1 if settings["task"] is not None and settings["task"]["kind"] == "extractive_qa" else BATCH
    plain = {**settings, "model": model, "precision": "fp32", "batch": batch}
    unpadded = {name: value for name, value in rival.items() if name not in ("workers", "multiple")}
    if batch == 1:
        unpadded.pop("padding", None)
    witness = Witness(settings)
    for run, options in ((run_lmtool, own), (run_trainer, unpadded)):
        gate = Gate(io.StringIO('{"steps": 1}\n'), io.StringIO(), settings["device"])
        run(folder, {**plain, "variant": options}, gate, witness)
    return {"loss": witness.row["loss"], "norm": witness.row["grad_norm"], **witness.theirs}


def check(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Compares one step for each of `settings["pairs"]`: the options of lmtool's variant and of its rival."""
    return {"steps": [one_step(folder, settings, own, rival) for own, rival in settings["pairs"]]}
