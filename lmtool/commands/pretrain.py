"""`lmtool pretrain`: trains a model on text."""

from __future__ import annotations

from lmtool.config.base import JsonObject
from lmtool.resolver.commands import PretrainConfig
from lmtool.session import fit
from lmtool.session.preparation import PretrainPreparation


def run(config: PretrainConfig) -> JsonObject:
    """Builds, trains, evaluates and saves. Returns result.json."""
    return fit.run(PretrainPreparation(config))
