"""Models that learn together, each from the others. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lmtool.config.tables import Choice, component
from lmtool.distillation.configs.base import DistillConfig
from lmtool.errors import Problem
from lmtool.models.configs import ModelConfig

_READ_ALIKE = ("architecture", "text_format", "vocab_size")


@component("distill", "codistillation", builder="lmtool.distillation.codistillation:Codistillation")
class CodistillationConfig(DistillConfig):
    """Several learners of the same data, each of which also learns what the others predict (Anil et al. 2018; Zhang et
    al. 2018, deep mutual learning)."""

    name: Literal["codistillation"] = Field("codistillation", description="Learners that learn from each other.")
    learners: int = Field(
        2, ge=2, description="How many learn: the run's model and its peers, each as in a run with the next seed."
    )
    model: Annotated[ModelConfig | None, Choice("model", optional=True)] = Field(
        None, description="The peers' model, from random weights: a section with its name. Null: the run's."
    )
    checkpoint: str | None = Field(
        None,
        min_length=1,
        description="The weights that the peers start from, and with them their model. Null: the run's checkpoint.",
    )
    weight: float = Field(1.0, ge=0, description="Weight of what the others predict, beside each learner's own loss.")
    burn_in_steps: int = Field(0, ge=0, description="Steps in which each learns alone.")
    refresh_steps: int | None = Field(
        None,
        ge=1,
        description="Steps between copies of the learners, whose predictions the others learn from. Null: the learners "
        "themselves, in each step.",
    )

    @property
    def same_batches(self) -> bool:
        return True

    def misfit(self, model: Any, learned: Any) -> Problem | None:
        if self.model is not None and self.checkpoint is not None:
            message = "distill.model is for peers with random weights, and distill.checkpoint names theirs"
            return Problem("distill.model", message, "leave one of them out")
        return None if self.model is None else reads_otherwise("distill.model", self.model, model)


def reads_otherwise(key: str, peer: ModelConfig, model: ModelConfig) -> Problem | None:
    """Why a peer does not read the batches of a model, if it does not. key: what names the peer."""
    for field in _READ_ALIKE:
        own, other = getattr(model, field), getattr(peer, field)
        if own != other:
            message = f"{key}: a peer reads the batches of the run's model, and its {field} is {other}, not {own}"
            hint = f"distill.model.{field}={own}" if field == "vocab_size" else f"distill.model.name={model.name}"
            return Problem(key, message, f"give {hint}")
    return None
