"""`lmtool pretrain`: learn a language from text."""

from __future__ import annotations

from typing import Any

from lmtool.resolver.schema.run import PretrainConfig
from lmtool.session import fit
from lmtool.session.preparation import PretrainPreparation


def run(config: PretrainConfig) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json."""
    return fit.run(PretrainPreparation(config))
