"""Forgetting in a finetuning run: the pretraining loss on held-out text before and after, and the change of the weights
of each level."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmtool.config.checkpoint import saved_steps
from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.configs import TextConfig
from lmtool.data.examples import SplitData
from lmtool.data.files import find
from lmtool.data.sources import OnStage
from lmtool.data.store import open_store
from lmtool.data.text import TextSource
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits
from lmtool.resolver.schema.run import FinetuneConfig, PretrainConfig
from lmtool.session.trained import Trained, read_trained
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.training.optimizers import levels
from lmtool.training.precision import Precision, select_device, select_precision

TOKENS = 8192  # per forward pass without gradients


@dataclass(frozen=True)
class StartScores:
    """The scores of a run's starting checkpoint on the held-out text. max_length: tokens per window of text. scores:
    by name, including "loss"."""

    config: FinetuneConfig
    precision: Precision
    on_stage: OnStage
    max_length: int
    scores: JsonMapping

    @property
    def summary(self) -> JsonObject:
        """For the first screen."""
        return {"text": str(self.config.forgetting), "loss": self.scores["loss"]}


def compare_with_start(start: StartScores, learner: BaseLearner) -> JsonObject:
    """Plain data: `text`, `objective`, the scores `before` and `after`, the relative `distance` by level (see
    `distances`), and the number of parameters that the tuning method `added`, which no distance includes. Merges the
    added parameters into the learner if possible: nothing needs them separately any more."""
    trained, pretraining = pretrained(start.config, start.precision)
    start_weights, model = trained.weights.tensors, trained.learner()
    model.backbone = learner.backbone
    for name in set(model.heads) & set(learner.heads):
        model.heads[name] = learner.heads[name]
    after = score(model.eval(), start.config, trained, pretraining, start.max_length, start.on_stage)
    # Adapters and prompts cannot be merged; only the weights that exist in both models are compared.
    if learner.tuning is not None:
        with suppress(UserError):
            learner.tuning.merge(learner)
    weights = dict(learner.state_dict())
    return {
        "text": str(start.config.forgetting),
        "objective": pretraining.objective.name,
        "before": dict(start.scores),
        "after": after,
        "distance": distances(start_weights, weights),
        "added": sum(weights[name].numel() for name in learner.added if name in weights),
    }


def require_measurable(config: FinetuneConfig) -> None:
    """Raise UserError, before any data is read, if forgetting cannot be measured. A resumed run was checked when it
    started."""
    started = config.run_dir is not None and saved_steps(Path(config.run_dir) / "checkpoints")
    if config.forgetting is not None and not started:
        find("forgetting", config.forgetting)
        pretrained(config, select_precision(config.precision, select_device(config.device)))


def measured_before(
    config: FinetuneConfig, learner: BaseLearner, precision: Precision, on_stage: OnStage
) -> StartScores:
    """The scores of a run's starting checkpoint. learner: the run's, whose virtual tokens take positions from the
    text."""
    trained, pretraining = pretrained(config, precision)
    max_length = min(pretraining.max_length, learner.backbone.longest_text)
    before = score(trained.learner(), config, trained, pretraining, max_length, on_stage)
    return StartScores(config, precision, on_stage, max_length, before)


def pretrained(config: FinetuneConfig, precision: Precision) -> tuple[Trained, PretrainConfig]:
    """A run's starting checkpoint and its pretraining configuration. UserError if it lacks the pretraining head."""
    hint = "omit forgetting=, or start from a run of lmtool pretrain, or a published folder with its head"
    try:
        trained = read_trained(str(config.checkpoint), config.offline, precision)
    except UserError as error:
        raise UserError(f"forgetting={config.forgetting}: {error.message}", hint) from error
    if not isinstance(trained.config, PretrainConfig):
        raise UserError(
            f"forgetting={config.forgetting}: checkpoint={config.checkpoint} was finetuned and has no pretraining head",
            hint,
        )
    return trained, trained.config


def score(
    model: BaseLearner,
    config: FinetuneConfig,
    trained: Trained,
    pretraining: PretrainConfig,
    max_length: int,
    on_stage: OnStage,
) -> JsonObject:
    """The scores of a pretraining learner on the complete text, with the same masking each time."""
    data = TextConfig(path=str(config.forgetting), documents=pretraining.data.documents)
    source = TextSource(data, config.cache_dir, on_stage, key="forgetting").complete()
    _, tasks = read_tasks(pretraining.objective, pretraining.seed, config.cache_dir, config.offline)
    store = open_store(source, "validation", trained.tokenizer, config.cache_dir, on_stage)
    split = SplitData("validation", store, data.documents, rows_of(tasks, "validation"))
    held_out = HeldOutSplits(model, {"validation": split}, max_length, max(TOKENS, max_length), pretraining.seed)
    return dict(held_out.score(trained.precision).metrics())


@torch.no_grad()
def distances(start: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative change by level, from the head down: the norm of the difference between the weights and those at the
    start, divided by the norm of the latter. Weights that exist in only one of them, or have another shape there, are
    left out."""
    # In the order of the model: a file's names are in alphabetical order.
    common = [name for name, tensor in weights.items() if name in start and start[name].shape == tensor.shape]
    return {
        level: (
            _squares(weights[name].cpu() - start[name] for name in names)
            / max(_squares(start[name] for name in names), 1e-30)
        )
        ** 0.5
        for level, names in levels(common).items()
        if names
    }


def _squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)
