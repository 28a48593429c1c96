"""The rules of tuning methods: the models, tasks and starts that they work with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from lmtool.data.configs import SHORTEST
from lmtool.errors import Problem
from lmtool.learners.configs import LearnedConfig
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.tuning.configs.base import TuningConfig


def refuse_conflicts(tuning: TuningConfig) -> Iterator[Problem]:
    """No value of a tuning method contradicts another one, or has no effect."""
    yield from tuning.conflicts()


def require_tunable_model(tuning: TuningConfig, model: ModelConfig, task: LearnedConfig) -> Iterator[Problem]:
    """The method can tune the model for the task."""
    yield from islice(tuning.conflicts_with_model(model, task), 1)


def refuse_fsdp(tuning: TuningConfig, parallel: str) -> Iterator[Problem]:
    """The method works with sharded weights, if parallel=fsdp shards them."""
    if parallel == "fsdp":
        yield from islice(tuning.conflicts_with_fsdp(), 1)


def require_positions_for_virtual_tokens(
    tuning: TuningConfig, model: ModelConfig, max_length: int
) -> Iterator[Problem]:
    """The model has positions for a text together with the virtual tokens of the tuning method."""
    virtual = tuning.reserved_positions(model)
    remaining = model.max_positions - virtual
    # A longer max_length is refused by require_positions_for_length.
    if virtual and remaining < max_length <= model.max_positions:
        fewer = f"tuning.length={max(1, model.max_positions - max_length)}"
        yield Problem(
            "max_length",
            f"max_length={max_length} and the {virtual} virtual tokens of tuning={tuning.name} are more than "
            f"model.max_positions={model.max_positions}",
            f"set max_length={remaining}" if remaining >= SHORTEST else f"set {fewer}",
        )


def refuse_virtual_tokens_in_trees(tuning: TuningConfig, model: ModelConfig) -> Iterator[Problem]:
    """Virtual tokens have no place in a dependency tree."""
    positions = model.positions if isinstance(model, TransformerConfig) else None
    if positions is not None and positions.reads_trees and tuning.reserved_positions(model):
        message = f"tuning={tuning.name} adds virtual tokens, which have no place in the trees of model/positions="
        yield Problem("tuning", f"{message}{positions.name}", "set tuning=full, or model/positions=learned")


def require_pretrained_weights(tuning: TuningConfig, checkpoint: str | None) -> Iterator[Problem]:
    """Regularization towards pretrained weights needs a checkpoint to start from."""
    if tuning.needs_initial_weights and checkpoint in (None, "none"):
        scheme_name = next((scheme.name for scheme in tuning.schemes if scheme.needs_initial_weights), tuning.name)
        yield Problem(
            "tuning.regularization",
            f"tuning/regularization={scheme_name} pulls the weights towards pretrained ones, but "
            "checkpoint=none has no pretrained weights",
            "set checkpoint=RUN, or tuning/regularization=none",
        )
