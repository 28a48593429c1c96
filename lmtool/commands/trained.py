"""A trained checkpoint, built again with its tokenizer and weights: what evaluate and predict start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.commands.configs import FinetuneConfig, PretrainConfig, UseConfig
from lmtool.commands.decoding import decoded
from lmtool.config.auto import AUTO, chosen_class
from lmtool.config.tables import Choice
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision, choose_device, choose_precision
from lmtool.weights.assemble import assemble
from lmtool.weights.load import saved_config
from lmtool.weights.reading import Weights, read


@dataclass(frozen=True)
class Trained:
    """config: what it was trained with. learner: the objective's or the task's, on its device, in evaluation mode."""

    folder: Path
    config: PretrainConfig | FinetuneConfig
    tokenizer: Tokenizer
    learner: BaseLearner
    precision: Precision


def load_trained(config: UseConfig) -> Trained:
    """The learner of `checkpoint=`, whole. UserError where it is damaged, or holds nothing that predicts."""
    saved = saved_config(config.checkpoint, config.offline)
    weights = read(config.checkpoint, config.offline)
    verb = saved.get("command")
    if verb not in ("pretrain", "finetune"):
        verb, saved = "pretrain", _as_pretrained(config.checkpoint, saved, weights)
    # What it started from may be gone, and is not needed.
    before = decoded(verb, {**saved, "checkpoint": "none"})
    precision = choose_precision(config.precision, choose_device(config.device))
    tokenizer = Tokenizer.load(weights.folder, before.tokenizer.parse_special_tokens)
    learner, _ = assemble(before, tokenizer, trained=weights)
    return Trained(weights.folder, before, tokenizer, learner.to(precision.device).eval(), precision)


def _as_pretrained(checkpoint: str, saved: dict[str, Any], weights: Weights) -> dict[str, Any]:
    """Published weights as if `lmtool pretrain` had made them, with the objective that their head stands for.

    UserError where there is no such head.
    """
    class_of_model = chosen_class(saved.get("model"), Choice("model"))
    architecture = getattr(class_of_model, "architecture", None)
    if architecture == "encoder" and not any(name.startswith("heads.masked_lm.") for name in weights.tensors):
        raise UserError(
            f"checkpoint={checkpoint} has no head that predicts words",
            f"lmtool finetune task=NAME checkpoint={checkpoint}",
        )
    objective = {"encoder": {"name": "mlm"}, "decoder": {"name": "clm"}}.get(str(architecture), AUTO)
    given = {"model": saved.get("model"), "tokenizer": saved.get("tokenizer", AUTO), "objective": objective}
    longest = (saved.get("model") or {}).get("max_positions", 512)
    return {
        **given,
        "data": {"name": "pydocs"},
        "optimizer": AUTO,
        "schedule": AUTO,
        "max_steps": 1,
        "max_length": min(longest, 512),
        "batch_tokens": 8192,
    }
