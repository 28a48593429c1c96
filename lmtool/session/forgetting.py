"""Forgetting in a finetuning run (forgetting=): the pretraining loss on held-out text before and after finetuning, and
how far the weights of each level moved.

A level is the embedding, a layer or a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.configs import TextConfig
from lmtool.data.examples import SplitData
from lmtool.data.files import find
from lmtool.data.sources import OnStage
from lmtool.data.store import open_store
from lmtool.data.text import TextSource
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.held_out import HeldOutSplits
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig
from lmtool.runs.finding import saved_steps
from lmtool.session.trained import Trained, read_trained
from lmtool.system.files import user_path
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.training.optimizers import levels
from lmtool.training.precision import Precision, select_device, select_precision

TOKENS = 8192  # number of tokens per forward pass without gradients


@dataclass(frozen=True)
class StartScores:
    """The scores of a run's starting checkpoint on the held-out text by name, including "loss". max_length: the maximum
    number of tokens per window of text."""

    config: FinetuneConfig
    precision: Precision
    on_stage: OnStage
    max_length: int
    scores: JsonMapping

    @property
    def summary(self) -> JsonObject:
        """The text and the loss before finetuning, for the first screen."""
        return {"text": str(self.config.forgetting), "loss": self.scores["loss"]}


def compare_with_start(start: StartScores, learner: BaseLearner) -> JsonObject:
    """Scores the finetuned model on the text and compares it with the starting checkpoint.

    Parameters that a tuning method added are merged into the learner's weights if the method allows it, so the learner
    is not trained further after this. start: the scores before finetuning. learner: the finetuned learner. Returns
    plain data: `text`, `objective`, the scores `before` and `after`, the relative `distance` by level (see
    `distances`), and the number of parameters that the tuning method `added`, which no distance includes.
    """
    trained, pretraining = read_pretrained(start.config, start.precision)
    start_weights, model = trained.weights.tensors, trained.learner()
    model.backbone = learner.backbone
    for name in set(model.heads) & set(learner.heads):
        model.heads[name] = learner.heads[name]
    after = score(model.eval(), start.config, trained, pretraining, start.max_length, start.on_stage)
    # Adapters and prompts cannot be merged: `distances` compares only weights that exist in both models.
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
        "added": sum(weights[name].numel() for name in learner.added_names if name in weights),
    }


def require_measurable(config: FinetuneConfig) -> None:
    """Raises UserError, before any data is read, if forgetting cannot be measured.

    A resumed run was checked when it started.
    """
    started = config.run_dir is not None and saved_steps(user_path(config.run_dir) / "checkpoints")
    if not started:
        assert config.forgetting is not None
        find("forgetting", config.forgetting)
        read_pretrained(config, select_precision(config.precision, select_device(config.device)))


def score_start(config: FinetuneConfig, learner: BaseLearner, precision: Precision, on_stage: OnStage) -> StartScores:
    """Scores a run's starting checkpoint on the text. learner: the run's; its virtual tokens occupy positions, which
    shortens the windows of text in both measurements."""
    trained, pretraining = read_pretrained(config, precision)
    max_length = min(pretraining.max_length, learner.backbone.longest_text)
    scores = score(trained.learner(), config, trained, pretraining, max_length, on_stage)
    return StartScores(config, precision, on_stage, max_length, scores)


def read_pretrained(config: FinetuneConfig, precision: Precision) -> tuple[Trained, PretrainConfig]:
    """Returns a run's starting checkpoint and its pretraining configuration. Raises UserError if it has no pretraining
    head."""
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
    """Scores a pretraining learner on the complete text, with the same masking each time. config: that of the
    finetuning run, which names the text. trained: the starting checkpoint, whose tokenizer is used. max_length: the
    maximum number of tokens per window of text."""
    data = TextConfig(path=str(config.forgetting), documents=pretraining.data.documents)
    source = TextSource(data, config.cache_dir, on_stage, key="forgetting").complete()
    _, tasks = read_tasks(pretraining.objective, pretraining.seed, config.cache_dir, config.offline)
    store = open_store(source, "validation", trained.tokenizer, config.cache_dir, on_stage)
    split = SplitData("validation", store, data.documents, rows_of(tasks, "validation"))
    held_out = HeldOutSplits(model, {"validation": split}, max_length, max(TOKENS, max_length), pretraining.seed)
    return dict(held_out.score(trained.precision).metrics())


@torch.no_grad()
def distances(start: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Computes how far the weights of each level moved, from the head down: |weights - start| / |start|, in the L2
    norm. Weights that exist in only one of the two models, or have different shapes, are omitted."""
    # The order is that of the model, since the names in a file are sorted alphabetically.
    common = [name for name, tensor in weights.items() if name in start and start[name].shape == tensor.shape]
    return {
        level: (
            _squares(weights[name].cpu() - start[name] for name in names)
            / max(_squares(start[name] for name in names), 1e-30)  # not 0, for weights that start at zero
        )
        ** 0.5
        for level, names in levels(common).items()
        if names
    }


def _squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)
