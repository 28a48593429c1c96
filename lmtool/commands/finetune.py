"""`lmtool finetune`: trains a model on a task with labeled text."""

from __future__ import annotations

from lmtool.config.base import JsonObject
from lmtool.resolver.commands import FinetuneConfig
from lmtool.session import fit, suite
from lmtool.session.preparation import FinetunePreparation
from lmtool.tasks.configs.mixture import GlueConfig


def run(config: FinetuneConfig) -> JsonObject:
    """Builds, trains, evaluates and saves. Returns result.json, or the summary of several tasks."""
    if isinstance(config.task, GlueConfig):
        return suite.run(config, config.task, run)
    return fit.run(FinetunePreparation(config))
