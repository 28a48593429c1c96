"""BitFit as configuration. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmtool.config.tables import component
from lmtool.errors import Problem
from lmtool.tuning.configs.schemes import ByDepthConfig


@component("tuning", "bitfit", builder="lmtool.tuning.bitfit:BitFitTuning")
class BitFitConfig(ByDepthConfig):
    """Only biases learn (Ben Zaken et al. 2022)."""

    name: Literal["bitfit"] = Field("bitfit", description="The biases of all maps and norms learn.")

    def misfit(self, model: Any, task: Any) -> Problem | None:
        problem = super().misfit(model, task)
        if problem is not None or model.has_biases:
            return problem
        return Problem(
            "tuning", f"tuning=bitfit trains biases; model={model.name} has none", "give tuning=ia3 or tuning=lora"
        )
