"""A trained checkpoint, built again with its tokenizer and weights: what evaluate and predict start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.commands.configs import FinetuneConfig, PretrainConfig, UseConfig
from lmtool.commands.decoding import decoded
from lmtool.config.tables import build
from lmtool.errors import UserError
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.checkpoints import find, read_config, read_weights
from lmtool.training.precision import Precision, choose_device, choose_precision
from lmtool.weights.loading import load_into


@dataclass(frozen=True)
class Trained:
    """config: what it was trained with. learner: the objective's or the task's, on its device, in evaluation mode."""

    folder: Path
    config: PretrainConfig | FinetuneConfig
    tokenizer: Tokenizer
    learner: Any
    precision: Precision


def load_trained(config: UseConfig) -> Trained:
    """The learner of `checkpoint=`, whole. UserError where it is damaged, or of no training command."""
    folder = find(config.checkpoint)
    saved = read_config(folder)
    verb = saved.get("command")
    if verb not in ("pretrain", "finetune"):
        raise UserError(
            f"checkpoint={config.checkpoint}: its config.json names no training command", "give a run folder"
        )
    # What it started from may be gone, and is not needed.
    before = decoded(verb, {**saved, "checkpoint": "none"})
    precision = choose_precision(config.precision, choose_device(config.device))
    tokenizer = Tokenizer.load(folder)
    learns: Any = before.objective if isinstance(before, PretrainConfig) else before.task
    learner = build(learns, build(before.model, before.seed), tokenizer, before.seed)
    load_into(learner, read_weights(folder), config.checkpoint, whole=True)
    return Trained(folder, before, tokenizer, learner.to(precision.device).eval(), precision)
