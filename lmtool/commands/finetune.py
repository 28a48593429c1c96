"""`lmtool finetune`: learn a task from labeled text."""

from __future__ import annotations

from typing import Any

from lmtool.resolver.schema.run import FinetuneConfig
from lmtool.session import fit, suite
from lmtool.session.preparation import FinetunePreparation
from lmtool.tasks.configs import GlueConfig


def run(config: FinetuneConfig) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns the content of result.json, or the summary if there are several tasks."""
    if isinstance(config.task, GlueConfig):
        return suite.run(config, config.task, run)
    return fit.run(FinetunePreparation(config))
